"""Fixtures of the stack tests: every profile is synthesized once a session (tests/synth.py)."""

import pytest

from tests.synth import PROFILES, Synthesis, synthesis


@pytest.fixture(params=PROFILES)
def each(request: pytest.FixtureRequest) -> Synthesis:
    """Every profile in turn."""
    return synthesis(str(request.param))


@pytest.fixture
def p5() -> Synthesis:
    return synthesis("p5")
