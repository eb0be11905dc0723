"""Stands for kubectl: keeps objects in a JSON file, makes a Job's pods, runs `exec` here. Started by a script on PATH.

It takes the options that payload/cluster uses and refuses others, so that a misspelt one fails a test.
"""

# ruff: noqa: PTH123 - every import counts: this starts many times a test

import json
import os
import sys

STATE = os.environ["FAKE_KUBECTL"]
CLUSTER_WIDE = ("namespace", "node", "persistentvolume")
KNOWN = {
    "get": ("--ignore-not-found", "--output=json", "--request-timeout=", "--selector="),
    "apply": ("--server-side", "--field-manager=", "--filename=-"),
    "delete": ("--ignore-not-found", "--wait=false", "--cascade=foreground"),
    "logs": ("--tail=", "--follow", "--previous", "--prefix", "--selector=", "--max-log-requests="),
    "cordon": (),
}


def load():
    with open(STATE) as file:
        return json.load(file)


def save(state):
    with open(STATE, "w") as file:
        json.dump(state, file)


def fail(text):
    sys.stderr.write(text + "\n")
    sys.exit(1)


def key(kind, namespace, name):
    return "/".join([kind, "" if kind in CLUSTER_WIDE else namespace, name])


def make_pods(state, job):
    meta, spec = job["metadata"], job["spec"]
    for index in range(spec["parallelism"]):
        name = f"{meta['name']}-{index}-abcde"
        state["objects"][key("pod", meta["namespace"], name)] = {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": meta["namespace"],
                "labels": dict(spec["template"]["metadata"]["labels"]),
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "owner": meta["name"],
            },
            "spec": dict(spec["template"]["spec"], nodeName=f"node-{index}"),
            "status": {"phase": state.get("pod_phase", "Running")},
        }


def get(state, namespace, arguments):
    plain = [item for item in arguments if not item.startswith("--")]
    kind = plain[0]
    if len(plain) > 1:
        found = state["objects"].get(key(kind, namespace, plain[1]))
        if found is not None:
            print(json.dumps(found))
        return
    selector = next((item.partition("=")[2] for item in arguments if item.startswith("--selector=")), "")
    wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
    prefix = key(kind, namespace, "")
    items = [
        item
        for name, item in sorted(state["objects"].items())
        if name.startswith(prefix) and wanted.items() <= item["metadata"].get("labels", {}).items()
    ]
    print(json.dumps({"items": items}))


def apply(state, namespace):
    for item in json.load(sys.stdin)["items"]:
        kind, meta = item["kind"].lower(), item["metadata"]
        place = key(kind, meta.get("namespace", namespace), meta["name"])
        before = state["objects"].get(place)
        if before and kind == "job" and before["spec"]["template"] != item["spec"]["template"]:
            fail("spec.template: field is immutable")
        state["count"] += 1
        meta["creationTimestamp"] = f"2026-01-01T00:00:00.{state['count']:03d}Z"
        item["status"] = {"phase": state.get("pod_phase", "Running")} if kind == "pod" else {}
        state["objects"][place] = item
        if kind == "job" and not before:
            make_pods(state, item)
            if state.get("job_ends"):
                item["status"] = {"conditions": [{"type": state["job_ends"], "status": "True"}]}
    save(state)


def delete(state, namespace, kind, name):
    place = key(kind, namespace, name)
    owned = [k for k, v in state["objects"].items() if kind == "job" and v["metadata"].get("owner") == name]
    if name in state.get("stuck", []):
        for item in owned:
            state["objects"][item]["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    else:
        for item in [*owned, place]:
            state["objects"].pop(item, None)
    save(state)


def execute(state, namespace, arguments):
    import subprocess

    pod, command = arguments[0], arguments[arguments.index("--") + 1 :]
    if key("pod", namespace, pod) not in state["objects"]:
        fail(f'pods "{pod}" not found')
    command = [sys.executable if part == "python" else part for part in command]
    sys.exit(subprocess.run(command, env=dict(os.environ, **state.get("exec_env", {}))).returncode)


def main(arguments):
    state = load()
    with open(f"{STATE}.calls", "a") as file:
        file.write(json.dumps(arguments) + "\n")
    if state.get("unreachable"):
        fail("The connection to the server was refused")
    namespace = "default"
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        if name == "--namespace":
            namespace = value
        elif name != "--context":
            fail("unknown flag: " + name)
    verb, rest = arguments[0], arguments[1:]
    if verb == "exec":
        execute(state, namespace, rest)
    for option in (item for item in rest if item.startswith("--")):
        if not option.startswith(KNOWN[verb]):
            fail("unknown flag: " + option)
    if verb == "get":
        get(state, namespace, rest)
    elif verb == "apply":
        apply(state, namespace)
    elif verb == "delete":
        delete(state, namespace, *[item for item in rest if not item.startswith("--")])
    elif verb == "logs":
        print("output of", " ".join(rest))
    elif verb == "cordon":
        state["objects"][key("node", "", rest[0])]["spec"]["unschedulable"] = True
        save(state)


main(sys.argv[1:])
