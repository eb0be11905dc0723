"""cfn-lint and cdk-nag over every profile: clean, or meant for a reason that is written down."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import cdk_nag
import pytest
from cfnlint.config import ConfigMixIn, ManualArgs
from cfnlint.runner import Runner

from stacks.acknowledged import ACKNOWLEDGED, explain
from tests.synth import PARTS, PROFILES, VARIANTS, Synthesis, Template, synthesis, variant

ALL = [*PROFILES, *VARIANTS]
IGNORED = {
    "W3005": "CDK writes out dependencies that a reference implies; tests of ours walk them",
    "W6001": "the last stack repeats what users need of the others",
    "W3010": "nodes, reservation and file system must share the zone that the profile names",
}


def found(name: str) -> Synthesis:
    return variant(name) if name in VARIANTS else synthesis(name)


def lint(templates: Mapping[str, Template], region: str, folder: Path) -> list[str]:
    """``name: rule: message`` of each problem. One run for many: much of its time is loading the rules."""
    paths = []
    for name, template in templates.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(template))
        paths.append(str(path))
    given = ManualArgs(regions=[region], ignore_checks=sorted(IGNORED), templates=paths)
    matches = Runner(ConfigMixIn([], **given)).run()
    return [f"{Path(str(match.filename)).stem}: {match.rule.id}: {match.message}" for match in matches]


@pytest.mark.timeout(300)
def test_cfn_lint_is_clean(tmp_path: Path) -> None:
    """Every profile; a template that differs from another in the profile's name and region alone is linted once."""
    distinct: dict[str, tuple[str, str, Template]] = {}
    for name in ALL:
        app = found(name)
        for part in PARTS:
            text = json.dumps(app.templates[part]).replace(app.profile.region, "REGION")
            distinct[text.replace(app.profile.prefix, "PREFIX")] = (
                f"{name}-{part}",
                app.profile.region,
                app.templates[part],
            )
    assert len(distinct) >= 15
    for region in sorted({region for _, region, _ in distinct.values()}):
        templates = {name: template for name, place, template in distinct.values() if place == region}
        assert lint(templates, region, tmp_path) == []


def test_cfn_lint_would_find_a_mistake(p5: Synthesis, tmp_path: Path) -> None:
    """Of the kind that the launch template's raw overrides could hold."""
    template = json.loads(json.dumps(p5.templates["gpu-nodes"]))
    (resource,) = [r for r in template["Resources"].values() if r["Type"] == "AWS::EC2::LaunchTemplate"]
    resource["Properties"]["LaunchTemplateData"]["NetworkInterfaces"][0]["DeviceIndexx"] = 0
    assert any("E3002" in problem for problem in lint({"mistaken": template}, "us-east-1", tmp_path))


def findings(app: Synthesis) -> Iterator[tuple[str, str]]:
    """``rule[detail]`` and the path below the profile's prefix."""
    for violation in cdk_nag.AwsSolutionsChecks().validate_scope(app.app).violations:
        for resource in violation.violating_resources:
            yield violation.rule_name, resource.construct_path.removeprefix(f"{app.profile.prefix}-")


@pytest.mark.parametrize("name", ALL)
def test_cdk_nag_finds_only_what_is_meant(name: str) -> None:
    unexplained = [f"{rule} at {path}" for rule, path in findings(found(name)) if explain(rule, path) is None]
    assert unexplained == []


def test_every_acknowledgement_is_still_needed() -> None:
    used = {explain(rule, path) for name in ("p5", "guest") for rule, path in findings(found(name))}
    assert [entry for entry in ACKNOWLEDGED if entry not in used] == []


def test_reasons_are_reasons() -> None:
    assert all(len(entry.reason) > 25 for entry in ACKNOWLEDGED)


def test_an_open_port_would_be_found() -> None:
    """The table does not cover findings of other kinds or places."""
    assert explain("AwsSolutions-EC23", "gpu-nodes/Efa/Resource") is None
    assert explain("AwsSolutions-IAM5[Resource::*]", "gpu-nodes/NodeRole/DefaultPolicy/Resource") is None
    assert (
        explain("AwsSolutions-IAM4[Policy::arn:aws:iam::aws:policy/AdministratorAccess]", "cluster/Role/Resource")
        is None
    )
