"""All parts of a training on many ranks: as 2, 8 and 16 nodes, even and uneven. The same processes run all layouts,
because the start of ranks takes most of the time. `benchmarks/ranks.py` measures the same parts."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import memory
import pytest
import torch
import xxhash
from torch import nn

import topkube
from ranks.counted_messages import count_messages
from ranks.training.scene import (
    assert_close,
    build_network,
    build_optimizer,
    build_sgd,
    compute_loss,
    draw_samples,
    take_own_part,
)
from topkube.collectives.link import measure_machines
from topkube.errors import CollectiveTimeout
from topkube.settings import Settings
from topkube.world import World

STEPS = 3
DEADLINE_SECONDS = 120.0


class Times:
    """Seconds of each phase on this rank, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the `with` block to `phase`."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def list_layouts(ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each node, by a name that describes the layout."""

    def spread_ranks(nodes: int, uneven: bool) -> tuple[int, ...]:
        counts = [ranks // nodes] * nodes
        if uneven:  # the first node has more, the last one fewer
            counts[0], counts[-1] = counts[0] + counts[-1] // 2, counts[-1] - counts[-1] // 2
        return tuple(counts)

    return {
        "2 nodes": spread_ranks(2, uneven=False),
        "2 uneven nodes": spread_ranks(2, uneven=True),
        "8 uneven nodes": spread_ranks(8, uneven=True),
        "16 nodes": spread_ranks(16, uneven=ranks > 16),
    }


def rejoin_as(nodes: tuple[int, ...], deadline_seconds: float = DEADLINE_SECONDS) -> World:
    """Return a world of the same ranks as other nodes."""
    topkube.shutdown()
    settings = Settings(ranks_per_node=",".join(map(str, nodes)), deadline_seconds=deadline_seconds)
    world = topkube.init(settings)
    assert tuple(map(len, world.node_ranks)) == nodes
    return world


def has_equal_weights_on_all_ranks(model: nn.Module) -> bool:
    """Return True if the hashes show that all ranks have the same bits."""
    own = xxhash.xxh3_64_intdigest(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    return bool(topkube.reduce(own % 2**62, "min") == topkube.reduce(own % 2**62, "max"))


def broadcast_weights(times: Times) -> None:
    """Broadcast the weights of rank 0. All ranks have the same bits afterwards."""
    torch.manual_seed(topkube.rank())
    model = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    with times.measure("broadcast_parameters"):
        topkube.broadcast_parameters(model)
    assert has_equal_weights_on_all_ranks(model)


def probe(times: Times) -> None:
    """Measure links and memory, as `auto` and `dense` do. A rank sends at most 13 messages to measure its link. Each of
    the two measurements of memory sends a hash of its call to at most 16 other nodes, as every call does."""
    world = topkube.world.current()
    with count_messages(world) as counted, times.measure("measurement of links"):
        measured = measure_machines(world)
    assert measured.memory > 0
    if world.cross_comm is not None:
        assert measured.rate > 0
        hashes = 2 * min(world.nodes - 1, 16)
        assert 7 <= counted.messages <= 13 + hashes, counted.messages
        assert counted.sent_bytes * world.shards <= 12_000_000


def train(times: Times, aggregation: str) -> None:
    """Train for a few steps. The weights are the same on all ranks; with dense aggregation, they are those of one
    process."""
    x, y = draw_samples(4 * topkube.size())
    model, reference = build_network(), build_network()
    optimizer = build_optimizer(model, aggregation=aggregation, density=0.05)
    alone = build_sgd(reference.parameters())
    with times.measure(f"step, {aggregation}"):
        for _ in range(STEPS):
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for _ in range(STEPS):
        compute_loss(reference, x, y).backward()
        alone.step()
        alone.zero_grad()
    if aggregation == "dense":
        assert_close(model, reference)
    assert has_equal_weights_on_all_ranks(model)
    with torch.no_grad():
        assert compute_loss(model, x, y) < compute_loss(build_network(), x, y)


def skip_step(times: Times) -> None:
    """Put a NaN on the last rank only: no rank takes the step."""
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.05)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = draw_samples(8)
    if topkube.rank() == topkube.size() - 1:
        x = x * float("nan")
    with times.measure("step with a NaN on one rank"):
        compute_loss(model, x, y).backward()
        optimizer.step()
    assert (optimizer.steps, optimizer.skipped_steps) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def run_until(times: Times, directory: str, step: int, phase: str) -> None:
    """Run with checkpoints in `directory`. The run continues where the last run in that directory ended."""
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.05)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=1000)
    with times.measure(phase), topkube.checkpointing(model, optimizer, settings=settings) as run:
        assert run.step == step - 1, (run.step, step)
        for x, y in run.progress([draw_samples(4, seed=step)], total=step):
            compute_loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert has_equal_weights_on_all_ranks(model)


def miss_collective(times: Times, nodes: tuple[int, ...], least_seconds: float = 2.0) -> None:
    """Skip a collective on one rank: all others name this rank. The world cannot be used afterwards."""
    world = rejoin_as(nodes, deadline_seconds=max(least_seconds, sum(nodes) / 8))
    absent = world.size // 2 + 1
    topkube.barrier()
    with times.measure("until a missing rank is named"):
        if world.rank != absent:
            with pytest.raises(CollectiveTimeout) as caught:
                topkube.allreduce_(torch.ones(1000))
            assert caught.value.missing == (absent,), caught.value


def run_all_parts(
    nodes: tuple[int, ...], directory: str, step: int = 1, aggregations: tuple[str, ...] = ("dense", "hitopk", "naive")
) -> dict[str, float]:
    """Run every part but the missing rank, as these nodes. Checkpoints continue from `step` - 1. Return the seconds
    of each phase."""
    times = Times()
    with times.measure("init"):
        rejoin_as(nodes)
    broadcast_weights(times)
    probe(times)
    for aggregation in aggregations:
        train(times, aggregation)
    skip_step(times)
    run_until(times, directory, step, "checkpoint" if step == 1 else "resume and checkpoint")
    return times.seconds


def leave_checkpoint(world: World, directory: str) -> None:
    """Write a checkpoint of one step to `directory`, from which other numbers of ranks continue."""
    rejoin_as((1,) * world.size)
    run_until(Times(), directory, 1, "checkpoint")


def run_all_layouts(world: World, directory: str, resumed: str) -> None:
    """Run the path as 2 uneven, 8 uneven and 16 nodes (benchmarks/ranks.py has 2 even nodes too), then resume from the
    checkpoint in `resumed`, which has another number of ranks."""
    for name, nodes in list_layouts(world.size).items():
        if name == "8 uneven nodes":
            run_all_parts(nodes, f"{directory}/{name}")
        elif name != "2 nodes":
            run_all_parts(nodes, f"{directory}/{name}", aggregations=("dense", "hitopk"))
    run_until(Times(), resumed, 2, "resume")
    miss_collective(Times(), list_layouts(world.size)["8 uneven nodes"], least_seconds=8.0)


def measure_probe(world: World, results: str, *nodes: str) -> None:
    """Write the seconds of three measurements of links, of the slowest rank, as these nodes."""
    rejoin_as(tuple(map(int, nodes)))
    seconds = []
    for _ in range(3):
        times = Times()
        topkube.barrier()
        probe(times)
        seconds.append(topkube.reduce(times.seconds["measurement of links"], "max"))
    if world.rank == 0:
        Path(results).write_text(json.dumps(seconds))


def measure(world: World, results: str, name: str, directory: str) -> None:
    """Measure the path as one layout. Rank 0 writes the seconds of each phase (of the slowest rank), and the memory
    that a rank uses in addition to the memory at its start."""
    nodes = list_layouts(world.size)[name]
    seconds = run_all_parts(nodes, directory, step=2)
    used, windows = (
        topkube.gather_object(memory.measure_own_memory() - memory.at_start),
        topkube.reduce(topkube.world.current().window.nbytes, "max"),
    )
    slowest = {phase: topkube.reduce(value, "max") for phase, value in seconds.items()}
    files_used = topkube.reduce(len(list(Path("/proc/self/fd").iterdir())), "max")
    row = {
        "layout": name,
        "nodes": nodes,
        "seconds": slowest,
        "memory_mib": {"median": statistics.median(used), "most": max(used)} if used else {},
        "window_mib_per_node": windows / 2**20,
        "files_per_rank": files_used,
        "cpu_seconds_per_rank": time.process_time(),
    }
    # MPI cannot end a world in which a rank skipped a collective. All ranks leave when all have written their results.
    times, problem = Times(), ""
    try:
        miss_collective(times, nodes)
    except BaseException:  # pytest's own failures do not derive from Exception
        problem = f"rank {world.rank}: {traceback.format_exc()}"
        print(problem, file=sys.stderr, flush=True)
    own = Path(f"{results}.{world.rank}")
    writing = own.with_suffix(f".{world.rank}.writing")
    writing.write_text(problem or str(times.seconds["until a missing rank is named"]))
    writing.rename(own)
    files = [Path(f"{results}.{rank}") for rank in range(world.size)]
    while not all(file.exists() for file in files):
        time.sleep(0.05 * world.crowding)
    if world.rank == 0:
        texts = [file.read_text() for file in files]
        if not any(text.startswith("rank") for text in texts):
            row["seconds"]["until a missing rank is named"] = max(map(float, texts))
            Path(results).write_text(json.dumps(row))
        Path(f"{results}.end").touch()
    while not Path(f"{results}.end").exists():
        time.sleep(0.05 * world.crowding)
    os._exit(0)
