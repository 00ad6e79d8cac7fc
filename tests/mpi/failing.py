"""A world in which something goes wrong: `failing.py CASE DIRECTORY`. Ranks leave what they met in DIRECTORY."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import topkube
from topkube import world as worlds
from topkube.errors import TopKubeError
from topkube.world import World


def x(length: int = 50_000, dtype: type = np.float32) -> np.ndarray:
    return np.ones(length, dtype)


def absent(which: Callable[[World], int], algorithm: str) -> Callable[[World], None]:
    def case(world: World) -> None:
        topkube.allreduce_(x(), algorithm=algorithm)
        if world.rank != which(world):
            topkube.allreduce_(x(), algorithm=algorithm)

    return case


def absent_from_agreement(world: World) -> None:
    if world.rank != 1:
        world.agree(True)


def lengths_differ_between_nodes(world: World) -> None:
    topkube.allreduce_(x(1000 + world.node))


def lengths_differ_inside_a_node(world: World) -> None:
    topkube.allreduce_(x(1000 + world.local_rank))


def types_differ(world: World) -> None:
    topkube.allreduce_(x(dtype=np.float16 if world.rank == 1 else np.float32))


def algorithms_differ(world: World) -> None:
    topkube.allreduce_(x(), algorithm="flat" if world.rank == 0 else "hitopk")


def densities_differ(world: World) -> None:
    topkube.allreduce_(x(), density=0.01 if world.rank == world.size - 1 else 0.02)


def raises(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one had enough")
    world.comm.recv(source=1)


def exits(world: World) -> None:
    if world.rank == 1:
        sys.exit(9)
    world.comm.recv(source=1)


def exits_by_raising(world: World) -> None:
    if world.rank == 1:
        raise SystemExit(9)
    world.comm.recv(source=1)


def exits_but_is_caught(world: World) -> None:
    try:
        sys.exit(9)
    except SystemExit:
        world.agree(True)


def raises_in_a_thread(world: World) -> None:
    def work() -> None:
        raise ValueError("the thread had enough")

    if world.rank == 1:
        threading.Thread(target=work).start()
    world.comm.recv(source=(world.rank + 1) % world.size)


CASES: dict[str, Callable[[World], None]] = {
    "absent-neighbour": absent(lambda world: 1, "hierarchical"),
    "absent-on-another-node": absent(lambda world: world.size - 1, "hitopk"),
    "absent-from-a-ring": absent(lambda world: 2, "flat"),
    "absent-from-an-agreement": absent_from_agreement,
    "lengths-differ-between-nodes": lengths_differ_between_nodes,
    "lengths-differ-inside-a-node": lengths_differ_inside_a_node,
    "types-differ": types_differ,
    "algorithms-differ": algorithms_differ,
    "densities-differ": densities_differ,
    "raises": raises,
    "raises-in-a-thread": raises_in_a_thread,
    "exits": exits,
    "exits-by-raising": exits_by_raising,
    "exits-with-mpi4py-first": exits,
    "exits-but-is-caught": exits_but_is_caught,
}


def main(case: str, directory: Path) -> None:
    if case == "exits-with-mpi4py-first":
        importlib.import_module("mpi4py.MPI")
    topkube.init()
    world = worlds.current()
    if case.startswith(("raises", "exits")):
        CASES[case](world)
        return
    start = time.monotonic()
    met: dict[str, object] = {"error": ""}
    try:
        CASES[case](world)
    except TopKubeError as error:
        met = {
            "error": type(error).__name__,
            "message": str(error),
            "missing": list(getattr(error, "missing", ())),
        }
    met["seconds"] = time.monotonic() - start
    written = directory / f"{world.rank}.writing"
    written.write_text(json.dumps(met))
    written.rename(directory / f"{world.rank}.json")
    # The world is out of step, so MPI cannot end it in order: all leave once all have written.
    while len(list(directory.glob("*.json"))) < world.size:
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
