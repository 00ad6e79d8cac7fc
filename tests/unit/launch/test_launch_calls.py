"""A worker that cannot reach its launcher reports why: in its log and in its termination message."""

from __future__ import annotations

import asyncio
import datetime
import errno
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from mounted_credentials import write_credentials

from topkube.launch.connection import calls
from topkube.launch.connection.calls import Calls, build_rejection_error
from topkube.launch.connection.credentials import LauncherCredentials, build_pinned_context
from topkube.launch.connection.rendezvous import Rendezvous
from topkube.launch.contract import (
    REFUSED_REASON,
    UNREACHABLE_CODE,
    UNREACHABLE_REASON,
    Ending,
    LaunchPlan,
    WorkerPlan,
)

PLAN = WorkerPlan(name="j", namespace="team", uid="u", index=0, attempt=1, pod="j-worker-0-1", launcher="10.0.0.1:7077")


def call_and_fail(server: Path, client: Path) -> BaseException:
    """Return the error of a worker with the certificate in `client` at a launcher with the certificate in `server`."""

    async def call() -> BaseException:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(server / "tls.crt", server / "tls.key")
        server_socket = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls)
        port = server_socket.sockets[0].getsockname()[1]
        try:
            async with aiohttp.ClientSession() as session:
                await session.get(f"https://127.0.0.1:{port}/", ssl=build_pinned_context(client / "tls.crt"))
        except aiohttp.ClientError as error:
            return error
        finally:
            server_socket.close()
        raise AssertionError("the call succeeded")

    return asyncio.run(call())


def note_failure(error: BaseException, certificate: Path, plan: WorkerPlan = PLAN) -> tuple[str, Calls]:
    """Return the message about a call that failed with `error`, and the calls."""
    messages: list[str] = []
    calls = Calls(plan, build_pinned_context(certificate / "tls.crt"), messages.append)
    calls.note_failure(error, "10.0.0.9")
    return messages[-1], calls


@pytest.mark.parametrize(
    ("begins", "ends", "problem"), [(-20.0, -10.0, "has expired"), (10.0, 20.0, "is not valid yet")]
)
def test_a_certificate_that_is_not_valid_now_is_reported_with_its_dates_and_the_time_of_the_node(
    tmp_path: Path, begins: float, ends: float, problem: str
) -> None:
    before = datetime.datetime.now(datetime.UTC)
    folder = write_credentials(tmp_path / "c", begins, ends)
    message, _ = note_failure(call_and_fail(folder, folder), folder)
    assert f"{problem} by this node's clock" in message
    times = (before, datetime.datetime.now(datetime.UTC))  # the hour or the day may end between them
    assert any(f"{time_here:%Y-%m-%dT%H:}" in message for time_here in times), "the message has the time of this node"
    assert any(f"valid from {time_here + datetime.timedelta(days=begins):%Y-%m-%d}" in message for time_here in times)
    assert any(f"to {time_here + datetime.timedelta(days=ends):%Y-%m-%d}" in message for time_here in times)
    assert "does not have the certificate" not in message


def test_a_server_with_another_certificate_is_refused(tmp_path: Path) -> None:
    first, second = write_credentials(tmp_path / "one"), write_credentials(tmp_path / "other")
    message, _ = note_failure(call_and_fail(first, second), second)
    assert "does not have the certificate of this job's launcher" in message


def test_plain_http_is_not_a_launcher(tmp_path: Path) -> None:
    folder = write_credentials(tmp_path / "c")

    async def call() -> BaseException:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 503 upstream connect error\r\n\r\n")
            writer.close()

        server_socket = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server_socket.sockets[0].getsockname()[1]
        try:
            async with aiohttp.ClientSession() as session:
                await session.get(f"https://127.0.0.1:{port}/", ssl=build_pinned_context(folder / "tls.crt"))
        except aiohttp.ClientError as error:
            return error
        finally:
            server_socket.close()
        raise AssertionError

    message, _ = note_failure(asyncio.run(call()), folder)
    assert "does not speak TLS as a launcher does" in message


def test_an_absent_launcher_is_reported_with_causes_and_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return time.time()

    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    messages: list[str] = []
    worker_calls = Calls(PLAN, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), messages.append)
    for _ in range(140):
        worker_calls.note_failure(TimeoutError(), "10.0.0.9")
        clock.now += 1
    assert messages[0] == "the launcher at 10.0.0.1:7077 cannot be reached: no answer; the worker keeps calling"
    assert len(messages) == 1 + 3, "one message at first, then one message per minute"
    message = messages[1]
    assert "cannot be reached: no answer, for 15 s now" in message
    for cause in ("pod does not run yet", "NetworkPolicy", "kube-proxy", "service mesh"):
        assert cause in message
    assert "Next: kubectl -n team get pods,services,networkpolicies -o wide" in message
    assert worker_calls.problem is not None
    assert (worker_calls.problem.reason, worker_calls.problem.exit_code) == (UNREACHABLE_REASON, UNREACHABLE_CODE)
    assert worker_calls.problem.pod == "j-worker-0-1"
    worker_calls.note_failure(OSError(errno.ECONNREFUSED, "refused"), "10.0.0.9")
    assert "Connection refused" in messages[-1], "another problem is reported at once"
    worker_calls.note_failure(OSError(errno.EADDRNOTAVAIL, "x"), "10.0.0.9")
    assert "from its address 10.0.0.9" in messages[-1]
    worker_calls.note_answer()
    assert worker_calls.problem is None
    worker_calls.note_failure(TimeoutError(), "10.0.0.9")
    assert messages[-1].endswith("keeps calling"), "the time since the first failure starts again"


def test_a_worker_behind_a_service_mesh_prints_the_next_step(tmp_path: Path) -> None:
    error = build_rejection_error(PLAN, "the call comes from 127.0.0.6, a service mesh's sidecar, not from 10.0.0.9")
    for text in ("excludeInboundPorts", "checkAddress: false", "port 7077"):
        assert text in str(error)
    plan = PLAN.model_copy(update={"unreachable_seconds": 1e-9})
    _, worker_calls = note_failure(error, write_credentials(tmp_path / "c"), plan)
    worker_calls.note_failure(error, "10.0.0.9")
    assert worker_calls.problem is not None
    assert worker_calls.problem.reason == REFUSED_REASON


@pytest.mark.parametrize(
    ("caller", "claimed", "check", "expected"),
    [
        ("10.0.0.9", "10.0.0.9", True, ""),
        ("::ffff:10.0.0.9", "10.0.0.9", True, ""),
        ("10.0.0.8", "10.0.0.9", True, "the call comes from 10.0.0.8, not from the pod's address 10.0.0.9"),
        ("127.0.0.6", "10.0.0.9", True, "the call comes from 127.0.0.6, a service mesh's sidecar"),
        ("::6", "fd00::9", True, "the call comes from ::6, a service mesh's sidecar"),
        ("127.0.0.6", "10.0.0.9", False, ""),
        ("127.0.0.1", "10.0.0.1", True, ""),  # the launcher runs inside this worker's pod
        ("127.0.0.6", "10.0.0.1", True, "the call comes from 127.0.0.6, a service mesh's sidecar"),
        ("127.0.0.6", "nonsense", False, "'nonsense' is not an address"),
    ],
)
def test_callers_are_checked_by_their_address(
    tmp_path: Path, caller: str, claimed: str, check: bool, expected: str
) -> None:
    workers = [{"index": 0, "attempt": 1, "pod": "p"}]
    plan = LaunchPlan.model_validate({"name": "j", "namespace": "n", "uid": "u", "attempt": 1, "workers": workers})
    plan = plan.model_copy(update={"check_address": check})
    assert LaunchPlan.read(plan.to_json()).check_address == check
    credentials = LauncherCredentials.load(write_credentials(tmp_path / "c"))
    rendezvous = Rendezvous(plan, credentials, "10.0.0.1", None, None)  # type: ignore[arg-type]
    problem = rendezvous._find_address_problem(caller, claimed)
    assert problem.startswith(expected)
    assert bool(problem) == bool(expected)


@pytest.mark.parametrize("asked_to_end", [False, True])
def test_the_termination_message_explains_why_a_worker_cannot_reach_the_launcher(
    tmp_path: Path, asked_to_end: bool
) -> None:
    """The worker writes the message by itself after the time in the plan, and when its pod is deleted. The message is
    there even if the worker is killed."""
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))
        port = silent_socket.getsockname()[1]
        unreachable_seconds = 3600.0 if asked_to_end else 1.0
        plan = PLAN.model_copy(update={"launcher": f"127.0.0.1:{port}", "unreachable_seconds": unreachable_seconds})
        termination_log = tmp_path / "termination"
        environment = {
            **os.environ,
            "TOPKUBE_WORKER": plan.to_json(),
            "TOPKUBE_CREDENTIALS": str(write_credentials(tmp_path / "c")),
            "TOPKUBE_TERMINATION_LOG": str(termination_log),
            "TMPDIR": str(tmp_path),
        }
        script = "import sys; from topkube.launch import worker; from topkube.launch.connection import calls; "
        script += "calls.PATIENCE_SECONDS = 0.5; sys.exit(worker.run_worker(['true']))"
        with subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
        ) as worker:
            end = time.monotonic() + 120
            while not (early_text := termination_log.read_text() if termination_log.exists() else "").endswith("}"):
                assert time.monotonic() < end
                time.sleep(0.02)
            early = Ending.read(early_text)  # the worker writes the file in place, and may do so again at any time
            if asked_to_end:
                worker.send_signal(signal.SIGTERM)
            output, _ = worker.communicate(timeout=120)
    code = 143 if asked_to_end else UNREACHABLE_CODE
    assert worker.returncode == code
    ending = Ending.read(termination_log.read_text())
    assert (ending.state, ending.exit_code, ending.index) == ("Failed", code, 0)
    for message in (early, ending):
        assert message.first_failure is not None
        assert (message.first_failure.reason, message.first_failure.pod) == (UNREACHABLE_REASON, "j-worker-0-1")
        assert f"127.0.0.1:{port} cannot be reached: Connection refused" in (message.first_failure.message or "")
    assert "NetworkPolicy" in output
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("topkube-worker-")]
