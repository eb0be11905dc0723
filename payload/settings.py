"""What the commands take from a profile and the command line: the run, its deployment, the local cluster."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from payload.config import FLAGS, ConfigError, RunConfig, load_profile, merge, parse_value
from payload.deployment import LOCAL, Deployment, load_deployment

CHECKOUT = Path(__file__).resolve().parents[1]
PROFILES = CHECKOUT / "profiles"
STACK_DEPLOYMENT = "stacks.deployment:deployment_of"
"""Entry point that turns a profile with a [nodes] table into a Deployment; not part of the image."""
_SWITCHES = {"fresh_start", "fault_include_rank0"}


class LineParser(argparse.ArgumentParser):
    """An argument that is not understood is one line on stderr, as every other error of the user."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help lists what is legal")


@dataclass(frozen=True)
class Settings:
    profile: Path
    config: RunConfig
    deployment: Deployment
    speedup: float
    """How many times as fast the local cluster's clock runs."""
    root: Path
    """Folder of the local cluster."""
    run_id_given: bool
    """On the command line: that very run is to be continued."""


def parser(command: str, description: str, profile: str = "local") -> LineParser:
    """A parser with ``--profile``, every flag of config.FLAGS (``-`` or ``_``) and ``--set FIELD=VALUE``."""
    made = LineParser(prog=f"python -m payload {command}", description=description, allow_abbrev=False)
    made.add_argument("--profile", default=profile, help=f"name of a file in profiles/, or a path (default: {profile})")
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of the run config")
    fields = made.add_argument_group("shorthand of --set")
    for flag, field in FLAGS.items():
        spellings = dict.fromkeys([f"--{flag}", f"--{flag.replace('_', '-')}"])
        if flag in _SWITCHES:
            fields.add_argument(*spellings, dest=flag, nargs="?", const="true", help=field)
        else:
            fields.add_argument(*spellings, dest=flag, help=field)
    return made


def read(given: argparse.Namespace) -> Settings:
    """Raises ConfigError, one line a problem."""
    path = profile_path(given.profile)
    config = load_profile(path)
    changes = _changes(given)
    if changes:
        config = config.with_overrides(changes)
    tables = tomllib.loads(path.read_text())
    local = _local_table(path, tables.get("local", {}))
    return Settings(
        profile=path,
        config=config,
        deployment=_deployment(path, tables, config, local["shm_mib"]),
        speedup=local["speedup"],
        root=CHECKOUT / local["root"],
        run_id_given="run_id" in changes,
    )


def profile_path(name: str) -> Path:
    """``local`` -> profiles/local.toml; whatever has a slash or a suffix is a path."""
    if "/" in name or name.endswith(".toml"):
        return Path(name)
    path = PROFILES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(found.stem for found in PROFILES.glob("*.toml")))
        raise ConfigError(f"--profile: {name!r}; legal: {known}, or a path")
    return path


def _changes(given: argparse.Namespace) -> dict[str, Any]:
    changes = {field: parse_value(field, text) for flag, field in FLAGS.items() if (text := getattr(given, flag))}
    for item in given.set:
        field, equals, text = item.partition("=")
        if not equals or not field:
            raise ConfigError(f"--set: {item!r}; legal: FIELD=VALUE, such as training.max_steps=50")
        changes[field] = parse_value(field, text)
    return changes


def _local_table(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"speedup": 1.0, "root": ".demo", "shm_mib": LOCAL.shm_mib}
    table: dict[str, Any] = merge(defaults, values)
    for name in table:
        if name not in defaults:
            raise ConfigError(f"profile {path}: local.{name}: unknown field; legal here: {', '.join(sorted(defaults))}")
    if isinstance(table["speedup"], bool) or not isinstance(table["speedup"], int | float) or table["speedup"] < 1:
        raise ConfigError(f"profile {path}: local.speedup: {table['speedup']!r}; legal: a number from 1 on")
    if isinstance(table["shm_mib"], bool) or not isinstance(table["shm_mib"], int) or table["shm_mib"] < 1:
        raise ConfigError(f"profile {path}: local.shm_mib: {table['shm_mib']!r}; legal: MiB from 1 on")
    if not isinstance(table["root"], str) or not table["root"]:
        raise ConfigError(f"profile {path}: local.root: {table['root']!r}; legal: a folder")
    return table


def _deployment(path: Path, tables: Mapping[str, Any], config: RunConfig, shm_mib: int) -> Deployment:
    if "deployment" in tables:
        return load_deployment(path, tables["deployment"])
    if "nodes" not in tables:
        gpus = config.parallelism.ranks_per_node if config.parallelism.device == "cuda" else 0
        return dataclasses.replace(LOCAL, num_gpus=gpus, shm_mib=shm_mib)
    module, _, function = STACK_DEPLOYMENT.partition(":")
    try:
        made: Deployment = getattr(importlib.import_module(module), function)(path)
    except ModuleNotFoundError as error:
        raise ConfigError(f"profile {path}: [nodes] needs the checkout with its stacks ({error})") from error
    return made


def arguments(argv: Sequence[str], made: LineParser) -> Settings:
    """For commands without options of their own."""
    return read(made.parse_args(argv))
