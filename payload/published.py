"""The article's figures and the formulas behind them, for comparison only.

Source: the article on NVRx on Amazon EKS, and the code of its public test case. Our own figures are those of
goodput.py; whatever comes from here is marked as published wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MARK = "published formula"


@dataclass(frozen=True)
class PublishedArm:
    """One bar of figure 7: LLaMA-3.1-8B, 16 H100, 2000 steps, interval 500, five faults. Fractions and seconds."""

    name: str
    training_goodput: float
    infrastructure_goodput: float
    recovery_s: float


FIGURE_7 = (
    PublishedArm("in-process", 0.31, 0.87, 10.0),
    PublishedArm("in-job", 0.255, 0.859, 17.0),
    PublishedArm("kubernetes", 0.115, 0.358, 270.0),
)
FIGURE_7_NUM_FAULTS = 5
FIGURE_7_STEPS = 2000
FIGURE_7_INTERVAL = 500

FIGURE_5 = {"async": (0.992, 0.998), "sync": (0.57, 0.61)}
"""Efficiency over 2 to 8 nodes at an interval of 1000 steps, lowest and highest."""
FIGURE_6 = {1000: {"async": 0.998, "sync": 0.603}, 100: {"async": 0.296, "sync": 0.147}}
"""Interval in steps -> efficiency, on 8 nodes."""
WRITE_S = 275.0
"""One write to FSx, at 16 and at 64 GPUs alike."""
SWEEP_GAP_S = 280.0
"""Said of the gap between saves at the crossing point of about 100 steps."""


def infrastructure_goodput(recoveries_s: Iterable[float], duration_s: float) -> float:
    """1 - sum(recovery) / T, with the published recovery time t6 - t0: stalls and replays are left out."""
    return 1.0 - sum(recoveries_s) / duration_s


def training_goodput(final_step: int, training_wall_s: float, duration_s: float) -> float:
    """step * (training wall / step) / T: the steps cancel out, so replays and downtime within it count as useful."""
    if not final_step:
        return 0.0
    return final_step * (training_wall_s / final_step) / duration_s


def checkpoint_efficiency(blocking_s: float, duration_s: float) -> float:
    """The final drain is left out of the blocking time but not out of the wall time."""
    return 1.0 - blocking_s / duration_s
