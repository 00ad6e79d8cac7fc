"""Rates of the machine, measured in the same run: memory with all ranks at once, links with a plain TCP stream."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allreduce.network import Network, Node

STREAM = Path(__file__).with_name("stream.py")
PASSES = 10
LARGEST = 16_000_000
"""The bytes of the largest message of the link probe."""


def time_memory(kind: str, length: int, barrier: Callable[[], None]) -> dict[str, Any]:
    """Time one pass over `length` float32 per rank, with all ranks at once: "read" or "update" (a += b)."""
    import numpy as np

    from topkube import kernels

    a, b = np.ones(length, np.float32), np.ones(length, np.float32)
    passes: dict[str, Callable[[], object]] = {
        "read": lambda: kernels.is_finite(a),
        "update": lambda: kernels.add_(a, b),
    }
    run = passes[kind]
    run()
    barrier()
    start = time.clock_gettime(time.CLOCK_MONOTONIC)
    for _ in range(PASSES):
        run()
    return {"start": start, "end": time.clock_gettime(time.CLOCK_MONOTONIC), "passes": PASSES}


def time_link(network: Network, sizes: list[int]) -> dict[str, Any]:
    """Return the seconds in which node 0 and node 1 send each other `size` bytes at the same time, like collectives:
    the median for each size, and the round trip of one byte."""
    first, second = network.nodes[:2]
    return finish_stream(*start_stream(first, second, sizes))


def start_stream(first: Node, second: Node, sizes: list[int]) -> tuple[subprocess.Popen[str], subprocess.Popen[bytes]]:
    """Start the two programs that exchange messages of `sizes` bytes, STREAM_REPEATS times each."""
    arguments = [first.address, ",".join(map(str, sizes))]
    program = [sys.executable, str(STREAM)]
    listener = subprocess.Popen(
        first.wrap_command([*program, "listen", *arguments]),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    connector = subprocess.Popen(second.wrap_command([*program, "connect", *arguments]), stdin=subprocess.DEVNULL)
    return listener, connector


def finish_stream(listener: subprocess.Popen[str], connector: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for the programs of `start_stream`, and return what the listener has measured."""
    output, _ = listener.communicate(timeout=120)
    connector.wait(timeout=10)
    if listener.returncode or connector.returncode:
        raise RuntimeError("the link probe failed; its traceback is above")
    answer: dict[str, Any] = json.loads(output)
    return answer
