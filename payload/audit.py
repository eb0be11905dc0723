"""``python -m payload audit``: which published figures of the article hold together, with the arithmetic shown.

Nothing is measured here. Each check takes some published figures, computes from them what another one would have to
be, and compares. The figures are in published.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from payload.plan_model import async_goodput, sync_goodput
from payload.published import (
    FIGURE_5,
    FIGURE_6,
    FIGURE_7,
    FIGURE_7_INTERVAL,
    FIGURE_7_NUM_FAULTS,
    FIGURE_7_STEPS,
    SWEEP_GAP_S,
    WRITE_S,
)
from payload.report import default_console

_POINT = 0.01
_SWEEP_STEPS = 1000
"""The sweep's figures are read as a run of so many steps between saves, several saves long."""


@dataclass(frozen=True)
class Check:
    claim: str
    arithmetic: tuple[str, ...]
    holds: bool
    verdict: str


def between_saves_s(efficiency: float, write_s: float = WRITE_S) -> float:
    """Training time between two synchronous saves, from e = T_k / (T_k + W)."""
    return efficiency * write_s / (1.0 - efficiency)


def audit() -> tuple[Check, ...]:
    """All checks, in the order of the figures."""
    return (
        _sizes(),
        _sync_interval(),
        _async_interval(),
        _async_drain(),
        _crossing(),
        *_run_lengths(),
        _writes(),
        _arms(),
    )


def _sizes() -> Check:
    low, high = FIGURE_5["sync"]
    spans = [between_saves_s(low), between_saves_s(high)]
    lowest, highest = FIGURE_5["async"]
    return Check(
        f"figure 5: sync {100 * low:.0f} to {100 * high:.0f} %, async {100 * lowest:.1f} to {100 * highest:.1f} %, "
        f"one write {WRITE_S:.0f} s at any size",
        (
            f"sync e = T/(T + W): T = e W/(1 - e) = {spans[0]:.0f} to {spans[1]:.0f} s for 1000 steps, "
            f"{spans[0] / 1000:.2f} to {spans[1] / 1000:.2f} s a step",
            f"T > W = {WRITE_S:.0f} s: a write fits between two saves, so async loses its stall only; "
            f"{100 * lowest:.1f} % allows {(1 / lowest - 1) * spans[0]:.1f} s of it",
            f"with a final drain of {WRITE_S:.0f} s a run of two saves has 2 x {spans[1]:.0f} / "
            f"(2 x {spans[1]:.0f} + {WRITE_S:.0f}) = {100 * sync_goodput(2 * spans[1], WRITE_S):.0f} %",
        ),
        spans[0] > WRITE_S,
        "sync and async agree on steps of 0.36 to 0.43 s; async only with its final drain left out",
    )


def _sync_interval() -> Check:
    at_1000, at_100 = FIGURE_6[1000]["sync"], FIGURE_6[100]["sync"]
    per_1000 = between_saves_s(at_1000)
    expected = sync_goodput(per_1000 / 10, WRITE_S)
    return Check(
        f"figure 6, sync: {100 * at_1000:.1f} % at 1000 steps, {100 * at_100:.1f} % at 100",
        (
            f"{100 * at_1000:.1f} % at 1000 steps: T = {at_1000:.3f} x {WRITE_S:.0f}/(1 - {at_1000:.3f}) = "
            f"{per_1000:.0f} s",
            f"so {per_1000 / 10:.1f} s for 100 steps, and {per_1000 / 10:.1f}/({per_1000 / 10:.1f} + {WRITE_S:.0f}) = "
            f"{100 * expected:.1f} %",
        ),
        abs(expected - at_100) <= _POINT,
        f"{100 * expected:.1f} % follows, {100 * at_100:.1f} % is published",
    )


def _async_interval() -> Check:
    at_100 = FIGURE_6[100]["async"]
    per_100 = between_saves_s(FIGURE_6[1000]["sync"]) / 10
    # Ten saves, the first write overlapping the first gap: nine waits and a drain.
    num_saves = _SWEEP_STEPS // 100
    steady = async_goodput(per_100, WRITE_S, 0.0)
    whole = num_saves * per_100 / (per_100 + num_saves * WRITE_S)
    return Check(
        f"figure 6, async: {100 * at_100:.1f} % at 100 steps",
        (
            f"one write in flight: a save starts every max({per_100:.1f}, {WRITE_S:.0f}) s: "
            f"{per_100:.1f}/{WRITE_S:.0f} = {100 * steady:.1f} %",
            f"{num_saves} saves to the end, drain included: {num_saves} x {per_100:.1f} / "
            f"({per_100:.1f} + {num_saves} x {WRITE_S:.0f}) = {100 * whole:.1f} %",
        ),
        min(steady, whole) - _POINT <= at_100 <= max(steady, whole) + _POINT,
        f"15 to 17 % follows, {100 * at_100:.1f} % is published",
    )


def _async_drain() -> Check:
    at_100 = FIGURE_6[100]["async"]
    per_100 = between_saves_s(FIGURE_6[1000]["sync"]) / 10
    found = []
    for num_saves in (5, 7, 10):
        training_s = num_saves * per_100
        stall_s = (num_saves - 1) * (WRITE_S - per_100)
        wall_s = per_100 + num_saves * WRITE_S
        found.append((num_saves, 1 - stall_s / wall_s, training_s / wall_s))
    best = min(found, key=lambda item: abs(item[1] - at_100))
    lines = [
        f"{num_saves} saves: stall {num_saves - 1} x ({WRITE_S:.0f} - {per_100:.1f}) = "
        f"{(num_saves - 1) * (WRITE_S - per_100):.0f} s of {per_100 + num_saves * WRITE_S:.0f} s: "
        f"1 - stall/wall = {100 * shown:.1f} %, true {100 * true:.1f} %"
        for num_saves, shown, true in found
    ]
    return Check(
        f"figure 6, async: {100 * at_100:.1f} % with the final drain in the wall time but not in the stall",
        tuple(lines),
        False,
        f"{100 * best[1]:.1f} % comes out in this way for {best[0]} saves, while training was "
        f"{100 * best[2]:.1f} % of the time: the wait for the last write counts as training",
    )


def _crossing() -> Check:
    per_1000 = between_saves_s(FIGURE_6[1000]["sync"])
    steps = WRITE_S / (per_1000 / 1000)
    return Check(
        f"figure 6: the gap between saves is about {SWEEP_GAP_S:.0f} s at about 100 steps",
        (
            f"{per_1000:.0f} s for 1000 steps are {per_1000 / 10:.1f} s for 100",
            f"T = W at {WRITE_S:.0f} / {per_1000 / 1000:.3f} = {steps:.0f} steps",
        ),
        abs(per_1000 / 10 - SWEEP_GAP_S) <= 0.1 * SWEEP_GAP_S,
        f"the crossing lies at {steps:.0f} steps; at 100 steps a gap of {SWEEP_GAP_S:.0f} s is the write, "
        "not the training",
    )


def _run_lengths() -> list[Check]:
    """T of each arm of figure 7, from its infrastructure goodput."""
    checks = []
    for arm in FIGURE_7:
        down_s = FIGURE_7_NUM_FAULTS * arm.recovery_s
        run_s = down_s / (1.0 - arm.infrastructure_goodput)
        step_s = arm.training_goodput * run_s / FIGURE_7_STEPS
        writes_s = FIGURE_7_STEPS // FIGURE_7_INTERVAL * WRITE_S
        checks.append(
            Check(
                f"figure 7, {arm.name}: {arm.recovery_s:.0f} s a recovery, "
                f"{100 * arm.infrastructure_goodput:.1f} % infrastructure, {100 * arm.training_goodput:.1f} % training",
                (
                    f"{FIGURE_7_NUM_FAULTS} x {arm.recovery_s:.0f} s = {down_s:.0f} s are "
                    f"{100 * (1 - arm.infrastructure_goodput):.1f} % of T: T = {run_s:.0f} s",
                    f"{100 * arm.training_goodput:.1f} % of it is {arm.training_goodput * run_s:.0f} s for "
                    f"{FIGURE_7_STEPS} steps: {step_s:.3f} s a step; figure 5 says 0.36 to 0.43 s",
                    f"its four writes of {WRITE_S:.0f} s alone take {writes_s:.0f} s",
                ),
                run_s > writes_s and 0.3 < step_s < 0.5,
                f"T = {run_s:.0f} s "
                + ("cannot hold four writes" if run_s <= writes_s else f"holds them, but with steps of {step_s:.2f} s"),
            )
        )
    return checks


def _writes() -> Check:
    ratio = FIGURE_7[0].training_goodput / FIGURE_7[-1].training_goodput
    return Check(
        f"figure 7: in-process trains {ratio:.1f} times as well as the pod restart",
        (
            f"{100 * FIGURE_7[0].training_goodput:.1f} / {100 * FIGURE_7[-1].training_goodput:.1f} = {ratio:.1f}",
            "the public code computes step x (wall / step) / T: in process the wall of the one process holds every "
            "replay and every recovery, while each restarted container counts its own wall only",
        ),
        False,
        "not comparable: the formula counts replays and downtime as training in the in-process arm",
    )


def _arms() -> Check:
    return Check(
        "figure 7: all arms ran the same five faults",
        (
            "seed 42 with exception,hang at 0.6,0.4 draws exception, exception, hang, exception, exception",
            "the public in-process job is given exception alone; what is drawn depends on the list given",
        ),
        False,
        "not like for like: the in-process arm had no hang to wait for",
    )


def print_audit(console: Console) -> None:
    """Every check with its arithmetic, then the count."""
    checks = audit()
    for check in checks:
        style, word = ("green", "holds") if check.holds else ("red", "does not hold")
        console.print(f"[bold]{check.claim}[/bold]", highlight=False)
        for line in check.arithmetic:
            console.print(f"    {line}", highlight=False, markup=False)
        console.print(f"    [{style}]{word}[/{style}]: {check.verdict}\n", highlight=False)
    num = sum(check.holds for check in checks)
    console.print(f"{num} of {len(checks)} hold together.", highlight=False)


def cli(argv: Sequence[str]) -> int:
    """Takes no arguments; returns 0."""
    argparse.ArgumentParser(prog="python -m payload audit", description="Check the published figures.").parse_args(argv)
    print_audit(default_console())
    return 0
