"""The auditor: which published figures hold together."""

import pytest

from payload import audit
from payload.published import FIGURE_7, infrastructure_goodput, training_goodput


def test_what_holds_and_what_does_not() -> None:
    checks = {check.claim: check for check in audit.audit()}
    assert len(checks) == 10
    holding = [claim for claim, check in checks.items() if check.holds]
    assert len(holding) == 1 and holding[0].startswith("figure 5")
    assert all(check.arithmetic and check.verdict for check in checks.values())


def text_of(beginning: str) -> str:
    (check,) = [check for check in audit.audit() if check.claim.startswith(beginning)]
    return "\n".join([*check.arithmetic, check.verdict])


def test_the_interval_sweep() -> None:
    """60.3 % at 1000 steps means 418 s, hence 13 % at 100 where 14.7 % is published."""
    assert audit.between_saves_s(0.603) == pytest.approx(418, abs=0.5)
    assert "13.2 % follows, 14.7 % is published" in text_of("figure 6, sync")
    assert "15 to 17 % follows" in text_of("figure 6, async: 29.6 % at 100")
    assert "28.8 % comes out in this way for 7 saves" in text_of("figure 6, async: 29.6 % with the final drain")
    assert "658 steps" in text_of("figure 6: the gap")


def test_the_length_of_figure_7_s_runs() -> None:
    """Five recoveries of 10 s being 13 % of the run make it 385 s long; four writes alone take 1100 s."""
    assert "T = 385 s cannot hold four writes" in text_of("figure 7, in-process")
    assert "1100 s" in text_of("figure 7, in-process")
    assert "T = 603 s cannot" in text_of("figure 7, in-job")
    assert "T = 2103 s holds them" in text_of("figure 7, kubernetes")


def test_the_published_formulas() -> None:
    assert infrastructure_goodput([10.0] * 5, 385.0) == pytest.approx(FIGURE_7[0].infrastructure_goodput, abs=1e-3)
    # Whatever the number of steps: only the wall time counts.
    assert training_goodput(1000, 300.0, 400.0) == training_goodput(7, 300.0, 400.0) == 0.75
    assert training_goodput(0, 300.0, 400.0) == 0.0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.cli([]) == 0
    out = capsys.readouterr().out
    assert "1 of 10 hold together." in out and "0.603 x 275" in out
