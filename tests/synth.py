"""Synthesis in this process, once a profile and session, for tests/stacks and tests/teardown."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by jsii when CDK is first imported, so set before that.
os.environ.setdefault("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "20")

from aws_cdk import App, CfnElement

from payload.config import merge
from stacks import config
from stacks.application import Stacks, build
from stacks.profile import Profile

ROOT = Path(__file__).parents[1]
PROFILES = tuple(config.names())
CONTEXT: dict[str, Any] = json.loads((ROOT / "cdk.json").read_text())["context"]
PARTS = ("network", "cluster", "storage", "gpu-nodes", "training")
VPC = {
    "network.vpc_id": "vpc-0123456789abcdef0",
    "network.gpu_subnet_id": "subnet-0123456789abcdef0",
    "network.second_subnet_id": "subnet-0123456789abcdef1",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "guest": {
        **VPC,
        "cluster.endpoint": "private",
        "cluster.admin_role_arn": "arn:aws:iam::123456789012:role/platform",
        "storage.export_bucket": "results-of-mine",
        "storage.export_prefix": "llm/runs",
        "job.hf_token_secret_arn": "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-token-AbCdEf",
    },
    "changed": {
        "cluster.public_cidrs": ["203.0.113.0/24"],
        "storage.allow_data_loss": True,
        "nodes.ami": "ami-0123456789abcdef0",
        "nodes.placement_group": True,
        "nodes.replace_on_change": True,
        "nodes.taints": [{"key": "nvidia.com/gpu"}, {"key": "team", "value": "llm", "effect": "NoExecute"}],
        "nodes.labels": {"team": "llm"},
    },
}
"""Of p5: in the user's VPC, all private, with an export bucket; and with the other choices that change templates."""
Template = dict[str, Any]
Resource = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """One synthesized application: its constructs, and a template for each part of the chain."""

    profile: Profile
    app: App
    stacks: Stacks
    templates: dict[str, Template]
    """Keyed as PARTS."""
    stack_dependencies: dict[str, tuple[str, ...]]
    """What the CDK command line orders stacks by, keyed as PARTS."""
    warnings: tuple[str, ...]
    """What synthesis says to the user."""

    def of_type(self, part: str, kind: str) -> dict[str, Resource]:
        """Resources of a CloudFormation type, by logical id."""
        resources = self.templates[part]["Resources"]
        return {id: resource for id, resource in resources.items() if resource["Type"] == kind}

    def only(self, part: str, kind: str) -> Resource:
        """The one resource of the type."""
        (resource,) = self.of_type(part, kind).values()
        return resource

    def objects(self, construct: Any) -> list[dict[str, Any]]:
        """The Kubernetes objects of one KubernetesObjects; a token reads ``Ref Id`` or ``GetAtt Id.Attribute``."""
        text = self.templates["training"]["Resources"][self.logical_id(construct.resource)]["Properties"]["Objects"]
        pieces = text["Fn::Join"][1] if isinstance(text, dict) else [text]
        found = json.loads("".join(piece if isinstance(piece, str) else self._token(piece) for piece in pieces))
        assert isinstance(found, list)
        return found

    def _token(self, token: dict[str, Any]) -> str:
        ((kind, value),) = token.items()
        if kind == "Fn::ImportValue":
            outputs = [output for template in self.templates.values() for output in template["Outputs"].values()]
            (exported,) = [o["Value"] for o in outputs if o.get("Export", {}).get("Name") == value]
            return self._token(exported)
        return f"{kind.removeprefix('Fn::')} {value if isinstance(value, str) else '.'.join(map(str, value))}"

    def all_of_type(self, kind: str) -> Iterator[tuple[str, str, Resource]]:
        """Part, logical id and resource of every resource of the type, in all templates."""
        for part in self.templates:
            for id, resource in self.of_type(part, kind).items():
                yield part, id, resource

    def logical_id(self, construct: Any) -> str:
        """Of a construct's resource, so that no test spells a hashed id."""
        resource = construct
        while not isinstance(resource, CfnElement):
            resource = resource.node.default_child
        stack = next(stack for stack in self.stacks.chain if resource.node.path.startswith(stack.node.path + "/"))
        found = stack.resolve(resource.logical_id)
        assert isinstance(found, str)
        return found


def synthesize(profile: Profile, context: Mapping[str, Any] | None = None) -> Synthesis:
    """Synthesizes without cache, leaving no files behind."""
    with tempfile.TemporaryDirectory() as folder:
        app = App(context={**CONTEXT, **(context or {})}, outdir=folder)
        stacks = build(app, profile)
        assembly = app.synth()
        names = {stack.stack_name: part for part, stack in zip(PARTS, stacks.chain, strict=True)}
        templates: dict[str, Template] = {}
        dependencies: dict[str, tuple[str, ...]] = {}
        warnings: list[str] = []
        for artifact in assembly.stacks:
            part = names[artifact.stack_name]
            templates[part] = json.loads(Path(artifact.template_full_path).read_text())
            found = [names[item.id] for item in artifact.dependencies if item.id in names]
            dependencies[part] = tuple(sorted(found, key=PARTS.index))
            warnings += [str(message.entry.data) for message in artifact.messages]
    return Synthesis(
        profile=profile,
        app=app,
        stacks=stacks,
        templates=templates,
        stack_dependencies=dependencies,
        warnings=tuple(warnings),
    )


@functools.cache
def synthesis(name: str) -> Synthesis:
    """The application of one of PROFILES; shared by all tests, so not to be changed."""
    return synthesize(config.load(name))


@functools.cache
def variant(name: str) -> Synthesis:
    """One of VARIANTS; shared as well."""
    tables = tomllib.loads((config.PROFILES / "p5.toml").read_text())
    return synthesize(config.validate(merge(tables, VARIANTS[name])))
