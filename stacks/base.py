"""What every stack has in common: its name, its place, its tags."""

from __future__ import annotations

from aws_cdk import CfnOutput, Environment, RemovalPolicies, Stack, Tags
from constructs import Construct

from stacks.profile import Profile


class ProfileStack(Stack):
    """A stack named ``<prefix>-<part>`` in the profile's region.

    The region is concrete, the account is the profile's or that of the deploying credentials.  Zones come from the
    profile: left alone, CDK would look them up with credentials at synthesis.
    """

    def __init__(self, scope: Construct, part: str, *, profile: Profile, description: str) -> None:
        super().__init__(
            scope,
            f"{profile.prefix}-{part}",
            env=Environment(account=profile.account or None, region=profile.region),
            description=description,
        )
        self.profile = profile
        # CDK keeps the log groups of its own functions; nothing is to outlive `cdk destroy`.
        RemovalPolicies.of(self).destroy(apply_to_resource_types=["AWS::Logs::LogGroup"])
        for key, value in profile.tags.items():
            Tags.of(self).add(key, value)

    @property
    def availability_zones(self) -> list[str]:
        return [self.profile.availability_zone, self.profile.second_zone]

    def output(self, name: str, value: str, description: str) -> None:
        """A stack output; never anything secret."""
        CfnOutput(self, name, value=value, description=description)
