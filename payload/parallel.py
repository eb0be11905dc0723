"""The one place that chooses device, backend, data type and sharding."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from payload.config import ConfigError, RunConfig
from payload.recovery.base import Attempt
from payload.task import Task

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def make_deterministic() -> None:
    """Once a process, before any tensor work: fixed thread counts and deterministic kernels only.

    The bit-equal ends that the product promises rest on this. CUBLAS_WORKSPACE_CONFIG comes with the pod.
    """
    torch.set_num_threads(1)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Otherwise every torch.empty is filled, which costs memory bandwidth and guards only against reading garbage.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def device_of(config: RunConfig, local_rank: int) -> torch.device:
    """Raises ConfigError where the device asked for is not there; never falls back to another."""
    if config.parallelism.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("parallelism.device: cuda, but this process sees no CUDA device; legal here: cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"parallelism.ranks_per_node: local rank {local_rank}, but this node has {torch.cuda.device_count()} "
            f"CUDA devices; legal: 1 to {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def join_group(config: RunConfig, attempt: Attempt, device: torch.device) -> None:
    """Collective: makes the default process group of this attempt over the attempt's store."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type],
        store=attempt.store,
        rank=attempt.rank,
        world_size=attempt.world_size,
        timeout=timedelta(seconds=config.timeouts.process_group_s),
        device_id=device if device.type == "cuda" else None,
    )
    # Also the first use of every connection: whoever cannot reach its peers fails here, not in step 1.
    dist.all_reduce(torch.zeros(1, device=device))


def release(device: torch.device) -> None:
    """Frees what an abandoned attempt left on the device: its model sits in reference cycles (hooks, tracebacks)."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def leave_group() -> None:
    """At the end of an attempt that completed; an abandoned one is torn down by its arm."""
    if dist.is_initialized():
        dist.destroy_process_group()


def distribute(config: RunConfig, task: Task, model: nn.Module, device: torch.device) -> nn.Module:
    """Collective: the model, sharded or replicated, in its precision, on the device.

    Parameters that were on the meta device hold garbage afterwards, for a load or initialise() to fill.
    """
    if config.model.precision == "bf16":
        for parameter in model.parameters():  # Not model.to(): rotary frequencies and other buffers stay fp32.
            parameter.data = parameter.data.to(torch.bfloat16)
    mesh, policy = _mesh(config, device), _policy(config)
    for layer in task.layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    _sum_gradients(model.modules())
    _materialise(model, device)
    return model


def _mesh(config: RunConfig, device: torch.device) -> DeviceMesh:
    """All ranks share one copy (fsdp2), or each has its own, a shard group of one (ddp).

    Not DistributedDataParallel: it regroups its buckets after the first step of a process, and a ring adds the ranks
    in an order that depends on the place in a bucket, so a restarted run would differ from the straight one.
    """
    world_size = dist.get_world_size()
    if config.parallelism.strategy == "ddp":
        return init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))


def _policy(config: RunConfig) -> MixedPrecisionPolicy:
    if config.model.precision == "mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def _sum_gradients(modules: Iterable[nn.Module]) -> None:
    """Ranks' gradients are added, not averaged: the loop divides by the global number of tokens."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Moves to the device, giving real memory to what is on the meta device; tied parameters stay tied."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(real)  # type: ignore[no-untyped-call]


def num_copies(config: RunConfig) -> int:
    """How many ranks hold the same gradients after the reduction."""
    return dist.get_world_size() if config.parallelism.strategy == "ddp" else 1


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself; memory is shared with it."""
    tensor = tensor.detach()
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """local_tensor(), and the index of its first row in the whole (0 for a scalar)."""
    if not isinstance(tensor, DTensor):
        return local_tensor(tensor), 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_tensor(tensor), offsets[0]


def whole(tensor: Tensor) -> Tensor:
    """Collective for a sharded tensor: all of it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
