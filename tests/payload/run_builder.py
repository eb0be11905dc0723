"""Writes the event log of a run that never took place, record by record, on a clock of its own."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_MONO_OFFSET_S = 900_000.0


@dataclass
class RunBuilder:
    """``now`` is the clock; every method that takes time moves it. Two pods, ranks spread evenly."""

    run_dir: Path
    num_ranks: int = 4
    num_pods: int = 2
    now: float = 1_700_000_000.0
    arm: str = "in-process"
    records: list[Record] = field(default_factory=list)
    _pid: int = 100
    _pids: dict[str, int] = field(default_factory=dict)
    _cycle: int = -1
    generation: str = "0.0"

    @property
    def ranks(self) -> list[str]:
        return [f"rank{rank}" for rank in range(self.num_ranks)]

    @property
    def pods(self) -> list[str]:
        return [f"pod{index}" for index in range(self.num_pods)]

    def emit(self, source: str, kind: str, **fields: Any) -> None:
        common = {"kind": kind, "wall": self.now, "mono": self.now - _MONO_OFFSET_S, "source": source}
        self.records.append({**common, "pid": self._pids[source], **fields})

    def every(self, kind: str, but: tuple[str, ...] = (), **fields: Any) -> None:
        for source in self.ranks:
            if source not in but:
                self.emit(source, kind, **fields)

    def new_process(self, source: str) -> None:
        self._pid += 1
        self._pids[source] = self._pid

    def submit(self, queued_s: float = 3.0) -> None:
        self.new_process("job")
        self.emit("job", "job_start", job="demo", speedup=20.0)
        self.now += queued_s

    def start_containers(self, restart_count: int = 0, launch_s: float = 0.5) -> None:
        """Every pod's launcher, 0.5 s after its process was started."""
        for index, pod in enumerate(self.pods):
            self.new_process(pod)
            if "job" in self._pids:
                self.emit("job", "pod_start", index=index, uid=f"u{index}", node="n", restart_count=restart_count)
        started = self.now
        self.now += launch_s
        for index, pod in enumerate(self.pods):
            self.emit(pod, "launcher_start", started_wall=started, index=index)

    def start_workers(self, meet_s: float = 1.0, spawn_s: float = 0.2, imports_s: float = 2.0) -> None:
        """Rendezvous, new processes, imports."""
        self._cycle += 1
        self.now += meet_s
        for pod in self.pods:
            self.emit(pod, "rendezvous", cycle=self._cycle)
            self.emit(pod, "workers_start", cycle=self._cycle, pids=[])
        started = self.now
        self.now += spawn_s
        for source in self.ranks:
            self.new_process(source)
            self.emit(source, "process_start", started_wall=started, warm=False)
        self.now += imports_s
        self.every("imports_done")
        self.generation = f"{self._cycle}.-1"

    def enter(self, step: int, group_s: float = 0.3, model_s: float = 0.4, load_s: float = 0.5) -> None:
        """The next attempt of all ranks; ``step``: of the state that is loaded."""
        cycle, iteration = self.generation.split(".")
        self.generation = f"{cycle}.{int(iteration) + 1}"
        for rank, source in enumerate(self.ranks):
            self.emit(source, "attempt", generation=self.generation, world_size=self.num_ranks, rank=rank)
        self.now += group_s
        self.every("group_ready", generation=self.generation)
        self.now += model_s
        self.every("model_ready")
        self.now += load_s
        tier = "durable" if step else "none"
        self.every("state_ready", step=step, tier=tier, load_s=load_s, size_bytes=1000, generation=self.generation)
        self.now += 0.25  # warm-up

    def steps(self, first: int, last: int, duration_s: float = 1.0, data_s: float = 0.125, gap_s: float = 0.01) -> None:
        for step in range(first, last + 1):
            self.now += duration_s
            fields = {"duration_s": duration_s, "data_s": data_s, "loss": 10.0 / step, "lr": 0.1}
            self.every("step", step=step, generation=self.generation, **fields)
            self.now += gap_s

    def save(self, step: int, blocking_s: float = 0.75, write_s: float = 2.5) -> None:
        self.now += blocking_s
        self.every("save", step=step, mode="async", blocking_s=blocking_s)
        self.every("save_done", step=step, write_s=write_s)

    def fault(self, kind: str, rank: int, step: int) -> None:
        number = sum(record["kind"] == "fault" for record in self.records)
        self.emit(f"rank{rank}", "fault", step=step, type=kind, rank=rank, number=number)
        folder = self.run_dir / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}-{step}-{rank}-{kind}").touch()

    def leave_in_process(self, detect_s: float, out_s: float = 0.6, meet_s: float = 0.2) -> None:
        """Detection everywhere, departure of one rank after the other, agreement on the next attempt."""
        self.now += detect_s
        self.every("detected", how="exception", reason="x", generation=self.generation)
        for source in self.ranks:
            self.now += out_s / self.num_ranks
            self.emit(source, "out", generation=self.generation)
        self.now += meet_s

    def kill_workers(self, detect_s: float) -> None:
        """The launchers find their workers dead, one a second after the other."""
        self.now += detect_s
        for pod in self.pods:
            self.emit(pod, "workers_failed", cycle=self._cycle, reason="signal 9", codes={"1": -9})
            self.now += 1.0

    def restart_containers(self, detect_s: float, raw_s: float, waited_s: float, restart_count: int) -> None:
        """The baseline: everything ends and is started again after a back-off."""
        self.now += detect_s
        for source in self.ranks:
            self.emit(source, "detected", how="exception", reason="x", generation=self.generation)
            self.emit(source, "process_end", code=1)
        self.now += 0.5
        for index, pod in enumerate(self.pods):
            self.emit(pod, "workers_failed", cycle=self._cycle, reason="exit code 1", codes={"0": 1})
            self.emit(pod, "launcher_end", code=1, reason="x")
            self.emit("job", "container_exit", index=index, code=1, signal=None)
            self.now += 0.25
        self.now += waited_s
        for index in range(self.num_pods):
            self.emit("job", "backoff", index=index, layer="kubelet", raw_s=raw_s, waited_s=waited_s)
        self.start_containers(restart_count)

    def finish(self, step: int, drain_s: float = 2.0) -> None:
        self.now += drain_s
        self.every("drain", duration_s=drain_s)
        self.now += 0.5
        self.every("train_end", step=step, sha256="abc", world_size=self.num_ranks)
        self.every("process_end", code=0)
        for pod in self.pods:
            self.emit(pod, "launcher_end", code=0, reason="complete")
        if "job" in self._pids:
            self.emit("job", "job_end", succeeded=True, reason="")

    def begin(self) -> None:
        """Submission to the first attempt's state."""
        self.submit()
        self.start_containers()
        self.start_workers()
        self.enter(0)

    def write(self, drop: Callable[[Record], bool] = lambda record: False, result: bool = True) -> Path:
        """The files, without the records that ``drop`` names; returns the run's folder."""
        folder = self.run_dir / "events"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        lines: dict[str, list[str]] = {}
        for record in self.records:
            if not drop(record):
                lines.setdefault(record["source"], []).append(json.dumps(record))
        for source, texts in lines.items():
            (folder / f"{source}.jsonl").write_text("\n".join(texts) + "\n")
        if result:
            asked = {"run_id": self.run_dir.name, "arm": self.arm, "checkpoint_mode": "async"}
            versions = {"torch": "2.13.0", "nvidia-resiliency-ext": "0.4.1"}
            values = {"succeeded": True, "reason": "", "asked": asked, "versions": versions}
            (self.run_dir / "result.json").write_text(json.dumps(values))
        return self.run_dir


def in_process_run(run_dir: Path) -> RunBuilder:
    """20 steps, saves at 5, 10, 15, 20; an exception at 8 (back to 5) and a hang at 16 (back to 15)."""
    run = RunBuilder(run_dir)
    run.begin()
    run.steps(1, 5)
    run.save(5)
    run.steps(6, 7)
    run.fault("exception", 2, 8)
    run.leave_in_process(detect_s=0.1)
    run.enter(5)
    run.steps(6, 10)
    run.save(10)
    run.steps(11, 15)
    run.save(15)
    run.fault("hang", 1, 16)
    run.leave_in_process(detect_s=5.0)
    run.enter(15)
    run.steps(16, 20)
    run.save(20)
    run.finish(20)
    return run


def straight_run(run_dir: Path) -> RunBuilder:
    """20 steps and the same saves, without a fault."""
    run = RunBuilder(run_dir, arm="in-process")
    run.begin()
    for last in (5, 10, 15, 20):
        run.steps(last - 4, last)
        run.save(last)
    run.finish(20, drain_s=1.75)
    return run


def kubernetes_run(run_dir: Path) -> RunBuilder:
    """The same faults, each ending in a restart of all containers; the second one waits."""
    run = RunBuilder(run_dir, arm="kubernetes")
    run.begin()
    run.steps(1, 5)
    run.save(5)
    run.steps(6, 7)
    run.fault("exception", 2, 8)
    run.restart_containers(detect_s=0.1, raw_s=0.0, waited_s=0.0, restart_count=1)
    run.start_workers()
    run.enter(5)
    run.steps(6, 10)
    run.save(10)
    run.steps(11, 15)
    run.save(15)
    run.fault("hang", 1, 16)
    run.restart_containers(detect_s=30.0, raw_s=10.0, waited_s=0.5, restart_count=2)
    run.start_workers()
    run.enter(15)
    run.steps(16, 20)
    run.save(20)
    run.finish(20)
    return run


def in_job_run(run_dir: Path) -> RunBuilder:
    """20 steps, one save at 10, SIGKILL of rank 0 at 13: the launchers start new workers."""
    run = RunBuilder(run_dir, arm="in-job")
    run.begin()
    run.steps(1, 10)
    run.save(10)
    run.steps(11, 12)
    run.fault("sigkill", 0, 13)
    run.kill_workers(detect_s=0.5)
    run.start_workers(meet_s=2.0)
    run.enter(10)
    run.steps(11, 20)
    run.save(20)
    run.finish(20)
    return run
