"""A small Kubernetes REST client for EKS: signed token, bounded retries, three ways to fail told apart.

``NoCluster`` (it does not exist), ``Unreachable`` (it exists, and no answer came) and ``ApiError`` (it answered
with an error) mean different things to a teardown, so they are different exceptions.
"""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from botocore.exceptions import ClientError
from botocore.signers import RequestSigner

from . import waiting

Object = dict[str, Any]

FIELD_MANAGER = "nvrx-eks"
REQUEST_TIMEOUT_S = 10.0
RETRY_BUDGET_S = 100.0
"""Retries of all calls of one invocation end after so long: the function itself ends after 240 s."""
RETRIED = frozenset({429, 500, 502, 503, 504})

KINDS: Mapping[str, tuple[str, str, bool]] = {
    "Namespace": ("v1", "namespaces", False),
    "PersistentVolume": ("v1", "persistentvolumes", False),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims", True),
    "ServiceAccount": ("v1", "serviceaccounts", True),
    "Service": ("v1", "services", True),
    "ConfigMap": ("v1", "configmaps", True),
    "Pod": ("v1", "pods", True),
    "Job": ("batch/v1", "jobs", True),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies", True),
    "PriorityClass": ("scheduling.k8s.io/v1", "priorityclasses", False),
    "ResourceQuota": ("v1", "resourcequotas", True),
    "LimitRange": ("v1", "limitranges", True),
    "Role": ("rbac.authorization.k8s.io/v1", "roles", True),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings", True),
}
"""Kind -> API version, plural, whether it belongs to a namespace."""


class NoCluster(RuntimeError):
    """EKS knows no such cluster."""


class Unreachable(RuntimeError):
    """The cluster exists, but its API gave no usable answer in time."""


class ApiError(RuntimeError):
    """The API refused. ``status``: the HTTP status; ``reason``: the API's word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"Kubernetes API: {status} {reason}: {message}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Ref:
    """Names one object."""

    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Ref:
        """Raises ValueError for a kind that this client does not know."""
        kind = str(item["kind"])
        if kind not in KINDS:
            raise ValueError(f"kind: {kind!r}; legal: {', '.join(sorted(KINDS))}")
        namespace = str(item["metadata"].get("namespace", "default")) if KINDS[kind][2] else ""
        return cls(kind, namespace, str(item["metadata"]["name"]))

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"

    @property
    def path(self) -> str:
        return f"{collection(self.kind, self.namespace)}/{quote(self.name)}"

    @property
    def command(self) -> str:
        """How to look at it."""
        where = f" -n {self.namespace}" if self.namespace else ""
        return f"kubectl get {KINDS[self.kind][1]} {self.name}{where} -o yaml"


def collection(kind: str, namespace: str) -> str:
    """URL path of all objects of a kind, in one namespace where ``namespace`` is not empty."""
    version, plural, _ = KINDS[kind]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    return f"{root}/namespaces/{quote(namespace)}/{plural}" if namespace else f"{root}/{plural}"


def send(
    method: str, url: str, headers: Mapping[str, str], body: bytes | None, ca_data: str
) -> tuple[int, Mapping[str, str], bytes]:
    """One HTTPS request: status, headers, body. Raises OSError when no answer came."""
    context = ssl.create_default_context(cadata=ca_data)
    # Python 3.13 asks for key identifiers, which the certificate authorities of EKS clusters lack.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S, context=context) as reply:
            return reply.status, dict(reply.headers), reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def token(cluster_name: str) -> str:
    """The bearer token that EKS accepts: a signed GetCallerIdentity URL, bound to the cluster's name."""
    session = waiting.session()
    credentials = session._session.get_credentials()
    if credentials is None:
        raise RuntimeError("no AWS credentials to sign the cluster token with")
    sts = waiting.client("sts")
    signer = RequestSigner(
        sts.meta.service_model.service_id,
        sts.meta.region_name,
        "sts",
        "v4",
        credentials,
        session.events,
    )
    request = {
        "method": "GET",
        "url": f"{sts.meta.endpoint_url}/?Action=GetCallerIdentity&Version=2011-06-15",
        "body": {},
        "headers": {"x-k8s-aws-id": cluster_name},
        "context": {},
    }
    url = signer.generate_presigned_url(request, operation_name="", region_name=sts.meta.region_name, expires_in=60)
    return "k8s-aws-v1." + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def connect(cluster_name: str) -> Client:
    """Raises NoCluster when EKS does not know it; other AWS errors pass."""
    try:
        found = waiting.client("eks").describe_cluster(name=cluster_name)["cluster"]
    except ClientError as error:
        if waiting.code(error) == "ResourceNotFoundException":
            raise NoCluster(cluster_name) from error
        raise
    if "endpoint" not in found:
        raise Unreachable(f"cluster {cluster_name} has no API endpoint; its status is {found.get('status')}")
    ca_data = base64.b64decode(found["certificateAuthority"]["data"]).decode()
    give_up_at = waiting.now() + RETRY_BUDGET_S
    return Client(cluster_name, found["endpoint"].rstrip("/"), ca_data, token(cluster_name), give_up_at)


@dataclass(frozen=True)
class Client:
    """One invocation's connection; the token lasts for minutes."""

    cluster_name: str
    endpoint: str
    ca_data: str
    bearer: str
    give_up_at: float
    """Seconds since the epoch; nothing is retried later."""

    def get(self, ref: Ref) -> Object | None:
        """None when there is no such object."""
        try:
            return self._call("GET", ref.path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str, selector: Mapping[str, str] | None = None) -> list[Object]:
        """All objects of a kind in a namespace ('': all), with the labels where given; in pages."""
        query = {"limit": "500"}
        if selector:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
        items: list[Object] = []
        while True:
            page = self._call("GET", collection(kind, namespace), query)
            # Items of a list carry no kind of their own.
            items += [{"apiVersion": KINDS[kind][0], "kind": kind, **item} for item in page.get("items") or []]
            following = page.get("metadata", {}).get("continue")
            if not following:
                return items
            query["continue"] = following

    def apply(self, item: Mapping[str, Any]) -> Object:
        """Server-side apply: creates it or makes our fields so, whoever set them last."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        body = json.dumps(item).encode()  # JSON is YAML
        return self._call("PATCH", Ref.of(item).path, query, body, "application/apply-patch+yaml")

    def delete(self, ref: Ref) -> None:
        """Asks for the deletion, dependents first; what is gone already is fine. Does not wait."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if ref.kind == "Job":
            # The Job stays until its pods are gone, so what blocks it can be named.
            options["propagationPolicy"] = "Foreground"
        try:
            self._call("DELETE", ref.path, {}, json.dumps(options).encode(), "application/json")
        except ApiError as error:
            if error.status != 404:
                raise

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Retries what may pass (no answer, throttling, server errors) until ``give_up_at``.

        Raises ApiError for any other answer than success, and Unreachable when the budget is spent.
        """
        url = self.endpoint + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self.bearer}", "Content-Type": content_type}
        pause_s = 0.5
        while True:
            try:
                status, answered, reply = send(method, url, headers, body, self.ca_data)
                trouble = f"{status} {reply[:200].decode(errors='replace')}"
            except OSError as error:
                status, answered, reply, trouble = 0, {}, b"", f"{type(error).__name__}: {error}"
            if status and status not in RETRIED:
                return _answer(status, reply)
            asked = {key.lower(): value for key, value in answered.items()}.get("retry-after", "")
            pause_s = min(max(pause_s * 2, float(asked) if asked.isdigit() else 0.0), 20.0)
            if waiting.now() + pause_s > self.give_up_at:
                raise Unreachable(
                    f"cluster {self.cluster_name} exists, but its API at {self.endpoint} does not answer: {trouble}"
                )
            waiting.sleep(pause_s)


def _answer(status: int, reply: bytes) -> Object:
    try:
        content = json.loads(reply or b"{}")
    except json.JSONDecodeError as error:
        raise ApiError(status, "NotJson", reply[:200].decode(errors="replace")) from error
    if 200 <= status < 300:
        answer: Object = content
        return answer
    raise ApiError(status, str(content.get("reason", "")), str(content.get("message", "")))
