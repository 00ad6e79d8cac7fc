"""Asks launchers how their attempts are doing, off the reconcile path.

Over TLS with the job's own certificate pinned and the operator's token, at the launcher's pod address. An answer goes
to the controller, which looks at the job again where it is news; the status is written every 15 seconds at most. A
launcher that does not answer is no failure: its pod says how it is.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp

from topkube.errors import TopKubeError
from topkube.launch import contract
from topkube_operator import attempts, credentials, pods, reconcile
from topkube_operator.controller import Controller
from topkube_operator.observed import Observed, Pod, Policy, Report
from topkube_operator.queue import Key
from topkube_operator.store import Store

_log = logging.getLogger(__name__)
_TICK = 0.5
_STARTING, _RUNNING, _SILENT = 1.0, 5.0, 10.0
"""Seconds between two questions: until ranks run, then, and to a launcher that has not answered for a while."""
_TIMEOUT = aiohttp.ClientTimeout(total=4, connect=2)
_LARGEST_ANSWER = 1 << 20
_AT_ONCE = 64


@dataclass
class _Asked:
    """One launcher."""

    context: ssl.SSLContext
    next: float = 0.0
    misses: int = 0
    busy: bool = False


class Progress:
    """Polls while `acting`. Runs in kopf's event loop."""

    def __init__(self, store: Store, controller: Controller, policy: Policy, acting: Callable[[], bool]) -> None:
        self._store, self._controller, self._policy, self._acting = store, controller, policy, acting
        self._asked: dict[str, _Asked] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=_AT_ONCE)) as session:
            tasks: set[asyncio.Task[None]] = set()
            while True:
                if self._acting():
                    for key, uid, launcher in self._launchers():
                        asked = self._asked.get(launcher.uid)
                        if asked is None:
                            asked = self._asked[launcher.uid] = _Asked(_pinned(self._policy.seed, uid))
                        if not asked.busy and time.monotonic() >= asked.next:
                            asked.busy = True
                            task = asyncio.create_task(self._ask(session, key, uid, launcher, asked))
                            tasks.add(task)
                            task.add_done_callback(tasks.discard)
                await asyncio.sleep(_TICK)

    def _launchers(self) -> list[tuple[Key, str, Pod]]:
        """The launchers that run, of jobs that are ours."""
        found: list[tuple[Key, str, Pod]] = []
        for job in self._store.jobs():
            status, metadata = job.get("status"), job["metadata"]
            if not isinstance(status, dict) or status.get("phase") not in (
                "Pending",
                "Starting",
                "Running",
                "Restarting",
            ):
                continue
            if not reconcile.managed(job):
                continue
            observed = self._store.observe(metadata["uid"], self._policy, None, {}, {})
            launcher = _running_launcher(observed, status.get("attempt"))
            if launcher is not None:
                found.append(((metadata["namespace"], metadata["name"]), metadata["uid"], launcher))
        current = {launcher.uid for _, _, launcher in found}
        self._asked = {uid: asked for uid, asked in self._asked.items() if uid in current}
        return found

    async def _ask(self, session: aiohttp.ClientSession, key: Key, uid: str, launcher: Pod, asked: _Asked) -> None:
        try:
            token = credentials.derive(self._policy.seed, uid).operator_token
            url = f"https://{pods.endpoint(launcher.address)}{contract.STATUS_PATH}"
            headers = {"Authorization": f"Bearer {token}"}
            async with self._limit, session.get(url, headers=headers, ssl=asked.context) as answer:
                answer.raise_for_status()
                text = await answer.content.read(_LARGEST_ANSWER)
            said = contract.LauncherStatus.read(text)
        except (aiohttp.ClientError, OSError, TimeoutError, TopKubeError) as error:
            asked.misses += 1
            asked.next = time.monotonic() + (_STARTING if asked.misses < 20 else _SILENT)
            if asked.misses in (10, 100):
                _log.warning("%s/%s: the launcher at %s does not answer: %s", *key, launcher.address, error)
        else:
            asked.misses = 0
            asked.next = time.monotonic() + (_RUNNING if said.state == "Running" else _STARTING)
            if said.attempt == launcher.attempt:
                self._controller.hear(key, uid, _report(said))
        finally:
            asked.busy = False


def _running_launcher(observed: Observed, attempt: object) -> Pod | None:
    for pod in observed.pods:
        if pod.attempt == attempt and attempts.launches(pod, pod.attempt):
            container = pod.launching
            if pod.address and container.started is not None and container.exit_code is None:
                return pod
    return None


def _pinned(seed: bytes, uid: str) -> ssl.SSLContext:
    """Trusts the job's own certificate and nothing else; the names in it mean nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=credentials.derive(seed, uid).certificate)
    return context


def _report(said: contract.LauncherStatus) -> Report:
    data = said.data()
    return Report(
        attempt=said.attempt,
        state=said.state,
        joined=said.joined,
        missing=said.missing,
        heard=datetime.now(UTC),
        progress=data.get("progress"),
        first_failure=data.get("firstFailure"),
        cache=data.get("cache"),
    )
