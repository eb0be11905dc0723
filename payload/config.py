"""RunConfig: the contract between the stacks, the manifest and the training process.

One frozen tree that travels as JSON (ConfigMap key ``run.json``).  It holds plain values only: no CDK
token, no secret, nothing about the machine that it runs on.  This module imports neither torch nor CDK.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Arm = Literal["kubernetes", "in-process", "in-job", "layered"]
CheckpointMode = Literal["sync", "async", "async-local"]
FaultType = Literal["exception", "hang", "hang-c", "hang-stop", "sigkill", "pod-loss", "node-loss"]

ARMS: tuple[Arm, ...] = get_args(Arm)
FAULT_TYPES: tuple[FaultType, ...] = get_args(FaultType)
# The faults that no code inside the container can undo: the Job controller replaces the pod.
POD_FAULTS: frozenset[str] = frozenset({"pod-loss", "node-loss"})

# Exit codes of the container, read by the Job's podFailurePolicy and by the local runner.
EXIT_NO_PROGRESS = 42
"""The run stopped itself: restarts without progress, or the restart budget is spent."""
EXIT_UNFIT_NODE = 43
"""Workers keep failing on this node alone: the node should be replaced."""
EXIT_BAD_CONFIG = 2
"""The configuration was refused before anything was started."""
EXIT_STOPPED = 143
"""SIGTERM: a save was made and the pod left."""

_RUN_ID = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Check = tuple[bool, str, object, str]
"""Whether it holds, the field, its value, the legal values."""


class ConfigError(ValueError):
    """A value that the user gave is not legal; the text names the field and the legal values."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    name: str = "llama-tiny"
    """``llama-tiny``, ``llama-1b``, ``llama-8b`` (random weights), a hub id or a local folder (its weights)."""
    precision: Literal["fp32", "bf16", "mixed"] = "fp32"
    """``bf16``: parameters and moments in bf16. ``mixed``: fp32 master weights, bf16 compute."""
    task: str = ""
    """``package.module:build`` of the user's own model, dataset and loss; empty: causal LM by name."""
    seed: int = 0
    """Seeds the weights, and with the logical rank every rank's RNG."""


class DataConfig(_Section):
    path: str = ""
    """Folder made by ``prepare-data``; empty: ``<workdir>/data``."""
    sequence_length: PositiveInt = 64
    """Tokens a sample."""
    seed: int = 0
    """Seeds the order of samples of each epoch."""


class TrainingConfig(_Section):
    max_steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    global_batch_size: PositiveInt = 8
    """Samples a step over all ranks; kept when the world size changes, so it must divide by every world size used."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    warmup_steps: NonNegativeInt = 10
    """Linear warm-up, then cosine decay to a tenth of the rate at ``max_steps``."""
    gradient_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    min_step_s: Annotated[float, Field(ge=0)] = 0.0
    """A step lasts at least this long: a tiny model then has the step time of a large one. 0: off."""


class ParallelismConfig(_Section):
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"
    num_nodes: PositiveInt = 2
    """Pods of the Job; one pod a node."""
    ranks_per_node: PositiveInt = 2
    """Worker processes a pod; on GPUs, the GPUs of a node."""
    device: Literal["cpu", "cuda"] = "cuda"
    """``cuda`` uses NCCL, ``cpu`` gloo. Never falls back: without the device, the worker fails at start."""


class CheckpointConfig(_Section):
    mode: CheckpointMode = "async"
    """``sync``: torch DCP. ``async``: NVRx async queue, DCP layout. ``async-local``: NVRx TorchAsyncCheckpoint of
    each rank's shards; loads at the same world size only."""
    interval: PositiveInt = 50
    """Steps between durable saves."""
    keep: PositiveInt = 2
    """Complete saves that retention leaves."""
    fresh_start: bool = False
    """Start at step 0 although the folder holds files but no complete save; they are moved aside, not deleted."""
    memory_interval: NonNegativeInt = 0
    """Steps between snapshots in node memory; 0: no memory tier. ``interval`` must be a multiple."""
    memory_dir: str = "/dev/shm"
    """Mount of the memory volume that the snapshots are kept in."""
    replicate: bool = False
    """Snapshots also go to the next pod's memory."""


class RecoveryConfig(_Section):
    arm: Arm = "layered"
    max_restarts: NonNegativeInt = 20
    """Restarts of the whole run, by whatever layer; one counter, stored with the run."""
    max_no_progress: PositiveInt = 3
    """Consecutive restarts without a newer step before the run stops with exit code 42."""
    min_world_size: NonNegativeInt = 0
    """Smallest world that an in-process restart may go on with; 0: all ranks."""
    max_rank_faults: NonNegativeInt = 0
    """In-process faults of one rank before it leaves (NVRx FaultCounter); 0: no limit."""
    max_node_faults: NonNegativeInt = 3
    """Consecutive worker failures that began on one node before its launcher exits with 43; 0: off."""
    warm_workers: bool = True
    """Fork workers from a process that has done the imports, instead of starting an interpreter each time."""


class TimeoutConfig(_Section):
    """All in seconds. soft < hard < barrier; heartbeat looser than soft (NVRx inprocess.Wrapper)."""

    soft_s: Seconds = 30.0
    """No progress for so long: the in-process restart begins. Longer than any step."""
    hard_s: Seconds = 60.0
    """No progress for so long: the rank is killed."""
    barrier_s: Seconds = 120.0
    """Ranks must meet within this after a fault."""
    completion_s: Seconds = 120.0
    """Ranks must finish within this of one another."""
    heartbeat_s: Seconds = 90.0
    """In-job: a rank silent for so long is restarted by the launcher."""
    initial_heartbeat_s: Seconds = 600.0
    """In-job: the first heartbeat may take so long (imports, first collective)."""
    setup_s: Seconds = 300.0
    """Longest model build, load or save of one attempt; the soft timeout is lifted meanwhile."""
    process_group_s: Seconds = 600.0
    """Timeout of a collective; in the baseline arm the only way a hang ends."""
    join_s: Seconds = 900.0
    """All launchers must meet within this, and pod 0's name must resolve."""
    poll_s: Seconds = 0.1
    """Poll interval of the in-process monitors and of the launcher."""
    last_call_s: Seconds = 1.0
    """Wait for late nodes once the smallest number has met."""
    grace_s: Annotated[float, Field(ge=0)] = 5.0
    """SIGTERM to SIGKILL of surviving workers."""
    save_grace_s: Seconds = 600.0
    """SIGTERM of the pod to SIGKILL: the last save must fit (terminationGracePeriodSeconds)."""


class FaultSpec(_Section):
    step: PositiveInt
    """Fires at the start of this step (1-based: the step that is about to be computed)."""
    rank: NonNegativeInt
    """Logical rank."""
    type: FaultType


class FaultConfig(_Section):
    count: NonNegativeInt = 0
    """Faults drawn by the article's generator (faults.schedule)."""
    seed: int = 42
    types: tuple[FaultType, ...] = ("exception",)
    type_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """One weight a type; empty: equal."""
    after_step: NonNegativeInt = 10
    """First eligible step is the one after."""
    include_rank0: bool = False
    """The article's generator never hits rank 0."""
    mtbf_s: Annotated[float, Field(ge=0)] = 0.0
    """Stochastic mode: mean time between faults of the run; 0: off. Drawn per step from ``seed``."""
    schedule: tuple[FaultSpec, ...] = ()
    """An explicit list instead of a drawn one."""

    @model_validator(mode="after")
    def _consistent(self) -> FaultConfig:
        if not self.types:
            raise ValueError(f"types: empty; legal: {', '.join(FAULT_TYPES)}")
        if self.type_weights and len(self.type_weights) != len(self.types):
            raise ValueError(
                f"type_weights: {len(self.type_weights)} weights for {len(self.types)} types; give one weight a type"
            )
        if self.type_weights and sum(self.type_weights) <= 0:
            raise ValueError("type_weights: all zero; at least one must be positive")
        modes = [bool(self.count), bool(self.mtbf_s), bool(self.schedule)]
        if sum(modes) > 1:
            raise ValueError("schedule: give one of count, mtbf_s and schedule")
        return self


class RunConfig(_Section):
    run_id: str = "local"
    """Owns the run's checkpoints, events and fired faults; outlives changes of the Job's spec.
    A DNS label of up to 40 characters."""
    workdir: str = "/fsx"
    """Durable folder shared by all pods; the run lives in ``<workdir>/runs/<run_id>``."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    faults: FaultConfig = FaultConfig()

    @property
    def world_size(self) -> int:
        return self.parallelism.num_nodes * self.parallelism.ranks_per_node

    @property
    def run_dir(self) -> Path:
        return Path(self.workdir) / "runs" / self.run_id

    @property
    def events_dir(self) -> Path:
        return self.run_dir / "events"

    @property
    def checkpoint_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def faults_dir(self) -> Path:
        """One marker a fired fault."""
        return self.run_dir / "faults"

    @property
    def restarts_dir(self) -> Path:
        """The restart budget (budget.py)."""
        return self.run_dir / "restarts"

    @property
    def data_dir(self) -> Path:
        return Path(self.data.path) if self.data.path else Path(self.workdir) / "data"

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        checks = [*self._name_checks(), *self._timeout_checks(), *self._size_checks(), *self._fault_checks()]
        problems = [f"{field}: {value}; legal: {legal}" for right, field, value, legal in checks if not right]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _name_checks(self) -> Iterator[Check]:
        named = bool(_RUN_ID.fullmatch(self.run_id)) and len(self.run_id) <= 40
        legal = "up to 40 of a-z, 0-9 and '-', beginning and ending with a letter or digit"
        yield named, "run_id", repr(self.run_id), legal
        yield self.workdir.startswith("/"), "workdir", repr(self.workdir), "an absolute path"

    def _timeout_checks(self) -> Iterator[Check]:
        t = self.timeouts
        given = f"soft_s {t.soft_s:g}, hard_s {t.hard_s:g}, barrier_s {t.barrier_s:g}"
        yield t.soft_s < t.hard_s < t.barrier_s, "timeouts", given, "soft_s < hard_s < barrier_s"
        looser = self.recovery.arm != "layered" or t.heartbeat_s > t.soft_s
        legal = f"more than soft_s ({t.soft_s:g}) in the layered arm"
        yield looser, "timeouts.heartbeat_s", f"{t.heartbeat_s:g}", legal
        first = t.initial_heartbeat_s
        legal = f"at least heartbeat_s ({t.heartbeat_s:g})"
        yield first >= t.heartbeat_s, "timeouts.initial_heartbeat_s", f"{first:g}", legal

    def _size_checks(self) -> Iterator[Check]:
        world, training, checkpoint = self.world_size, self.training, self.checkpoint
        batch, warmup = training.global_batch_size, training.warmup_steps
        yield batch % world == 0, "training.global_batch_size", batch, f"a multiple of the world size ({world})"
        legal = f"less than max_steps ({training.max_steps})"
        yield warmup < training.max_steps, "training.warmup_steps", warmup, legal
        smallest = self.recovery.min_world_size
        yield smallest <= world, "recovery.min_world_size", smallest, f"0 (all) to {world}"
        every = checkpoint.memory_interval
        legal = f"a multiple of checkpoint.memory_interval ({every})"
        yield not every or checkpoint.interval % every == 0, "checkpoint.interval", checkpoint.interval, legal
        possible = every > 0 and self.parallelism.num_nodes > 1
        legal = "true only with memory_interval > 0 and at least 2 nodes"
        yield possible or not checkpoint.replicate, "checkpoint.replicate", "true", legal

    def _fault_checks(self) -> Iterator[Check]:
        faults, world, steps = self.faults, self.world_size, self.training.max_steps
        hittable = world > 1 or faults.include_rank0 or not (faults.count or faults.mtbf_s)
        yield hittable, "faults.include_rank0", "false", "true in a world of one rank, which else has no rank to hit"
        eligible = max(0, steps - faults.after_step)
        legal = f"0 to {eligible}, the steps after after_step ({faults.after_step}) up to max_steps ({steps})"
        yield faults.count <= eligible, "faults.count", faults.count, legal
        for i, spec in enumerate(faults.schedule):
            yield spec.step <= steps, f"faults.schedule[{i}].step", spec.step, f"1 to {steps}"
            yield spec.rank < world, f"faults.schedule[{i}].rank", spec.rank, f"0 to {world - 1}"

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Raises ConfigError with one line a problem, each naming the field and the legal values."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe(error)) from error

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"run config: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError("run config: not a JSON object")
        return cls.from_dict(values)

    def with_overrides(self, overrides: Mapping[str, Any]) -> RunConfig:
        """A copy with dotted fields replaced, validated as a whole: ``{"training.max_steps": 50}``."""
        return RunConfig.from_dict(merge(self.model_dump(mode="json"), overrides))


def describe(error: ValidationError, root: type[BaseModel] = RunConfig) -> str:
    """One line a problem: the dotted field, the value, and what is legal. ``root``: the model that was validated."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown field; legal here: {', '.join(_siblings(item['loc'], root))}")
        elif item["type"] == "value_error":
            text = item["msg"].removeprefix("Value error, ")
            lines += [f"{where}.{line}" if where else line for line in text.splitlines()]
        elif item["type"] == "missing":
            lines.append(f"{where}: missing; legal: a value must be given")
        else:
            lines.append(f"{where}: {item['input']!r}; legal: {item['msg'].removeprefix('Input should be ')}")
    return "\n".join(lines)


def _siblings(location: Sequence[int | str], root: type[BaseModel]) -> list[str]:
    """The fields of the section that ``location`` lies in."""
    section = root
    for part in location[:-1]:
        if isinstance(part, str) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
            # A tuple of sections: the index that follows in ``location`` changes nothing.
            inner = get_args(annotation)[0] if get_args(annotation) else annotation
            assert isinstance(inner, type) and issubclass(inner, BaseModel)
            section = inner
    return sorted(section.model_fields)


def merge(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Sets dotted keys in a nested dict; raises ConfigError where a key leads through a plain value."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in overrides.items():
        *sections, name = key.split(".")
        target = merged
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{key}: {section} is not a section")
        target[name] = value
    return merged


FLAGS: dict[str, str] = {
    "run_id": "run_id",
    "workdir": "workdir",
    "model": "model.name",
    "task": "model.task",
    "max_steps": "training.max_steps",
    "batch_size": "training.global_batch_size",
    "nodes": "parallelism.num_nodes",
    "ranks_per_node": "parallelism.ranks_per_node",
    "arm": "recovery.arm",
    "checkpoint_mode": "checkpoint.mode",
    "checkpoint_interval": "checkpoint.interval",
    "fresh_start": "checkpoint.fresh_start",
    "fault_count": "faults.count",
    "fault_seed": "faults.seed",
    "fault_types": "faults.types",
    "fault_type_weights": "faults.type_weights",
    "fault_after_step": "faults.after_step",
    "fault_include_rank0": "faults.include_rank0",
    "fault_mtbf_s": "faults.mtbf_s",
}
"""Command line flag -> dotted field. The first words are the article's own flags, verbatim."""

_LISTS = {"faults.types", "faults.type_weights"}


def parse_value(field: str, text: str) -> Any:
    """The value of one flag: a TOML literal where it is one, else the text; comma lists for list fields."""
    if field in _LISTS:
        return [_literal(part.strip()) for part in text.split(",") if part.strip()]
    return _literal(text)


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def load_profile(path: Path) -> RunConfig:
    """The ``[run]`` table of a profile. Raises ConfigError naming the file and the field."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"profile {path}: not TOML: {error}") from error
    if "run" not in tables:
        raise ConfigError(f"profile {path}: no [run] table")
    try:
        return RunConfig.from_dict(tables["run"])
    except ConfigError as error:
        raise ConfigError("\n".join(f"profile {path}: run.{line}" for line in str(error).splitlines())) from error
