"""Async saving: training waits for a copy in memory only; NVRx's worker writes it, rank 0 publishes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from payload.checkpoint.base import CheckpointError, StateDict
from payload.checkpoint.durable import Attempt, Durable
from payload.checkpoint.job import Job
from payload.checkpoint.planning import Plan, plan_saves
from payload.checkpoint.publication import Publication
from payload.checkpoint.stage import SlabStager, Staged, Stager
from payload.checkpoint.writer import AsyncWriter
from payload.config import RunConfig

if TYPE_CHECKING:
    from payload.events import EventLog

NUM_FILES = 2
"""Files a rank and save, written in parallel."""
_POLL_S = 0.01


@dataclass
class _Pending:
    """This rank's part of a save, being written."""

    step: int
    job: Job
    deadline: float
    submitted: bool = False
    """The copy was whole, and the writer has the job."""

    @property
    def ticket(self) -> str:
        return self.job.ticket


@dataclass
class _Saving:
    """What an attempt has in flight."""

    pending: _Pending | None = None
    publications: list[Publication] = field(default_factory=list)
    """On rank 0, oldest first."""
    failed: set[str] = field(default_factory=set)
    """Tickets of this rank's parts that were not written."""
    abandoned: bool = False


class AsyncCheckpointer(Durable):
    """Modes ``async`` (DCP layout) and ``async-local`` (one file a rank)."""

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        *,
        stager: Stager | None = None,
        writer: AsyncWriter | None = None,
    ) -> None:
        """Args:
        stager: where the copies are kept; closed with this object. None: a buffer of its own.
        writer: a warm one to use and to leave open. None: one of its own.
        """
        super().__init__(config, events)
        self.mode = config.checkpoint.mode
        self._local = self.mode == "async-local"
        self._owns_writer = writer is None
        self._writer = writer or AsyncWriter()
        self._writer.start()  # While this process can still be forked.
        self._stager: Stager = stager or SlabStager()
        self._saving = _Saving()
        self._plan: Plan | None = None
        """Planned or confirmed in this attempt, or else of an earlier one."""
        self._planned = False

    def begin_attempt(self, rank: int, world_size: int) -> None:
        super().begin_attempt(rank, world_size)
        self._saving = _Saving()
        self._planned = False
        self._stager.release()
        self._writer.start()

    def prepare_saves(self, state: StateDict) -> None:
        """Plans ahead what is the same for all saves of the attempt, so that they need no collective."""
        if not self._local and not self._planned:
            self._plan = plan_saves(state, self._folder.root, self.peers(), self._plan)
            self._planned = True

    def save(self, step: int, state: StateDict) -> float:
        started = time.monotonic()
        attempt, _ = self._joined()
        self.prepare_saves(state)
        self._await_own_part()
        # The only part of a save that grows with the size of the state.
        staged = self._stager.stage(step, state)
        draft = self._draft(step, attempt)
        self._writer.start()
        self._saving.pending = _Pending(step, self._job(draft, staged, attempt.rank), time.monotonic() + self._limit_s)
        self._submit_ready()
        if attempt.rank == 0:
            self._publish(draft, step, attempt)
        return time.monotonic() - started

    def _submit_ready(self) -> None:
        """Hands the job on once its copy is whole: at once, or some step later."""
        pending = self._saving.pending
        if pending is not None and not pending.submitted and self._stager.is_ready(pending.step):
            self._writer.submit(pending.job)
            pending.submitted = True

    def _job(self, draft: Path, staged: Staged, rank: int) -> Job:
        common = (draft.name, self._writer.address, draft, rank, staged.path)
        if self._local:
            return Job(*common, places=staged.layout.places, plain=pickle.dumps(dict(staged.plain)))
        places = {place.name: place for place in staged.layout.places}
        assert self._plan is not None
        return Job(*common, items=self._plan.sources(places, staged.plain), num_files=NUM_FILES)

    def _publish(self, draft: Path, step: int, attempt: Attempt) -> None:
        plan = None if self._local else self._plan
        publication = Publication(
            self._folder,
            draft,
            self._manifest(step, attempt.world_size, "local" if plan is None else "dcp"),
            plan.metadata if plan is not None else None,
            keep=self._config.checkpoint.keep,
            damaged=self._loader.damaged,
            limit_s=self._limit_s,
        )
        saving = self._saving
        saving.publications.append(publication)
        if saving.abandoned:  # After the append, as abandon() in another thread sets it before it looks.
            publication.cancel()
        publication.start()

    def poll(self) -> str | None:
        self._collect()
        return super().poll()

    def publish_ready(self) -> None:
        """Not collective here: rank 0 learns from the drafts who is done."""
        self._collect()

    def _collect(self) -> None:
        """Takes in what the writer and the publications have to say. Never blocks."""
        attempt, saving = self._attempt, self._saving
        if attempt is None:
            return
        self._submit_ready()
        for report in self._writer.reports():
            pending = saving.pending
            if pending is None or report.ticket != pending.ticket:
                continue  # A save of an abandoned attempt.
            self._end_own_part()
            if report.reason:
                self._fail(attempt, pending, report.reason)
            elif attempt.rank:
                self._events.emit("save_done", step=pending.step, write_s=report.write_s)
        self._check_writer(attempt)
        for publication in [p for p in saving.publications if p.done()]:
            saving.publications.remove(publication)
            if publication.reason:
                attempt.failures.append(f"save of step {publication.step} failed: {publication.reason}")
            elif not publication.cancelled:
                self._events.emit("save_done", step=publication.step, write_s=publication.write_s)

    def _end_own_part(self) -> None:
        self._saving.pending = None
        self._stager.release()

    def _check_writer(self, attempt: Attempt) -> None:
        pending, death = self._saving.pending, self._writer.death()
        if death is not None:
            self._end_own_part()
            self._fail(attempt, pending, death)
            self._writer.start()
        elif pending is not None and time.monotonic() > pending.deadline:
            self._end_own_part()
            self._fail(attempt, pending, f"not written after {self._limit_s:.0f} s")
            self._writer.restart()

    def _fail(self, attempt: Attempt, pending: _Pending | None, reason: str) -> None:
        attempt.failures.append(f"save of step {pending.step} failed: {reason}" if pending else reason)
        if pending:
            self._saving.failed.add(pending.ticket)
            self._give_up({pending.ticket})

    def _give_up(self, tickets: Collection[str]) -> None:
        """Some rank could not write its part, so that there is nothing to wait for."""
        for publication in self._saving.publications:
            if publication.ticket in tickets:
                publication.cancel()

    def _await_own_part(self) -> None:
        """The copy in memory is free again; bounded by the deadline of the save."""
        while self._saving.pending is not None:
            self._collect()
            time.sleep(_POLL_S)

    def drain(self) -> float:
        started = time.monotonic()
        attempt, peers = self._joined()
        self._await_own_part()
        self._collect()
        mine = (list(attempt.failures), self._saving.failed)
        outcomes = peers.gather(mine, "waiting for the last save")
        attempt.failures.clear()
        self._give_up(set().union(*(tickets for _, tickets in outcomes)))
        texts = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(outcomes) for text in texts]
        if texts:
            raise CheckpointError("; ".join(texts))
        peers.on_first(lambda: self._finish_publications(attempt), "publishing the last save")
        return time.monotonic() - started

    def _finish_publications(self, attempt: Attempt) -> None:
        for publication in self._saving.publications:
            publication.wait(self._limit_s)
        self._collect()
        reason = super().poll()
        if reason is not None:
            raise CheckpointError(reason)

    def abandon(self) -> None:
        self._saving.abandoned = True
        for publication in list(self._saving.publications):
            publication.cancel()
        super().abandon()

    def close(self) -> None:
        super().close()
        if self._owns_writer:
            self._writer.close()
        self._stager.close()
