"""Builds the training image in CodeBuild; no Docker engine on the deploying machine, nothing built twice."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from aws_cdk import Duration, IgnoreMode, Stack
from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from stacks.constructs.provider import WaitingProvider

BUILD_TIMEOUT = Duration.minutes(50)
"""The custom resource ends at 60 minutes; the build must end before it does."""

_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_ECR = re.compile(
    r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+)(?::([\w.-]+))?(?:@(sha256:[0-9a-f]{64}))?"
)

_BUILDSPEC = {
    "version": "0.2",
    "env": {"shell": "bash"},
    "phases": {
        "pre_build": {
            "commands": [
                'if [ -n "$BASE_REGION" ]; then aws ecr get-login-password --region "$BASE_REGION"'
                ' | docker login --username AWS --password-stdin "${BASE_IMAGE%%/*}"; fi',
                'aws ecr get-login-password | docker login --username AWS --password-stdin "${REPOSITORY_URI%%/*}"',
            ]
        },
        "build": {
            "commands": [
                'docker build --file "$DOCKERFILE" --build-arg BASE_IMAGE="$BASE_IMAGE" $BUILD_ARGS'
                ' --tag "$REPOSITORY_URI:$TAG" .',
                'docker push "$REPOSITORY_URI:$TAG"',
            ]
        },
    },
}


class ImageBuild(Construct):
    """The image of one build context on one base image, pushed under the tag ``<context hash>-<base digest>``.

    A tag that exists counts as built. Roll-back and delete stop a running build. The images themselves go with
    their repository. On failure the reason names the phase and the build's
    log, and quotes its end.

    Attributes: ``resource`` (depend on it), ``digest``, ``uri`` (``repository@sha256:...``, for the Job),
    ``tag``, ``context_hash`` (a plain value, known at synth), ``project``.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        repository: ecr.IRepository,
        context: Path,
        base_image: str,
        dockerfile: str = "docker/Dockerfile",
        build_args: Mapping[str, str] | None = None,
        exclude: Sequence[str] = (),
        compute_type: codebuild.ComputeType = codebuild.ComputeType.X2_LARGE,
    ) -> None:
        """``base_image``: by digest, or a tag in a private ECR registry (AWS's training images), which is
        resolved when the stack is deployed. ``exclude``: .gitignore patterns left out of the context.
        ``build_args``: plain values of letters, digits and ``._/:@+-``, part of the context hash.

        Raises ValueError for a base image that cannot be resolved and for build arguments that need quoting.
        """
        super().__init__(scope, id)
        base = _base(base_image)
        args = dict(sorted((build_args or {}).items()))
        for name, value in args.items():
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*=[\w./:@+-]*", f"{name}={value}"):
                raise ValueError(f"build_args.{name}: {value!r}; legal: NAME and letters, digits, . _ / : @ + -")
        flags = " ".join(f"--build-arg {name}={value}" for name, value in args.items())
        source = s3_assets.Asset(
            self,
            "Context",
            path=str(context),
            exclude=list(exclude),
            ignore_mode=IgnoreMode.GIT,
        )
        self.context_hash = _with_arguments(source.asset_hash, dockerfile, flags)
        log_group = logs.LogGroup(self, "Logs", retention=logs.RetentionDays.ONE_MONTH)
        self.project = codebuild.Project(
            self,
            "Project",
            source=codebuild.Source.s3(bucket=source.bucket, path=source.s3_object_key),
            environment=codebuild.BuildEnvironment(
                build_image=codebuild.LinuxBuildImage.STANDARD_7_0,
                privileged=True,  # docker build
                compute_type=compute_type,
            ),
            timeout=BUILD_TIMEOUT,
            queued_timeout=Duration.minutes(5),
            logging=codebuild.LoggingOptions(cloud_watch=codebuild.CloudWatchLoggingOptions(log_group=log_group)),
            environment_variables={
                "REPOSITORY_URI": codebuild.BuildEnvironmentVariable(value=repository.repository_uri),
                "DOCKERFILE": codebuild.BuildEnvironmentVariable(value=dockerfile),
                "BUILD_ARGS": codebuild.BuildEnvironmentVariable(value=flags),
                "BASE_REGION": codebuild.BuildEnvironmentVariable(value=base["BaseRegion"]),
                "BASE_IMAGE": codebuild.BuildEnvironmentVariable(value=base_image),
                "TAG": codebuild.BuildEnvironmentVariable(value="set-by-the-build-request"),
            },
            build_spec=codebuild.BuildSpec.from_object(_BUILDSPEC),
        )
        repository.grant_pull_push(self.project)
        source.grant_read(self.project)
        statements = [
            iam.PolicyStatement(
                actions=[
                    "codebuild:StartBuild",
                    "codebuild:StopBuild",
                    "codebuild:BatchGetBuilds",
                    "codebuild:ListBuildsForProject",
                ],
                resources=[self.project.project_arn],
            ),
            iam.PolicyStatement(actions=["ecr:DescribeImages"], resources=[repository.repository_arn]),
        ]
        # The log goes with a roll-back, so its end is quoted in the reason.
        read_log = iam.PolicyStatement(actions=["logs:GetLogEvents"], resources=[log_group.log_group_arn])
        if base["BaseRegion"]:
            partition = Stack.of(self).partition
            arn = f"arn:{partition}:ecr:{base['BaseRegion']}:{base['BaseRegistry']}:repository/{base['BaseRepository']}"
            pull = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]
            self.project.add_to_role_policy(iam.PolicyStatement(actions=pull, resources=[arn]))
            statements.append(iam.PolicyStatement(actions=["ecr:BatchGetImage"], resources=[arn]))
        self.provider = WaitingProvider(
            self,
            "Waiting",
            module="image_build",
            statements=[*statements, read_log],
            on_event_statements=statements,
            query_interval=Duration.seconds(30),
        )
        self.resource = self.provider.resource(
            self,
            "Resource",
            resource_type="Custom::ImageBuild",
            properties={
                "ProjectName": self.project.project_name,
                "RepositoryName": repository.repository_name,
                "ContextHash": self.context_hash,
                "BaseImage": base_image,
                "BuildSeconds": str(int(BUILD_TIMEOUT.to_seconds())),
                **{key: value for key, value in base.items() if value},
            },
        )
        self.tag = self.resource.get_att_string("Tag")
        self.digest = self.resource.get_att_string("Digest")
        self.uri = f"{repository.repository_uri}@{self.digest}"


def _base(base_image: str) -> dict[str, str]:
    """What the handler needs to find the digest of the base image."""
    found = _ECR.fullmatch(base_image)
    if found:
        registry, region, name, tag, digest = found.groups()
        if tag or digest:
            fields = {"BaseRegistry": registry, "BaseRegion": region, "BaseRepository": name}
            return {**fields, "BaseTag": tag or "", "BaseDigest": digest or ""}
    elif _DIGEST.fullmatch(base_image):
        return {"BaseRegion": "", "BaseDigest": base_image.partition("@")[2]}
    raise ValueError(
        f"base_image: {base_image!r}; legal: name@sha256:<64 hex digits>, or an image of a private ECR registry "
        "with a tag, whose digest is looked up"
    )


def _with_arguments(asset_hash: str, dockerfile: str, flags: str) -> str:
    """The asset's hash covers the files only."""
    return hashlib.sha256("\n".join([asset_hash, dockerfile, flags]).encode()).hexdigest()
