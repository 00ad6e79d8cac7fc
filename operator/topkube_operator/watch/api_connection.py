"""The connection to the API server: calls with tokens and deadlines, and the errors of the server. The only module that
imports `kubernetes`.

The client works with plain dictionaries, because the generated models would take longer than the calls.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode

import kubernetes.client
import kubernetes.config
import urllib3
from kubernetes.config.config_exception import ConfigException

from topkube.errors import TopKubeError

_CONNECTIONS = 48
"""The most connections that are kept for later calls: enough for the workers of the controller (16), the calls of a
batch (24), the watches and the Lease. A call beyond them opens a connection of its own."""
_TIMEOUT = urllib3.Timeout(connect=3, read=10)
_PASSING = (401, 408, 409, 429)
"""The statuses below 500 of calls that may succeed soon: a token that is being renewed, a timeout, a conflict, too many
requests."""
_LONGEST_WAIT_SECONDS = 300.0
"""The longest wait that is accepted from the server."""


class ApiError(TopKubeError):
    """The API server refused a call, or it did not answer (status 0). A refused call has changed nothing. A call that
    was not answered may have been carried out.

    `status` is the HTTP status. `wait` is the minimum number of seconds that the server asks us to wait (Retry-After).
    """

    def __init__(self, status: int, what: str, reason: str = "", wait: float = 0.0) -> None:
        self.status, self.reason, self.wait = status, reason, wait
        super().__init__(what)

    @property
    def is_refusal(self) -> bool:
        """True if the same call would be refused again until somebody changes something: a right, a policy, a quota or
        an object. An admission webhook chooses its status freely."""
        return 400 <= self.status < 500 and self.status not in _PASSING


def ignore_call(method: str, status: int, seconds: float | None) -> None:
    """Observe nothing."""


class ApiConnection:
    """The connection to one API server. Safe for many threads. `observe` receives the method, the HTTP status (0: no
    answer) and the seconds of each call (None: a watch, or no answer)."""

    def __init__(self, kubeconfig: str = "", observe: Callable[[str, int, float | None], None] = ignore_call) -> None:
        self.configuration = _load_configuration(kubeconfig)
        self._client = kubernetes.client.ApiClient(self.configuration)
        self._pool: urllib3.PoolManager = self._client.rest_client.pool_manager
        self._observe = observe

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
        """Make one call, and return the server's answer. Raises ApiError."""
        response = self.send(method, path, body, query=query, content=content, accept=accept)
        try:
            data: dict[str, Any] = json.loads(response.data)
        except ValueError:  # a proxy in front of the API server answers in its place
            raise ApiError(0, f"{method} {path}: the answer is not JSON", "NotJSON") from None
        return data

    def send(
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
        """Make one call, and return the response: its data, or with `stream` a response to read. Raises ApiError."""
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
    """Return the seconds of a Retry-After header, at most _LONGEST_WAIT_SECONDS; 0 if there is no valid header. API
    servers send seconds; proxies also send dates."""
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS) if math.isfinite(seconds) else 0.0


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
