"""The poller, which asks launchers for the state of their attempts, independently of reconciles.

The poller passes an answer to the controller, which reconciles the job if the answer has changed. The status is written
every 15 seconds at most. A launcher that does not answer is not a failure: the state of its pod decides.

The pods run code of users, and the operator can reach addresses that the pods cannot. Therefore the poller calls a
launcher only over TLS with the job's own certificate pinned, only at the IP address and port of its pod, and without
names, proxies, cookies and redirects. The answer is bounded in time, in bytes, and field by field
(`contract.LauncherStatus`).
"""

from __future__ import annotations

import asyncio
import http
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp

from topkube.errors import LaunchError, TopKubeError
from topkube.launch import contract
from topkube_operator.children import credentials, pods
from topkube_operator.control.controller import Controller
from topkube_operator.model import names, stored_job
from topkube_operator.model.observed import LauncherReport, Pod, Policy
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.work_queue import Key

_log = logging.getLogger(__name__)
_TICK_SECONDS = 0.5
_STARTING, _RUNNING, _SILENT = 1.0, 5.0, 10.0
"""Seconds between two polls: until ranks run, while they run, and after a launcher has not answered for a while."""
_MOST_QUICK_MISSES = 20
"""After this many polls without an answer, a launcher is polled less often."""
_REPORTED_MISSES = (10, 100)
"""The numbers of polls without an answer at which a warning is logged."""
_TIMEOUT = aiohttp.ClientTimeout(total=4, connect=2)
LARGEST_ANSWER = 256 << 10
"""Bytes. The longest valid answer has 130 KiB: 10,000 missing workers and 256 nodes with long names."""
_AT_ONCE = 64
"""The most polls at the same time."""
_METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Addresses, besides link-local addresses, at which clouds serve credentials to every caller."""


@dataclass
class _Target:
    """One launcher to poll."""

    context: ssl.SSLContext
    next_poll_at: float = 0.0
    """The time (monotonic) of the next poll."""
    domains: str = ""
    """The zone, rack or block of each worker, for the launcher; empty if it is not known or not wanted."""
    has_warned: bool = False
    misses: int = 0
    busy: bool = False

    def set_domains(self, key: Key, domains: str) -> None:
        """Take the domains of the workers of the job `key`. If they are too long to be sent, log that once."""
        is_too_long = len(domains) > contract.LONGEST_DOMAINS
        self.domains = "" if is_too_long else domains
        if is_too_long and not self.has_warned:
            self.has_warned = True
            _log.warning(
                "%s/%s: spec.topology has no effect: the domains of its workers take %d characters, and a header has at"
                " most %d. Likely cause: thousands of workers, whose neighbours are in other domains. Next: choose a"
                " label with fewer domains",
                *key,
                len(domains),
                contract.LONGEST_DOMAINS,
            )


class LauncherPoller:
    """Polls launchers while `is_acting` returns True. Runs in kopf's event loop."""

    def __init__(
        self, cache: WatchCache, controller: Controller, policy: Policy, is_acting: Callable[[], bool]
    ) -> None:
        self._cache, self._controller, self._policy, self._is_acting = cache, controller, policy, is_acting
        self._targets: dict[str, _Target] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        async with open_session() as session:
            tasks: set[asyncio.Task[None]] = set()
            while True:
                if self._is_acting():
                    for key, uid, launcher, domains in self._find_launchers():
                        target = self._targets.get(launcher.uid)
                        if target is None:
                            target = self._targets[launcher.uid] = _Target(_build_tls_context(self._policy.seed, uid))
                        target.set_domains(key, domains)
                        if not target.busy and time.monotonic() >= target.next_poll_at:
                            target.busy = True
                            task = asyncio.create_task(self._poll_launcher(session, key, uid, launcher, target))
                            tasks.add(task)
                            task.add_done_callback(tasks.discard)
                await asyncio.sleep(_TICK_SECONDS)

    def _find_launchers(self) -> list[tuple[Key, str, Pod, str]]:
        """Return the running launchers of the jobs that this operator manages, and the domains of their workers."""
        launchers: list[tuple[Key, str, Pod, str]] = []
        for job in self._cache.list_jobs():
            status, metadata = job.get("status"), job["metadata"]
            if not isinstance(status, dict) or status.get("phase") not in (
                "Pending",
                "Starting",
                "Running",
                "Restarting",
            ):
                continue
            if not stored_job.is_managed(job):
                continue
            owner = Owner.of(job)
            launcher = _find_running_launcher(self._cache.find_launchers(owner), status.get("attempt"))
            if launcher is not None:
                topology = stored_job.read_topology_key(job)
                domains = (
                    find_domains(self._cache.find_pods(owner), launcher, topology, self._cache.find_node_label)
                    if topology
                    else ""
                )
                launchers.append(((metadata["namespace"], metadata["name"]), metadata["uid"], launcher, domains))
        current = {launcher.uid for _, _, launcher, _ in launchers}
        self._targets = {uid: target for uid, target in self._targets.items() if uid in current}
        return launchers

    async def _poll_launcher(
        self, session: aiohttp.ClientSession, key: Key, uid: str, launcher: Pod, target: _Target
    ) -> None:
        try:
            token = credentials.derive_credentials(self._policy.seed, uid).operator_token
            async with self._limit:
                endpoint = pods.format_endpoint(check_pod_address(launcher.address))
                status = await read_status(session, endpoint, token, target.context, target.domains)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, TopKubeError) as error:
            target.misses += 1
            target.next_poll_at = time.monotonic() + (_STARTING if target.misses < _MOST_QUICK_MISSES else _SILENT)
            if target.misses in _REPORTED_MISSES:
                _log.warning("%s/%s: the launcher at %s does not answer: %s", *key, launcher.address, error)
        else:
            target.misses = 0
            target.next_poll_at = time.monotonic() + (_RUNNING if status.state == "Running" else _STARTING)
            if status.attempt == launcher.attempt:
                self._controller.receive_report(key, uid, _build_report(status))
        finally:
            target.busy = False


def open_session() -> aiohttp.ClientSession:
    """Return a session without cookies, proxies from the environment and decompression."""
    return aiohttp.ClientSession(
        timeout=_TIMEOUT,
        connector=aiohttp.TCPConnector(limit=_AT_ONCE),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def check_pod_address(text: str) -> str:
    """Return the address of a pod in its shortest form.

    Raises LaunchError if the text is not an IP address, or is an address that no pod has: loopback, link-local (clouds
    serve metadata there), multicast. A pod in its node's network has the node's address, which is allowed.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _build_address_error(text, "is not an IP address") from None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise _build_address_error(text, "belongs to one network interface only")
        # A connection to such an address goes to the IPv4 address inside.
        address = address.ipv4_mapped or address.sixtofour or address
    is_forbidden = address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    # Reserved IPv6 addresses stand for other addresses (NAT64, mapped addresses). Reserved IPv4 addresses are allowed,
    # because some clusters use them for pods.
    is_forbidden = is_forbidden or (address.version == 6 and address.is_reserved)
    if is_forbidden or address in _METADATA or str(address) == "255.255.255.255":
        raise _build_address_error(text, "is not an address that a pod can have")
    return str(address)


def _build_address_error(text: str, problem: str) -> LaunchError:
    return LaunchError(
        f"the launcher is not polled: its pod's address {text[:60]!r} {problem}",
        cause="a faulty or hostile kubelet reported the address",
        next_step="kubectl get pods -o wide",
    )


async def read_status(
    session: aiohttp.ClientSession, endpoint: str, token: str, context: ssl.SSLContext, domains: str = ""
) -> contract.LauncherStatus:
    """Return the status of the launcher at `endpoint` (ADDRESS:PORT). `domains` orders its ranks.

    Raises LaunchError if the answer is anything but one LauncherStatus of at most LARGEST_ANSWER bytes, and
    aiohttp.ClientError, OSError or TimeoutError if the launcher cannot be reached within four seconds.
    """
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
    headers |= {contract.DOMAINS_HEADER: domains} if domains else {}
    url = f"https://{endpoint}{contract.STATUS_PATH}"
    async with session.get(url, headers=headers, ssl=context, allow_redirects=False) as answer:
        if answer.status != http.HTTPStatus.OK:
            raise _build_answer_error(f"the launcher answers with status {answer.status}")
        text = bytearray()
        async for piece in answer.content.iter_any():
            text += piece
            if len(text) > LARGEST_ANSWER:
                raise _build_answer_error(f"the launcher's answer has more than {LARGEST_ANSWER:,} bytes")
    return contract.LauncherStatus.read(bytes(text))


def _build_answer_error(what: str) -> LaunchError:
    return LaunchError(
        what, cause="another program than TopKube's launcher listens in the pod", next_step="read the launcher's log"
    )


def find_domains(job_pods: Iterable[Pod], launcher: Pod, key: str, read_label: Callable[[str, str], str]) -> str:
    """Return the domains of all workers of a launcher for `contract.DOMAINS_HEADER`: equal numbers for nodes with the
    same value of the label `key`. `job_pods`: the pods of the launcher's job. `read_label` returns a label of a node.
    The text is empty until each worker has a node. It may be too long to be sent."""
    nodes: dict[int, tuple[int, str]] = {}  # by worker: the newest attempt of its pods, and the node of that pod
    for pod in job_pods:
        if pod.role == names.WORKER and 0 <= pod.index < launcher.workers and not pod.has_ended:
            newest = max(nodes.get(pod.index, (0, "")), (pod.attempt, pod.node))
            nodes[pod.index] = newest
    values = [read_label(node, key) if node else None for _, (_, node) in sorted(nodes.items())]
    if len(values) != launcher.workers or None in values:
        return ""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return contract.encode_domains(numbers[value] for value in values)


def _find_running_launcher(launchers: Iterable[Pod], attempt: object) -> Pod | None:
    for pod in launchers:
        if pod.attempt == attempt:
            container = pod.launcher_container
            if pod.address and container.started is not None and container.exit_code is None:
                return pod
    return None


def _build_tls_context(seed: bytes, uid: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the job's own certificate only. The names in the certificate do not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=credentials.derive_credentials(seed, uid).certificate)
    return context


def _build_report(status: contract.LauncherStatus) -> LauncherReport:
    data = status.to_dict()
    return LauncherReport(
        attempt=status.attempt,
        state=status.state,
        joined=status.joined,
        missing=status.missing,
        heard=datetime.now(UTC),
        progress=data.get("progress"),
        first_failure=data.get("firstFailure"),
        cache=data.get("cache"),
    )
