"""What a pod does before its workers: the token, and the wait for the data."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from payload import startup
from payload.config import ConfigError, RunConfig

ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hf-AbCdEf"


class Secrets:
    """Fails ``num_failures`` times, as an identity that is not there yet, then answers."""

    def __init__(self, text: str, num_failures: int = 0) -> None:
        self._text, self._left = text, num_failures
        self.regions: list[str] = []

    def __call__(self, region: str) -> Secrets:
        self.regions.append(region)
        return self

    def get_secret_value(self, SecretId: str) -> dict[str, Any]:
        assert SecretId == ARN
        if self._left:
            self._left -= 1
            raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "GetSecretValue")
        return {"SecretString": self._text}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(startup.TOKEN, "")
    monkeypatch.setattr(startup, "_RETRY_S", 0.01)


def test_token_reaches_the_workers_and_no_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = Secrets("hf_very_secret\n", num_failures=2)
    startup.load_token(ARN, client=secrets, wait_s=60)
    assert os.environ[startup.TOKEN] == "hf_very_secret"
    assert secrets.regions == ["eu-west-1"], "the secret's own region"
    printed = capfd.readouterr()
    assert "very_secret" not in caplog.text + printed.out + printed.err


def test_no_secret_is_fine() -> None:
    startup.load_token("", client=Secrets("x"))
    assert os.environ[startup.TOKEN] == ""


@pytest.mark.parametrize("text", ["", '{"token": "hf_x"}', "two words"])
def test_what_is_no_token_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigError, match="legal: the bare token") as error:
        startup.load_token(ARN, client=Secrets(text))
    assert not text or text not in str(error.value)


def test_a_token_in_place_of_the_secrets_name_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="legal: arn:aws:secretsmanager") as error:
        startup.load_token("hf_very_secret", client=Secrets("x"))
    assert "very_secret" not in str(error.value)


def test_missing_permission_ends_in_time() -> None:
    with pytest.raises(startup.NotReady, match="must be allowed to read it"):
        startup.load_token(ARN, client=Secrets("x", num_failures=10**9), wait_s=0.1)


def config(tmp_path: Path, join_s: float) -> RunConfig:
    return RunConfig.from_dict({"workdir": str(tmp_path), "timeouts": {"join_s": join_s}})


def test_waits_for_the_data_to_be_published(tmp_path: Path) -> None:
    run = config(tmp_path, join_s=100)

    def publish() -> None:
        run.data_dir.mkdir()
        (run.data_dir / startup.META).write_text("{}")

    writer = threading.Timer(0.2, publish)
    writer.start()
    startup.wait_for_data(run, poll_s=0.01)
    writer.join()
    assert (run.data_dir / startup.META).exists()


def test_data_that_never_come_are_an_error(tmp_path: Path) -> None:
    run = config(tmp_path, join_s=0.1)
    run.data_dir.mkdir()
    with pytest.raises(startup.NotReady, match="look at the Job that prepares it"):
        startup.wait_for_data(run, poll_s=0.01)
