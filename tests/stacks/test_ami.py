"""The command that shows the newest node image and pins it, against moto's SSM."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ssm.models import Parameter, ssm_backends

from payload.config import ConfigError
from stacks import ami, config
from stacks.nodes import AMI_FAMILY

FAMILY = AMI_FAMILY.format(version="1.35")
RELEASE = "amazon-eks-node-al2023-x86_64-nvidia-1.35-v20261120"
NEWEST = f"{FAMILY}/{RELEASE}/image_id"
IMAGE_ID = "ami-0fedcba9876543210"


def put(name: str, value: str) -> None:
    """What AWS publishes; put_parameter refuses names of AWS's own."""
    backend = ssm_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]
    parameter = Parameter(
        account_id=DEFAULT_ACCOUNT_ID,
        name=name,
        value=value,
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=datetime.now(UTC).timestamp(),
        version=1,
        data_type="text",
    )
    backend._parameters[name].append(parameter)


@pytest.fixture
def published() -> Iterator[None]:
    with mock_aws():
        put(f"{FAMILY}/recommended/image_name", RELEASE)
        put(f"{FAMILY}/recommended/image_id", IMAGE_ID)
        yield


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text((config.PROFILES / "p5.toml").read_text())
    return path


@pytest.mark.usefixtures("published")
def test_newest_is_shown_and_nothing_written(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = own.read_text()
    assert ami.main(["--profile", str(own)]) == 0
    shown = capsys.readouterr().out
    assert config.load("p5").nodes.ami in shown
    assert NEWEST in shown and IMAGE_ID in shown
    assert own.read_text() == before


@pytest.mark.usefixtures("published")
def test_newest_is_pinned_on_request(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = own.read_text()
    old = config.load(str(own)).nodes.ami
    assert ami.main(["--profile", str(own), "--write"]) == 0
    assert own.read_text() == before.replace(old, NEWEST)
    assert config.load(str(own)).nodes.image_reference == f"resolve:ssm:{NEWEST}"
    assert ami.main(["--profile", str(own), "--write"]) == 0
    assert "is the newest" in capsys.readouterr().out


@pytest.mark.usefixtures("published")
def test_pinned_id_of_the_newest_counts(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own.write_text(own.read_text().replace(config.load(str(own)).nodes.ami, IMAGE_ID))
    assert ami.main(["--profile", str(own), "--write"]) == 0
    assert "is the newest" in capsys.readouterr().out
    assert config.load(str(own)).nodes.ami == IMAGE_ID


def test_missing_parameter_is_an_error(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock_aws():
        assert ami.main(["--profile", str(own)]) == 2
    assert "no parameter" in capsys.readouterr().err


def test_outcome_must_be_a_legal_profile(own: Path) -> None:
    old, before = config.load(str(own)).nodes.ami, own.read_text()
    with pytest.raises(ConfigError, match=r"nodes\.ami"):
        ami.pin(own, old, f"{FAMILY}/recommended/image_id")
    assert own.read_text() == before


def test_pin_needs_one_place(own: Path) -> None:
    with pytest.raises(ConfigError, match="exactly once"):
        ami.pin(own, "ami-00000000", NEWEST)


def test_refused_credentials_are_reported(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    assert ami.main(["--profile", str(own)]) == 1
    assert "SSM in us-east-1: Unable to locate credentials" in capsys.readouterr().err
