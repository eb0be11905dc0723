"""What stands between `cdk destroy` and the runs on the file system: an export, or the user's word."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import Duration, Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.provider import WaitingProvider, describe_stack, seconds


class FileSystemExport(Construct):
    """On delete: an export task of the data repository, awaited; an error if it fails, and nothing goes on.

    A roll-back of the stack, or an update that drops this resource, exports nothing: the file system stays.
    Automatic export is asynchronous, so what was written last is not in the bucket when a Job ends. Create and
    update do nothing. Place it so that it is deleted after the writers' pods and before the claim.

    Attributes: ``resource`` (depend on it).
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        file_system_id: str,
        paths: Sequence[str] = (),
        timeout: Duration | None = None,
    ) -> None:
        """``paths``: below the file system's root, without a leading slash; empty: everything.
        ``timeout``: 50 minutes."""
        super().__init__(scope, id)
        stack = Stack.of(self)
        arn = f"arn:{stack.partition}:fsx:{stack.region}:{stack.account}"
        task = iam.PolicyStatement(
            actions=["fsx:CreateDataRepositoryTask"],
            resources=[f"{arn}:file-system/{file_system_id}", f"{arn}:task/*"],
        )
        read = iam.PolicyStatement(
            actions=["fsx:DescribeDataRepositoryTasks", "fsx:DescribeFileSystems"],
            resources=[f"{arn}:file-system/{file_system_id}", f"{arn}:task/*"],
        )
        self.provider = WaitingProvider(
            self,
            "Waiting",
            module="export",
            statements=[task, read, describe_stack(self)],
            query_interval=Duration.seconds(30),
        )
        properties = {
            "FileSystemId": file_system_id,
            "Paths": list(paths),
            "DeleteSeconds": seconds("timeout", timeout or Duration.minutes(50)),
        }
        self.resource = self.provider.resource(
            self, "Resource", resource_type="Custom::FileSystemExport", properties=properties
        )


class DataLossGuard(Construct):
    """Without an export bucket: `cdk destroy` stops here, before anything is ended, until data loss is allowed.

    Make it depend on everything else in its stack, so that it is the first to go. Roll-backs and updates pass it.

    Attributes: ``resource``.
    """

    def __init__(self, scope: Construct, id: str, *, allow_data_loss: bool) -> None:
        """``allow_data_loss``: as deployed; what the profile says while destroying does not reach CloudFormation."""
        super().__init__(scope, id)
        self.provider = WaitingProvider(
            self,
            "Waiting",
            module="data_loss_guard",
            statements=[describe_stack(self)],
            query_interval=Duration.seconds(10),
        )
        self.resource = self.provider.resource(
            self,
            "Resource",
            resource_type="Custom::DataLossGuard",
            properties={"AllowDataLoss": str(allow_data_loss).lower()},
        )
