"""The API server: list, watch, create, server-side apply, patch, delete. The only module that imports `kubernetes`.

Plain dictionaries in and out: the generated models would cost more time than the calls. Every write goes through
`acting`, which refuses it when this replica does not lead.
"""

from __future__ import annotations

import http
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import kubernetes.client
import kubernetes.config
import urllib3
from kubernetes.config.config_exception import ConfigException

from topkube.errors import TopKubeError
from topkube.job import API_VERSION, KIND
from topkube.job.cached_dataset import CACHED_KIND, CACHED_PLURAL
from topkube_operator import names

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
    KIND: (API_VERSION, "trainingjobs"),
    CACHED_KIND: (API_VERSION, CACHED_PLURAL),
}
_CONNECTIONS = 48
_TIMEOUT = urllib3.Timeout(connect=3, read=10)
_WATCH_SECONDS = 50
"""A watch is renewed so often: a connection that died without a word is noticed then at the latest."""


class ApiError(TopKubeError):
    """The API server refused a call, or could not be reached (status 0); nothing has changed that is not in the store
    of the server. `status`: HTTP's."""

    def __init__(self, status: int, what: str, reason: str = "") -> None:
        self.status, self.reason = status, reason
        super().__init__(what)


class Cluster:
    """One API server. Safe for many threads."""

    def __init__(self, kubeconfig: str = "", acting: Callable[[], bool] = lambda: True) -> None:
        self.configuration = _configuration(kubeconfig)
        self._client = kubernetes.client.ApiClient(self.configuration)
        self._pool: urllib3.PoolManager = self._client.rest_client.pool_manager
        self._paths = dict(_PATHS)
        self.acting = acting

    # Reading.

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return self.call("GET", self._path(kind, namespace, name))

    def list(
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False
    ) -> tuple[list[dict[str, Any]], str]:
        """All objects of a kind, and the version of the list, from which a watch goes on."""
        found: list[dict[str, Any]] = []
        accept = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io" if metadata_only else ""
        query = {"limit": "500", **({"labelSelector": selector} if selector else {})}
        while True:
            page = self.call("GET", self._path(kind, namespace), query=query, accept=accept)
            found += page.get("items") or []
            more = page["metadata"].get("continue")
            if not more:
                return found, page["metadata"]["resourceVersion"]
            query["continue"] = more

    def watch(self, kind: str, namespace: str | None, selector: str, version: str) -> Iterator[dict[str, Any]]:
        """Events from `version` on, until the server ends the watch. Raises ApiError; 410: list again."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
            "allowWatchBookmarks": "true",
            **({"labelSelector": selector} if selector else {}),
        }
        timeout = urllib3.Timeout(connect=3, read=_WATCH_SECONDS + 10)
        response = self._send("GET", self._path(kind, namespace), query=query, timeout=timeout, stream=True)
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
            raise ApiError(0, f"the watch of {kind} broke: {error}") from None
        finally:
            response.close()
            response.release_conn()

    def log_tail(self, namespace: str, pod: str, container: str, lines: int, most: int) -> str:
        """The last lines of a container's log; empty where there is none."""
        query = {"container": container, "tailLines": str(lines), "timestamps": "false"}
        path = self._path("Pod", namespace, pod) + "/log"
        try:
            response = self._send("GET", path, query=query, timeout=urllib3.Timeout(connect=3, read=4))
        except ApiError as error:
            _log.info("no log of %s/%s: %s", namespace, pod, error)
            return ""
        return bytes(response.data[-most:]).decode(errors="replace")

    def claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A PersistentVolumeClaim; None where there is none, we may not see it, or the answer takes too long for
        somebody who waits."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
        try:
            response = self._send("GET", path, timeout=urllib3.Timeout(total=1))
        except ApiError:
            return None
        found: dict[str, Any] = json.loads(response.data)
        return found

    def knows(self, group: str, version: str, plural: str) -> bool:
        """Whether the API server serves a resource."""
        try:
            found = self.call("GET", f"/apis/{group}/{version}")
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return False
            raise
        return any(one.get("name") == plural for one in found.get("resources") or ())

    def learn(self, kind: str, version: str, plural: str) -> None:
        """Adds a kind that only some clusters have."""
        self._paths[kind] = (version, plural)

    # Writing.

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        path = self._path(manifest["kind"], manifest["metadata"]["namespace"])
        return self._write("POST", path, manifest, query={"fieldManager": names.FIELD_MANAGER})

    def apply(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply, fields of others are taken over."""
        metadata = manifest["metadata"]
        path = self._path(manifest["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._write("PATCH", path, manifest, query=query, content="application/apply-patch+yaml")

    def patch(
        self, kind: str, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        """A merge patch."""
        path = self._path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": names.FIELD_MANAGER}
        return self._write("PATCH", path, patch, query=query, content="application/merge-patch+json")

    def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """An update that fails with 409 where the object has changed since it was read."""
        metadata = manifest["metadata"]
        path = self._path(manifest["kind"], metadata["namespace"], metadata["name"])
        return self.call("PUT", path, manifest)

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, ended: bool = False) -> dict[str, Any]:
        """Deletes this very object; what it owns follows. `ended`: a pod in which nothing runs, which need not wait for
        its kubelet's word."""
        options: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if ended:
            options["gracePeriodSeconds"] = 0
        return self._write("DELETE", self._path(kind, namespace, name), options)

    def publish_bundle(self, configuration: str, bundle: str) -> None:
        """Writes the webhooks' caBundle into a ValidatingWebhookConfiguration, where it is another."""
        path = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{configuration}"
        found = self.call("GET", path)
        hooks = found.get("webhooks") or []
        if all((hook.get("clientConfig") or {}).get("caBundle") == bundle for hook in hooks):
            return
        for hook in hooks:
            hook.setdefault("clientConfig", {})["caBundle"] = bundle
        self.call("PUT", path, found)

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
        """One call, whether this replica leads or not. Raises ApiError."""
        response = self._send(method, path, body, query=query, content=content, accept=accept)
        data: dict[str, Any] = json.loads(response.data)
        return data

    def _write(self, method: str, path: str, body: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        if not self.acting():
            raise ApiError(0, "this replica does not lead any more: nothing was written", "NotLeading")
        return self.call(method, path, body, **more)

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
        # Adds the token, renewed where it is a file's or a plug-in's.
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        try:
            response = self._pool.request(
                method,
                self.configuration.host + path + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body, separators=(",", ":")).encode(),
                headers=headers,
                timeout=timeout,
                preload_content=not stream,
                retries=False,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"the API server cannot be reached: {error}") from None
        if response.status >= 400:
            raise _refused(response, method, path)
        return response

    def _path(self, kind: str, namespace: str | None, name: str = "") -> str:
        version, plural = self._paths[kind]
        base = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        place = f"/namespaces/{namespace}" if namespace and kind != "Node" else ""
        return f"{base}{place}/{plural}" + (f"/{name}" if name else "")


def _refused(response: urllib3.BaseHTTPResponse, method: str, path: str) -> ApiError:
    try:
        status = json.loads(response.data)
        message, reason = str(status.get("message")), str(status.get("reason"))
    except (ValueError, AttributeError, urllib3.exceptions.HTTPError):
        message, reason = f"{method} {path}: status {response.status}", ""
    response.release_conn()
    return ApiError(response.status, message, reason)


def _configuration(kubeconfig: str) -> kubernetes.client.Configuration:
    configuration = kubernetes.client.Configuration()
    if kubeconfig:
        kubernetes.config.load_kube_config(kubeconfig, client_configuration=configuration)
    else:
        try:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        except ConfigException:
            kubernetes.config.load_kube_config(client_configuration=configuration)
    configuration.connection_pool_maxsize = _CONNECTIONS
    kubernetes.client.Configuration.set_default(configuration)  # kopf takes its credentials from there
    return configuration
