"""What whole-run tests share: the prepared data, and the run without faults that all others must equal."""

from pathlib import Path

import pytest

from tests.payload.runs import Run, run_job


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared token file of English text."""
    from payload.prepare import BYTES, Request, prepare

    folder = tmp_path_factory.mktemp("tokens") / "data"
    prepare(Request("pydoc", BYTES, 20), folder)
    return folder


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> Run:
    """Two pods of one rank, 25 steps, no fault, by the simplest arm."""
    folder = tmp_path_factory.mktemp("reference")
    return run_job(folder, token_folder, **{"recovery.arm": "kubernetes", "checkpoint.mode": "sync"}).check()
