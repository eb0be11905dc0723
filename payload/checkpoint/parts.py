"""What one rank wrote of a save: left in the draft for rank 0, which makes the manifest and DCP's index of it."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from payload.checkpoint.folder import FileEntry
from payload.checkpoint.names import part_name


@dataclass(frozen=True)
class Part:
    files: tuple[FileEntry, ...]
    results: tuple[WriteResult, ...]
    """Where each tensor lies; empty in the ``local`` layout."""

    def leave(self, draft: Path, rank: int) -> None:
        """Appears whole or not at all. Raises OSError."""
        path = draft / part_name(rank)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            pickle.dump(self, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
