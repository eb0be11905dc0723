"""The planner's formulas: expected goodput, best interval, failure rates, and what stands in the way of a goal.

Everything here is arithmetic on seconds and rates. First-order: one failure at a time, so the figures are rough once
a failure costs as long as the time between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class FailureRate:
    name: str
    per_gpu_h: float
    source: str

    def mttf_h(self, num_gpus: int) -> float:
        """Mean time to failure of a job on ``num_gpus``, failures independent."""
        return 1.0 / (self.per_gpu_h * num_gpus)


LLAMA_3 = FailureRate(
    "llama3", 419 / (16_384 * 54 * 24), "Llama 3: 419 unexpected interruptions in 54 days on 16,384 H100"
)
RSC_1 = FailureRate("rsc1", 6.5 / 1000 / 24 / GPUS_PER_NODE, "Meta RSC-1: 6.5 failures in 1000 node-days")
RSC_2 = FailureRate("rsc2", 2.34 / 1000 / 24 / GPUS_PER_NODE, "Meta RSC-2: 2.34 failures in 1000 node-days")
RATES: dict[str, FailureRate] = {rate.name: rate for rate in (LLAMA_3, RSC_1, RSC_2)}
MEASURED_MTTF_1024_H = 7.9
"""Of jobs of 1,024 GPUs on RSC-1, measured; hardware rates alone promise more."""


@dataclass(frozen=True)
class Tier:
    """One way to keep state and to come back. Seconds."""

    name: str
    stall_s: float
    """c: training stands still for one save."""
    write_s: float
    """W: a save counts only after so long; 0 where it counts at once. Also the shortest gap between two saves."""
    recovery_s: float
    """R: fault to first step."""


PUBLISHED_TIERS = (
    Tier("sync + pod restart", 275.0, 0.0, 1800.0),
    Tier("async + in-job", 1.0, 275.0, 180.0),
    Tier("node memory + peer", 0.15, 1.0, 45.0),
    Tier("peer, every step", 0.005, 0.4, 15.0),
)
"""The designs of the table over sizes. 275 s: the article's write to FSx; stalls and recovery times are assumed."""


def sync_goodput(between_s: float, write_s: float) -> float:
    """Synchronous saves without failures: T_k / (T_k + W)."""
    return between_s / (between_s + write_s)


def async_gap_s(between_s: float, write_s: float, stall_s: float) -> float:
    """Begin of one save to the next with one write in flight: max(T_k, W) + c."""
    return max(between_s, write_s) + stall_s


def async_goodput(between_s: float, write_s: float, stall_s: float) -> float:
    """Asynchronous saves without failures, the final drain left out."""
    return between_s / async_gap_s(between_s, write_s, stall_s)


def best_interval_s(tier: Tier, failures_per_s: float) -> float:
    """Training time between saves: max(sqrt(2 c / lambda), W); infinite without failures."""
    if failures_per_s == 0:
        return math.inf
    return max(math.sqrt(2.0 * tier.stall_s / failures_per_s), tier.write_s)


def overheads(tier: Tier, between_s: float, failures_per_s: float) -> dict[str, float]:
    """Time lost for each second of useful training, by cause; 1 / (1 + sum) is the training goodput."""
    return {
        "checkpoint stall": tier.stall_s / between_s,
        "recovery": failures_per_s * tier.recovery_s,
        "commit lag": failures_per_s * tier.write_s,
        "replayed steps": failures_per_s * between_s / 2.0 if failures_per_s else 0.0,
    }


def training_goodput(tier: Tier, between_s: float, failures_per_s: float) -> float:
    """First order: 1 / (1 + c / tau + lambda (R + W + tau / 2))."""
    return 1.0 / (1.0 + sum(overheads(tier, between_s, failures_per_s).values()))


def best_goodput(tier: Tier, failures_per_s: float) -> float:
    """At the best interval."""
    return training_goodput(tier, best_interval_s(tier, failures_per_s), failures_per_s)


@dataclass(frozen=True)
class Constraint:
    """What keeps a goal out of reach."""

    goal: float
    best: float
    """Training goodput at the best interval."""
    name: str
    """The cost that weighs most; empty where the goal is met."""
    cost_s: float
    """Its seconds a failure (or a save)."""
    share: float
    """Training goodput that it takes away, in fractions of 1."""
    needed_s: float | None
    """With it at this value and the interval chosen anew the goal is met; None where even 0 s would not do."""

    @property
    def reachable(self) -> bool:
        return self.best >= self.goal

    def __str__(self) -> str:
        if self.reachable:
            return f"{100 * self.goal:g} % reachable: {100 * self.best:.1f} % at the best interval"
        remedy = "0 s of it would not be enough" if self.needed_s is None else f"{self.needed_s:.1f} s would do"
        return (
            f"{100 * self.goal:g} % unreachable: {self.name} {self.cost_s:.3g} s "
            f"(best {100 * self.best:.1f} %; it takes {100 * self.share:.1f} points; {remedy})"
        )


def binding_constraint(
    goal: float, tier: Tier, recovery_parts: Mapping[str, tuple[float, float]], failures_per_s: float
) -> Constraint:
    """The cost whose removal would raise the training goodput most.

    Args:
        recovery_parts: name -> (seconds where it occurs, share of failures in which it does); their weighted sum
            takes the place of ``tier.recovery_s``.

    Raises ValueError where ``goal`` is no fraction between 0 and 1.
    """
    if not 0 < goal < 1:
        raise ValueError(f"goal: {goal:g}; legal: a fraction between 0 and 1")
    costs = _Costs(tier, recovery_parts, failures_per_s)
    best = costs.goodput({})
    gains = {name: costs.goodput({name: 0.0}) - best for name in costs.seconds}
    name = max(gains, key=lambda key: gains[key])
    needed = None if costs.goodput({name: 0.0}) < goal else _solve(costs, name, goal)
    return Constraint(goal, best, "" if best >= goal else name, costs.seconds[name], gains[name], needed)


class _Costs:
    """Best training goodput with some costs replaced."""

    def __init__(self, tier: Tier, parts: Mapping[str, tuple[float, float]], failures_per_s: float) -> None:
        self._tier, self._parts, self._rate = tier, parts, failures_per_s
        self.seconds = {name: seconds for name, (seconds, _) in parts.items()}
        self.seconds["checkpoint stall"] = tier.stall_s
        self.seconds["checkpoint write"] = tier.write_s

    def goodput(self, changed: Mapping[str, float]) -> float:
        now = {**self.seconds, **changed}
        recovery_s = sum(now[name] * share for name, (_, share) in self._parts.items())
        # A stall of nothing at all would let the interval go to 0.
        stall_s = max(now["checkpoint stall"], 1e-9)
        tier = replace(self._tier, stall_s=stall_s, write_s=now["checkpoint write"], recovery_s=recovery_s)
        return best_goodput(tier, self._rate)


def _solve(costs: _Costs, name: str, goal: float) -> float:
    """Bisection: goodput falls with the cost."""
    low, high = 0.0, costs.seconds[name]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if costs.goodput({name: middle}) >= goal else (low, middle)
    return low


@dataclass(frozen=True)
class SizeRow:
    num_gpus: int
    mttf_h: float
    goodput: tuple[float, ...]
    """One a tier, at its best interval."""


SIZES = (16, 64, 256, 1_024, 4_096, 16_384, 100_000)


def sizes_table(rate: FailureRate, tiers: Sequence[Tier], sizes: Sequence[int] = SIZES) -> list[SizeRow]:
    """Expected training goodput of each tier over job sizes."""
    return [
        SizeRow(n, rate.mttf_h(n), tuple(best_goodput(tier, rate.per_gpu_h * n / 3600.0) for tier in tiers))
        for n in sizes
    ]
