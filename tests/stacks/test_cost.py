"""What a profile costs, and the bound of its run."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from payload.config import merge
from stacks import config, cost
from stacks.instances import CATALOGUE, PRICES_AS_OF
from stacks.profile import Profile

P5: dict[str, Any] = tomllib.loads((config.PROFILES / "p5.toml").read_text())
ELSEWHERE = {"region": "us-west-2", "availability_zone": "us-west-2a", "second_zone": "us-west-2b"}


def profile(overrides: dict[str, Any] | None = None) -> Profile:
    return config.validate(merge(P5, overrides or {}))


def part(found: cost.Estimate, name: str) -> float:
    (usd,) = [item.usd_h for item in found.parts if item.name == name]
    return usd


def test_parts_of_p5() -> None:
    found = cost.estimate(profile())
    assert part(found, "GPU nodes") == pytest.approx(2 * 55.04)
    assert part(found, "FSx for Lustre") == pytest.approx(1200 * 0.14 / 730)
    assert part(found, "EKS control plane") == pytest.approx(0.10)
    assert part(found, "system nodes") == pytest.approx(2 * 0.096)
    assert part(found, "root volumes") == pytest.approx((2 * 200 + 2 * 50) * 0.08 / 730)
    assert found.usd_h == pytest.approx(sum(item.usd_h for item in found.parts))


def test_bound_counts_the_waiting_the_run_and_the_guard() -> None:
    """1 h before, 24 h Job, 1 h guard, half an hour to stop; every part, and one image build."""
    found = cost.estimate(profile())
    assert found.hours == 26.5
    assert found.bound_usd == pytest.approx(26.5 * found.usd_h + 50 * 0.25)
    longer = cost.estimate(profile({"job.max_hours": 48, "idle_guard.minutes": 120}))
    assert longer.hours == 51.5


def test_nothing_bounds_a_run_without_the_idle_guard() -> None:
    open_ended = profile({"idle_guard.minutes": 0})
    found = cost.estimate(open_ended)
    assert found.hours is None and found.bound_usd is None
    assert "no upper bound, as the idle guard is off" in cost.render(open_ended, found)


def test_block_is_paid_for_from_start_to_end() -> None:
    block = config.load("p5-capacity-block")
    found = cost.estimate(block)
    assert found.hours == 48
    assert any("paid in advance" in note for note in found.notes)


def test_reservation_costs_without_nodes() -> None:
    assert any("until it is cancelled" in note for note in cost.estimate(config.load("p5-odcr")).notes)


def test_spares_cost_as_much_as_workers() -> None:
    found = cost.estimate(config.load("p5-8nodes"))
    assert part(found, "hot spares") == pytest.approx(part(found, "GPU nodes") / 8)


def test_own_vpc_has_its_own_gateway() -> None:
    vpc = {
        "network.vpc_id": "vpc-0123456789abcdef0",
        "network.gpu_subnet_id": "subnet-0123456789abcdef0",
        "network.second_subnet_id": "subnet-0123456789abcdef1",
    }
    assert "NAT gateway" in [item.name for item in cost.estimate(profile()).parts]
    assert "NAT gateway" not in [item.name for item in cost.estimate(profile(vpc)).parts]


def test_what_is_not_known_is_said() -> None:
    found = cost.estimate(profile({"cluster.system_instance_type": "c9.large", **ELSEWHERE}))
    assert "system nodes" not in [item.name for item in found.parts]
    assert any("no price known for c9.large" in note for note in found.notes)
    assert any("us-west-2 may differ" in note for note in found.notes)


@pytest.mark.parametrize("name", config.names())
def test_every_shipped_profile_has_a_price_and_a_bound(name: str) -> None:
    found = cost.estimate(config.load(name))
    assert found.bound_usd is not None
    assert found.bound_usd > found.usd_h > 0
    assert CATALOGUE[config.load(name).nodes.instance_type].price_usd_h > 0


def test_command_prints_parts_total_bound_date_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.main(["--profile", "p5"]) == 0
    text = capsys.readouterr().out
    for piece in (
        "GPU nodes",
        "total",
        "one run: at most",
        f"as of {PRICES_AS_OF}",
        "https://aws.amazon.com/ec2/pricing",
    ):
        assert piece in text


def test_command_refuses_an_unknown_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.main(["--profile", "p6"]) == 2
    assert "profile: 'p6'; legal:" in capsys.readouterr().err
