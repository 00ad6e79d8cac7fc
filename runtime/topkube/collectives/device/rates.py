"""The rates of a device, for the choices of `auto` and `dense`: of its memory, and of the link between nodes as NCCL
uses it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from topkube.algorithms import OWN, Algorithm, Workload
from topkube.collectives.all_reduce import load
from topkube.collectives.device.pipeline import DeviceAllReduce
from topkube.collectives.device.rank_group import count_gpus
from topkube.collectives.request import Request

_ELEMENTS = 4 << 20
"""The float32 values of one all-reduce: 16 MiB, so that bandwidth decides, not latency."""
_ROUNDS = 3
_COPIED_BYTES = 16 << 20
"""The bytes of a copy: little memory is free after the first backward."""


@dataclass(frozen=True)
class DeviceRates:
    """What a rank measured on its GPU, in bytes per second: `memory` counts the bytes that a copy reads and writes, and
    `nccl_link` is what a node sends through NCCL (None if NCCL cannot be used)."""

    memory: float
    nccl_link: float | None


def measure_device(engine: DeviceAllReduce | None) -> DeviceRates | None:
    """Measure the GPU of this rank; None without a GPU, and with one node. A collective of all ranks."""
    if engine is None or not engine.memory.is_cuda or engine.world.nodes == 1:
        return None
    return DeviceRates(_measure_memory(engine), measure_nccl_link(engine))


def _measure_memory(engine: DeviceAllReduce) -> float:
    import torch

    engine.memory.enter_thread()
    cuda: Any = torch.cuda
    best = 0.0
    with engine.on_stream():
        source, to = (torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=engine.device) for _ in range(2))
        for _ in range(1 + _ROUNDS):  # the first round allocates and loads the kernel
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            to.copy_(source)
            end.record()
            end.synchronize()
            best = max(best, 2 * _COPIED_BYTES / (1e-3 * begin.elapsed_time(end)))
    return best


def measure_nccl_link(engine: DeviceAllReduce | None) -> float | None:
    """Return the bytes per second that a node sends through NCCL; None without a GPU, with one node, if torch has no
    NCCL, and if ranks share a GPU, which NCCL refuses. A collective of all ranks."""
    if engine is None or not engine.memory.is_cuda or engine.world.nodes == 1:
        return None
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        return None
    world = engine.world
    if count_gpus(world, world.comm, engine.device, "the comparison of GPUs") < world.size:
        return None
    return measure_link(engine, next(algorithm for algorithm in OWN if algorithm.needs_gpu))


def measure_link(engine: DeviceAllReduce, algorithm: Algorithm) -> float:
    """Return the bytes per second that a node sends in an all-reduce by `algorithm`, the best of a few rounds after one
    that connects the ranks. A collective of all ranks."""
    import torch

    world = engine.world
    engine.memory.enter_thread()
    with engine.on_stream():
        x = torch.zeros(_ELEMENTS, dtype=torch.float32, device=engine.device)
    best = 0.0
    sent = algorithm.traffic(Workload(world.nodes, world.largest_node, _ELEMENTS)).sent
    for is_first in (True, *(False for _ in range(_ROUNDS))):
        start = time.perf_counter()
        engine.begin(load(algorithm), Request(x))
        engine.flush()
        if not is_first:
            best = max(best, sent / (time.perf_counter() - start))
    return best
