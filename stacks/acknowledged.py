"""Findings of cdk-nag's AwsSolutions pack that are meant, each with the reason; all others fail the tests.

A finding is ``rule[detail]`` at a construct path.  Details and paths are matched as shell patterns; paths begin with
the part of the chain, without the profile's prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

_PROVIDER = "*/Provider/*"
"""CDK's own custom resource framework."""
_BASIC = "writes logs and nothing else; CDK attaches it to the functions of its own custom resource framework"
_VPC_FUNCTION = (
    "creates and deletes the network interfaces of a function in the VPC; "
    "ec2:CreateNetworkInterface and its siblings allow no narrower resource"
)
_NODE = "required of every EKS node; AWS changes it along with the kubelet and the CNI, which a copy would miss"


@dataclass(frozen=True)
class Acknowledged:
    """One kind of finding that is meant."""

    rule: str
    detail: str
    """Empty for rules that report no detail."""
    path: str
    reason: str

    def covers(self, rule: str, detail: str, path: str) -> bool:
        return rule == self.rule and fnmatchcase(detail, self.detail) and fnmatchcase(path, self.path)


_MANAGED = "AwsSolutions-IAM4"
_WILDCARD = "AwsSolutions-IAM5"

ACKNOWLEDGED = (
    Acknowledged(
        _MANAGED, "Policy::*/AmazonEKSClusterPolicy", "cluster/Cluster/Role/*", "the policy that EKS asks for"
    ),
    Acknowledged(_MANAGED, "Policy::*/service-role/AWSLambdaBasicExecutionRole", "cluster/Cluster/Kubectl*", _BASIC),
    Acknowledged(_MANAGED, "Policy::*/service-role/AWSLambdaBasicExecutionRole", f"training/{_PROVIDER}", _BASIC),
    Acknowledged(
        _MANAGED, "Policy::*/service-role/AWSLambdaVPCAccessExecutionRole", "cluster/Cluster/Kubectl*", _VPC_FUNCTION
    ),
    Acknowledged(_MANAGED, "Policy::*/service-role/AWSLambdaVPCAccessExecutionRole", "training/*", _VPC_FUNCTION),
    Acknowledged(
        _MANAGED,
        "Policy::*ContainerRegistry*ReadOnly*",
        "cluster/Cluster/KubectlProvider/Handler/*",
        "read only; CDK's kubectl function takes it to pull charts from registries, and offers no switch for it",
    ),
    Acknowledged(_MANAGED, "Policy::*/AmazonEKSWorkerNodePolicy", "*/Node*Role/Resource", _NODE),
    Acknowledged(_MANAGED, "Policy::*/AmazonEKS_CNI_Policy", "*/Node*Role/Resource", _NODE),
    Acknowledged(_MANAGED, "Policy::*/AmazonEC2ContainerRegistryReadOnly", "*/Node*Role/Resource", _NODE),
    Acknowledged(
        _MANAGED,
        "Policy::*/AmazonSSMManagedInstanceCore",
        "gpu-nodes/NodeRole/Resource",
        "Session Manager instead of SSH: no port is open and every session is logged",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::<*.Arn>:[*]",
        "*",
        "versions of the one function that CDK's custom resource framework invokes",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::arn:aws:fsx:*:<AWS::AccountId>:file-system/[*]",
        "cluster/FsxCsiRole/*",
        "fsx:DescribeFileSystems alone; the driver is installed before the file system has an id",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::arn:aws:fsx:*:<AWS::AccountId>:task/[*]",
        "training/Export/*",
        "an export task has no id before it is created; the file system in the same statement is the one of the stack",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::arn:aws:autoscaling:*:autoScalingGroup:[*]:autoScalingGroupName/nvrx-*",
        "training/*",
        "one group by its name; the id before the name is known to AWS only",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::[*]",
        "training/Capacity/*",
        "describe actions of EC2 and Auto Scaling, which know no resources",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::[*]",
        "training/IdleGuard/*",
        "autoscaling:DescribeAutoScalingGroups, which knows no resources",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::[*]",
        "training/*/Project/Role/*",
        "ecr:GetAuthorizationToken, which knows no resources; pushing is allowed to the stack's repository only",
    ),
    Acknowledged(
        _WILDCARD,
        "*s3:*",
        "training/*/Project/Role/*",
        "reading the build context in CDK's asset bucket, as granted by CDK's grant_read",
    ),
    Acknowledged(
        _WILDCARD,
        "Resource::arn:aws:*:<AWS::AccountId>:*/<*Project*>*",
        "training/*/Project/Role/*",
        "log streams and reports of this build project",
    ),
    Acknowledged(
        "AwsSolutions-CB4",
        "",
        "training/*/Project/Resource",
        "the build has no artifacts: its product is the image in ECR, encrypted there; its cache is not used",
    ),
    Acknowledged(
        "AwsSolutions-L1",
        "",
        "*",
        "Python 3.13 has security support until 2029-10; the handlers are tested on the language level of one runtime, "
        "and CDK's own functions follow CDK",
    ),
    Acknowledged(
        "AwsSolutions-AS3",
        "",
        "gpu-nodes/Nodes/ASG",
        "the capacity resource waits for the instances and quotes failed scaling activities; nobody watches a topic",
    ),
    Acknowledged(
        "AwsSolutions-SF1",
        "",
        f"training/{_PROVIDER}",
        "the framework's waiter; the functions that it calls log every step, and its input holds no more than they do",
    ),
    Acknowledged(
        "AwsSolutions-SF2",
        "",
        f"training/{_PROVIDER}",
        "the framework's waiter runs at deployments only and calls two functions; there is no path to trace",
    ),
)


def explain(finding: str, path: str) -> Acknowledged | None:
    """The entry for ``rule[detail]`` at a path below the chain's part, or None: then it is not meant."""
    rule, _, rest = finding.partition("[")
    detail = rest[:-1]
    return next((entry for entry in ACKNOWLEDGED if entry.covers(rule, detail, path)), None)
