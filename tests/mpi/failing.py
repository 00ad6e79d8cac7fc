"""A world in which a rank fails: `failing.py CASE DIRECTORY`. Each rank writes the error that it raised to
DIRECTORY."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

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


def absent_from_init(directory: Path) -> None:
    """Rank 1 has started MPI and never calls `topkube.init`."""
    from mpi4py.MPI import COMM_WORLD

    if COMM_WORLD.rank != 1:
        leave(directory, COMM_WORLD.rank, topkube.init)
    await_all(directory, COMM_WORLD.size - 1)


def absent_from_agreement(world: World) -> None:
    if world.rank != 1:
        world.agree(True)


def absent_from_a_barrier(world: World) -> None:
    if world.rank != 1:
        topkube.barrier()


def elsewhere(world: World) -> None:
    """Rank 1 waits in an all-reduce, and the other ranks wait in a barrier."""
    if world.rank == 1:
        topkube.allreduce_(x())
    else:
        topkube.barrier()


def absent_from_a_sub_world(world: World) -> None:
    sub = topkube.new_world([3, 1, 2])
    if sub is not None and world.rank != 2:
        topkube.allreduce_(x(), world=sub)


def absent_from_the_making_of_a_sub_world(world: World) -> None:
    if world.rank != 1:
        topkube.new_world([0])


def calls_differ(world: World) -> None:
    topkube.barrier() if world.rank == 2 else topkube.allgather(np.arange(3))


def types_of_a_call_differ(world: World) -> None:
    topkube.reduce(1.0 if world.rank == 2 else 1)


def sub_worlds_differ(world: World) -> None:
    topkube.new_world([0, 1] if world.rank == 2 else [0])


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


def child_raises(world: World) -> None:
    """A forked child raises an error that nothing catches, while the ranks continue."""
    if world.rank == 1:
        child = os.fork()
        if not child:
            raise ValueError("the child had enough")
        os.waitpid(child, 0)
    assert world.agree(True)


def _ends_during_an_all_reduce(world: World, joins: bool, status: int = 0) -> None:
    """Rank 0's program ends while its communication thread waits in an all-reduce. The others join it then, or do
    not."""
    from topkube.training.ranks.communication_thread import schedule  # loads torch, which other cases do without

    ending = Path(sys.argv[2]) / "ending"
    if world.rank == 0:
        inside = threading.Event()
        world.cache["told"] = schedule().submit(lambda: (inside.set(), topkube.allreduce_(x())))
        inside.wait()
        atexit.register(ending.touch)  # runs first
        if status:
            sys.exit(status)
        return
    while not ending.exists():
        time.sleep(0.01)
    if joins:
        topkube.allreduce_(x())
    if status:
        world.comm.recv(source=0)


def ends_during_an_all_reduce(world: World) -> None:
    _ends_during_an_all_reduce(world, joins=True)


def ends_during_an_all_reduce_alone(world: World) -> None:
    _ends_during_an_all_reduce(world, joins=False)


def exits_during_an_all_reduce(world: World) -> None:
    _ends_during_an_all_reduce(world, joins=False, status=9)


CASES: dict[str, Callable[[World], None]] = {
    "absent-neighbour": absent(lambda world: 1, "hierarchical"),
    "absent-on-another-node": absent(lambda world: world.size - 1, "hitopk"),
    "absent-from-a-ring": absent(lambda world: 2, "flat"),
    "absent-from-an-agreement": absent_from_agreement,
    "absent-from-a-barrier": absent_from_a_barrier,
    "absent-from-a-sub-world": absent_from_a_sub_world,
    "absent-from-the-making-of-a-sub-world": absent_from_the_making_of_a_sub_world,
    "elsewhere": elsewhere,
    "calls-differ": calls_differ,
    "types-of-a-call-differ": types_of_a_call_differ,
    "sub-worlds-differ": sub_worlds_differ,
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
    "exits-during-an-all-reduce": exits_during_an_all_reduce,
    "ends-during-an-all-reduce": ends_during_an_all_reduce,
    "ends-during-an-all-reduce-alone": ends_during_an_all_reduce_alone,
    "ends-though-a-child-raises": child_raises,
}


def main(case: str, directory: Path) -> None:
    if case == "exits-with-mpi4py-first":
        importlib.import_module("mpi4py.MPI")
    if case == "absent-from-init":
        absent_from_init(directory)
    topkube.init()
    world = worlds.current()
    if case.startswith(("raises", "exits", "ends")):
        CASES[case](world)
        return
    leave(directory, world.rank, lambda: CASES[case](world))
    await_all(directory, world.size)


def leave(directory: Path, rank: int, act: Callable[[], object]) -> None:
    """Write to `directory` which error `act` raises on this rank."""
    start = time.monotonic()
    met: dict[str, object] = {"error": ""}
    try:
        act()
    except TopKubeError as error:
        met = {
            "error": type(error).__name__,
            "message": str(error),
            "missing": list(getattr(error, "missing", ())),
        }
    met["seconds"] = time.monotonic() - start
    written = directory / f"{rank}.writing"
    written.write_text(json.dumps(met))
    written.rename(directory / f"{rank}.json")


def await_all(directory: Path, ranks: int) -> NoReturn:
    """End the process when all ranks have written. The ranks are out of step, so MPI_Finalize would not return."""
    while len(list(directory.glob("*.json"))) < ranks:
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
