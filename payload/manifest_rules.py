"""Rules between the fields of a Job that schema validators do not know and the API server enforces.

Sources: validation of batch/v1 Jobs (pkg/apis/batch/validation) and of pods (pkg/apis/core/validation) in
Kubernetes 1.34. Rules of our own are marked "ours".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from payload.config import ConfigError

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
MAX_NAME = 63
MAX_EXIT_CODES = 255


def validate(job: Mapping[str, Any]) -> None:
    """Raises ConfigError, one line a problem, each naming the field, its value and what is legal."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    problems = [
        *_names(job, pod),
        *_completion(spec, pod),
        *_failure_policy(spec, pod),
        *_volumes(pod),
        *_environment(pod),
        *_resources(pod),
        *_placement(pod),
        *_security(pod),
    ]
    if problems:
        raise ConfigError("\n".join(f"Job {job['metadata']['name']}: {line}" for line in problems))


def parse_quantity(text: str) -> int:
    """``512Mi`` -> 536870912; whole numbers with a binary or decimal suffix."""
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"quantity {text!r}; legal: a whole number with one of {', '.join(filter(None, _UNITS))}")
    return int(match[1]) * _UNITS[match[2]]


def _repeated(values: Iterable[str]) -> list[str]:
    found = list(values)
    return sorted({value for value in found if found.count(value) > 1})


def _names(job: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    metadata, spec = job["metadata"], job["spec"]
    name = metadata["name"]
    longest = f"{name}-{max(0, spec.get('completions', 1) - 1)}"
    if not _LABEL.fullmatch(name):
        yield f"metadata.name: {name!r}; legal: a-z, 0-9 and '-', beginning with a letter, ending with no '-'"
    if len(longest) > MAX_NAME:
        yield f"metadata.name: pod host name {longest!r} has {len(longest)} characters; legal: up to {MAX_NAME}"
    subdomain = pod.get("subdomain", name)
    if not _LABEL.fullmatch(subdomain) or len(subdomain) > MAX_NAME:
        yield f"subdomain: {subdomain!r}; legal: the name of a Service, up to {MAX_NAME} characters"
    labels = {**metadata.get("labels", {}), **spec["template"].get("metadata", {}).get("labels", {})}
    for key, value in labels.items():
        if len(value) > MAX_NAME or not _LABEL_VALUE.fullmatch(value):
            yield f"labels.{key}: {value!r}; legal: up to {MAX_NAME} of letters, digits, '-', '_' and '.'"


def _completion(spec: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    if spec.get("completionMode") == "Indexed" and not spec.get("completions"):
        yield "completions: missing; legal: at least 1 with completionMode Indexed"
    if "completions" in spec and spec.get("parallelism", 1) != spec["completions"]:
        legal = f"completions ({spec['completions']}): all pods at once"
        yield f"parallelism: {spec.get('parallelism', 1)}; legal: {legal}"
    if spec.get("backoffLimit", 6) < 0:
        yield f"backoffLimit: {spec['backoffLimit']}; legal: 0 or more"
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield f"restartPolicy: {pod.get('restartPolicy')}; legal: Never or OnFailure in a Job"
    if pod.get("terminationGracePeriodSeconds", 30) < 1:
        yield f"terminationGracePeriodSeconds: {pod['terminationGracePeriodSeconds']}; legal: 1 or more, for a save"
    # Ours: a Job that a stack owns must not delete itself.
    if "ttlSecondsAfterFinished" in spec:
        yield "ttlSecondsAfterFinished: set; legal: unset, the Job's owner deletes it"


def _failure_policy(spec: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    policy = spec.get("podFailurePolicy")
    if policy is None:
        return
    if pod.get("restartPolicy") != "Never":
        yield f"podFailurePolicy: set with restartPolicy {pod.get('restartPolicy')}; legal: with Never only"
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield f"podReplacementPolicy: {spec['podReplacementPolicy']}; legal: Failed with podFailurePolicy"
    containers = {container["name"] for container in pod["containers"]}
    for number, rule in enumerate(policy["rules"]):
        where = f"podFailurePolicy.rules[{number}]"
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield f"{where}: legal: exactly one of onExitCodes and onPodConditions"
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
            yield f"{where}.action: FailIndex; legal: only with backoffLimitPerIndex"
        codes = rule.get("onExitCodes")
        if codes:
            yield from _exit_codes(f"{where}.onExitCodes", codes, containers)


def _exit_codes(where: str, codes: Mapping[str, Any], containers: set[str]) -> Iterator[str]:
    values = codes["values"]
    if not values or values != sorted(set(values)) or len(values) > MAX_EXIT_CODES:
        yield f"{where}.values: {values}; legal: 1 to {MAX_EXIT_CODES} codes, rising, each once"
    if codes["operator"] == "In" and 0 in values:
        yield f"{where}.values: holds 0, which is success; legal: 1 to 255 with operator In"
    if codes.get("containerName") not in {None, *containers}:
        yield f"{where}.containerName: {codes['containerName']!r}; legal: {', '.join(sorted(containers))}"


def _volumes(pod: Mapping[str, Any]) -> Iterator[str]:
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    for name in _repeated(volumes):
        yield f"volumes: {name!r} twice; legal: each name once"
    for container in pod["containers"]:
        mounts = container.get("volumeMounts", [])
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"volumeMounts: {mount['name']!r} names no volume; legal: {', '.join(volumes)}"
            if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
                yield f"volumeMounts.mountPath: {mount['mountPath']!r}; legal: an absolute path without ':'"
        for path in _repeated(mount["mountPath"] for mount in mounts):
            yield f"volumeMounts.mountPath: {path} twice; legal: each path once"


def _environment(pod: Mapping[str, Any]) -> Iterator[str]:
    for container in pod["containers"]:
        for name in _repeated(entry["name"] for entry in container.get("env", [])):
            yield f"env: {name} twice; legal: each name once (the last would win silently)"
        for entry in container.get("env", []):
            if entry.get("value") and "valueFrom" in entry:
                yield f"env.{entry['name']}: value and valueFrom; legal: one of them"


def _resources(pod: Mapping[str, Any]) -> Iterator[str]:
    for container in pod["containers"]:
        resources = container.get("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name in sorted({*requests, *limits}):
            request, limit = requests.get(name), limits.get(name)
            if ("/" in name or name.startswith("hugepages-")) and request != limit:
                yield f"resources.{name}: request {request}, limit {limit}; legal: equal"
            elif request and limit and name == "memory" and parse_quantity(request) > parse_quantity(limit):
                yield f"resources.{name}: request {request} above limit {limit}; legal: at most the limit"
        if any(name.startswith("hugepages-") for name in limits) and not {"cpu", "memory"} & {*requests, *limits}:
            yield "resources: hugepages alone; legal: with a CPU or memory request"
        # Ours: pages of a memory volume are charged to the pod, which would be killed before the volume is full.
        if "memory" not in limits:
            continue
        for volume in pod.get("volumes", []):
            size = volume.get("emptyDir", {}).get("sizeLimit")
            if volume.get("emptyDir", {}).get("medium") != "Memory":
                continue
            if not size or parse_quantity(size) >= parse_quantity(limits["memory"]):
                yield f"volumes.{volume['name']}.sizeLimit: {size}; legal: below the memory limit ({limits['memory']})"


def _placement(pod: Mapping[str, Any]) -> Iterator[str]:
    for item in pod.get("tolerations", []):
        key = item.get("key", "")
        if item.get("operator", "Equal") == "Exists" and item.get("value"):
            yield f"tolerations.{key}: operator Exists with a value; legal: no value"
        if not key and item.get("operator") != "Exists":
            yield "tolerations: empty key; legal: with operator Exists only"
        if "tolerationSeconds" in item and item.get("effect") != "NoExecute":
            yield f"tolerations.{key}.tolerationSeconds: effect {item.get('effect')}; legal: with NoExecute only"


def _security(pod: Mapping[str, Any]) -> Iterator[str]:
    context = pod.get("securityContext", {})
    if context.get("runAsNonRoot") and context.get("runAsUser") == 0:
        yield "securityContext.runAsUser: 0; legal: 1 or more with runAsNonRoot"
    for container in pod["containers"]:
        if not container.get("image"):
            yield f"containers.{container['name']}.image: empty; legal: an image reference"
