"""Measure the link between nodes as NCCL uses it, so that `auto` and `dense` can compare NCCL with MPI."""

from __future__ import annotations

import time

from topkube.algorithms import OWN, Algorithm, Workload
from topkube.collectives.all_reduce import load
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.request import Request

_ELEMENTS = 4 << 20
"""The float32 values of one all-reduce: 16 MiB, so that bandwidth decides, not latency."""
_ROUNDS = 3


def measure_nccl_link(engine: DeviceAllReduce | None) -> float | None:
    """Return the bytes per second that a node sends through NCCL; None without a GPU, with one node, and if torch has
    no NCCL. A collective of all ranks."""
    if engine is None or not engine.memory.is_cuda or engine.world.nodes == 1:
        return None
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        return None
    return measure_link(engine, next(algorithm for algorithm in OWN if algorithm.needs_gpu))


def measure_link(engine: DeviceAllReduce, algorithm: Algorithm) -> float:
    """Return the bytes per second that a node sends in an all-reduce by `algorithm`, the best of a few rounds after one
    that connects the ranks. A collective of all ranks."""
    import torch

    world = engine.world
    engine.memory.enter_thread()
    with engine.on_stream():
        x = torch.zeros(_ELEMENTS, device=engine.device)
    best = 0.0
    sent = algorithm.traffic(Workload(world.nodes, max(map(len, world.node_ranks)), _ELEMENTS)).sent
    for is_first in (True, *(False for _ in range(_ROUNDS))):
        start = time.perf_counter()
        engine.begin(load(algorithm), Request(x))
        engine.flush()
        if not is_first:
            best = max(best, sent / (time.perf_counter() - start))
    return best
