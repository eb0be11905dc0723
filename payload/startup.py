"""What a pod does before its workers start: fetches the Hugging Face token and waits for the data."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from payload import environment
from payload.config import ConfigError, RunConfig
from payload.environment import PodEnvironment

log = logging.getLogger(__name__)

TOKEN = "HF_TOKEN"
"""What the Hugging Face libraries read."""
SECRET_LEGAL = "arn:aws:secretsmanager:<region>:<account>:secret:<name>"
META = "meta.json"
"""Published last by prepare-data (payload/data.py, which imports torch)."""
_CREDENTIALS_S = 60.0
"""The pod's identity may come up after the pod."""
_RETRY_S = 5.0
_SPEAK_S = 30.0


class NotReady(RuntimeError):
    """What the pod waited for did not come; another try may find it."""


def prepare(pod: PodEnvironment) -> None:
    """Called by the launcher. Raises ConfigError, or NotReady naming what is missing."""
    load_token(pod.token_secret)
    if pod.await_data and not pod.config.model.task:
        wait_for_data(pod.config)


def load_token(secret_arn: str, *, client: Callable[[str], Any] | None = None, wait_s: float = _CREDENTIALS_S) -> None:
    """Puts the token into this process's environment, which its workers inherit; it is never logged or written.

    ``secret_arn`` empty: nothing, public models work without. ``client``: region -> a Secrets Manager client.
    """
    if not secret_arn:
        return
    match = re.fullmatch(r"arn:aws[a-z-]*:secretsmanager:([a-z0-9-]+):\d{12}:secret:\S+", secret_arn)
    if not match:
        # Not shown: somebody may have put the token itself here.
        raise ConfigError(f"{environment.TOKEN_SECRET}: no ARN of a secret; legal: {SECRET_LEGAL}")
    text = _read_secret((client or _client)(match[1]), secret_arn, wait_s)
    if not text or re.search(r"[\s{}\"]", text):
        raise ConfigError(f"secret {secret_arn}: not a token; legal: the bare token as the secret's text")
    environment.export({TOKEN: text})


def _read_secret(secrets: Any, secret_arn: str, wait_s: float) -> str:
    from botocore.exceptions import ClientError, NoCredentialsError

    deadline = time.monotonic() + wait_s
    while True:
        try:
            return str(secrets.get_secret_value(SecretId=secret_arn).get("SecretString", "")).strip()
        except (NoCredentialsError, ClientError) as error:
            if time.monotonic() >= deadline:
                raise NotReady(f"secret {secret_arn}: {error}; the pod's identity must be allowed to read it") from None
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))


def _client(region: str) -> Any:
    import boto3

    return boto3.client("secretsmanager", region_name=region)


def wait_for_data(config: RunConfig, *, poll_s: float = 1.0) -> None:
    """Returns once the data folder is complete. Raises NotReady after ``timeouts.join_s``."""
    path = Path(config.data_dir) / META
    deadline, speak = time.monotonic() + config.timeouts.join_s, 0.0
    while not path.exists():
        now = time.monotonic()
        if now >= deadline:
            waited = f"{config.timeouts.join_s:g} s"
            raise NotReady(f"{config.data_dir}: no data after {waited}; look at the Job that prepares it")
        if now >= speak:
            log.warning("waiting for the data in %s", config.data_dir)
            speak = now + _SPEAK_S
        time.sleep(min(poll_s, deadline - now))
