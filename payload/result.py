"""result.json: how a run ended and what really ran. Written atomically by rank 0; imports no torch."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from payload.config import RunConfig

_PACKAGES = ("torch", "nvidia-resiliency-ext", "transformers", "numpy")


def result_path(config: RunConfig) -> Path:
    return config.run_dir / "result.json"


def read(config: RunConfig) -> dict[str, Any] | None:
    """None where no attempt has ended yet."""
    try:
        values: dict[str, Any] = json.loads(result_path(config).read_text())
    except FileNotFoundError:
        return None
    return values


def is_finished(config: RunConfig) -> bool:
    """Whether the run has done its ``max_steps``: whoever starts it again has nothing to do."""
    values = read(config)
    return values is not None and values["succeeded"] and values["step"] >= config.training.max_steps


def write_success(config: RunConfig, step: int, sha256: str, ran: dict[str, Any]) -> None:
    """Args:
    ran: what the training process saw of itself (device, backend, classes), beside what the config asked for.
    """
    values = {"succeeded": True, "reason": "", "step": step, "sha256": sha256, "ran": ran}
    _write(config, values)


def write_failure(config: RunConfig, reason: str) -> None:
    """The run may still be restarted, and the result then overwritten."""
    _write(config, {"succeeded": False, "reason": reason, "step": 0, "sha256": "", "ran": {}})


def _write(config: RunConfig, values: dict[str, Any]) -> None:
    asked = {
        "run_id": config.run_id,
        "arm": config.recovery.arm,
        "checkpoint_mode": config.checkpoint.mode,
        "model": config.model.task or config.model.name,
        "precision": config.model.precision,
        "max_steps": config.training.max_steps,
        "global_batch_size": config.training.global_batch_size,
    }
    values = {**values, "asked": asked, "versions": _versions(), "wall": time.time()}
    path = result_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as file:
        file.write(json.dumps(values, indent=1, sort_keys=True))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
