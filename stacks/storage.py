"""StorageStack: the image repository and the Lustre file system."""

from __future__ import annotations

from aws_cdk import Annotations, RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_fsx as fsx
from constructs import Construct

from stacks.base import ProfileStack
from stacks.network import NetworkStack
from stacks.profile import Profile

LUSTRE_VERSION = "2.15"
"""The API's default for scratch file systems is 2.10, which the client of AL2023 cannot mount."""
EXPORTED_FOLDER = "runs"
"""Below the file system's root; RunConfig.run_dir lies in it. The dataset can be prepared again."""


class StorageStack(ProfileStack):
    """ECR, then FSx: on delete the file system goes first.

    Attributes: ``repository``; ``file_system``, with ``file_system_id``, ``dns_name`` and ``mount_name``;
    ``file_system_security_group``; ``client_security_group``, for every interface of a node that mounts;
    ``data_repository``, the association with the export bucket, or None; ``exported_paths``.
    """

    def __init__(self, scope: Construct, *, profile: Profile, network: NetworkStack) -> None:
        super().__init__(scope, "storage", profile=profile, description="Image repository and FSx for Lustre")
        self.repository = ecr.Repository(
            self,
            "Repository",
            repository_name=profile.repository_name,
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            image_scan_on_push=True,
            empty_on_delete=True,
            removal_policy=RemovalPolicy.DESTROY,
        )
        self.client_security_group = ec2.SecurityGroup(
            self, "LustreClients", vpc=network.vpc, description="Lustre clients", allow_all_outbound=True
        )
        self.file_system_security_group = self._server_group(network)
        self.file_system = self._file_system(network)
        self.file_system_id = self.file_system.ref
        self.dns_name = self.file_system.attr_dns_name
        self.mount_name = self.file_system.attr_lustre_mount_name
        self.exported_paths = (EXPORTED_FOLDER,)
        self.data_repository = self._data_repository() if profile.storage.export_bucket else None
        self._outputs()

    def _server_group(self, network: NetworkStack) -> ec2.SecurityGroup:
        """Ports of Lustre's network layer: 988 and 1018 to 1023, from clients and servers, and back to the clients."""
        servers = ec2.SecurityGroup(
            self, "LustreServers", vpc=network.vpc, description="Lustre servers", allow_all_outbound=True
        )
        clients = self.client_security_group
        for target, source in ((servers, servers), (servers, clients), (clients, servers)):
            for ports in (ec2.Port.tcp(988), ec2.Port.tcp_range(1018, 1023)):
                target.add_ingress_rule(source, ports, "Lustre")
        return servers

    def _file_system(self, network: NetworkStack) -> fsx.CfnFileSystem:
        storage = self.profile.storage
        file_system = fsx.CfnFileSystem(
            self,
            "FileSystem",
            file_system_type="LUSTRE",
            file_system_type_version=LUSTRE_VERSION,
            storage_capacity=storage.capacity_gib,
            subnet_ids=[network.gpu_subnet.subnet_id],
            security_group_ids=[self.file_system_security_group.security_group_id],
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="SCRATCH_2", data_compression_type=storage.compression
            ),
        )
        file_system.apply_removal_policy(RemovalPolicy.DESTROY)
        # The rules first: FSx checks them when it is made, and they must outlive the mounts.
        file_system.node.add_dependency(self.file_system_security_group, self.client_security_group, self.repository)
        return file_system

    def _data_repository(self) -> fsx.CfnDataRepositoryAssociation:
        storage = self.profile.storage
        association = fsx.CfnDataRepositoryAssociation(
            self,
            "DataRepository",
            file_system_id=self.file_system_id,
            file_system_path=f"/{EXPORTED_FOLDER}",
            data_repository_path=f"s3://{storage.export_bucket}/{storage.export_prefix}",
            batch_import_meta_data_on_create=False,
            s3=fsx.CfnDataRepositoryAssociation.S3Property(
                auto_export_policy=fsx.CfnDataRepositoryAssociation.AutoExportPolicyProperty(
                    events=["NEW", "CHANGED", "DELETED"]
                )
            ),
        )
        association.apply_removal_policy(RemovalPolicy.DESTROY)
        return association

    def _outputs(self) -> None:
        storage = self.profile.storage
        self.output("RepositoryUri", self.repository.repository_uri, "Image repository")
        self.output("FileSystemId", self.file_system_id, "FSx for Lustre file system")
        if storage.export_bucket:
            self.output("ExportPath", f"s3://{storage.export_bucket}/{storage.export_prefix}", "Exported runs")
        elif storage.allow_data_loss:
            self._warn("storage:data-loss", "destroying these stacks deletes all runs: storage.allow_data_loss is true")
        else:
            self._warn(
                "storage:no-export",
                "no storage.export_bucket: destroying is refused until storage.allow_data_loss = true is deployed",
            )

    def _warn(self, id: str, text: str) -> None:
        Annotations.of(self).add_warning_v2(f"nvrx-eks/{id}", text)
