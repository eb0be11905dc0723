"""The pinned CDK command line, and the command that synthesizes every profile, without network or credentials."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from stacks import config, synth_all
from tests.synth import PARTS, ROOT

CDK = ROOT / "node_modules" / ".bin" / "cdk"


def test_cdk_is_pinned() -> None:
    pinned = json.loads((ROOT / "package.json").read_text())["devDependencies"]["aws-cdk"]
    lock = json.loads((ROOT / "package-lock.json").read_text())
    assert lock["packages"]["node_modules/aws-cdk"]["version"] == pinned
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
    assert all("integrity" in package for name, package in lock["packages"].items() if name)


def test_context_keeps_references_strong() -> None:
    """With weak references a cluster could be deleted under the stacks that use it."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    assert context["@aws-cdk/core:defaultCrossStackReferences"] == "strong"


@pytest.mark.timeout(300)
def test_cdk_ls_works_offline(tmp_path: Path) -> None:
    """In a place without credentials or proxies; app.py is what cdk.json names."""
    assert CDK.exists(), "the command line is not installed: make setup"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    command = [str(CDK), "ls", "-c", "profile=p4de", "--no-notices", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"nvrx-p4de-{part}" for part in PARTS]


def test_every_profile_is_synthesized(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them for real; the tests of the stacks do the others in process."""
    monkeypatch.setattr(config, "names", lambda: ["g5"])
    assert synth_all.main() == 0
    assert capsys.readouterr().out.startswith("g5                  5 templates")


def test_a_profile_that_cannot_be_synthesized_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "names", lambda: ["p6"])
    monkeypatch.setattr(synth_all, "_SYNTH", "raise SystemExit('profile: p6')")
    assert synth_all.main() == 1
    assert "p6: cannot be synthesized" in capsys.readouterr().err
