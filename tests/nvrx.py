"""Puts another release of nvidia-resiliency-ext beside the installed one: ``python -m tests.nvrx 0.7.0``.

Prints the folder to put first on PYTHONPATH. Releases from 0.5 on have wheels for Python 3.12 and glibc 2.39 only;
their Python code runs on 3.11 and older glibc too (the compiled part, CUPTI, is not needed), so the wheel is unpacked
instead of installed. What it needs beyond this environment goes into the same folder, at versions that fit it.
"""

import fcntl
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".nvrx"
_READY = ".ready"


class NotAvailable(RuntimeError):
    """The release could not be downloaded; the text holds pip's own words."""


def prepare(release: str) -> Path:
    """The folder of a release, made on the first call. Raises NotAvailable."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        site = FOLDER / release
        if not (site / _READY).exists():
            shutil.rmtree(site, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=FOLDER) as draft:
                _fill(release, Path(draft) / "site")
                (Path(draft) / "site" / _READY).touch()
                (Path(draft) / "site").rename(site)
        return site


def _fill(release: str, site: Path) -> None:
    site.mkdir()
    wheels = site.with_name("wheels")
    platform = "--python-version 3.12 --implementation cp --platform manylinux_2_39_x86_64"
    _pip("download", "--no-deps", "--only-binary=:all:", *platform.split(), "--dest", str(wheels), _pin(release))
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    missing = _missing(site)
    if missing:
        constraints = site.with_name("constraints.txt")
        constraints.write_text("\n".join(f"{d.name}=={d.version}" for d in _installed()))
        _pip("install", "--target", str(site), "--constraint", str(constraints), *missing)


def _pin(release: str) -> str:
    return f"nvidia-resiliency-ext=={release}"


def _missing(site: Path) -> list[str]:
    """Requirements of the release that this environment does not meet."""
    (metadata,) = site.glob("nvidia_resiliency_ext-*.dist-info/METADATA")
    lines = Parser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []
    wanted = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})]
    have = {_normal(d.name): d.version for d in _installed()}
    return [str(r) for r in wanted if not r.specifier.contains(have.get(_normal(r.name), "0"))]


def _installed() -> list[importlib.metadata.Distribution]:
    return [d for d in importlib.metadata.distributions() if _normal(d.name) != "nvidia-resiliency-ext"]


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(f"pip {arguments[0]} failed; is the package index reachable?\n{done.stderr.strip()}")


if __name__ == "__main__":
    try:
        print(prepare(sys.argv[1]))
    except NotAvailable as error:
        sys.exit(str(error))
