"""The calls of a worker to its launcher, and why they fail.

A worker calls before its launcher runs, and keeps calling when a launcher is gone, so a failed call is normal. If calls
fail for `PATIENCE_SECONDS`, the message names the likely causes. It goes to the worker's log and becomes the worker's
termination message, which the kubelet reads however the container ends.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime

import aiohttp

from topkube.errors import LaunchError
from topkube.job import FirstFailure
from topkube.launch.contract import REFUSED_REASON, UNREACHABLE_CODE, UNREACHABLE_REASON, WorkerPlan
from topkube.timestamps import format_timestamp

PATIENCE_SECONDS = 15.0
"""The time in which a launcher usually starts: failed calls before are not explained."""
_REPEAT_SECONDS = 60.0
"""The time after which the same message is printed again."""
_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_MESSAGE_CHARACTERS = 1024


class Calls:
    """The calls of a worker since the last answer. `problem` is why it does not reach its launcher; None until calls
    have failed for some time."""

    def __init__(self, plan: WorkerPlan, tls: ssl.SSLContext, say: Callable[[str], None]) -> None:
        self.problem: FirstFailure | None = None
        self._plan, self._tls, self._say = plan, tls, say
        self._failing_since: float | None = None
        self._last_printed: tuple[str, float] = ("", 0.0)

    def note_answer(self) -> None:
        """Note that the launcher has accepted this worker."""
        self.problem, self._failing_since, self._last_printed = None, None, ("", 0.0)

    @property
    def failing_seconds(self) -> float:
        """The seconds for which every call has failed; 0 if the last call was answered."""
        return time.monotonic() - self._failing_since if self._failing_since is not None else 0.0

    def note_failure(self, error: BaseException, source: str) -> None:
        """Note a failed call from the address `source`. Print why: the first time, when the reason changes, and once a
        minute."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        what, cause, next_step, reason = self._explain(error, source)
        is_lasting = self.failing_seconds >= min(PATIENCE_SECONDS, self._plan.unreachable_seconds or PATIENCE_SECONDS)
        if is_lasting:
            text = str(LaunchError(f"{what}, for {self.failing_seconds:.0f} s now", cause=cause, next_step=next_step))
            pod, code = self._plan.pod, UNREACHABLE_CODE
            message = text[:_MESSAGE_CHARACTERS]
            self.problem = FirstFailure(pod=pod, reason=reason, exit_code=code, message=message)
        key = f"{what}{is_lasting}"
        if key != self._last_printed[0] or now - self._last_printed[1] > _REPEAT_SECONDS:
            self._last_printed = (key, now)
            self._say(text if is_lasting else f"{what}; the worker keeps calling")

    def _explain(self, error: BaseException, source: str) -> tuple[str, str, str, str]:
        """Return what happened, the likely cause, the next step, and the reason for the status."""
        launcher, namespace = self._plan.launcher, self._plan.namespace
        if isinstance(error, aiohttp.WSServerHandshakeError):
            why = error.headers.get("X-Topkube-Reason", error.message) if error.headers else error.message
            what = f"the launcher at {launcher} refuses this worker ({error.status}): {why[:300]}"
            cause = "this pod belongs to another attempt, or a service mesh or a proxy answers in place of the launcher"
            return what, cause, f"kubectl -n {namespace} describe pod {self._plan.pod}", REFUSED_REASON
        if isinstance(error, LaunchError):
            return error.what, error.cause, error.next_step, REFUSED_REASON
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return *self._explain_certificate(error.certificate_error), UNREACHABLE_REASON
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            what = f"the server at {launcher} does not speak TLS as a launcher does: {_describe_error(error)}"
            cause = "a service mesh or a proxy intercepts the connection, or the address belongs to another server"
            next_step = f"exclude port {launcher.rpartition(':')[2]} from the mesh, for the launcher and the workers"
            return what, cause, next_step, UNREACHABLE_REASON
        return *self._explain_network(error, source), UNREACHABLE_REASON

    def _explain_certificate(self, error: Exception) -> tuple[str, str, str]:
        launcher, code = self._plan.launcher, getattr(error, "verify_code", 0)
        if code in (_EXPIRED, _NOT_YET_VALID):
            state = "has expired" if code == _EXPIRED else "is not valid yet"
            what = f"the certificate of the launcher at {launcher} {state} by this node's clock: it is {_format_now()}"
            if validity := self._describe_validity():
                what += f", and the certificate is valid from {validity[0]} to {validity[1]}"
            cause = "the clock of this node is wrong (no time synchronisation), or the certificate is too old"
            next_step = (
                "compare `date -u` on the nodes; if they agree, delete the job's Secret: the operator creates it again"
            )
            return what, cause, next_step
        return (
            f"the server at {launcher} does not have the certificate of this job's launcher, so no worker joins it",
            "the address belongs to another server, or the job's Secret was changed after this pod started",
            "delete this pod",
        )

    def _describe_validity(self) -> tuple[str, str] | None:
        """Return the start and the end of the validity of the certificate that this worker trusts; None if it trusts
        none."""
        for certificate in self._tls.get_ca_certs():
            times = [ssl.cert_time_to_seconds(str(certificate.get(name))) for name in ("notBefore", "notAfter")]
            return _format_stamp(times[0]), _format_stamp(times[1])
        return None

    def _explain_network(self, error: BaseException, source: str) -> tuple[str, str, str]:
        launcher, namespace = self._plan.launcher, self._plan.namespace
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRNOTAVAIL:
            return (
                f"this pod cannot call the launcher at {launcher} from its address {source}: {_describe_error(error)}",
                "no network interface of this pod has that address",
                f"kubectl -n {namespace} get pod {self._plan.pod} -o wide; compare with `ip address` in the pod",
            )
        causes = [
            "its pod does not run yet",
            "a NetworkPolicy blocks this pod",
            "this node does not route Services (kube-proxy or its replacement does not work)",
            "a service mesh intercepts the connection",
        ]
        return (
            f"the launcher at {launcher} cannot be reached: {_describe_error(error)}",
            "; or ".join(causes),
            f"kubectl -n {namespace} get pods,services,networkpolicies -o wide",
        )


def build_rejection_error(plan: WorkerPlan, reason: str) -> LaunchError:
    """Return the error of a worker that the launcher rejects with `reason`."""
    cause = "the launcher is ending, another pod has taken this worker's place, or the network rewrites addresses"
    next_step = f"kubectl -n {plan.namespace} get pods, and read the log of the launcher"
    if "mesh" in reason:
        port = plan.launcher.rpartition(":")[2]
        cause = "a sidecar forwards this pod's calls from its own address"
        next_step = (
            f"exclude port {port} from the mesh (Istio: traffic.sidecar.istio.io/excludeInboundPorts on the launcher, "
            "excludeOutboundPorts on the workers), or turn off the check of the address (the job's annotation "
            'topkube.dev/check-address: "false", or the chart value operator.checkAddress: false)'
        )
    what = f"the launcher at {plan.launcher} rejects this worker: {reason or 'it gave no reason'}"
    return LaunchError(what, cause=cause, next_step=next_step)


def find_own_address(launcher: str) -> str:
    """Return the address from which this host reaches the launcher, for workers outside pods; 127.0.0.1 if that is
    unknown."""
    host, _, port = launcher.rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
        except (OSError, ValueError):
            return "127.0.0.1"


def _describe_error(error: BaseException) -> str:
    """Return a short description of an error."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else str(error)[:300]
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before an answer"
    return str(error)[:300] or type(error).__name__


def _format_now() -> str:
    return _format_stamp(time.time())


def _format_stamp(seconds: float) -> str:
    return format_timestamp(datetime.fromtimestamp(seconds, UTC))
