"""The operator's ports with hostile callers: incomplete, slow and malformed requests, and too many of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replica import wait_until
from thorough import choose

from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.http import bounded_server, probes, webhook
from topkube_operator.http.bounded_server import BoundedServer, Bounds, listen
from topkube_operator.http.certificates import Authority
from topkube_operator.http.probes import Probes

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def find_no_problem() -> str:
    return ""


@contextlib.contextmanager
def serve(find_health_problem: Callable[[], str] = find_no_problem) -> Iterator[Probes]:
    probes = Probes(0, OperatorMetrics().render, find_health_problem, find_no_problem, "127.0.0.1")
    probes.start()
    try:
        yield probes
    finally:
        probes.stop()


def call(port: int, request: bytes = LAST_REQUEST, *, give_up: bool = False) -> bytes:
    """Return the answer to a request, up to the end of the connection. With `give_up`, close the sending side before
    the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(request)
        if give_up:
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: connection.recv(65536), b""))
        return b""


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_incomplete_requests_start_no_threads_and_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "BOUNDS", Bounds(connections=64, connections_per_client=16, head_seconds=1.0))
    with serve() as server, contextlib.ExitStack() as stack:
        threads = threading.active_count()
        connections = []
        for _ in range(400):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=120))
            with contextlib.suppress(OSError):  # the server may have closed it already, to make room
                connection.sendall(b"GET /healthz HTT")
            connections.append(connection)
        assert call(server.port).startswith(b"HTTP/1.1 200 ")
        assert threading.active_count() <= threads + 2
        wait_until(lambda: all(map(is_closed, connections)))


def test_a_head_that_comes_byte_by_byte_gets_no_extra_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "BOUNDS", Bounds(head_seconds=0.5))
    with serve() as server, socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")

        def send_slowly() -> bool:
            with contextlib.suppress(OSError):  # a reset or a broken pipe: which of them depends on the kernel
                connection.sendall(b"A")
                return False
            return True

        wait_until(send_slowly)


def test_a_check_that_hangs_is_a_failed_probe_and_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_CHECK_SECONDS", 1.0)
    release = threading.Event()

    def find_problem_late() -> str:
        release.wait(120)
        return ""

    with serve(find_problem_late) as server:
        try:
            assert b"the check has not ended" in call(server.port)
            assert call(server.port, LAST_REQUEST.replace(b"healthz", b"readyz")).startswith(b"HTTP/1.1 200 ")
        finally:
            release.set()


def test_scrapes_within_a_second_share_one_text() -> None:
    renders = 0

    def count_and_render() -> bytes:
        nonlocal renders
        renders += 1
        return b"text"

    probes = Probes(0, count_and_render, find_no_problem, find_no_problem, "127.0.0.1")
    probes.start()
    try:
        answers = [call(probes.port, LAST_REQUEST.replace(b"healthz", b"metrics")) for _ in range(5)]
    finally:
        probes.stop()
    assert all(answer.endswith(b"text") for answer in answers)
    assert renders < 5


# The bounded server alone.


@contextlib.asynccontextmanager
async def open_server(
    bounds: Bounds, answer: bounded_server.Answer, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[BoundedServer, int]]:
    listener = listen("127.0.0.1", 0)
    server = BoundedServer(listener, answer, tls, bounds)
    await server.open()
    try:
        yield server, listener.getsockname()[1]
    finally:
        await server.close()


async def answer_hello(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def send_request(port: int, request: bytes = REQUEST) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    return reader, writer


async def wait_in_loop_until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.01)


def test_the_longest_idle_connection_makes_room_and_answers_under_way_are_finished() -> None:
    async def run_scenario() -> None:
        release, busy = asyncio.Event(), asyncio.Event()

        async def answer_late(request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/slow":
                busy.set()
                await release.wait()
            return await answer_hello(request)

        async with open_server(Bounds(connections=4, connections_per_client=3), answer_late) as (server, port):
            reader, slow_writer = await send_request(port, b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            await busy.wait()
            idle = [await send_request(port, b"GET /") for _ in range(6)]
            await wait_in_loop_until(lambda: len(server) == 3)
            answer, writer = await send_request(port)
            assert (await answer.readline()).startswith(b"HTTP/1.1 200")
            assert await idle[0][0].read() == b"", "the connection was closed"
            release.set()
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            slow_writer.close()

    asyncio.run(run_scenario())


def test_a_new_connection_is_refused_while_all_others_are_being_answered() -> None:
    async def run_scenario() -> None:
        release, entered = asyncio.Event(), asyncio.Semaphore(0)

        async def answer_late(request: web.BaseRequest) -> web.StreamResponse:
            entered.release()
            await release.wait()
            return await answer_hello(request)

        async with open_server(Bounds(connections=2, connections_per_client=2), answer_late) as (_, port):
            kept = [await send_request(port) for _ in range(2)]
            for _ in kept:
                await entered.acquire()
            with contextlib.suppress(ConnectionError):
                newcomer, _writer = await send_request(port)
                assert await newcomer.read() == b""
            release.set()
            for reader, _ in kept:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    asyncio.run(run_scenario())


def test_idle_connections_and_requests_that_never_end_are_closed() -> None:
    async def run_scenario() -> None:
        async def answer_never(request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/never":
                await asyncio.Event().wait()
            return await answer_hello(request)

        async with open_server(Bounds(idle_seconds=0.3, work_seconds=1.5), answer_never) as (server, port):
            reader, _ = await send_request(port)
            assert b"hello" in await asyncio.wait_for(reader.read(), 120)
            reader, _ = await send_request(port, b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 120)).startswith(b"HTTP/1.1 503")
            await wait_in_loop_until(lambda: len(server) == 0)

    asyncio.run(run_scenario())


def test_malformed_requests_are_answered_and_not_logged_but_our_own_faults_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run_scenario() -> None:
        async def raise_error(request: web.BaseRequest) -> web.StreamResponse:
            await request.content.read()
            raise ZeroDivisionError("our own fault")

        async with open_server(Bounds(), raise_error) as (_, port):
            for request in (b"\x00\x00\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
                reader, writer = await send_request(port, request)
                assert (await reader.readline()).split()[1] == b"400"
                writer.close()
            assert caplog.records == []
            reader, writer = await send_request(port)
            assert (await reader.readline()).startswith(b"HTTP/1.1 500")
            writer.close()

    asyncio.run(run_scenario())
    assert [record.getMessage() for record in caplog.records] == ["a request for /healthz could not be answered"]


def test_a_handshake_that_never_comes_ends() -> None:
    async def run_scenario() -> None:
        tls = Authority.derive(b"secret").build_server_context(["127.0.0.1"])
        async with open_server(Bounds(head_seconds=0.4), answer_hello, tls) as (server, port):
            for reader, _ in [await send_request(port, b""), await send_request(port, b"GET / HTTP/1.1\r\n\r\n")]:
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 120)
            await wait_in_loop_until(lambda: len(server) == 0)

    asyncio.run(run_scenario())


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    async def run_scenario() -> None:
        async def read_body(request: web.BaseRequest) -> web.StreamResponse:
            body = await bounded_server.read_body(request, 100, 0.2)
            return body if isinstance(body, web.Response) else web.Response(body=body)

        async with open_server(Bounds(), read_body) as (_, port):
            heads = {
                b"Content-Length: 9": b"408",
                b"Content-Length: 101": b"413",
                b"Transfer-Encoding: chunked": b"411",
            }
            for head, status in heads.items():
                reader, _ = await send_request(port, b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
                assert (await reader.readline()).split()[1] == status

    asyncio.run(run_scenario())


# Malformed requests.

HEADS = st.lists(
    st.sampled_from(
        [
            *(b"GET", b"POST", b" ", b"/healthz", b"/metrics", b"/", b"HTTP/1.1", b"HTTP/9.9", b"\r\n", b"\n", b"\x00"),
            *(b"Host: x", b"Content-Length: 5", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"a" * 9000),
            *(b"Connection: Upgrade", b"Upgrade: websocket", b"Expect: 100-continue", b"PRI * HTTP/2.0", b"0", b"ffff"),
        ]
    )
    | st.binary(max_size=20),
    max_size=12,
).map(b"".join)


@pytest.fixture(scope="module")
def served_probes() -> Iterator[Probes]:
    with serve() as probes:
        yield probes


@given(HEADS)
@settings(max_examples=60)
def test_probes_are_answered_whatever_callers_send(served_probes: Probes, request: bytes) -> None:
    answer = call(served_probes.port, request, give_up=True)
    assert answer == b"" or answer.startswith((b"HTTP/1.", b"HTTP/9.9"))
    assert call(served_probes.port).startswith(b"HTTP/1.1 200 ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4),
    max_leaves=20,
)
PARTS = ("apiVersion", "kind", "metadata", "spec", "template", "containers", "name", "workers", "command", "image")
PARTS += ("aggregation", "dataset", "launcher", "runPolicy", "labels", "uri", "checkpoint", "env", "args", "cache")
JOBS = st.recursive(
    JSON | st.sampled_from(["worker", "topkube.dev/v1alpha1", "TrainingJob"]),
    lambda below: st.dictionaries(st.sampled_from(PARTS), below, max_size=6) | st.lists(below, max_size=3),
    max_leaves=40,
)
REVIEWS = st.fixed_dictionaries(
    {
        "request": st.fixed_dictionaries(
            {"uid": st.just("1") | JSON, "operation": st.sampled_from(["CREATE", "UPDATE", "DELETE"]), "object": JOBS},
            optional={"oldObject": JOBS, "namespace": JSON},
        )
    }
)


@given(st.binary(max_size=300) | (REVIEWS | JSON).map(lambda data: json.dumps(data).encode()))
@example(b"[" * 100_000)
@example(b'{"request": ' * 5_000)
@example(b'{"request": {"uid": "1", "operation": "CREATE", "object": {"spec": {"workers": NaN}}}}')
@example(b'{"request": {"uid": "1", "operation": "CREATE", "object": {"spec": {"workers": 1e999}}}}')
@example(b'{"request": {"uid": "1", "operation": "CREATE", "object": {"kind": "\\ud800"}}}')
@settings(max_examples=choose(100, thorough=300))
def test_the_webhook_answers_any_body_with_a_short_review_or_a_400(body: bytes) -> None:
    status, text = webhook.answer_review(body)
    assert status in (200, 400)
    assert len(text) < 64 << 10
    if status == 200:
        answer = json.loads(text)
        assert answer["kind"] == "AdmissionReview"
        assert isinstance(answer["response"]["allowed"], bool)
        json.dumps(answer, allow_nan=False)


def _build_job(**spec: Any) -> dict[str, Any]:
    container = {"name": "worker", "image": "i:1", "command": ["a"]}
    metadata = {"name": "t", "namespace": "n"}
    whole_spec = {"template": {"spec": {"containers": [container]}}, **spec}
    return {"apiVersion": "topkube.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": whole_spec}


def _build_fields(count: int) -> dict[str, int]:
    return {f"a{index}": 1 for index in range(count)}


def _build_job_of_containers(containers: list[Any]) -> dict[str, Any]:
    return _build_job(template={"spec": {"containers": containers}})


HEAVY_BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "unknown fields": lambda: _build_job(**_build_fields(240_000)),
    "unknown fields of a part": lambda: _build_job(aggregation=_build_fields(90_000)),
    "parts that are none": lambda: _build_job(
        runPolicy=_build_fields(199), dataset=_build_fields(199), aggregation=_build_fields(199)
    ),
    "a long name": lambda: _build_job(**{"w" * 3_000_000: 1}),
    "labels": lambda: {**_build_job(), "metadata": {"name": "t", "labels": _build_fields(90_000)}},
    "empty containers": lambda: _build_job_of_containers([{}] * 90_000),
    "containers with one name": lambda: _build_job_of_containers([{"name": f"w{index}"} for index in range(45_000)]),
    "arguments that are no text": lambda: _build_job_of_containers([{"name": "worker", "args": [1] * 90_000}]),
    "variables": lambda: _build_job_of_containers([{"name": "worker", "env": [{}] * 90_000}]),
    "a list of lists": lambda: _build_job(template={"x": [[[]]] * 400_000}),
    "text": lambda: _build_job(dataset={"uri": "s3://" + "a" * 3_000_000}),
}


@pytest.mark.parametrize("body", HEAVY_BODIES)
def test_the_work_for_one_body_is_bounded(body: str) -> None:
    """The bodies have the largest size that is accepted. With a limit of 8 MiB, each body would take 43 seconds."""
    text = json.dumps(
        {"request": {"uid": "1", "operation": "CREATE", "object": HEAVY_BODIES[body]()}}, separators=(",", ":")
    )
    assert len(text) < webhook.LARGEST_BODY
    begun = time.process_time()
    status, answer = webhook.answer_review(text.encode())
    assert time.process_time() - begun < 20
    assert status == 200
    assert not json.loads(answer)["response"]["allowed"]
    assert len(answer) < 64 << 10
