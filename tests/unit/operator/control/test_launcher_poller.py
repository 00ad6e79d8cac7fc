"""The operator and hostile launchers: redirects, endless answers, numbers that JSON does not have."""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_api_server import START
from simulated_cluster import SimulatedCluster, start_running_job

from topkube.errors import LaunchError
from topkube.job.crd import build_crd
from topkube.launch import contract
from topkube_operator.children import credentials
from topkube_operator.control import launcher_poller
from topkube_operator.planning import planner
from topkube_operator.watch.watch_cache import WatchCache

SEED, UID = b"s" * 32, "uid-1"
STATUS = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
LARGEST_STATUS = 64 << 10


def build_tls(uid: str = UID) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    derived = credentials.derive_credentials(SEED, uid)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "both.pem")
        path.write_text(derived.certificate + derived.key)
        context.load_cert_chain(path)
    return context


def poll(answer: Answer, *, uid: str = UID, domains: str = "") -> contract.LauncherStatus:
    """Return the operator's view of a launcher that sends this answer."""

    async def serve_and_poll() -> contract.LauncherStatus:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=build_tls(uid))
        await site.start()
        try:
            async with launcher_poller.open_session() as session:
                endpoint = f"127.0.0.1:{runner.addresses[0][1]}"
                return await launcher_poller.read_status(
                    session, endpoint, "token", launcher_poller._build_tls_context(SEED, UID), domains
                )
        finally:
            await runner.cleanup()

    return asyncio.run(serve_and_poll())


def test_an_answer_longer_than_one_segment_is_read_to_its_end() -> None:
    """8,000 missing workers make an answer of 47 KB. The answer arrives in pieces, as over a network."""
    status = contract.LauncherStatus(attempt=1, state="Waiting", joined=2, missing=tuple(range(2, 8000)))
    text = status.to_json().encode()

    async def answer_in_pieces(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(text), 1400):
            await response.write(text[start : start + 1400])
        return response

    assert poll(answer_in_pieces) == status


def test_an_endless_answer_is_refused_and_not_kept() -> None:
    written = 0

    async def answer_without_end(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        while written < 64 << 20 and request.transport is not None:
            await response.write(b" " * 65536)
            await asyncio.sleep(0)  # the end of the connection is noticed here
            written += 65536
        return response

    with pytest.raises(LaunchError, match="more than 262,144 bytes"):
        poll(answer_without_end)
    assert written < 16 << 20


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    paths: list[str] = []

    async def redirect(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(request.path)
        if request.path != contract.STATUS_PATH:
            return web.Response(text='{"attempt": 1, "state": "Running"}')
        return web.Response(status=status, headers={"Location": "/latest/meta-data"})

    with pytest.raises(LaunchError, match=f"status {status}"):
        poll(redirect)
    assert paths == [contract.STATUS_PATH]


def test_the_token_is_sent_only_to_a_launcher_with_the_pinned_certificate() -> None:
    async def fail_if_called(_: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("another server was called")

    with pytest.raises(OSError, match="certificate verify failed"):
        poll(fail_if_called, uid="uid-of-another-job")


def test_a_compressed_answer_is_not_unpacked() -> None:
    async def answer_with_bomb(_: web.BaseRequest) -> web.StreamResponse:
        response = web.Response(text=" " * (8 << 20) + "{}")
        response.enable_compression(web.ContentCoding.gzip)
        return response

    with pytest.raises(LaunchError, match="status is invalid"):
        poll(answer_with_bomb)


@pytest.mark.parametrize("address", ["10.1.2.3", "192.168.3.4", "240.1.2.3", "fd00::1", "2001:db8::7"])
def test_an_address_that_pods_have_is_accepted(address: str) -> None:
    assert launcher_poller.check_pod_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "localhost", "metadata.google.internal", "10.0.0.1:80", "10.0.0.1/x", "0x7f000001", "2130706433"),
        *("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "255.255.255.255", "224.0.0.1", "ff02::1"),
        *("169.254.169.254", "::ffff:169.254.169.254", "::ffff:127.0.0.1", "fe80::1", "fe80::1%eth0", "fd00::1%eth0"),
        *("fd00:ec2::254", "100.100.100.200", "168.63.129.16", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"),
        *("10.0.0.1@169.254.169.254", "10.0.0.1#", "10.0.0.1?", "[::1]"),
    ],
)
def test_an_address_that_no_pod_has_is_not_polled(address: str) -> None:
    with pytest.raises(LaunchError, match="is not polled"):
        launcher_poller.check_pod_address(address)


# Answers of any content.

NUMBERS = st.sampled_from(["1e400", "-1e400", "9" * 40, "-7", "1.5", "NaN", "Infinity", "0", "3", "true", "null"])
WORDS = st.text(max_size=20) | st.sampled_from(["x" * 40_000, "\x00", "Error", "a b", "\ud800", "12"])
VALUES = NUMBERS | WORDS.map(lambda text: json.dumps(text)) | st.sampled_from(["[]", "{}", "[[]]", '{"a": 1}'])
FIELDS = {
    "progress": ("step", "totalSteps", "percent", "etaSeconds", "loss", "samplesPerSecond", "updatedAt", "other"),
    "firstFailure": ("pod", "rank", "reason", "exitCode", "message", "logTail", "other"),
    "cache": ("hitRatio", "remoteBytes", "nodes", "other"),
}


@st.composite
def draw_hostile_text(draw: st.DrawFn, head: str) -> str:
    """Draw the JSON of a launcher's status or termination message in which any field holds any value."""
    parts = [head]
    for name, fields in FIELDS.items():
        if draw(st.booleans()):
            chosen = draw(st.dictionaries(st.sampled_from(fields), VALUES, max_size=4))
            if name == "cache" and draw(st.booleans()):
                entry = st.dictionaries(st.sampled_from(["name", "cachedBytes", "x"]), VALUES, max_size=3)
                nodes = draw(st.lists(entry.map(_write_object), max_size=3))
                chosen["nodes"] = "[" + ", ".join(nodes * draw(st.sampled_from([1, 1, 200]))) + "]"
            parts.append(f'"{name}": {_write_object(chosen)}')
    others = draw(st.lists(st.sampled_from(["joined", "missing", "oomKills", "index", "new"]), unique=True))
    parts += [f'"{name}": {draw(VALUES)}' for name in others]
    return "{" + ", ".join(parts) + "}"


def _write_object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}"


def read_status(text: str | bytes) -> contract.LauncherStatus | None:
    """Return the status that a launcher sends, or None if the operator refuses the status with a short message."""
    try:
        return contract.LauncherStatus.read(text)
    except LaunchError as error:
        words = str(error)
    assert len(words) < 4096
    return None


def check_status(world: SimulatedCluster) -> None:
    """Check that the status to write is JSON, small, and valid by the CRD's schema."""
    text = json.dumps(world.status, allow_nan=False)
    assert len(text) < LARGEST_STATUS
    jsonschema.Draft4Validator(STATUS).validate(json.loads(text))


@given(draw_hostile_text('"attempt": 1, "state": "Running"'))
@example('{"attempt": 1, "state": "Running", "progress": {"samplesPerSecond": 1e400, "step": 3}}')
@example('{"attempt": 1, "state": "Running", "joined": -5}')
@example('{"attempt": 1, "state": "Running", "progress": {"loss": "%s"}}' % ("0" * 900_000))
@settings(max_examples=60)
def test_the_status_stays_small_and_valid_whatever_a_launcher_answers(text: str) -> None:
    status = read_status(text)
    if status is None:
        return
    world = start_running_job()
    world.report = launcher_poller._build_report(status)
    world.now = START + timedelta(seconds=60)
    world.reconcile()
    check_status(world)


@given(draw_hostile_text('"attempt": 1, "state": "Failed", "exitCode": 1'), st.sampled_from([0, 1, 137]))
@example('{"attempt": 1, "state": "Succeeded", "exitCode": 0, "progress": {"loss": "%s"}}' % ("0" * 90_000), 0)
@example('{"attempt": 1, "state": "Succeeded", "exitCode": 0, "progress": {"samplesPerSecond": 1e400}}', 0)
@settings(max_examples=60)
def test_any_termination_message_leaves_the_status_small_and_valid(text: str, code: int) -> None:
    world = start_running_job()
    world.end("train-launcher-1-uid-1", code, "launcher", ended_message=text)
    world.end("train-worker-0-1-uid-1", code, "worker", ended_message=text)
    world.reconcile()
    check_status(world)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")))
@example(b"[" * 200_000)
@example(b'{"attempt": 1, "state": "Waiting", "missing": [' + b'"a",' * 60_000 + b"1]}")
def test_bytes_of_any_kind_are_a_status_or_a_refusal(text: bytes) -> None:
    read_status(text)


def test_numbers_in_bounds_and_words_are_kept_as_they_are() -> None:
    text = contract.LauncherStatus.model_validate(
        {
            "attempt": 1,
            "state": "Running",
            "progress": {"step": 7, "totalSteps": 9, "percent": 77, "loss": "0.125", "samplesPerSecond": 1.5},
            "firstFailure": {
                "pod": "p",
                "rank": 3,
                "reason": "OutOfnvidia.com/gpu",
                "exitCode": 137,
                "logTail": "a\nb",
            },
            "cache": {"hitRatio": "0.5", "remoteBytes": 9, "nodes": [{"name": "n", "cachedBytes": 4}]},
        }
    ).to_json()
    assert contract.LauncherStatus.read(text).to_json() == text


def test_the_end_of_a_long_log_tail_is_kept() -> None:
    ending = contract.Ending.read(
        json.dumps({"attempt": 1, "state": "Failed", "exitCode": 1, "firstFailure": {"logTail": "y" * 9000 + "END"}})
    )
    assert ending.first_failure is not None
    assert (ending.first_failure.log_tail or "").endswith("yEND")
    assert len(ending.first_failure.log_tail or "") == 4096


def test_ten_thousand_missing_workers_leave_the_status_small() -> None:
    """10,000 missing workers in the answer of a job of two."""
    world = start_running_job()
    status = contract.LauncherStatus(attempt=1, state="Waiting", missing=tuple(range(10_000)))
    world.report = launcher_poller._build_report(status)
    assert world.job is not None
    assert len(json.dumps(planner.plan(world.job, world.observe(), world.now).status)) < LARGEST_STATUS


def test_the_launcher_gets_the_rack_of_each_worker() -> None:
    world = start_running_job(workers=3, topology={"key": "rack"})
    launcher = world.pods["train-launcher-1-uid-1"]
    racks = {"node-a": "r1", "node-b": "r2", "node-c": "r1"}
    for index, node in enumerate(racks):
        world.change(f"train-worker-{index}-1-uid-1", node=node)

    def read_label(node: str, key: str) -> str:
        return racks[node] if key == "rack" else ""

    assert launcher_poller.find_domains(world.observe().pods, launcher, "rack", read_label) == "0,1,0"
    assert launcher_poller.find_domains(world.observe().pods, launcher, "zone", read_label) == "0,0,0"
    world.change("train-worker-2-1-uid-1", node="")
    assert launcher_poller.find_domains(world.observe().pods, launcher, "rack", read_label) == ""


def test_the_poller_reads_only_the_pods_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for launchers twice a second in kopf's event loop. What a plan sees costs more with every job."""
    world, cache = start_running_job(topology={"key": "rack"}), WatchCache()
    assert world.job is not None
    world.job["metadata"]["resourceVersion"] = "1"
    cache.put_job(world.job)
    for name, pod in world.pods.items():
        started = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        status = {"podIP": "10.0.0.1", "containerStatuses": [{"name": pod.main_container, "state": started}]}
        manifest = world.manifests[name]
        manifest["metadata"]["resourceVersion"] = "1"
        cache.put("Pod", {**manifest, "spec": {"nodeName": pod.node}, "status": status})
    monkeypatch.delattr(WatchCache, "observe")
    poller = launcher_poller.LauncherPoller(cache, None, world.policy, lambda: True)  # type: ignore[arg-type]
    ((key, uid, launcher, domains),) = poller._find_launchers()
    assert (key, uid, launcher.name, domains) == (("team", "train"), UID, "train-launcher-1-uid-1", "0,0")


def test_domains_that_are_too_long_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    target = launcher_poller._Target(launcher_poller._build_tls_context(SEED, UID))
    text = contract.encode_domains(index % 300 for index in range(10_000))
    for _ in range(3):
        target.set_domains(("team", "train"), text)
    assert target.domains == ""
    (record,) = caplog.records
    assert "team/train: spec.topology has no effect" in record.getMessage()
    target.set_domains(("team", "train"), "0*64")
    assert target.domains == "0*64"


@pytest.mark.parametrize("domains", ["", "1,0"])
def test_domains_are_sent_with_the_request(domains: str) -> None:
    seen: list[str | None] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.headers.get(contract.DOMAINS_HEADER))
        return web.Response(text=contract.LauncherStatus(attempt=1, state="Waiting").to_json())

    poll(answer, domains=domains)
    assert seen == [domains or None]
