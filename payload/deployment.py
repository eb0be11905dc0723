"""Where a run goes: the facts of a cluster that its manifest needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from payload.config import ConfigError

PodSecurity = Literal["restricted", "privileged"]


@dataclass(frozen=True)
class Toleration:
    key: str
    value: str = ""
    """Empty: any value (operator Exists)."""
    effect: str = ""
    """``NoSchedule`` or ``NoExecute``; empty: both."""
    seconds: int | None = None
    """How long a NoExecute taint is tolerated; None: for ever."""

    def render(self) -> dict[str, Any]:
        found: dict[str, Any] = {"key": self.key, "operator": "Equal" if self.value else "Exists"}
        if self.value:
            found["value"] = self.value
        if self.effect:
            found["effect"] = self.effect
        if self.seconds is not None:
            found["tolerationSeconds"] = self.seconds
        return found


@dataclass(frozen=True)
class Deployment:
    """Where a run goes: what the cluster offers and what the pod asks of it. Plain values but for ``image``."""

    image: str
    """The only field that may hold a CDK token; then ``image_id`` must be given."""
    image_id: str = ""
    """What stands for the image in the Job's name, such as the hash of its build context; empty: ``image``."""
    namespace: str = "nvrx-eks"
    name_prefix: str = "nvrx"
    """The Job is called ``<name_prefix>-<run_id>-<hash>``."""
    service_account: str = ""
    """Empty: the namespace's default; its token is not mounted either way."""
    volume_claim: str = "fsx"
    """PersistentVolumeClaim that is mounted at ``RunConfig.workdir``."""
    host_path: str = ""
    """A folder of the node instead of a claim; then the namespace must admit ``privileged`` pods."""
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    cpu: str = ""
    """CPU request, as Kubernetes spells it; empty: none."""
    memory_mib: int = 0
    """Memory request and limit; 0: none. The memory volume counts towards it."""
    num_gpus: int = 0
    """nvidia.com/gpu."""
    num_efa: int = 0
    """vpc.amazonaws.com/efa."""
    hugepages_2mi_mib: int = 0
    """Only where the node reserves them: the EFA driver does so on the EKS GPU images."""
    shm_mib: int = 64
    """sizeLimit of the memory volume at /dev/shm: worker queues, NCCL, and the snapshots of the memory tier."""
    command: tuple[str, ...] = ("python", "-m", "payload.launcher")
    """Of the training container, for an image with a start of its own."""
    env: tuple[tuple[str, str], ...] = ()
    """More environment, such as NCCL and EFA settings."""
    token_secret: str = ""
    """ARN of the AWS secret that the pod reads its Hugging Face token from, by its own identity; empty: none."""
    await_data: bool = False
    """A Job of ``render_prepare_data`` fills the data folder: launchers wait for it."""
    user_id: int = 1000
    group_id: int = 1000
    """Also fsGroup: the group that owns the volumes."""
    ipc_lock: bool = False
    """Adds IPC_LOCK, for runtimes whose memlock limit is too low for EFA; needs a ``privileged`` namespace."""
    max_s: int = 0
    """The Job is ended so long after it was submitted, pending time included (activeDeadlineSeconds); 0: never."""
    unreachable_s: int = 30
    """How long the pod stays bound to a node that is not ready or not reachable; Kubernetes' default is 300."""

    @property
    def pod_security(self) -> PodSecurity:
        """The Pod Security Standards level that the pod meets. ``restricted`` implies ``baseline``."""
        return "privileged" if self.host_path or self.ipc_lock else "restricted"


LOCAL = Deployment(image="local", volume_claim="fsx", shm_mib=64, env=(("GLOO_SOCKET_IFNAME", "lo"),))
"""The local runner: the image is this checkout, the claim a folder."""
KIND = Deployment(image="nvrx-eks:cpu", volume_claim="nvrx-eks", memory_mib=6144, shm_mib=512, cpu="2")
"""kind, k3d, minikube: the CPU image, loaded by hand, and a claim of the default storage class."""


def load_deployment(path: Path, tables: Mapping[str, Any]) -> Deployment:
    """The ``[deployment]`` table of a profile. Raises ConfigError naming the file, the field and the legal fields."""
    values = dict(tables)
    legal = {field.name: field for field in dataclasses.fields(Deployment)}
    for name, value in values.items():
        where = f"profile {path}: deployment.{name}"
        if name not in legal:
            raise ConfigError(f"{where}: unknown field; legal here: {', '.join(sorted(legal))}")
        wanted: type = {"str": str, "int": int, "bool": bool}.get(str(legal[name].type), object)
        if type(value) is not wanted and wanted is not object:
            raise ConfigError(f"{where}: {value!r}; legal: a value of type {wanted.__name__}")
    if "image" not in values:
        raise ConfigError(f"profile {path}: deployment.image: missing; legal: an image reference")
    for name in ("env", "node_selector"):
        if name in values:
            values[name] = tuple((str(key), str(value)) for key, value in dict(values[name]).items())
    try:
        values["command"] = tuple(values.get("command", Deployment.command))
        values["tolerations"] = tuple(Toleration(**item) for item in values.get("tolerations", ()))
    except TypeError as error:
        raise ConfigError(f"profile {path}: deployment.tolerations: {error}; legal: key, value, effect") from error
    return Deployment(**values)
