"""NVRx's ft_launcher in this process, with options that the installed release accepts.

What differs between releases is asked of the release's own argument parser, never of its version number.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import TCPStore

from payload import environment
from payload.agent import Observer, no_action, run_agent
from payload.environment import PodEnvironment
from payload.meeting import Meeting

_KEEP_ALIVE = timedelta(seconds=2)


def ft_arguments(pod: PodEnvironment, host: str, local_address: str, parser: argparse.ArgumentParser) -> list[str]:
    """The options of ft_launcher for this pod, without the command of the worker.

    Args:
        host: address of pod 0, whose launcher holds the store.
        local_address: address by which the other pods reach this one.
        parser: the release's own.
    """
    config = pod.config
    timeouts, parallelism = config.timeouts, config.parallelism
    rendezvous = {
        "is_host": str(pod.index == 0).lower(),
        "join_timeout": str(int(timeouts.join_s)),
        "last_call_timeout": str(max(1, int(timeouts.last_call_s))),
        "read_timeout": str(int(timeouts.join_s)),
    }
    # A surviving node must never train alone: all nodes, or none.
    always = {
        "--nnodes": f"{parallelism.num_nodes}:{parallelism.num_nodes}",
        "--nproc-per-node": str(parallelism.ranks_per_node),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{host}:{pod.port}",
        "--rdzv-id": config.run_id,
        "--rdzv-conf": ",".join(f"{key}={value}" for key, value in rendezvous.items()),
        "--local-addr": local_address,
        "--node-rank": str(pod.index),
        "--max-restarts": str(config.recovery.max_restarts),
        "--monitor-interval": f"{timeouts.poll_s:g}",
        "--term-timeout": f"{timeouts.save_grace_s:g}",
        "--workers-stop-timeout": str(max(1, int(timeouts.grace_s))),
        "--ft-workload-check-interval": f"{min(0.5, timeouts.heartbeat_s / 4):g}",
        "--ft-rank-heartbeat-timeout": f"{timeouts.heartbeat_s:g}",
        "--ft-initial-rank-heartbeat-timeout": f"{timeouts.initial_heartbeat_s:g}",
        "--ft-rank-termination-signal": "SIGKILL",
    }
    # Only where the release has them. Checks of hardware that a CPU run lacks; waits for GPU memory that it never had.
    cpu = parallelism.device == "cpu"
    where_known = {
        "--ft-restart-policy": "any-failed",
        "--ft-enable-nic-monitor": str(not cpu).lower(),
        "--ft-enable-nic-healthcheck": str(not cpu).lower(),
    }
    known = {option for action in parser._actions for option in action.option_strings}
    options = [*always.items(), *((name, value) for name, value in where_known.items() if name in known)]
    return [f"{name}={value}" for name, value in options]


def run_ft_launcher(pod: PodEnvironment, meeting: Meeting, observer: Observer) -> None:
    """Runs ft_launcher's agent, which restarts the workers of all pods after a failure, until the run is complete.

    Raises what payload.agent.run_torchrun raises.
    """
    from nvidia_resiliency_ext.fault_tolerance import launcher

    # From 0.6 on the agents take their rank from here.
    environment.export({"GROUP_RANK": str(pod.index)})
    _adapt_rendezvous(pod)
    _share_store()
    _replace(
        {
            # The launcher's own supervisor handles SIGTERM; these handlers would raise in the agent instead.
            "_terminate_process_handler": no_action,
            "_rdzv_signal_exception_handler": no_action,
            # Names the caller in a log record by reading the source of the whole stack: half a second a restart.
            "get_method_name": lambda depth=2: "rendezvous",
        }
    )
    parser = launcher.get_args_parser()
    options = ft_arguments(pod, meeting.host, meeting.local_address, parser)
    arguments = parser.parse_args([*options, "--no-python", *observer.command])
    run_agent(launcher, observer, lambda: launcher.run(arguments))


def _adapt_rendezvous(pod: PodEnvironment) -> None:
    """Releases without GROUP_RANK sort the nodes by descriptor: let it begin with the completion index.

    They also hard-code how often a node shows that it lives (three misses and it counts as lost), and look once a
    second whether all have met, which is most of the time that a restart of warm workers takes.

    The pod's uid keeps a replaced pod apart from the one before, which had the same index and often the same pid.
    """
    try:
        from nvidia_resiliency_ext.fault_tolerance import _ft_rendezvous as rendezvous
    except ImportError:
        return
    numbers = itertools.count()

    class Pinned:
        def generate(self, local_addr: str | None = None) -> Any:
            return rendezvous._NodeDesc(f"{pod.index:06d}-{pod.pod_uid}", 0, next(numbers))

    rendezvous.FtRendezvousHandler._node_desc_generator = Pinned()
    settings = rendezvous.RendezvousSettings

    def quicker(*args: Any, keep_alive_interval: timedelta, **kwargs: Any) -> Any:
        return settings(*args, keep_alive_interval=min(keep_alive_interval, _KEEP_ALIVE), **kwargs)

    rendezvous.RendezvousSettings = quicker
    rendezvous._BackendRendezvousStateHolder = partial(rendezvous._BackendRendezvousStateHolder, cache_duration=0)
    rendezvous._delay = lambda seconds: time.sleep(pod.config.timeouts.poll_s)


def _share_store() -> None:
    """0.4.1's rendezvous opens a server of its own; newer ones, as torch's, share the one in this process."""
    try:
        from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.rendezvous import c10d_rendezvous_backend
    except ImportError:
        return

    class SharedStore(TCPStore):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "multi_tenant": True})

    c10d_rendezvous_backend.TCPStore = SharedStore


def _replace(names: dict[str, Callable[..., Any]]) -> None:
    """Sets functions in every loaded module of NVRx that has one of that name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("nvidia_resiliency_ext."):
            for name, function in names.items():
                if hasattr(module, name):
                    setattr(module, name, function)
