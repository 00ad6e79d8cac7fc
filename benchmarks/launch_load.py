"""Measure the launch layer: the cost of a launcher's sessions, and how fast the output of a rank arrives.

    .venv/bin/python benchmarks/launch_load.py                          # about a minute
    .venv/bin/python benchmarks/launch_load.py --sessions 128 1024 --megabytes 20 700

Sessions: a real launcher waits for one more worker than there are; the workers are coroutines of this process. The
results are those of the launcher: its processor time to accept all calls, its memory, and its processor time per second
for the heartbeats. Output: a real worker with one rank prints lines of 100 bytes as fast as it can and ends. The
results are the share of the lines in the pod's output, and the time from the launcher's start to the worker's end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/mpi"))

from pods import KEY, PYTHONS, UID, SimulatedJob  # noqa: E402  the tests' stand-in for the operator

from topkube.launch.connection.link import FRAME_BYTES, Link  # noqa: E402
from topkube.launch.connection.messages import Hello  # noqa: E402
from topkube.launch.contract import JOIN_PATH, compute_worker_token  # noqa: E402

_HEARTBEATS_SECONDS = 10.0
_PRINTING_SCRIPT = """
import sys
for _ in range({megabytes}):
    sys.stdout.write(("x" * 99 + chr(10)) * 10_000)
print("the last line")
"""


def read_processor_seconds(pid: int) -> float:
    """Return the processor time of a living process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10


async def run_session(client: aiohttp.ClientSession, index: int, port: int) -> None:
    """Simulate a worker that calls until it is accepted, and then stays connected."""
    headers = {"Authorization": f"Bearer {compute_worker_token(KEY, UID, index, 1)}"}
    url = f"https://127.0.0.1:{port}{JOIN_PATH}?index={index}&attempt=1"
    hello = Hello(session=str(index), ip=f"127.60.{index >> 8}.{index & 255}", slots=1, python="p", time=time.time())
    while True:
        try:
            async with asyncio.timeout(10):
                socket = await client.ws_connect(url, headers=headers, max_msg_size=FRAME_BYTES)
                await socket.send_str(hello.to_json())
                await socket.receive()
            break
        except (TimeoutError, aiohttp.ClientError, OSError):
            await asyncio.sleep(0.5)
    await Link(lambda _: None, lambda *_: None).run(socket, 0)


async def measure_sessions(count: int, directory: Path) -> dict[str, object]:
    """Measure the cost of `count` sessions for the launcher."""
    with SimulatedJob(directory, ["true"], count + 1, 1, rendezvous_seconds=3600, check_address=False) as job:
        launcher = job.start_launcher().process.pid
        while await asyncio.to_thread(job.ask_status) is None:
            await asyncio.sleep(0.1)
        began, used = time.monotonic(), read_processor_seconds(launcher)
        connector = aiohttp.TCPConnector(ssl=job.tls, limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:
            calls = [asyncio.create_task(run_session(client, index, job.port)) for index in range(count)]
            while (status := await asyncio.to_thread(job.ask_status)) is None or status.joined < count:
                await asyncio.sleep(0.2)
            join_seconds, join_used = time.monotonic() - began, read_processor_seconds(launcher) - used
            began, used = time.monotonic(), read_processor_seconds(launcher)
            await asyncio.sleep(_HEARTBEATS_SECONDS)
            share = (read_processor_seconds(launcher) - used) / (time.monotonic() - began)
            memory = read_resident_mib(launcher)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    return {
        "sessions": count,
        "join_seconds": round(join_seconds, 1),
        "join_processor_seconds": round(join_used, 1),
        "heartbeats_percent_of_a_core": round(100 * share, 1),
        "memory_mib": memory,
    }


def measure_output(megabytes: int, directory: Path) -> dict[str, object]:
    """Measure a rank that prints `megabytes` (10**6 bytes) and ends."""
    command = [str(PYTHONS["MPICH"]), "-c", _PRINTING_SCRIPT.format(megabytes=megabytes)]
    with SimulatedJob(directory, command, 1, 1) as job:
        job.environment = {"PYTHONUNBUFFERED": ""}
        began = time.monotonic()
        job.start()
        codes = [job.launcher.wait(600) if job.launcher else 1, job.workers[0].wait(600)]
        seconds = time.monotonic() - began
        printed = job.workers[0].output_file.read_bytes()
    lines = printed.count(b"[rank 0] xxx")
    return {
        "megabytes": megabytes,
        "exit_codes": codes,
        "share_printed": lines / (megabytes * 10_000),
        "last_line": b"the last line" in printed,
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="*", default=[128, 1024])
    parser.add_argument("--megabytes", type=int, nargs="*", default=[1, 20, 700])
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for count in options.sessions:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(asyncio.run(measure_sessions(count, Path(directory)))), flush=True)
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(measure_output(megabytes, Path(directory))), flush=True)


if __name__ == "__main__":
    main()
