"""docs/operations.md speaks of commands, options and profile fields that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from payload.cli import COMMANDS, main
from stacks.profile import Profile

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
CALLS = sorted(set(re.findall(r"python -m payload ([a-z-]+)([^\n`]*)", TEXT)))


def options(rest: str) -> list[str]:
    """Those of the command itself; a quoted text is for another one."""
    return re.findall(r"--[a-z-]+", re.sub(r'"[^"]*"', "", rest))


def test_every_day_two_command_is_documented() -> None:
    named = {name for name, _ in CALLS} | set(re.findall(r"`([a-z-]+)(?: [^`]*)?`", TEXT))
    assert {name for name, place in COMMANDS.items() if "cluster" in place} - {"run-state"} <= named


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_commands_and_options_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    legal = capsys.readouterr().out
    used = {option for command, rest in CALLS if command == name for option in options(rest)}
    assert not [option for option in used if option not in legal]


@pytest.mark.parametrize("field", sorted(set(re.findall(r"`((?:storage|job|nodes|idle_guard)\.[a-z_]+)", TEXT))))
def test_profile_fields_exist(field: str) -> None:
    section, name = field.split(".")
    annotation = Profile.model_fields[section].annotation
    assert annotation is not None and name in annotation.model_fields
