"""Unauthenticated and hostile callers of the launcher's port are refused, and a stolen token does not make a caller a
rank."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_certificate import write_certificate
from pods import KEY, PYTHONS, UID, SimulatedJob, wait_until

from topkube.launch.connection.messages import Hello
from topkube.launch.connection.rendezvous import UNKNOWN_CALLERS_PER_ADDRESS
from topkube.launch.contract import JOIN_PATH, STATUS_PATH, compute_worker_token
from topkube.launch.mpi.mpiexec import find_listening_addresses

TOKEN = compute_worker_token(KEY, UID, 0, 1)
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedJob]:
    """A launcher that waits for two workers that never come."""
    with SimulatedJob(tmp_path_factory.mktemp("hostile"), ["true"], rendezvous_seconds=3600) as job:
        job.start_launcher()
        wait_until(job.ask_status)
        yield job
        assert job.ask_status() is not None, "the launcher does not answer any more"
        assert job.ask_status().joined == 0


def connect(job: SimulatedJob, source: str = "127.0.0.1") -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", job.port), 60, source_address=(source, 0))
    return job.tls.wrap_socket(raw)


def ask(job: SimulatedJob, head: str, source: str = "127.0.0.1") -> str:
    """Send the head of a request. Return all bytes that arrive until the other end closes."""
    with connect(job, source) as connection:
        with contextlib.suppress(OSError):  # the other end may refuse the request before it has all of it
            connection.sendall(head.encode())
        return receive_all(connection)


def receive_all(connection: ssl.SSLSocket) -> str:
    received = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(65536):
            received += data
    return received.decode(errors="replace")


def build_join_request(
    token: str = TOKEN, query: str = "index=0&attempt=1", headers: str = UPGRADE, method: str = "GET"
) -> str:
    return f"{method} {JOIN_PATH}?{query} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{headers}\r\n"


def build_hello(busy: bool = False) -> bytes:
    """Return the first message of a worker at 127.77.0.9, as a frame of the WebSocket."""
    message = Hello(
        session="s", busy=busy, ip="127.77.0.9", slots=2, python="/bin/python", mpi="MPICH 5.0.2", time=time.time()
    )
    text = message.to_json().encode()
    # A text frame with a length of two bytes (126) and a mask of zeros, which leaves the text as it is.
    return bytes([0x81, 0x80 | 126]) + len(text).to_bytes(2, "big") + b"\0\0\0\0" + text


@pytest.mark.parametrize(
    ("token", "query"),
    [
        ("", "index=0&attempt=1"),
        ("wrong", "index=0&attempt=1"),
        (TOKEN[:-1], "index=0&attempt=1"),
        (TOKEN, "index=1&attempt=1"),  # another worker's
        (compute_worker_token(KEY, UID, 0, 2), "index=0&attempt=2"),  # a pod that this run does not expect
        (compute_worker_token(KEY, UID, 7, 1), "index=7&attempt=1"),
        (compute_worker_token(KEY, "another job", 0, 1), "index=0&attempt=1"),
        (TOKEN, "index=-1&attempt=1"),
        (TOKEN, "index=%00&attempt=1"),
        ("wrong", "index=0&attempt=%C2%B2"),  # a digit, but no number
        ("wrong", "index=0&attempt=" + "9" * 5000),
        (TOKEN, ""),
        ("the operator's token", "index=0&attempt=1"),
    ],
)
def test_a_wrong_token_is_refused(job: SimulatedJob, token: str, query: str) -> None:
    answer = ask(job, build_join_request(token, query))
    assert answer.startswith("HTTP/1.1 401"), answer
    assert "101 Switching" not in answer
    assert job.launcher is not None
    assert "Traceback" not in job.launcher.output


def test_the_status_is_for_the_operator(job: SimulatedJob) -> None:
    for token in ("", TOKEN, "the operator's tokeN"):
        answer = ask(job, f"GET {STATUS_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n")
        assert answer.startswith("HTTP/1.1 401")
        assert '"state"' not in answer


def test_a_token_does_not_work_from_another_address(job: SimulatedJob) -> None:
    """Another pod cannot use a stolen token."""
    with connect(job, "127.88.0.1") as connection:
        connection.sendall(build_join_request().encode() + build_hello())
        answer = receive_all(connection)
    assert "the call comes from 127.88.0.1" in answer


def test_a_call_through_a_service_mesh_is_named_as_such(job: SimulatedJob) -> None:
    """Istio's sidecar forwards calls, which then arrive from the sidecar's address."""
    with connect(job, "127.0.0.6") as connection:
        connection.sendall(build_join_request().encode() + build_hello())
        answer = receive_all(connection)
    assert "the call comes from 127.0.0.6, a service mesh's sidecar, not from 127.77.0.9" in answer
    status = job.ask_status()
    assert status is not None
    (refusal,) = status.refused
    assert refusal.index == 0
    assert "excludeInboundPorts" in refusal.reason
    assert "checkAddress: false" in refusal.reason


def test_without_the_check_of_the_address_a_call_through_a_mesh_is_taken(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["true"], rendezvous_seconds=3600, check_address=False) as job:
        job.start_launcher()
        wait_until(job.ask_status)
        with connect(job, "127.0.0.6") as connection:
            connection.sendall(build_join_request().encode() + build_hello())
            status = wait_until(lambda: (answer := job.ask_status()) and answer.joined == 1 and answer)
            assert status.refused == ()


def test_a_worker_that_still_runs_ranks_of_another_attempt_is_not_counted(job: SimulatedJob) -> None:
    """Such a worker leaves to end its ranks, so an attempt that began with it would fail."""
    with connect(job, "127.77.0.9") as connection:
        connection.sendall(build_join_request().encode() + build_hello(busy=True))
        answer = receive_all(connection)
    assert '"kind":"welcome"' in answer, "the worker is not told that another launcher is here"
    assert "end what you run" in answer
    assert " joined from " not in job.read_all_output()


def test_other_paths_and_methods_are_refused(job: SimulatedJob) -> None:
    assert ask(job, "GET /v1/anything HTTP/1.1\r\nHost: x\r\n\r\n").startswith("HTTP/1.1 404")
    assert ask(job, build_join_request(headers="Content-Length: 0\r\n", method="POST")).startswith("HTTP/1.1 405")
    assert ask(job, build_join_request(headers="")).startswith("HTTP/1.1 426")
    assert ask(job, "\r\n\r\n\x00\x01nonsense\r\n\r\n").startswith("HTTP/1.0 400")


@pytest.mark.parametrize("token", ["wrong", TOKEN])
def test_ten_megabytes_are_not_read(job: SimulatedJob, token: str) -> None:
    with connect(job) as connection:
        connection.sendall(build_join_request(token, headers=f"Content-Length: {10 << 20}\r\n", method="POST").encode())
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 10 << 20:
                sent += connection.send(bytes(1 << 16))
            answer = receive_all(connection)
            assert answer == "" or answer.startswith("HTTP/1.1 40")
    assert sent < 10 << 20, "the launcher took the whole body"


def test_a_first_message_of_ten_megabytes_ends_the_connection(job: SimulatedJob) -> None:
    with connect(job) as connection:
        connection.sendall(
            # A text frame with a length of eight bytes (127) and a mask of zeros.
            build_join_request().encode() + bytes([0x81, 0x80 | 127]) + (10 << 20).to_bytes(8, "big") + b"\0\0\0\0"
        )
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 10 << 20:
                sent += connection.send(b"x" * (1 << 16))
    assert sent < 10 << 20


def test_headers_without_end_are_refused(job: SimulatedJob) -> None:
    many = "".join(f"X-{number}: {'y' * 4000}\r\n" for number in range(200))
    answer = ask(job, build_join_request(headers=many))
    assert answer == "" or answer.startswith("HTTP/1.0 400")


def test_slow_clients_do_not_keep_others_out(job: SimulatedJob) -> None:
    slow: list[socket.socket] = []
    try:
        for number in range(150):
            raw = socket.create_connection(("127.0.0.1", job.port), 60)
            slow.append(raw)
            if number % 3 == 0:  # finishes TLS, then sends a head without its end
                slow[-1] = job.tls.wrap_socket(raw)
                slow[-1].sendall(b"GET /v1/join HTTP/1.1\r\nX-A: ")
        assert job.ask_status() is not None
        slow_client = slow[0]
        slow_client.settimeout(90)
        deadline = time.monotonic() + 90
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                slow_client.sendall(b"y")  # single bytes do not extend the time limit
                time.sleep(0.2)
        assert time.monotonic() < deadline, "a slow client is not disconnected"
    finally:
        for client in slow:
            client.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_crowd_from_one_address_does_not_keep_others_out(job: SimulatedJob, tls: bool) -> None:
    """The launcher limits the callers of an address that may stay connected. Two crowds come, one after another."""
    crowd: list[socket.socket] = []
    try:
        for _ in range(2):
            for _ in range(UNKNOWN_CALLERS_PER_ADDRESS + 100):
                raw = socket.create_connection(("127.0.0.1", job.port), 60, source_address=("127.99.0.1", 0))
                crowd.append(raw)
                if tls and len(crowd) < 100:
                    crowd[-1] = job.tls.wrap_socket(raw)
            wait_until(lambda: sum(_is_open(client) for client in crowd) <= UNKNOWN_CALLERS_PER_ADDRESS)
            assert job.ask_status() is not None, "the operator is kept out"
            while crowd:
                crowd.pop().close()
            wait_until(lambda: '"state"' in _read_status(job, "127.99.0.1"))  # they have left: there is room again
    finally:
        for client in crowd:
            client.close()


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


def _read_status(job: SimulatedJob, source: str) -> str:
    try:
        token = "Authorization: Bearer the operator's token"
        return ask(job, f"GET {STATUS_PATH} HTTP/1.1\r\nHost: x\r\n{token}\r\nConnection: close\r\n\r\n", source)
    except OSError:
        return ""


def test_plain_text_and_old_tls_are_refused(job: SimulatedJob) -> None:
    with socket.create_connection(("127.0.0.1", job.port), 60) as plain:
        plain.sendall(b"GET /v1/status HTTP/1.1\r\n\r\n")
        plain.settimeout(90)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in plain.recv(100)
    old = job.tls
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", job.port), 60) as raw:
        old.wrap_socket(raw)


def test_a_worker_does_not_talk_to_another_certificate(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["true"], rendezvous_seconds=3600) as job:
        launcher = job.start_launcher()
        wait_until(job.ask_status)
        write_certificate(job.secret)  # workers mount another certificate from now on
        worker = job.start_worker(0)
        wait_until(lambda: "does not have the certificate of this job's launcher" in worker.output)
        assert "joined" not in launcher.output


def test_a_second_session_replaces_the_first_while_waiting(tmp_path: Path) -> None:
    with SimulatedJob(tmp_path, ["true"], slots=1) as job:
        launcher = job.start_launcher()
        first = job.start_worker(0)
        wait_until(lambda: job.ask_status() and job.ask_status().joined == 1)
        first.kill()  # its container is started again
        job.start_worker(0)
        job.start_worker(1)
        assert launcher.wait() in (0, 1), job.read_all_output()  # `true` never calls MPI
        assert launcher.output.count("worker 0 (j-worker-0-1) joined") == 2


@pytest.mark.parametrize("mpi", ["MPICH", "OpenMPI"])
def test_an_intruder_with_mpis_own_proxy_does_not_become_a_rank(tmp_path: Path, mpi: str) -> None:
    """mpiexec's control port has no authentication: a caller with the stock proxy can run ranks or end the job. The
    port cannot be reached from another host."""
    script = (
        "import os, time; from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n"
        "while not os.path.exists('looked'): time.sleep(0.05)\n"
        "MPI.COMM_WORLD.Barrier()"
    )
    with SimulatedJob(tmp_path, [str(PYTHONS[mpi]), "-c", script], slots=1, mpi=mpi) as job:
        launcher = job.start()
        wait_until(lambda: (answer := job.ask_status()) and answer.state == "Running", what="running")
        open_ports = [
            address
            for address in find_listening_addresses(launcher.list_processes())
            if not address.endswith(f":{job.port}")
        ]
        assert open_ports, "mpiexec listens on no port, so its proxies cannot connect"
        outside = find_own_address()
        for address in open_ports:
            assert address.startswith(("127.0.0.1:", "[::1]:")), f"{mpi}'s mpiexec can be reached on {address}"
            port = address.rpartition(":")[2]
            if mpi == "MPICH":
                proxy = PYTHONS[mpi].parent / "hydra_pmi_proxy"
                options = ["--rmk", "user", "--launcher", "manual", "--demux", "poll", "--pgid", "0", "--retries", "0"]
                command = [proxy, "--control-port", f"{outside}:{port}", *options, "--usize", "-1", "--proxy-id", "1"]
                intruder = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
                assert intruder.returncode != 0
                assert "unable to connect" in intruder.stdout + intruder.stderr
            with pytest.raises((ConnectionRefusedError, TimeoutError)):
                socket.create_connection((outside, int(port)), 2)
        (tmp_path / "looked").touch()
        assert launcher.wait() == 0, job.read_all_output()


def find_own_address() -> str:
    """Return an address of this machine that is not loopback, to which another host would connect."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.2"  # without a network, another address than the one on which mpiexec listens
