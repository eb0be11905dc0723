"""What would fail minutes into a deployment, asked of AWS beforehand: ``python -m stacks.preflight --profile p5``.

Read-only, with the user's credentials. One line a check; a miss says what to do, and any miss makes the exit code 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from payload.config import ConfigError
from stacks import config, image_context, quotas
from stacks.profile import Profile
from stacks.quotas import Client, Line

NO_EKS_ZONES = frozenset({"use1-az3", "usw1-az2", "cac1-az3"})
"""Zone ids in which EKS places no control plane (EKS user guide, subnet requirements)."""
ECR_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([^:@]+)(?::([^@]+))?(?:@(sha256:\w+))?")


Check = Callable[[Profile, Client], Iterator[Line]]


def run(profile: Profile, session: boto3.Session) -> list[Line]:
    """All checks, each independent of the others; a check that AWS refuses to answer is a miss as well."""

    def client(service: str) -> Any:
        return session.client(service, region_name=profile.region)  # type: ignore[call-overload]

    lines: list[Line] = []
    for check in CHECKS:
        name = check.__name__.strip("_").replace("_", " ")
        try:
            lines += list(check(profile, client))
        except ClientError as error:
            code, text = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
            lines.append(Line(False, name, f"AWS does not say: {code}: {text}; ask for the right, or check by hand"))
        except BotoCoreError as error:
            lines.append(Line(False, name, f"AWS does not say: {error}; check credentials and network"))
    return lines


def _credentials(profile: Profile, client: Client) -> Iterator[Line]:
    account = client("sts").get_caller_identity()["Account"]
    right = not profile.account or profile.account == account
    said = f"account {account}" if right else f"account {account}, but the profile says {profile.account}; log in there"
    yield Line(right, "credentials", said)


def _bootstrap(profile: Profile, client: Client) -> Iterator[Line]:
    try:
        found = client("ssm").get_parameter(Name="/cdk-bootstrap/hnb659fds/version")["Parameter"]["Value"]
        yield Line(True, "bootstrap", f"version {found}")
    except ClientError as error:
        if error.response["Error"]["Code"] != "ParameterNotFound":
            raise
        yield Line(False, "bootstrap", f"{profile.region} is not bootstrapped; run: npx cdk bootstrap")


def _zones(profile: Profile, client: Client) -> Iterator[Line]:
    ec2, kind = client("ec2"), profile.nodes.instance_type
    zones = {zone["ZoneName"]: zone["ZoneId"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]}
    for field, zone in (("availability_zone", profile.availability_zone), ("second_zone", profile.second_zone)):
        usable = sorted(name for name, id in zones.items() if id not in NO_EKS_ZONES)
        said = f"{zone} is {zones.get(zone, 'unknown')}"
        advice = "" if zone in usable else f"; EKS has no place there: set {field} to one of {', '.join(usable)}"
        yield Line(zone in usable, field, said + advice)
    filters = [{"Name": "instance-type", "Values": [kind]}]
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=filters
    )
    offered = sorted(offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"])
    here = profile.availability_zone in offered
    where = f"set availability_zone to one of {', '.join(offered)}" if offered else "choose another region"
    said = f"{kind} is offered in {profile.availability_zone}"
    yield Line(here, "offering", said if here else f"{kind} is not offered in {profile.availability_zone}; {where}")


def _reservation(profile: Profile, client: Client) -> Iterator[Line]:
    capacity, nodes = profile.nodes.capacity, profile.nodes
    if capacity.kind == "on-demand":
        return
    try:
        found = client("ec2").describe_capacity_reservations(CapacityReservationIds=[capacity.id])
        items = found["CapacityReservations"]
    except ClientError as error:
        if "NotFound" not in error.response["Error"]["Code"]:
            raise
        items = []
    if not items:
        yield Line(False, "reservation", f"{capacity.id} is not known in {profile.region}; correct nodes.capacity.id")
        return
    item, block = items[0], capacity.kind == "capacity-block"
    alive = ("active", "scheduled", "pending", "payment-pending") if block else ("active",)
    wrong = [
        (item["State"] in alive, f"it is {item['State']}, not {' or '.join(alive)}; buy or make another"),
        (item["InstanceType"] == nodes.instance_type, f"it is of {item['InstanceType']}; set nodes.instance_type"),
        (
            item["AvailabilityZone"] == profile.availability_zone,
            f"it is in {item['AvailabilityZone']}; set availability_zone to that",
        ),
        (
            item["TotalInstanceCount"] >= nodes.maximum,
            f"it holds {item['TotalInstanceCount']} instances; set nodes.count and spare to that many at most",
        ),
        (
            block == (item.get("ReservationType", "default") == "capacity-block"),
            f"it is of type {item.get('ReservationType', 'default')}; correct nodes.capacity.kind",
        ),
    ]
    misses = [f"{capacity.id}: {text}" for right, text in wrong if not right]
    misses += _times(profile, item) if block else []
    yield from (Line(False, "reservation", text) for text in misses)
    if not misses:
        free = item.get("AvailableInstanceCount", 0)
        yield Line(True, "reservation", f"{capacity.id} is {item['State']}, {free} instances free")


def _times(profile: Profile, item: dict[str, Any]) -> Iterator[str]:
    capacity = profile.nodes.capacity
    for field, given, real in (
        ("start", capacity.start, item.get("StartDate")),
        ("end", capacity.end, item.get("EndDate")),
    ):
        if given and real and given != real:
            yield f"{capacity.id}: nodes.capacity.{field} is {given.isoformat()}; set it to {real.isoformat()}"


def _subnets(profile: Profile, client: Client) -> Iterator[Line]:
    """Of a network that exists already."""
    network = profile.network
    if not network.vpc_id:
        return
    for field, id, zone in (
        ("network.gpu_subnet_id", network.gpu_subnet_id, profile.availability_zone),
        ("network.second_subnet_id", network.second_subnet_id, profile.second_zone),
    ):
        found = client("ec2").describe_subnets(Filters=[{"Name": "subnet-id", "Values": [id]}])["Subnets"]
        if not found or found[0]["VpcId"] != network.vpc_id:
            yield Line(False, field, f"{id} is not in {network.vpc_id}; correct one of the two")
        else:
            real = found[0]["AvailabilityZone"]
            advice = "" if real == zone else f", but the profile says {zone}; choose a subnet there"
            yield Line(real == zone, field, f"{id} is in {real}{advice}")


def _node_image(profile: Profile, client: Client) -> Iterator[Line]:
    ami, here = profile.nodes.ami, True
    try:
        if ami.startswith("ami-"):
            here = bool(client("ec2").describe_images(ImageIds=[ami])["Images"])
        else:
            client("ssm").get_parameter(Name=ami)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("ParameterNotFound", "InvalidAMIID.NotFound"):
            raise
        here = False
    advice = "" if here else f" is not in {profile.region}; run: make ami PROFILE={profile.name}"
    yield Line(here, "node image", ami + advice)


def _base_image(profile: Profile, client: Client) -> Iterator[Line]:
    """Only a private registry of ECR can be asked; a digest elsewhere is looked up when the image is built."""
    image = image_context.base_image(profile.image, profile.region)
    found = ECR_IMAGE.fullmatch(image)
    if not found:
        yield Line(True, "base image", f"{image} is not in ECR and is not checked")
        return
    registry, region, name, tag, digest = found.groups()
    if region != profile.region:
        yield Line(True, "base image", f"{image} is in {region} and is not checked")
        return
    wanted = {"imageDigest": digest} if digest else {"imageTag": tag}
    images = client("ecr").batch_get_image(registryId=registry, repositoryName=name, imageIds=[wanted])["images"]
    advice = "" if images else " is not in its registry; set image.base_image to one that is"
    yield Line(bool(images), "base image", image + advice)


def _export_bucket(profile: Profile, client: Client) -> Iterator[Line]:
    bucket = profile.storage.export_bucket
    if not bucket:
        return
    try:
        client("s3").head_bucket(Bucket=bucket)
        yield Line(True, "export bucket", bucket)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        text = "does not exist; make it" if code in ("404", "NoSuchBucket") else f"is not yours to use ({code})"
        yield Line(False, "export bucket", f"{bucket} {text}, in {profile.region}, or change storage.export_bucket")


CHECKS: tuple[Check, ...] = (
    _credentials,
    _bootstrap,
    _zones,
    quotas.vcpus,
    _reservation,
    quotas.file_systems,
    quotas.repositories,
    quotas.clusters,
    quotas.vpcs,
    _subnets,
    _node_image,
    _base_image,
    _export_bucket,
)


def main(argv: Sequence[str] | None = None) -> int:
    """0: nothing is missing; 1: something is; 2: the profile is not legal."""
    parser = argparse.ArgumentParser(prog="python -m stacks.preflight", description=__doc__)
    parser.add_argument("--profile", default=config.DEFAULT, help="a name in profiles/, or the path of a .toml file")
    try:
        profile = config.load(parser.parse_args(argv).profile)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    lines = run(profile, boto3.Session())
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    misses = sum(not line.ok for line in lines)
    sys.stdout.write(f"{misses} of {len(lines)} missing\n" if misses else "nothing is missing\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
