"""Rank 0's part of an async save: waits for the parts of all ranks and makes the save visible, beside training."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
import time
from collections.abc import Collection
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from payload.checkpoint.folder import Manifest, SaveFolder, describe_file
from payload.checkpoint.names import part_name
from payload.checkpoint.parts import Part

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""Between two listings of the draft."""
_CANCEL_S = 5.0
"""How long a cancel waits for a rename that is under way."""


class Publication:
    """One thread for one save. Cancelled, it never makes anything visible."""

    def __init__(
        self,
        folder: SaveFolder,
        draft: Path,
        manifest: Manifest,
        metadata: Metadata | None,
        *,
        keep: int,
        damaged: Collection[str],
        limit_s: float,
    ) -> None:
        """``manifest``: without files yet. ``metadata``: DCP's index without places, None in the local layout."""
        self.step = manifest.step
        self.ticket = draft.name
        self.reason = ""
        """Why nothing was published; valid once done()."""
        self.write_s = 0.0
        self._folder, self._draft, self._manifest, self._metadata = folder, draft, manifest, metadata
        self._keep, self._damaged, self._limit_s = keep, frozenset(damaged), limit_s
        self._cancelled = threading.Event()
        self._renaming = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"publish-{self.step}")

    def start(self) -> None:
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """From any thread; bounded. Afterwards nothing of this save becomes visible any more."""
        self._cancelled.set()
        if self._renaming.acquire(timeout=_CANCEL_S):
            self._renaming.release()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            if self._await_parts(started + self._limit_s):
                self._complete()
        except Exception as error:  # noqa: BLE001 - handed to poll() and drain()
            self.reason = f"publishing step {self.step}: {type(error).__name__}: {error}"
        self.write_s = time.monotonic() - started

    def _await_parts(self, deadline: float) -> bool:
        """Whether all parts are there; False once cancelled. Raises TimeoutError naming the ranks that are late."""
        wanted = {part_name(rank): rank for rank in range(self._manifest.world_size)}
        while not self._cancelled.wait(_POLL_S):
            try:
                present = {entry.name for entry in self._draft.iterdir()}
            except FileNotFoundError:
                present = set()
            missing = [rank for name, rank in wanted.items() if name not in present]
            if not missing:
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not written their part after {self._limit_s:.0f} s")
        return False

    def _complete(self) -> None:
        paths = [self._draft / part_name(rank) for rank in range(self._manifest.world_size)]
        parts: list[Part] = [pickle.loads(path.read_bytes()) for path in paths]
        files = [entry for part in parts for entry in part.files]
        if self._metadata is not None:
            # A copy, as finish() fills it in and another save may be about to.
            FileSystemWriter(self._draft).finish(
                dataclasses.replace(self._metadata), [list(part.results) for part in parts]
            )
            files.append(describe_file(self._draft / ".metadata", 0))
        for path in paths:
            path.unlink()
        manifest = dataclasses.replace(self._manifest, files=tuple(files), saved_wall=time.time())
        with self._renaming:
            if self._cancelled.is_set():
                return
            name = self._folder.publish(self._draft, manifest)
        self._folder.retain(self._keep, name, self._damaged)
        self._folder.sweep(older_than=self.step)
