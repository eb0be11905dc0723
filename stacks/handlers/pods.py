"""Who uses what in a namespace: Jobs and their pods, and the pods that mount a claim."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .kube import Client, Object, Ref

DONE = ("Complete", "Failed")


def finished(job: Object) -> str:
    """``Complete`` or ``Failed``, '' while the Job may still have pods to run."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((c["type"] for c in conditions if c["type"] in DONE and c["status"] == "True"), "")


def unfinished(client: Client, namespace: str, selector: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Jobs with these labels that still run, without those called ``names``."""
    jobs = client.list("Job", namespace, selector)
    return [str(Ref.of(job)) for job in jobs if Ref.of(job).name not in names and not finished(job)]


def end_jobs(client: Client, namespace: str, selector: Mapping[str, str], but: Collection[str] | None = None) -> str:
    """Ends the Jobs with these labels; what is still there, '' when all are gone. Pods get SIGTERM and their grace.

    ``but`` None: all of them, whoever submitted them, and pods of ours that no Job owns. Else: the unfinished ones
    that are called otherwise; finished Jobs stay, as their logs do. Pods are searched by owner as well as by label,
    as the template of a Job submitted by hand may be labelled otherwise.
    """
    jobs = _to_end(client, namespace, selector, but)
    for job in jobs:
        if not job["metadata"].get("deletionTimestamp"):
            client.delete(Ref.of(job))
    names = {Ref.of(job).name for job in jobs}
    labels = selector if but is None else None
    for pod in _pods_of(client, namespace, names, labels):
        if not pod["metadata"].get("ownerReferences") and not pod["metadata"].get("deletionTimestamp"):
            client.delete(Ref.of(pod))
    left = [*_to_end(client, namespace, selector, but), *_pods_of(client, namespace, names, labels)]
    return "; ".join(describe(item) for item in left)


def _to_end(client: Client, namespace: str, selector: Mapping[str, str], but: Collection[str] | None) -> list[Object]:
    jobs = client.list("Job", namespace, selector)
    if but is None:
        return jobs
    # A Job that is being deleted may count as finished while its last pods still save.
    return [
        job
        for job in jobs
        if Ref.of(job).name not in but and (not finished(job) or job["metadata"].get("deletionTimestamp"))
    ]


def _pods_of(client: Client, namespace: str, jobs: Collection[str], selector: Mapping[str, str] | None) -> list[Object]:
    """Pods that the Jobs own, and those with the labels where labels are given."""
    found = []
    for pod in client.list("Pod", namespace):
        owners = {owner["name"] for owner in pod["metadata"].get("ownerReferences") or [] if owner["kind"] == "Job"}
        labels = pod["metadata"].get("labels") or {}
        if owners & set(jobs) or (selector is not None and selector.items() <= labels.items()):
            found.append(pod)
    return found


def users(client: Client, ref: Ref) -> list[Object]:
    """What would lose something if ``ref`` went: pods that mount a claim; pods and claims in a namespace.

    Ended pods count: the API server holds a claim for them as well.
    """
    if ref.kind == "PersistentVolumeClaim":
        return [pod for pod in client.list("Pod", ref.namespace) if ref.name in claims(pod)]
    if ref.kind == "Namespace":
        return [*client.list("Pod", ref.name), *client.list("PersistentVolumeClaim", ref.name)]
    return []


def claims(pod: Object) -> set[str]:
    """Names of the claims that the pod mounts, those of its ephemeral volumes included."""
    volumes = pod["spec"].get("volumes") or []
    named = {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}
    return named | {f"{pod['metadata']['name']}-{v['name']}" for v in volumes if "ephemeral" in v}


def describe(item: Object, used_by: Sequence[Object] = ()) -> str:
    """One line: the object, its state, owner and finalizers, who uses it, and the command to look at it."""
    ref, meta = Ref.of(item), item["metadata"]
    facts = []
    phase = (item.get("status") or {}).get("phase")
    if phase:
        facts.append(f"phase {phase}")
    if item.get("spec", {}).get("nodeName"):
        facts.append(f"on node {item['spec']['nodeName']}")
    facts += [f"owned by {owner['kind']} {owner['name']}" for owner in meta.get("ownerReferences") or []]
    if meta.get("deletionTimestamp"):
        facts.append(f"deleting since {meta['deletionTimestamp']}")
    if meta.get("finalizers"):
        facts.append(f"finalizers {', '.join(meta['finalizers'])}")
    facts += [f"used by {Ref.of(user)}" for user in used_by]
    return f"{ref} ({'; '.join(facts) or 'present'}; look: {ref.command})"
