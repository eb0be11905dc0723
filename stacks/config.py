"""Reads the profile: the one place where the stacks look at CDK context and at files the user edits."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from payload.config import ConfigError, describe
from stacks.profile import Profile

PROFILES = Path(__file__).parents[1] / "profiles"
DEFAULT = "p5"


def names() -> list[str]:
    """The profiles in profiles/ that describe nodes, so can be deployed to AWS."""
    found = sorted(PROFILES.glob("*.toml"))
    return [path.stem for path in found if "nodes" in tomllib.loads(path.read_text())]


class Context(Protocol):
    """What a construct's ``node`` offers; keeps this module free of CDK, whose import starts a Node process."""

    def try_get_context(self, key: str) -> Any: ...


def from_context(node: Context) -> Profile:
    """The profile named by ``-c profile=``; the default is p5."""
    given = node.try_get_context("profile")
    return load(str(given) if given is not None else DEFAULT)


def load(name: str) -> Profile:
    """A profile by its name in profiles/, or by the path of a TOML file.

    Raises ConfigError, one line a problem, each naming the file, the field and the legal values.
    """
    return load_file(path_of(name))


def path_of(name: str) -> Path:
    """The file of a profile given by name or path. Raises ConfigError for a name that is not there."""
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    path = PROFILES / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"profile: {name!r}; legal: {', '.join(names())}, or the path of a .toml file")
    return path


def load_file(path: Path) -> Profile:
    """As load(), for a path."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}") from error
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError("\n".join(f"profile {path}: {line}" for line in str(error).splitlines())) from error


def parse(text: str) -> Profile:
    """A profile from TOML text; raises ConfigError."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}") from error
    return validate(values)


def validate(values: Mapping[str, Any]) -> Profile:
    """A profile from the tables of its file; raises ConfigError."""
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, Profile)) from error
