"""What a pod and a worker are told by their environment; the only module of payload/ that reads it.

The manifest sets the pod's variables, the launcher adds the worker's. Each missing or bad variable is one
ConfigError that names it and says what is legal.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from payload.config import ConfigError, RunConfig

CONFIG = "NVRX_EKS_CONFIG"
INDEX = "JOB_COMPLETION_INDEX"
COORDINATOR = "NVRX_EKS_COORDINATOR"
PORT = "NVRX_EKS_PORT"
HOSTS = "NVRX_EKS_HOSTS"
RUNNER = "NVRX_EKS_RUNNER"
CYCLE = "NVRX_EKS_CYCLE"
STORE = "NVRX_EKS_STORE"
WARM = "NVRX_EKS_WARM"
WORKER_MODULE = "NVRX_EKS_WORKER"
TOKEN_SECRET = "NVRX_EKS_HF_SECRET"
AWAIT_DATA = "NVRX_EKS_AWAIT_DATA"
DEFAULT_WORKER = "payload.worker"


@dataclass(frozen=True)
class PodEnvironment:
    """What the manifest tells the launcher."""

    config: RunConfig
    index: int
    """Completion index of the Job; the group rank of this node."""
    coordinator: str
    """Name of pod 0."""
    port: int
    """Port of pod 0's store."""
    pod_name: str
    pod_uid: str
    node_name: str
    hosts_file: Path | None
    """Lines ``name address`` that come before DNS; only where pods are local processes."""
    runner_dir: Path | None
    """Where a fault may ask for the loss of a pod; only where pods are local processes."""
    worker_module: str
    """Module run as a worker."""
    token_secret: str = ""
    """ARN of the secret that holds the Hugging Face token; empty: public models only."""
    await_data: bool = False
    """A Job beside this one prepares the data: wait for it before the workers start."""

    @classmethod
    def read(cls, values: Mapping[str, str] | None = None) -> PodEnvironment:
        """From the process's environment, or from ``values``. Raises ConfigError."""
        values = os.environ if values is None else values
        config = _config(values)
        index = _integer(values, INDEX, 0, config.parallelism.num_nodes - 1)
        return cls(
            config=config,
            index=index,
            coordinator=_text(values, COORDINATOR, "the name of pod 0"),
            port=_integer(values, PORT, 1, 65535),
            pod_name=_text(values, "POD_NAME", "the pod's name"),
            pod_uid=_text(values, "POD_UID", "the pod's uid"),
            node_name=_text(values, "NODE_NAME", "the node's name"),
            hosts_file=_path(values, HOSTS),
            runner_dir=_path(values, RUNNER),
            worker_module=values.get(WORKER_MODULE) or DEFAULT_WORKER,
            token_secret=values.get(TOKEN_SECRET, ""),
            await_data=values.get(AWAIT_DATA) == "1",
        )


@dataclass(frozen=True)
class WorkerEnvironment:
    """What the agent and the launcher tell a worker, as it starts."""

    config: RunConfig
    rank: int
    """Global rank at the start of the process; in-process restarts may assign another one."""
    world_size: int
    local_rank: int
    pod_index: int
    cycle: int
    """Number of this start of the worker group in the whole run; the same on all ranks."""
    store_host: str
    store_port: int
    """The store in pod 0's launcher."""
    node_name: str
    runner_dir: Path | None
    warm: bool
    """Forked from a process that had done the imports."""

    @classmethod
    def read(cls, values: Mapping[str, str] | None = None) -> WorkerEnvironment:
        """From the process's environment, or from ``values``. Raises ConfigError."""
        values = os.environ if values is None else values
        config = _config(values)
        world_size = _integer(values, "WORLD_SIZE", 1, config.world_size)
        host, _, port = _text(values, STORE, "host:port of the launcher's store").rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{STORE}: {values[STORE]!r}; legal: host:port of the launcher's store")
        return cls(
            config=config,
            rank=_integer(values, "RANK", 0, world_size - 1),
            world_size=world_size,
            local_rank=_integer(values, "LOCAL_RANK", 0, config.parallelism.ranks_per_node - 1),
            pod_index=_integer(values, INDEX, 0, config.parallelism.num_nodes - 1),
            cycle=_integer(values, CYCLE, 0, 10**9),
            store_host=host,
            store_port=int(port),
            node_name=_text(values, "NODE_NAME", "the node's name"),
            runner_dir=_path(values, RUNNER),
            warm=values.get(WARM) == "1",
        )


@dataclass(frozen=True)
class AgentEnvironment:
    """What torchrun tells a script that it started, without this package's launcher."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    node_rank: int
    store_host: str
    store_port: int
    """The store in the agent of node 0."""

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def worker(self, config: RunConfig) -> WorkerEnvironment:
        """As a worker of cycle 0 is told."""
        return WorkerEnvironment(
            config=config,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            pod_index=self.node_rank,
            cycle=0,
            store_host=self.store_host,
            store_port=self.store_port,
            node_name=platform.node(),
            runner_dir=None,
            warm=False,
        )


def agent_environment(values: Mapping[str, str] | None = None) -> AgentEnvironment:
    """From the process's environment, or from ``values``. Raises ConfigError."""
    values = os.environ if values is None else values
    world_size = _integer(values, "WORLD_SIZE", 1, 10**6)
    ranks_per_node = _integer(values, "LOCAL_WORLD_SIZE", 1, world_size)
    if values.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            f"TORCHELASTIC_USE_AGENT_STORE: {values.get('TORCHELASTIC_USE_AGENT_STORE', '')!r}; legal: True, as "
            "torchrun sets it where its own store is open to the workers: only that one outlives rank 0"
        )
    return AgentEnvironment(
        rank=_integer(values, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=_integer(values, "LOCAL_RANK", 0, ranks_per_node - 1),
        ranks_per_node=ranks_per_node,
        node_rank=_integer(values, "GROUP_RANK", 0, world_size // ranks_per_node - 1),
        store_host=_text(values, "MASTER_ADDR", "the address of node 0"),
        store_port=_integer(values, "MASTER_PORT", 1, 65535),
    )


def run_config(values: Mapping[str, str] | None = None) -> RunConfig:
    """The config that the pod was given. Raises ConfigError."""
    return _config(os.environ if values is None else values)


def local_rank() -> int:
    """Of a process that torchrun started. Raises ConfigError."""
    return _integer(os.environ, "LOCAL_RANK", 0, 1024)


def token_secret() -> str:
    """ARN of the secret that holds the Hugging Face token, for a pod that is no part of a run; '' without."""
    return os.environ.get(TOKEN_SECRET, "")


def export(values: Mapping[str, str]) -> None:
    """Adds to this process's environment, which the agent's workers inherit."""
    os.environ.update(values)


def set_defaults(values: Mapping[str, str]) -> None:
    """Adds what this process's environment does not hold yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def replace(values: Mapping[str, str]) -> None:
    """Makes ``values`` the whole environment: a forked worker takes over that of the process it stands for."""
    os.environ.clear()
    os.environ.update(values)


def snapshot() -> dict[str, str]:
    """A copy of this process's environment, for a child process."""
    return dict(os.environ)


def _config(values: Mapping[str, str]) -> RunConfig:
    path = Path(_text(values, CONFIG, "path of the run's config (JSON)"))
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{CONFIG}: {path}: {error.strerror}; legal: a readable file") from error
    return RunConfig.from_json(text)


def _text(values: Mapping[str, str], name: str, legal: str) -> str:
    value = values.get(name, "")
    if not value:
        raise ConfigError(f"{name}: not set; legal: {legal}")
    return value


def _integer(values: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = _text(values, name, f"{low} to {high}")
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ConfigError(f"{name}: {text!r}; legal: {low} to {high}")
    return int(text)


def _path(values: Mapping[str, str], name: str) -> Path | None:
    return Path(values[name]) if values.get(name) else None
