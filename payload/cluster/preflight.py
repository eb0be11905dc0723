"""preflight-nodes: a short Job on the nodes themselves, before days of training are spent on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from payload.cluster import jobs
from payload.cluster.kubectl import ClusterError, condition, wait_until
from payload.cluster.target import EXIT_FAILED, Target, command, number, parser, read, say
from payload.manifests import COMPONENT_LABEL, JOB_LABEL, Manifest, job_of, render

PREFLIGHT = "preflight"
EFA_SHARE_GB_S = 4.0
"""Bus bandwidth asked for of each EFA device: a third of 100 Gbit/s. NCCL over sockets stays below 10 GB/s in all."""
WRITE_MB_S = 100.0
"""Of one writer; the smallest SCRATCH_2 file system takes 240 MB/s from all (200 MB/s a TiB)."""
JOB_S = 1800
POLL_S = 5.0


def objects(target: Target, bus_gb_s: float, write_mb_s: float) -> list[Manifest]:
    """The run's own objects and pods, with another command and name; nothing is tried twice."""
    command = (
        *("python", "-m", "payload.cluster.node_check"),
        f"--num-efa={target.deployment.num_efa}",
        f"--bus-gb-s={bus_gb_s:g}",
        f"--write-mb-s={write_mb_s:g}",
    )
    place = dataclasses.replace(target.deployment, command=command, name_prefix="check", max_s=JOB_S)
    found = render(target.config, place)
    spec = job_of(found)["spec"]
    spec["backoffLimit"] = 0
    spec.pop("podFailurePolicy", None)
    spec["template"]["spec"]["restartPolicy"] = "Never"
    for labels in (*(item["metadata"]["labels"] for item in found), spec["template"]["metadata"]["labels"]):
        labels[COMPONENT_LABEL] = PREFLIGHT
    return found


@command
def preflight(argv: Sequence[str]) -> int:
    """Prints what each node says; exit code 1 when one is unfit. The Job is removed at the end."""
    made = parser("preflight-nodes", "checks EFA, NCCL's use of it, all-reduce and volume on the nodes")
    made.add_argument("--bus-gb-s", default="", help=f"least bus bandwidth (default: {EFA_SHARE_GB_S:g} an EFA device)")
    made.add_argument("--write-mb-s", default=str(WRITE_MB_S), help=f"least write rate (default: {WRITE_MB_S:g})")
    made.add_argument("--timeout", default="1800", help="seconds until it is an error (default: 1800)")
    given = made.parse_args(argv)
    timeout_s = number(given.timeout, "--timeout", 1)
    write_mb_s = number(given.write_mb_s, "--write-mb-s", 0)
    target = read(given)
    bus_gb_s = number(given.bus_gb_s or str(EFA_SHARE_GB_S * target.deployment.num_efa), "--bus-gb-s", 0)
    busy = [jobs.name_of(job) for job in jobs.training_jobs(target.kubectl) if not condition(job, *jobs.DONE)]
    if busy:
        raise ClusterError(f"{', '.join(busy)}: runs on these nodes; delete it first, its files stay")
    items = objects(target, bus_gb_s, write_mb_s)
    return _run(target, items, timeout_s)


def _run(target: Target, items: list[Manifest], timeout_s: float) -> int:
    kubectl, name = target.kubectl, jobs.name_of(items[-1])
    jobs.end(kubectl, [name], timeout_s=120)
    kubectl.apply(items)
    try:

        def missing() -> str:
            job = kubectl.find("job", name)
            if job is None:
                raise ClusterError(f"Job {name}: gone")
            pods = "; ".join(jobs.describe_pod(pod).strip() for pod in jobs.pods_of(kubectl, name))
            return "" if condition(job, *jobs.DONE) else pods or "no pod yet"

        wait_until(missing, timeout_s=timeout_s, poll_s=POLL_S, what=f"Job {name}")
        job = kubectl.find("job", name)
        for pod in kubectl.list("pod", {JOB_LABEL: name}):
            say(kubectl.run("logs", jobs.name_of(pod), "--tail=200").rstrip())
        return EXIT_FAILED if job is None or condition(job, "Failed") else 0
    finally:
        jobs.end(kubectl, [name], timeout_s=300)
