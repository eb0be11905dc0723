"""Who may import whom, and what no file of the project may hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_TORCH = ["config", "manifests", "volumes", "events", "faults", "goodput", "report", "local", "plan"]
NVRX_ALLOWED = ("payload/checkpoint/", "payload/recovery/")
STACKS_MAY_IMPORT = {"payload.config", "payload.manifests", "payload.volumes", "payload"}


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no source in {folder}"
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(folder: str, forbidden: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if name == forbidden or name.startswith(forbidden + ".")
    ]


def test_payload_knows_nothing_of_cdk() -> None:
    assert offenders("payload", "aws_cdk") == []
    assert offenders("payload", "stacks") == []


def test_nvrx_stays_in_checkpoint_and_recovery() -> None:
    outside = [line for line in offenders("payload", "nvidia_resiliency_ext") if not line.startswith(NVRX_ALLOWED)]
    assert outside == []


def test_stacks_take_only_the_contracts_from_payload() -> None:
    taken = {
        ".".join(name.split(".")[:2])
        for path in sources("stacks")
        for name in imports(path)
        if name.split(".")[0] == "payload"
    }
    assert taken <= STACKS_MAY_IMPORT


@pytest.mark.parametrize("module", NO_TORCH)
def test_light_modules_load_no_torch(module: str) -> None:
    """Followed through the project's own imports, those inside functions left out."""
    seen: set[str] = set()
    waiting = [f"payload.{module}"]
    while waiting:
        name = waiting.pop()
        path = ROOT / (name.replace(".", "/") + ".py")
        path = path if path.exists() else ROOT / name.replace(".", "/") / "__init__.py"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for node in ast.parse(path.read_text()).body:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            assert not [n for n in found if n.split(".")[0] == "torch"], f"{name} imports torch"
            waiting += [n for n in found if n.split(".")[0] == "payload"]
    assert f"payload.{module}" in seen


def test_the_environment_is_read_in_two_places() -> None:
    allowed = {"stacks/config.py", "payload/environment.py"}
    readers = {
        str(path.relative_to(ROOT))
        for folder in ("payload", "stacks")
        for path in sources(folder)
        if "handlers" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "environ" and isinstance(node.ctx, ast.Load)
    }
    assert readers <= allowed
