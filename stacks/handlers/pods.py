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


def end_jobs(client: Client, namespace: str, selector: Mapping[str, str], keep: Collection[str] = ()) -> str:
    """Deletes the Jobs with these labels but those called ``keep``, and pods of ours that no Job owns.

    Pods get SIGTERM and their grace. Returns what is still there, '' when all are gone. Pods are searched by
    label and by owner, as a Job submitted by hand may label its template otherwise.
    """
    jobs = [job for job in client.list("Job", namespace, selector) if Ref.of(job).name not in keep]
    for job in jobs:
        if not job["metadata"].get("deletionTimestamp"):
            client.delete(Ref.of(job))
    names = {Ref.of(job).name for job in jobs}
    left = [pod for pod in client.list("Pod", namespace) if _belongs(pod, names, selector, keep)]
    for pod in left:
        if not pod["metadata"].get("ownerReferences") and not pod["metadata"].get("deletionTimestamp"):
            client.delete(Ref.of(pod))
    jobs = [job for job in client.list("Job", namespace, selector) if Ref.of(job).name not in keep]
    left = [pod for pod in client.list("Pod", namespace) if _belongs(pod, names, selector, keep)]
    return "; ".join(describe(item) for item in [*jobs, *left])


def _belongs(pod: Object, names: Collection[str], selector: Mapping[str, str], keep: Collection[str]) -> bool:
    owners = {owner["name"] for owner in pod["metadata"].get("ownerReferences") or [] if owner["kind"] == "Job"}
    if owners & set(keep):
        return False
    labels = pod["metadata"].get("labels") or {}
    return bool(owners & set(names)) or all(labels.get(key) == value for key, value in selector.items())


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
