"""The kubelet of the local cluster: a pod is a sandbox process, its volumes are folders, its address is 127.0.0.x."""

from __future__ import annotations

import json
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from payload.config import ConfigError
from payload.job_controller import Pod
from payload.manifest_rules import parse_quantity
from payload.process import descendants, send

SHM = Path("/dev/shm")
SANDBOX_END_S = 30.0
"""A sandbox that still runs so long after its stdin was closed is an error."""
PORTS = range(10000, 65536)
MIN_PORTS = 500
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Exit:
    uid: str
    code: int
    signal: int


@dataclass
class _Sandbox:
    process: subprocess.Popen[bytes]
    pod: Pod
    folders: list[Path]
    mounts: dict[str, Path]
    pending: bytes = b""
    kill_at: float | None = None
    """End of the grace period."""

    def tell(self, **command: Any) -> None:
        """A sandbox that is gone shows on its stdout, where wait() raises."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return


@dataclass
class LocalKubelet:
    """Every node of the local cluster. Single-threaded: start, wait() for exits, close()."""

    job: Mapping[str, Any]
    config_maps: Mapping[str, Mapping[str, Any]]
    root: Path
    """Durable: claims, host folders and logs, kept after the run."""
    base: Path
    """Ephemeral: pods' folders; a short path, since sockets lie below."""
    extra_env: Mapping[str, str] = field(default_factory=dict)
    memory_root: Path = SHM

    def __post_init__(self) -> None:
        self._sandboxes: dict[str, _Sandbox] = {}
        self._selector = selectors.DefaultSelector()
        self._spec = self.job["spec"]["template"]["spec"]
        self._container = self._spec["containers"][0]
        self._ports = {str(port["containerPort"]): str(free_port()) for port in self._container.get("ports", [])}
        self.requests = self.base / "requests"
        self.requests.mkdir()
        self.hosts = self.base / "hosts"
        self.logs = self.root / "logs" / str(self.job["metadata"]["name"])
        self.logs.mkdir(parents=True, exist_ok=True)
        self._write_hosts()

    # What the controller asks for

    def start_pod(self, pod: Pod) -> None:
        folder = self.base / f"{pod.index}-{pod.uid[:5]}"
        folder.mkdir()
        folders = [folder]
        mounts = self._make_volumes(pod, folder, folders)
        process = subprocess.Popen(
            [sys.executable, "-S", "-m", "payload.sandbox", *map(str, folders)],
            env={"PYTHONPATH": _PACKAGE_ROOT, "PATH": os.defpath},
            cwd=self.base,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        sandbox = _Sandbox(process, pod, folders, mounts)
        self._sandboxes[pod.uid] = sandbox
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, sandbox)
        self._write_hosts()
        self.start_container(pod)

    def start_container(self, pod: Pod) -> None:
        sandbox = self._sandboxes[pod.uid]
        argv = [self._rewrite(word, sandbox.mounts) for word in self._argv()]
        log = self.logs / f"pod{pod.index}-{pod.uid[:5]}-{pod.restart_count}.log"
        env = self._environment(pod, sandbox.mounts)
        sandbox.tell(do="start", argv=argv, env=env, cwd=str(sandbox.folders[0]), log=str(log))

    def terminate(self, pod: Pod) -> None:
        sandbox = self._sandboxes[pod.uid]
        sandbox.kill_at = time.monotonic() + self._spec.get("terminationGracePeriodSeconds", 30)
        sandbox.tell(do="signal", number=15)

    def kill(self, pod: Pod) -> None:
        self._sandboxes[pod.uid].tell(do="kill")

    def remove(self, pod: Pod) -> None:
        sandbox = self._sandboxes.pop(pod.uid)
        self._end([sandbox])
        self._write_hosts()

    # What the runner asks for

    def wait(self, timeout_s: float) -> list[Exit]:
        """Containers that ended, waiting up to ``timeout_s``; ends grace periods that are over.

        Raises RuntimeError when a sandbox is gone, which nothing of ours does.
        """
        found: list[Exit] = []
        for key, _ in self._selector.select(timeout_s):
            sandbox: _Sandbox = key.data
            data = os.read(key.fd, 65536)
            if not data:
                raise RuntimeError(f"the sandbox of pod {sandbox.pod.name} is gone: {sandbox.process.wait()}")
            *lines, sandbox.pending = (sandbox.pending + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                sandbox.kill_at = None
                found.append(Exit(sandbox.pod.uid, report["code"], report["signal"]))
        now = time.monotonic()
        for sandbox in self._sandboxes.values():
            if sandbox.kill_at is not None and sandbox.kill_at <= now:
                sandbox.kill_at = None
                sandbox.tell(do="kill")
        return found

    def close(self) -> None:
        """Ends every pod at once and removes its folders; idempotent."""
        sandboxes = list(self._sandboxes.values())
        self._sandboxes.clear()
        self._end(sandboxes)
        self._selector.close()

    def host_folder(self, volume: Mapping[str, Any]) -> Path | None:
        """Where a durable volume lies on this machine; None for the others."""
        if "persistentVolumeClaim" in volume:
            return self.root / "volumes" / str(volume["persistentVolumeClaim"]["claimName"])
        if "hostPath" in volume:
            return self.root / "host" / str(volume["hostPath"]["path"]).strip("/")
        return None

    # Inside

    def _end(self, sandboxes: Iterable[_Sandbox]) -> None:
        ending = list(sandboxes)
        for sandbox in ending:
            assert sandbox.process.stdin is not None
            try:
                sandbox.process.stdin.close()
            except BrokenPipeError:
                continue
        for sandbox in ending:
            try:
                sandbox.process.wait(SANDBOX_END_S)
            except subprocess.TimeoutExpired:
                send([*descendants(sandbox.process.pid), sandbox.process.pid], signal.SIGKILL)
                sandbox.process.wait()
            assert sandbox.process.stdout is not None
            self._selector.unregister(sandbox.process.stdout)
            sandbox.process.stdout.close()
            for folder in sandbox.folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_volumes(self, pod: Pod, folder: Path, folders: list[Path]) -> dict[str, Path]:
        """Makes the pod's volumes; returns mount path -> folder. ``folders`` gets what must go with the pod."""
        places: dict[str, Path] = {}
        for volume in self._spec.get("volumes", []):
            name = volume["name"]
            if durable := self.host_folder(volume):
                places[name] = durable
            elif volume.get("emptyDir", {}).get("medium") == "Memory":
                places[name] = self._memory_folder(volume, folder, f"{self.base.name}-{folder.name}-{name}")
                folders.append(places[name])
            else:
                places[name] = folder / name
            places[name].mkdir(parents=True, exist_ok=True)
        mounts = {mount["mountPath"]: places[mount["name"]] for mount in self._container.get("volumeMounts", [])}
        for volume in self._spec.get("volumes", []):
            if "configMap" in volume:
                self._write_config_map(volume["configMap"]["name"], places[volume["name"]], mounts)
        return mounts

    def _memory_folder(self, volume: Mapping[str, Any], folder: Path, name: str) -> Path:
        """In real memory where it has room, else among the pod's other folders."""
        size_bytes = parse_quantity(volume["emptyDir"].get("sizeLimit", "0"))
        if os.access(self.memory_root, os.W_OK) and shutil.disk_usage(self.memory_root).free > size_bytes:
            return self.memory_root / name
        return folder / "memory"

    def _write_config_map(self, name: str, folder: Path, mounts: Mapping[str, Path]) -> None:
        if name not in self.config_maps:
            raise ConfigError(f"volumes.configMap.name: {name}; legal: {', '.join(self.config_maps) or 'none given'}")
        for key, text in self.config_maps[name].items():
            if key.endswith(".json"):
                text = json.dumps(self._rewrite(json.loads(text), mounts), indent=1, sort_keys=True)
            (folder / key).write_text(text)

    def _rewrite(self, value: Any, mounts: Mapping[str, Path]) -> Any:
        """Paths below a mount become paths on this machine, in every string of a JSON value."""
        if isinstance(value, dict):
            return {key: self._rewrite(item, mounts) for key, item in value.items()}
        if isinstance(value, list):
            return [self._rewrite(item, mounts) for item in value]
        if isinstance(value, str):
            for path in sorted(mounts, key=len, reverse=True):
                if value == path or value.startswith(path.rstrip("/") + "/"):
                    return str(mounts[path]) + value[len(path) :]
        return value

    def _argv(self) -> list[str]:
        argv = [*self._container.get("command", []), *self._container.get("args", [])]
        if not argv:
            raise ConfigError("containers[0].command: missing; the local runner has no image with an entrypoint")
        return [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]

    def _environment(self, pod: Pod, mounts: Mapping[str, Path]) -> dict[str, str]:
        """What the image, the kubelet and the manifest set on a cluster; nothing of this process's environment."""
        facts = {
            "metadata.name": pod.name,
            "metadata.namespace": self.job["metadata"].get("namespace", "default"),
            "metadata.uid": pod.uid,
            "spec.nodeName": pod.node,
            "status.podIP": address(pod.index),
        }
        values = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "PYTHONPATH": os.pathsep.join(_import_path()),
            "LANG": "C.UTF-8",
            "JOB_COMPLETION_INDEX": str(pod.index),
            "NVRX_EKS_HOSTS": str(self.hosts),
            "NVRX_EKS_RUNNER": str(self.requests),
        }
        for entry in self._container.get("env", []):
            name, text = entry["name"], entry.get("value", "")
            if "valueFrom" in entry:
                text = facts[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            values[name] = self._ports.get(text, text) if name.endswith("_PORT") else self._rewrite(text, mounts)
        return {**values, **self.extra_env}

    def _write_hosts(self) -> None:
        """One line a running pod: its stable name and address, replaced at once."""
        metadata = self.job["metadata"]
        domain = f"{self._spec.get('subdomain', metadata['name'])}.{metadata.get('namespace', 'default')}.svc"
        pods = sorted({sandbox.pod.index for sandbox in self._sandboxes.values()})
        lines = [f"{metadata['name']}-{index}.{domain} {address(index)}\n" for index in pods]
        draft = self.hosts.with_suffix(".new")
        draft.write_text("".join(lines))
        draft.replace(self.hosts)


def address(index: int) -> str:
    """Loopback address of a pod."""
    return f"127.0.0.{1 + index}"


def free_port() -> int:
    """A port that nothing listens on, outside the range that the kernel gives to outgoing connections.

    A port of that range could be taken by any connection while pod 0 is being replaced. Where the range leaves next
    to nothing, that risk is taken.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [port for port in PORTS if not low <= port <= high]
    candidates = outside if len(outside) >= MIN_PORTS else list(PORTS)
    for port in random.sample(candidates, len(candidates)):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {candidates[0]} to {candidates[-1]}")


def _import_path() -> list[str]:
    """The package, and what comes before the standard library in this interpreter's path (another NVRx, say)."""
    standard = next((n for n, entry in enumerate(sys.path) if entry.startswith(sys.base_prefix)), 0)
    first = [entry for entry in sys.path[:standard] if entry and Path(entry).is_dir() and entry != _PACKAGE_ROOT]
    return [_PACKAGE_ROOT, *dict.fromkeys(first)]
