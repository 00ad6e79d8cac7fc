"""The API server: list, watch, create, server-side apply, patch, delete. The only module that imports `kubernetes`.

The client works with plain dictionaries, because the generated models would take longer than the calls. Every write
asks `acting` first, which refuses the write if this replica does not lead.
"""

from __future__ import annotations

import http
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode

import kubernetes.client
import kubernetes.config
import urllib3
from kubernetes.config.config_exception import ConfigException

from topkube.errors import TopKubeError
from topkube.job import API_VERSION, KIND
from topkube.job.cached_dataset import CACHED_KIND, CACHED_PLURAL
from topkube_operator.model import names

_log = logging.getLogger(__name__)
_PATHS = {
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "Secret": ("v1", "secrets"),
    "Event": ("v1", "events"),
    "Node": ("v1", "nodes"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "PriorityClass": ("scheduling.k8s.io/v1", "priorityclasses"),
    KIND: (API_VERSION, "trainingjobs"),
    CACHED_KIND: (API_VERSION, CACHED_PLURAL),
}
_CONNECTIONS = 48
_TIMEOUT = urllib3.Timeout(connect=3, read=10)
_LONGEST_LOG = 1 << 20
_LONGEST_WAIT = 300.0
_WATCH_SECONDS = 50
"""How often a watch is renewed. A broken connection that reports no error is noticed after this time at the latest."""


class ApiError(TopKubeError):
    """The API server refused a call, or could not be reached (status 0). The cluster has not changed.

    `status` is HTTP's status. `wait` is the minimum number of seconds that the server asks us to wait (Retry-After).
    """

    def __init__(self, status: int, what: str, reason: str = "", wait: float = 0.0) -> None:
        self.status, self.reason, self.wait = status, reason, wait
        super().__init__(what)


def _ignore_call(method: str, status: int, seconds: float | None) -> None:
    pass


class Cluster:
    """One API server. Safe for many threads. `observe` receives the method, HTTP's status (0: no answer) and the
    seconds of each call (None: a watch)."""

    def __init__(
        self,
        kubeconfig: str = "",
        acting: Callable[[], bool] = lambda: True,
        observe: Callable[[str, int, float | None], None] = _ignore_call,
    ) -> None:
        self.configuration = _load_configuration(kubeconfig)
        self._client = kubernetes.client.ApiClient(self.configuration)
        self._pool: urllib3.PoolManager = self._client.rest_client.pool_manager
        self._paths = dict(_PATHS)
        self.acting, self._observe = acting, observe

    # Reading.

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return self.call("GET", self._build_path(kind, namespace, name))

    def list(
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False
    ) -> tuple[list[dict[str, Any]], str]:
        """Return all objects of a kind, and the version of the list, from which a watch can continue."""
        objects: list[dict[str, Any]] = []
        accept = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io" if metadata_only else ""
        query = {"limit": "500", **({"labelSelector": selector} if selector else {})}
        while True:
            page = self.call("GET", self._build_path(kind, namespace), query=query, accept=accept)
            objects += page.get("items") or []
            more = page["metadata"].get("continue")
            if not more:
                return objects, page["metadata"]["resourceVersion"]
            query["continue"] = more

    def watch(self, kind: str, namespace: str | None, selector: str, version: str) -> Iterator[dict[str, Any]]:
        """Yield events from `version` on, until the server ends the watch. Raises ApiError; for 410, list again."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
            "allowWatchBookmarks": "true",
            **({"labelSelector": selector} if selector else {}),
        }
        timeout = urllib3.Timeout(connect=3, read=_WATCH_SECONDS + 10)
        response = self._send("GET", self._build_path(kind, namespace), query=query, timeout=timeout, stream=True)
        try:
            rest = b""
            for piece in response.stream(65536, decode_content=False):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.strip():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            status = event["object"]
                            raise ApiError(int(status.get("code") or 500), str(status.get("message")))
                        yield event
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"the watch of {kind} was interrupted: {error}") from None
        finally:
            response.close()
            response.release_conn()

    def log_tail(self, namespace: str, pod: str, container: str, lines: int, max_bytes: int) -> str:
        """Return the last lines of a container's log, at most `max_bytes` bytes; empty if there is no log."""
        query = {
            "container": container,
            "tailLines": str(lines),
            "limitBytes": str(_LONGEST_LOG),  # a line may have no end, and the whole answer is held in memory
            "timestamps": "false",
        }
        path = self._build_path("Pod", namespace, pod) + "/log"
        try:
            response = self._send("GET", path, query=query, timeout=urllib3.Timeout(connect=3, read=4))
        except ApiError as error:
            _log.info("no log of %s/%s: %s", namespace, pod, error)
            return ""
        return bytes(response.data[-max_bytes:]).decode(errors="replace")

    def read_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a PersistentVolumeClaim. None if there is none, the operator may not read it, or the answer takes
        longer than a second."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
        try:
            response = self._send("GET", path, timeout=urllib3.Timeout(total=1))
        except ApiError:
            return None
        claim: dict[str, Any] = json.loads(response.data)
        return claim

    def serves(self, group: str, version: str, plural: str) -> bool:
        """Return True if the API server serves a resource."""
        try:
            resources = self.call("GET", f"/apis/{group}/{version}").get("resources")
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return False
            raise
        return any(resource.get("name") == plural for resource in resources or ())

    def register_kind(self, kind: str, version: str, plural: str) -> None:
        """Add a kind that only some clusters serve."""
        self._paths[kind] = (version, plural)

    # Writing.

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        path = self._build_path(manifest["kind"], manifest["metadata"]["namespace"])
        return self._write("POST", path, manifest, query={"fieldManager": names.FIELD_MANAGER})

    def apply(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a manifest on the server side. Fields of other managers are taken over."""
        metadata = manifest["metadata"]
        path = self._build_path(manifest["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._write("PATCH", path, manifest, query=query, content="application/apply-patch+yaml")

    def patch(
        self, kind: str, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        """Apply a merge patch."""
        path = self._build_path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": names.FIELD_MANAGER}
        return self._write("PATCH", path, patch, query=query, content="application/merge-patch+json")

    def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Update an object. Raises ApiError with status 409 if the object has changed since it was read."""
        metadata = manifest["metadata"]
        path = self._build_path(manifest["kind"], metadata["namespace"], metadata["name"])
        return self.call("PUT", path, manifest)

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, ended: bool = False) -> dict[str, Any]:
        """Delete the object with this UID; its dependents follow. `ended`: nothing runs in the pod, so do not wait for
        its kubelet."""
        options: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if ended:
            options["gracePeriodSeconds"] = 0
        return self._write("DELETE", self._build_path(kind, namespace, name), options)

    def remove_finalizer(self, namespace: str, pod: str, uid: str) -> dict[str, Any]:
        """Remove our finalizer from the pod with this UID. Other finalizers stay."""
        patch = {"metadata": {"uid": uid, "$deleteFromPrimitiveList/finalizers": [names.ENDING]}}
        path = self._build_path("Pod", namespace, pod)
        query = {"fieldManager": names.FIELD_MANAGER}
        return self._write("PATCH", path, patch, query=query, content="application/strategic-merge-patch+json")

    def end_pod_group(self, namespace: str, pod: str, uid: str) -> dict[str, Any]:
        """Mark the pod with this UID, so that Kueue expects no more replacements in its group."""
        patch = {"metadata": {"uid": uid, "annotations": {names.KUEUE_RETRIABLE: "false"}}}
        return self.patch("Pod", namespace, pod, patch)

    def publish_bundle(self, configuration: str, bundle: str) -> None:
        """Write the webhooks' caBundle into a ValidatingWebhookConfiguration, if it has another."""
        path = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{configuration}"
        stored = self.call("GET", path)
        hooks = stored.get("webhooks") or []
        if all((hook.get("clientConfig") or {}).get("caBundle") == bundle for hook in hooks):
            return
        for hook in hooks:
            hook.setdefault("clientConfig", {})["caBundle"] = bundle
        self.call("PUT", path, stored)

    # The wire.

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        accept: str = "",
    ) -> dict[str, Any]:
        """Make one call, even if this replica does not lead. Raises ApiError."""
        response = self._send(method, path, body, query=query, content=content, accept=accept)
        data: dict[str, Any] = json.loads(response.data)
        return data

    def _write(self, method: str, path: str, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        if not self.acting():
            raise ApiError(0, "this replica does not lead: nothing was written", "NotLeading")
        return self.call(method, path, body, **options)

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        accept: str = "",
        timeout: urllib3.Timeout = _TIMEOUT,
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": accept or "application/json", "User-Agent": "topkube-operator"}
        if body is not None:
            headers["Content-Type"] = content
        data = None if body is None else _to_json(body)
        # Adds the token. A token from a file or a plug-in is renewed.
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        begun = time.monotonic()
        try:
            response = self._pool.request(
                method,
                self.configuration.host + path + (f"?{urlencode(query)}" if query else ""),
                body=data,
                headers=headers,
                timeout=timeout,
                preload_content=not stream,
                retries=False,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._observe(method, 0, None)
            raise ApiError(0, f"the API server cannot be reached: {error}") from None
        self._observe(method, response.status, None if stream else time.monotonic() - begun)
        if response.status >= 400:
            raise _read_error(response, method, path)
        return response

    def _build_path(self, kind: str, namespace: str | None, name: str = "") -> str:
        version, plural = self._paths[kind]
        base = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        scope = f"/namespaces/{namespace}" if namespace and kind != "Node" else ""
        return f"{base}{scope}/{plural}" + (f"/{name}" if name else "")


def _to_json(body: Mapping[str, Any]) -> bytes:
    """Return the body as JSON. Raises ApiError if the body contains a number that JSON does not have."""
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise ApiError(0, f"nothing was written: the object cannot be written as JSON: {error}", "NotJSON") from None


def _read_error(response: urllib3.BaseHTTPResponse, method: str, path: str) -> ApiError:
    try:
        status = json.loads(response.data)
        message, reason = str(status.get("message")), str(status.get("reason"))
    except (ValueError, AttributeError, urllib3.exceptions.HTTPError):
        message, reason = f"{method} {path}: status {response.status}", ""
    response.release_conn()
    return ApiError(response.status, message, reason, _parse_retry_after(response.headers.get("Retry-After")))


def _parse_retry_after(retry_after: str | None) -> float:
    """Return a Retry-After header in bounded seconds; 0 if there is none. API servers send seconds, proxies also send
    dates."""
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT) if math.isfinite(seconds) else 0.0


def _load_configuration(kubeconfig: str) -> kubernetes.client.Configuration:
    configuration = kubernetes.client.Configuration()
    if kubeconfig:
        kubernetes.config.load_kube_config(kubeconfig, client_configuration=configuration)
    else:
        try:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        except ConfigException:
            kubernetes.config.load_kube_config(client_configuration=configuration)
    configuration.connection_pool_maxsize = _CONNECTIONS
    kubernetes.client.Configuration.set_default(configuration)  # kopf reads its credentials from there
    return configuration
