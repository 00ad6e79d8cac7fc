"""A connection to an API server, with the kubeconfig, context and namespace that kubectl would use, or with the pod's
own account.

The Kubernetes client reads the kubeconfig, gets tokens and sets up TLS. Requests are plain JSON, so that objects stay
as the server stores them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from topkube.errors import ClusterError, JobError, TopKubeError
from topkube.installation import build_install_command

CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
FIELD_MANAGER = "topkube"
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
JSON = "application/json"
_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INSTALL = build_install_command("cluster")


@dataclass(frozen=True)
class ClusterLocation:
    """The cluster and namespace that a command uses; None stands for kubectl's default."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


@dataclass(frozen=True)
class Answer:
    """The server's response: JSON, and warnings."""

    data: dict[str, Any]
    warnings: list[str]


class Api:
    """An API server and the namespace that commands act in."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        import urllib3
        from kubernetes import client

        self.namespace, self.server = namespace, configuration.host
        self._configuration = configuration
        self._pool: urllib3.PoolManager = client.ApiClient(configuration).rest_client.pool_manager

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self.request("GET", path, query).data

    def request(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None, content: str = JSON
    ) -> Answer:
        """Send one request; entries of `query` that are None are left out. Raises ClusterError, or JobError if the
        server refuses a job."""
        import urllib3

        response = self._send(method, path, query or {}, body, content)
        try:
            text = response.read()
        except urllib3.exceptions.HTTPError as error:
            raise self._build_silence_error(error) from None
        finally:
            response.release_conn()
        if response.status >= 400:
            raise _build_refusal_error(response.status, text, method, path, self.namespace)
        warnings = [_parse_warning(value) for name, value in response.headers.iteritems() if name.lower() == "warning"]
        try:
            return Answer(json.loads(text), warnings)
        except ValueError:
            raise ClusterError(
                f"{self.server} sends a response that is not JSON",
                cause="a proxy or another server has this address",
                next_step="kubectl config view --minify",
            ) from None

    def read_lines(self, path: str, query: Mapping[str, Any], silent_seconds: float | None = None) -> Iterator[bytes]:
        """Yield the lines of a stream (a log, a watch) without line ends. Raises ClusterError if the server refuses,
        and, after the lines that arrived, if the connection breaks or is silent for `silent_seconds`: ask again for the
        rest."""
        import urllib3

        response = self._send("GET", path, query, None, JSON, silent_seconds)
        unfinished = list[bytes]()  # the pieces of a line, which may have many megabytes
        try:
            if response.status >= 400:
                raise _build_refusal_error(response.status, response.read(), "GET", path, self.namespace)
            for piece in response.stream(1 << 16, decode_content=False):
                *whole, rest = piece.split(b"\n")
                if whole:
                    yield b"".join([*unfinished, whole[0]])
                    unfinished = []
                    yield from whole[1:]
                if rest:
                    unfinished.append(rest)
        except urllib3.exceptions.HTTPError as error:
            raise self._build_silence_error(error) from None
        finally:
            response.close()
        if unfinished:
            yield b"".join(unfinished)

    def _send(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, content: str, silent: float | None = None
    ) -> Any:
        import urllib3

        parameters = {
            key: str(value).lower() if isinstance(value, bool) else value
            for key, value in query.items()
            if value is not None
        }
        headers = {"Accept": JSON, "Content-Type": content}
        try:
            for setting in self._configuration.auth_settings().values():
                if setting["in"] == "header" and setting["value"]:
                    headers[setting["key"]] = setting["value"]
            return self._pool.request(
                method,
                self.server + path + (f"?{urlencode(parameters)}" if parameters else ""),
                headers=headers,
                body=None if body is None else json.dumps(body),
                preload_content=False,
                retries=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=silent or READ_SECONDS),
            )
        except urllib3.exceptions.HTTPError as error:
            raise self._build_silence_error(error) from None

    def _build_silence_error(self, error: Exception) -> ClusterError:
        return ClusterError(
            f"the cluster at {self.server} does not answer: {_find_reason(error)}",
            cause="it is down, or this machine cannot reach it",
            next_step="kubectl cluster-info; another cluster: --context NAME or --kubeconfig FILE",
        )


def connect(location: ClusterLocation) -> Api:
    """Return a connection. Raises ClusterError if the client, the kubeconfig or the context is missing."""
    import yaml

    try:
        from kubernetes import client, config
        from kubernetes.config import kube_config
    except ImportError:
        raise ClusterError(
            "the Kubernetes client is not installed here",
            cause="topkube was installed for local runs only",
            next_step=_INSTALL,
        ) from None
    file = str(location.kubeconfig) if location.kubeconfig else None
    configuration = client.Configuration()
    shown_path = file or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    try:
        if file is None and not _has_kubeconfig(kube_config.KUBE_CONFIG_DEFAULT_LOCATION):
            return _connect_in_cluster(configuration, location, kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
        contexts, active = config.list_kube_config_contexts(file)
        chosen = (
            next((candidate for candidate in contexts if candidate["name"] == location.context), active)
            if location.context
            else active
        )
        config.load_kube_config(
            file, context=location.context, client_configuration=configuration, persist_config=False
        )
    except config.ConfigException as error:
        names = _list_context_names(file)
        listed = f"; known: {', '.join(names)}" if names else ""
        raise ClusterError(
            f"the kubeconfig {shown_path} cannot be used: {_read_first_line(error)}{listed}",
            cause="the context is not in the file, or the file is incomplete",
            next_step="kubectl config get-contexts",
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        # The client raises these for a damaged file.
        raise ClusterError(
            f"the kubeconfig {shown_path} cannot be read: {_read_first_line(error)}",
            cause="it is not a kubeconfig",
            next_step="kubectl config view",
        ) from None
    namespace = location.namespace or (chosen.get("context") or {}).get("namespace") or "default"
    return Api(configuration, namespace)


def _connect_in_cluster(configuration: Any, location: ClusterLocation, shown_path: str) -> Api:
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        raise ClusterError(
            f"no cluster is configured: {shown_path} does not exist",
            cause="no kubeconfig has been set up on this machine",
            next_step="export KUBECONFIG=FILE, or pass --kubeconfig FILE; without a cluster: topkube run JOB.yaml",
        ) from None
    own = _ACCOUNT_NAMESPACE.read_text().strip() if _ACCOUNT_NAMESPACE.exists() else "default"
    return Api(configuration, location.namespace or own)


def _has_kubeconfig(location: str) -> bool:
    return any(Path(path).expanduser().exists() for path in location.split(":") if path)


def _list_context_names(file: str | None) -> list[str]:
    from kubernetes import config

    try:
        return [context["name"] for context in config.list_kube_config_contexts(file)[0]]
    except Exception:  # the file is already known to be bad
        return []


def _build_refusal_error(status: int, text: bytes, method: str, path: str, namespace: str) -> TopKubeError:
    """Return the typed error for the server's refusal."""
    try:
        response = json.loads(text)
    except ValueError:
        response = {}
    response = response if isinstance(response, dict) else {}
    message = response.get("message") or text.decode(errors="replace").strip()[:500] or f"HTTP {status}"
    details = response.get("details") or {}
    kind, name = details.get("kind", ""), details.get("name", "")
    if status == 401:
        return ClusterError(
            "the cluster does not know who you are",
            status=status,
            cause="a token or certificate has expired",
            next_step="log in again, or choose another user: kubectl config get-contexts",
        )
    if status == 403:
        role = "edit" if kind == "configmaps" else "topkube-edit"
        verb, what = _find_missing_right(message, method, kind, details.get("group") or "")
        return ClusterError(
            message,
            status=status,
            cause="your account has no role for it in this namespace",
            next_step=f"ask an admin to bind the ClusterRole {role}; kubectl auth can-i {verb} {what} -n {namespace}",
        )
    if status == 404 and "/apis/topkube.dev/" in path and not name:
        return ClusterError(
            "this cluster does not know TrainingJobs",
            status=status,
            unknown_kind=True,
            cause="TopKube is not installed in it",
            next_step="kubectl apply -f manifests/ (an admin's task); `topkube run JOB.yaml` needs no cluster",
        )
    if status == 404 and kind == "namespaces":
        return ClusterError(
            f"there is no namespace {name}",
            status=status,
            cause="the name is misspelt, or it is in another cluster",
            next_step=f"kubectl get namespaces; kubectl create namespace {name}",
        )
    causes = [f"{entry.get('field', '')}: {entry.get('message', '')}" for entry in details.get("causes") or ()]
    if method != "GET" and (status == 422 or (status == 400 and "admission webhook" in message)):
        listed = causes if status == 422 and causes else []
        return JobError(f"the cluster refuses the job: {'it has mistakes' if listed else message}", listed)
    return ClusterError(message, status=status)


def _find_missing_right(message: str, method: str, kind: str, group: str) -> tuple[str, str]:
    """Return the verb and the resource of a right, as `kubectl auth can-i` takes them. Only the message names a
    subresource, such as pods/log."""
    named = re.search(r'cannot (\w+) resource "([\w./-]+)"', message)
    verb = named[1] if named else {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method, "get")
    resource, slash, part = (named[2] if named else kind).partition("/")
    if not resource:
        return verb, "trainingjobs.topkube.dev"
    return verb, resource + (f".{group}" if group else "") + slash + part


def _parse_warning(warning: str) -> str:
    """Return the text of a Warning header: 299 - "the \\"text\\"" becomes the "text\""""
    match = re.fullmatch(r'\s*\d{3} \S+ "(.*)"\s*', warning, re.DOTALL)
    return re.sub(r"\\(.)", r"\1", match[1]) if match else warning


def _find_reason(error: Exception) -> str:
    text = str(getattr(error, "reason", None) or error)
    return re.sub(r"^<?[\w.]*(connection|Connection)\S*( object at 0x[0-9a-f]+>)?: ", "", text)


def _read_first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).removeprefix("Invalid kube-config file. ")


def build_path(namespace: str | None, kind: str, name: str | None = None, group: str = "") -> str:
    """Return the URL path of a kind (its plural name), in the core group if `group` (with its version) is empty."""
    root = f"/apis/{group}" if group else "/api/v1"
    place = f"/namespaces/{quote(namespace)}" if namespace else ""
    return f"{root}{place}/{kind}" + (f"/{quote(name)}" if name else "")


@contextmanager
def ignore_missing() -> Iterator[None]:
    """Ignore the 404 of an object that is already gone. The 404 of a server that does not know the kind (it may have
    just started) does not mean that."""
    try:
        yield
    except ClusterError as error:
        if error.status != 404 or error.unknown_kind:
            raise
