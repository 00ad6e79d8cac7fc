"""The client of the API server. It reads, watches and writes objects.

A method that writes first calls `is_acting`, and raises ApiError if this replica does not lead. Three methods skip this
check:

- `replace_lease`: replicas compete for the Lease in order to lead.
- `publish_bundle`: every replica serves the webhooks, and all replicas derive the same bundle from one secret.
- `call`: methods that read use it too. A replica that does not lead also uses it to create the Lease, and to create the
  Secret that holds the operator's seed.
"""

from __future__ import annotations

import http
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import urllib3

from topkube.job import API_VERSION, KIND
from topkube.job.cached_dataset import CACHED_KIND, CACHED_PLURAL
from topkube_operator.model import names
from topkube_operator.watch.api_connection import ApiConnection, ApiError, ignore_call

_log = logging.getLogger(__name__)
_RESOURCES = {  # kind: (apiVersion, plural)
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
_MOST_LOG_BYTES = 1 << 20
"""The most bytes of a log that are read, because the whole answer is held in memory. Container runtimes split long
lines (containerd: after 16 KiB by default), so this is enough for 64 lines, and the operator reads 20. If a runtime
allows longer lines, the last bytes of the log may be missing."""
_LOG_TIMEOUT = urllib3.Timeout(connect=3, read=4)
"""The log comes from the kubelet of the pod's node, which may be broken. The wait is short, because the next plan for a
failed job waits for the log."""
_WATCH_SECONDS = 50
"""The server ends every watch after this time."""
_WATCH_SILENCE_SECONDS = _WATCH_SECONDS + 10
"""A watch that is silent for this time has a broken connection: the server would have ended it before."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""The names that Kubernetes accepts for objects of the kinds that the operator uses."""
_CLUSTER_SCOPED = ("Node", "PriorityClass")
"""The kinds of _RESOURCES whose objects have no namespace."""


class ApiClient:
    """The client of one API server. Safe for many threads.

    `kubeconfig` is the path of a kubeconfig file. If it is empty, the client uses the pod's service account, or the
    default kubeconfig outside a pod. `is_acting` returns True while this replica leads. `observe` receives the method,
    the HTTP status (0: no answer) and the seconds of each call (None: a watch, or no answer).

    Methods raise ApiError, with the HTTP status, if the API server refuses a call or does not answer. The status is 404
    if an object does not exist, and 409 if it exists already (`create`) or has another UID (`delete`).
    """

    def __init__(
        self,
        kubeconfig: str = "",
        is_acting: Callable[[], bool] = lambda: True,
        observe: Callable[[str, int, float | None], None] = ignore_call,
    ) -> None:
        self.connection = ApiConnection(kubeconfig, observe)
        self._resources = dict(_RESOURCES)
        self.is_acting = is_acting

    # Reading.

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Return an object."""
        return self.call("GET", self._build_path(kind, namespace, name))

    def list(
        self,
        kind: str,
        namespace: str | None,
        selector: str = "",
        *,
        metadata_only: bool = False,
        may_lag: bool = False,
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the objects of a kind, and the resource version of the list, from which a watch can continue.

        If `namespace` is None, the objects of all namespaces are returned. `selector` is a label selector. With
        `metadata_only`, the objects have no spec and no status. With `may_lag`, the API server answers from its memory,
        which costs it little and may lack the last changes: for callers that ask again and again."""
        objects, version = list[dict[str, Any]](), ""
        pages = self.list_pages(kind, namespace, selector, metadata_only=metadata_only, may_lag=may_lag)
        for page, page_version in pages:
            objects += page
            version = page_version
        return objects, version

    def list_pages(
        self,
        kind: str,
        namespace: str | None,
        selector: str = "",
        *,
        metadata_only: bool = False,
        may_lag: bool = False,
    ) -> Iterator[tuple[Sequence[dict[str, Any]], str]]:
        """Yield the objects of `list` in pages, each with the resource version of the list. All objects of a large
        cluster need many times the memory of what the watch cache keeps of them."""
        accept = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io" if metadata_only else ""
        query = {"resourceVersion": "0"} if may_lag else {"limit": "500"}  # from its memory, it answers in one page
        query |= {"labelSelector": selector} if selector else {}
        more: str | None = ""
        while more is not None:
            page = self.call("GET", self._build_path(kind, namespace), query=query, accept=accept)
            more = page["metadata"].get("continue") or None
            yield page.pop("items", None) or [], page["metadata"]["resourceVersion"]
            query["continue"] = more or ""

    def watch(self, kind: str, namespace: str | None, selector: str, resource_version: str) -> Iterator[dict[str, Any]]:
        """Yield events from `resource_version` on, until the server ends the watch. Raises ApiError, with status 410 if
        the server has no events from that version on: the caller must list the objects again."""
        query = {
            "watch": "1",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_SECONDS),
            "allowWatchBookmarks": "true",
            **({"labelSelector": selector} if selector else {}),
        }
        timeout = urllib3.Timeout(connect=3, read=_WATCH_SILENCE_SECONDS)
        response = self.connection.send(
            "GET", self._build_path(kind, namespace), query=query, timeout=timeout, stream=True
        )
        try:
            remainder = b""
            for piece in response.stream(65536, decode_content=False):
                *lines, remainder = (remainder + piece).split(b"\n")
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

    def read_log_tail(self, namespace: str, pod: str, container: str, lines: int, max_bytes: int) -> str:
        """Return the last `lines` lines of a container's log, cut to their last `max_bytes` bytes; empty if the log
        cannot be read."""
        query = {
            "container": container,
            "tailLines": str(lines),
            "limitBytes": str(_MOST_LOG_BYTES),
            "timestamps": "false",
        }
        path = self._build_path("Pod", namespace, pod) + "/log"
        try:
            response = self.connection.send("GET", path, query=query, timeout=_LOG_TIMEOUT)
        except ApiError as error:
            _log.info("the log of pod %s/%s cannot be read: %s", namespace, pod, error)
            return ""
        return bytes(response.data[-max_bytes:]).decode(errors="replace")

    def read_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a PersistentVolumeClaim, or None if it does not exist or cannot be read. The call waits at most one
        second, because the claim is needed only for a warning."""
        path = self._build_path("PersistentVolumeClaim", namespace, name)
        try:
            response = self.connection.send("GET", path, timeout=urllib3.Timeout(total=1))
        except ApiError:
            return None
        claim: dict[str, Any] = json.loads(response.data)
        return claim

    def serves(self, group: str, version: str, plural: str) -> bool:
        """Return True if the API server serves the resource `plural` in this version of the API group."""
        try:
            resources = self.call("GET", f"/apis/{group}/{version}").get("resources")
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return False
            raise
        return any(resource.get("name") == plural for resource in resources or ())

    def register_kind(self, kind: str, api_version: str, plural: str) -> None:
        """Add a kind that only some clusters serve. `api_version` is the `apiVersion` of manifests of this kind,
        such as "apps/v1"."""
        self._resources[kind] = (api_version, plural)

    # Writing.

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create the object of a manifest, and return it as it was stored. A pod comes from a template of a user: from
        Kubernetes 1.25 on, the API server refuses an unknown field in it, which it would drop otherwise."""
        path = self._build_path(manifest["kind"], manifest["metadata"]["namespace"])
        strict = {"fieldValidation": "Strict"} if manifest["kind"] == "Pod" else {}
        return self._write("POST", path, manifest, query={"fieldManager": names.FIELD_MANAGER, **strict})

    def apply(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a manifest on the server side. If another manager owns a field of the manifest, the operator takes over
        this field."""
        metadata = manifest["metadata"]
        path = self._build_path(manifest["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._write("PATCH", path, manifest, query=query, content="application/apply-patch+yaml")

    def patch(
        self, kind: str, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        """Apply a merge patch to an object or to its `subresource`, such as "status"."""
        path = self._build_path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": names.FIELD_MANAGER}
        return self._write("PATCH", path, patch, query=query, content="application/merge-patch+json")

    def replace_lease(self, lease: Mapping[str, Any]) -> dict[str, Any]:
        """Update a Lease, even if this replica does not lead. Raises ApiError with status 409 if the Lease has changed
        since it was read."""
        metadata = lease["metadata"]
        return self.call("PUT", self._build_path("Lease", metadata["namespace"], metadata["name"]), lease)

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, ended: bool = False) -> dict[str, Any]:
        """Delete the object with this UID. The garbage collector deletes its dependents later. Pass `ended=True`
        only for a pod in which nothing runs any more: the API server then deletes it at once, without waiting for its
        kubelet."""
        options: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if ended:
            options["gracePeriodSeconds"] = 0
        return self._write("DELETE", self._build_path(kind, namespace, name), options)

    def remove_finalizer(self, namespace: str, pod: str, uid: str) -> dict[str, Any]:
        """Remove our finalizer from the pod with this UID. Other finalizers stay. The API server refuses the patch if
        the pod has another UID."""
        patch = {"metadata": {"uid": uid, "$deleteFromPrimitiveList/finalizers": [names.ENDING]}}
        path = self._build_path("Pod", namespace, pod)
        query = {"fieldManager": names.FIELD_MANAGER}
        return self._write("PATCH", path, patch, query=query, content="application/strategic-merge-patch+json")

    def end_pod_group(self, namespace: str, pod: str, uid: str) -> dict[str, Any]:
        """Mark the pod with this UID, so that Kueue expects no more replacements in its group."""
        patch = {"metadata": {"uid": uid, "annotations": {names.KUEUE_RETRIABLE: "false"}}}
        return self.patch("Pod", namespace, pod, patch)

    def publish_bundle(self, webhook_configuration: str, bundle: str) -> None:
        """Write the webhooks' caBundle into a ValidatingWebhookConfiguration, even if this replica does not lead. Write
        nothing if the stored caBundle is the same. `bundle` is the authority's certificate, PEM in base64."""
        path = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{webhook_configuration}"
        stored = self.call("GET", path)
        hooks = stored.get("webhooks") or []
        if all((hook.get("clientConfig") or {}).get("caBundle") == bundle for hook in hooks):
            return
        for hook in hooks:
            hook.setdefault("clientConfig", {})["caBundle"] = bundle
        self.call("PUT", path, stored)

    # Calls.

    @property
    def configuration(self) -> Any:
        """The address of the API server and the credentials, as `kubernetes.client.Configuration`."""
        return self.connection.configuration

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Make one call, even if this replica does not lead (see `ApiConnection.call`). Raises ApiError."""
        return self.connection.call(method, path, body, **options)

    def _write(self, method: str, path: str, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        if not self.is_acting():
            raise ApiError(0, "this replica does not lead: nothing was written", "NotLeading")
        return self.call(method, path, body, **options)

    def _build_path(self, kind: str, namespace: str | None, name: str = "") -> str:
        """Return the path of an object, or of all objects of a kind if there is no name.

        Raises ApiError with status 404 for a name that no object can have. A pod template may contain any text as the
        name of a priority class: "../../api/v1/pods?watch=1" must not become a call with the operator's rights."""
        if name and not _NAME.fullmatch(name):
            raise ApiError(http.HTTPStatus.NOT_FOUND, f"no {kind} can have the name {name[:80]!r}", "NotFound")
        api_version, plural = self._resources[kind]
        base = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"  # the core group has no name
        scope = f"/namespaces/{namespace}" if namespace and kind not in _CLUSTER_SCOPED else ""
        return f"{base}{scope}/{plural}" + (f"/{name}" if name else "")
