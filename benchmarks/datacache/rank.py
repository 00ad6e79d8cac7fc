"""The program of every rank: it opens a contender, reads an epoch between barriers, and checks that all samples came.

rank.py LIBRARY SOCKET LAYOUT
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import torch

import topkube
from allreduce import orders
from datacache import contenders
from datacache.problem import NUMBER_BYTES, CacheProblem

_DIRECTORY = Path(os.environ["TMPDIR"])
_open: dict[str, Any] = {}
"""The contenders that are open, by name."""


def main(path: str) -> None:
    world = topkube.init()
    torch.set_num_threads(1)
    orders.follow(path, world.rank, lambda order: run_order(world, order))
    for contender in _open.values():
        contender.close()


def run_order(world: Any, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "link":
        return time_link(world, order["url"])
    if order["do"] == "close":
        _open.pop(order["name"]).close()
        gc.collect()
        return {}
    problem = CacheProblem(**order["problem"])
    contenders.import_libraries(order["kind"])
    wait_for_all(world)
    used_before = read_processor_seconds()
    start = time.clock_gettime(time.CLOCK_MONOTONIC)
    if order["name"] not in _open:
        _open[order["name"]] = open_dataset(world, order, problem)
    # The numbers of the samples: each sample begins with its number.
    heads = [batch[:, :NUMBER_BYTES].clone() for batch in _open[order["name"]].read_epoch(order["epoch"])]
    end = time.clock_gettime(time.CLOCK_MONOTONIC)
    used = read_processor_seconds() - used_before
    wait_for_all(world)
    missing, repeated = count_missing(world, problem, heads)
    statistics = getattr(getattr(_open[order["name"]], "dataset", None), "statistics", dict)()
    return {
        "start": start,
        "end": end,
        "processor_seconds": used,
        "missing": missing,
        "repeated": repeated,
        "counted": statistics,
    }


def read_processor_seconds() -> float:
    """Return the processor time of this process and of all its descendants since they started."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # own, and of children that have ended
    family = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def open_dataset(world: Any, order: dict[str, Any], problem: CacheProblem) -> Any:
    folder = _DIRECTORY / order["folder"] / f"node{world.node}"
    arguments: dict[str, Any] = dict(order["arguments"])
    if order["kind"] in ("InMemory", "PageCache"):
        arguments["sampler"] = _open[arguments.pop("like")].sampler
    kind = getattr(contenders, order["kind"])
    return kind(problem, order["uri"], folder, _DIRECTORY / "remote", **arguments)


def count_missing(world: Any, problem: CacheProblem, heads: list[torch.Tensor]) -> tuple[int, int]:
    """Return the number of samples that no rank has read, and the number of samples that were read twice."""
    received = torch.cat(heads).numpy().view("<i8").reshape(-1) if heads else np.empty(0, np.int64)
    counts = np.bincount(received, minlength=problem.samples)
    total = np.empty_like(counts)
    world.comm.Allreduce(counts, total)
    if total.size != problem.samples:
        raise ValueError(f"sample {total.size - 1} arrived, but the dataset has {problem.samples} samples")
    return int((total == 0).sum()), int((total - 1).clip(0).sum())


def wait_for_all(world: Any) -> None:
    """Wait in a barrier that sleeps. A barrier that spins would take the processor from ranks that still read."""
    request = world.comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


def time_link(world: Any, url: str) -> dict[str, Any]:
    """Time a plain GET by the first rank of every node at the same time. The bytes are discarded."""
    address, path = urlsplit(url).hostname, urlsplit(url).path
    received, buffer = 0, bytearray(1 << 20)
    wait_for_all(world)
    start = time.clock_gettime(time.CLOCK_MONOTONIC)
    if world.local_rank == 0:
        with socket.create_connection((address, 80)) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            while count := connection.recv_into(buffer):
                received += count
    end = time.clock_gettime(time.CLOCK_MONOTONIC)
    wait_for_all(world)
    return {"start": start, "end": end, "bytes": received}


if __name__ == "__main__":
    main(sys.argv[2])
