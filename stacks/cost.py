"""What a profile costs an hour, by part, and the most that its run can cost.

``python -m stacks.cost --profile p5``.  Prices are indicative: on demand, us-east-1, without tax, traffic and logs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from payload.config import ConfigError
from stacks import config
from stacks.instances import PRICE_REGION, PRICE_SOURCE, PRICES_AS_OF
from stacks.profile import Profile

HOURS_A_MONTH = 730
CONTROL_PLANE_USD_H = 0.10
"""https://aws.amazon.com/eks/pricing/: a version in standard support; 0.60 in extended support."""
NAT_GATEWAY_USD_H = 0.045 + 0.005
"""https://aws.amazon.com/vpc/pricing/: the gateway and its public address; traffic is 0.045 a GB besides."""
SCRATCH_USD_GIB_MONTH = 0.140
"""https://aws.amazon.com/fsx/lustre/pricing/: SCRATCH_2 SSD."""
GP3_USD_GIB_MONTH = 0.08
"""https://aws.amazon.com/ebs/pricing/"""
ECR_USD_GB_MONTH = 0.10
"""https://aws.amazon.com/ecr/pricing/"""
IMAGE_GB = 20
SYSTEM_USD_H = {"m6i.large": 0.096, "m6i.xlarge": 0.192, "m5.large": 0.096, "m7i.large": 0.1008, "t3.large": 0.0832}
"""https://aws.amazon.com/ec2/pricing/on-demand/"""
SYSTEM_VOLUME_GIB = 50
BUILD_USD_MIN = {"large": 0.02, "xlarge": 0.1002, "2xlarge": 0.25}
"""https://aws.amazon.com/codebuild/pricing/: general1, Linux."""
BUILD_MINUTES = 50
"""A build is stopped after so long."""
BEFORE_RUN_H = 1.0
"""GPUs that are not training yet: their start, the pull of the image, the preparation of data beside the Job."""
AFTER_RUN_H = 0.5
"""From the idle guard's verdict to the last instance: its period of 5 minutes, and a p5's shutdown of 20."""


@dataclass(frozen=True)
class Part:
    name: str
    quantity: str
    usd_h: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    parts: tuple[Part, ...]
    once_usd: float
    """One image build at its longest."""
    hours: float | None
    """Longest time that the GPUs of one run are paid for; None: nothing ends it."""
    notes: tuple[str, ...]

    @property
    def usd_h(self) -> float:
        return sum(part.usd_h for part in self.parts)

    @property
    def bound_usd(self) -> float | None:
        """For one run, stacks and all, from deployment until the GPUs are gone."""
        return None if self.hours is None else self.hours * self.usd_h + self.once_usd


def estimate(profile: Profile) -> Estimate:
    """The parts that cost by the hour, and the bound of one run."""
    minutes = BUILD_MINUTES * BUILD_USD_MIN[profile.image.build_compute]
    return Estimate(parts=tuple(_parts(profile)), once_usd=minutes, hours=_hours(profile), notes=tuple(_notes(profile)))


def _parts(profile: Profile) -> Iterator[Part]:
    nodes, cluster = profile.nodes, profile.cluster
    quantity = f"{nodes.count} x {nodes.instance_type}"
    yield Part("GPU nodes", quantity, nodes.count * nodes.instance.price_usd_h)
    if nodes.spare:
        yield Part("hot spares", f"{nodes.spare} x {nodes.instance_type}", nodes.spare * nodes.instance.price_usd_h)
    size = profile.storage.capacity_gib
    yield Part("FSx for Lustre", f"{size} GiB SCRATCH_2", size * SCRATCH_USD_GIB_MONTH / HOURS_A_MONTH)
    yield Part("EKS control plane", "1", CONTROL_PLANE_USD_H)
    price = SYSTEM_USD_H.get(cluster.system_instance_type)
    if price is not None:
        count = cluster.system_nodes
        yield Part("system nodes", f"{count} x {cluster.system_instance_type}", count * price)
    volumes = nodes.maximum * nodes.root_volume_gib + cluster.system_nodes * SYSTEM_VOLUME_GIB
    yield Part("root volumes", f"{volumes} GiB gp3", volumes * GP3_USD_GIB_MONTH / HOURS_A_MONTH)
    if not profile.network.vpc_id:
        yield Part("NAT gateway", "1", NAT_GATEWAY_USD_H)
    yield Part("image", f"about {IMAGE_GB} GB in ECR", IMAGE_GB * ECR_USD_GB_MONTH / HOURS_A_MONTH)


def _hours(profile: Profile) -> float | None:
    capacity = profile.nodes.capacity
    if capacity.start and capacity.end:
        return (capacity.end - capacity.start).total_seconds() / 3600
    if not profile.idle_guard.minutes:
        return None
    return BEFORE_RUN_H + profile.job.max_hours + profile.idle_guard.minutes / 60 + AFTER_RUN_H


def _notes(profile: Profile) -> Iterator[str]:
    kind = profile.nodes.capacity.kind
    if kind == "capacity-block":
        yield "The Capacity Block is paid in advance at its own price; the on-demand price stands for it here."
    if kind == "odcr":
        yield "A reservation costs the price of its nodes until it is cancelled, with or without these stacks."
    if profile.cluster.system_instance_type not in SYSTEM_USD_H:
        yield f"System nodes are left out: no price known for {profile.cluster.system_instance_type}."
    if profile.region != PRICE_REGION:
        yield f"Prices are those of {PRICE_REGION}; {profile.region} may differ."


def render(profile: Profile, found: Estimate) -> str:
    """The table that the command prints."""
    lines = [f"profile {profile.name} ({profile.region}), US dollars an hour"]
    lines += [f"  {part.name:<20}{part.quantity:<28}{part.usd_h:>10.2f}" for part in found.parts]
    lines += [f"  {'total':<48}{found.usd_h:>10.2f}", ""]
    idle = found.usd_h - sum(part.usd_h for part in found.parts if part.name in ("GPU nodes", "hot spares"))
    lines.append(f"without GPU nodes, until `cdk destroy`: {idle:.2f} an hour")
    lines.append(f"image build: at most {found.once_usd:.2f}, once a change of the image")
    if found.bound_usd is None:
        lines.append("one run: no upper bound, as the idle guard is off; set idle_guard.minutes")
    else:
        lines.append(f"one run: at most {found.bound_usd:,.2f} ({_reason(profile, found.hours or 0)})")
    lines += [f"note: {note}" for note in found.notes]
    lines.append(f"Prices: on demand, Linux, {PRICE_REGION}, as of {PRICES_AS_OF}, without traffic, logs and tax.")
    lines.append(f"Source: {PRICE_SOURCE} and the price pages named in stacks/cost.py.")
    return "\n".join(lines) + "\n"


def _reason(profile: Profile, hours: float) -> str:
    if profile.nodes.capacity.kind == "capacity-block":
        return f"the block's {hours:g} h"
    job, guard = profile.job.max_hours, profile.idle_guard.minutes
    return (
        f"{hours:g} h: {BEFORE_RUN_H:g} h before the Job, job.max_hours {job:g}, "
        f"idle_guard.minutes {guard}, {AFTER_RUN_H:g} h to stop"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the table; 2 for a profile that is refused."""
    parser = argparse.ArgumentParser(prog="python -m stacks.cost", description="What a profile costs.")
    parser.add_argument("--profile", default=config.DEFAULT, help="name in profiles/, or the path of a TOML file")
    try:
        profile = config.load(parser.parse_args(argv).profile)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(render(profile, estimate(profile)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
