"""A world in which a rank fails: `failing.py CASE DIRECTORY`. Each rank writes the error that it raised to
DIRECTORY. What each case does is in CASES."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import differing
from differing import make_ones

import topkube
from topkube import world as worlds
from topkube.collectives.greetings import count_greeted_bytes
from topkube.errors import CollectiveTimeout, TopKubeError
from topkube.world import World


def build_absence(choose_rank: Callable[[World], int], algorithm: str) -> Callable[[World], None]:
    """Return a case in which the rank that `choose_rank` returns skips the second all-reduce."""

    def skip_all_reduce(world: World) -> None:
        topkube.allreduce_(make_ones(), algorithm=algorithm)
        if world.rank != choose_rank(world):
            topkube.allreduce_(make_ones(), algorithm=algorithm)

    return skip_all_reduce


def skip_init(directory: Path) -> None:
    """Start MPI on all ranks, and call `topkube.init` on all but rank 1."""
    from mpi4py.MPI import COMM_WORLD

    if COMM_WORLD.rank != 1:
        record_error(directory, COMM_WORLD.rank, topkube.init)
    end_when_all_have_written(directory, COMM_WORLD.size - 1)


def skip_agreement(world: World) -> None:
    if world.rank != 1:
        world.agree(True)


def skip_barrier(world: World) -> None:
    if world.rank != 1:
        topkube.barrier()


def skip_step_with_delayed_exchange(world: World) -> None:
    """Begin a delayed exchange of weights on rank 0, which rank 1 never joins. The error comes where rank 0 waits."""
    import torch

    world.comm.Barrier()  # loading torch may take longer than the deadline
    model = torch.nn.Linear(64, 64)
    topkube.broadcast_parameters(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="onebit", delay=1)
    for step in range(2):
        model(torch.ones(1, 64)).sum().backward()
        if world.rank != 1 or step == 0:
            optimizer.step()
    if world.rank != 1:
        optimizer.state_dict()


def wait_elsewhere(world: World) -> None:
    """Wait in an all-reduce on rank 1, and in a barrier on the other ranks."""
    if world.rank == 1:
        topkube.allreduce_(make_ones())
    else:
        topkube.barrier()


def lose_connections(world: World) -> None:
    """Close the connections of rank 1 to other nodes, as a firewall or a proxy might."""
    topkube.allreduce_(make_ones())
    if world.rank == 1 and world.links is not None:
        world.links.close()
    else:
        topkube.allreduce_(make_ones())


def go_on_after(world: World, leave: Callable[[World], None]) -> None:
    """Rank 0 leaves an all-reduce by an error that it catches. Rank 1 completes the same one later, and both go on. No
    message may arrive in memory that rank 0 has used for something else."""
    left, completed = (Path(sys.argv[2]) / name for name in ("left", "completed"))
    topkube.allreduce_(make_ones(400), algorithm="hierarchical")
    if world.rank == 0:
        leave(world)
        room = 8 + count_greeted_bytes(world.nodes)
        arrays = [np.zeros(room, np.uint8) for _ in range(64)]
        left.touch()
        while not completed.exists():
            world.comm.Iprobe()
            time.sleep(0.01)
        world.comm.Iprobe()
        assert not any(array.any() for array in arrays)
    else:
        while not left.exists():
            time.sleep(0.01)
        topkube.allreduce_(make_ones(400), algorithm="hierarchical")
        completed.touch()
    topkube.barrier()


def time_out(world: World) -> None:
    with contextlib.suppress(CollectiveTimeout):
        topkube.allreduce_(make_ones(400), algorithm="hierarchical")


def interrupt(world: World) -> None:
    """Press Ctrl-C in an all-reduce."""
    calls = world.calls
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        while world.calls == calls:
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=press).start()
    with contextlib.suppress(KeyboardInterrupt):
        topkube.allreduce_(make_ones(400), algorithm="hierarchical")


def skip_all_reduce_of_a_sub_world(world: World) -> None:
    sub = topkube.new_world([3, 1, 2])
    if sub is not None and world.rank != 2:
        topkube.allreduce_(make_ones(), world=sub)


def skip_creation_of_a_sub_world(world: World) -> None:
    if world.rank != 1:
        topkube.new_world([0])


class Mean(torch.autograd.Function):
    """A layer whose backward needs a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        topkube.allreduce_(torch.ones(5000), algorithm="dense")
        return gradient


def reduce_during_backward(world: World) -> None:
    last, first = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
    model = torch.nn.Sequential(first, last)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    aggregation = "hierarchical"
    optimizer = topkube.DistributedOptimizer(
        sgd, model.named_parameters(), aggregation=aggregation, bucket_bytes=1 << 20
    )
    for _ in range(2):  # the first backward exchanges at its end
        last(Mean.apply(first(torch.ones(1, 600)))).sum().backward()
        optimizer.step()


def raise_error(world: World) -> None:
    if world.rank == 1:
        raise ValueError("an error of rank 1")
    world.comm.recv(source=1)


def raise_error_of_a_busy_rank(world: World) -> None:
    """Rank 1 fails in a stage that ends with an error on all ranks, and is the last one to print it."""
    from topkube.training.checkpoint.stages import Stages

    def fail() -> None:
        if world.rank == 1:
            raise ValueError("the reason")

    try:
        Stages(world).run(fail, "the stage failed")
    finally:
        time.sleep(1.0 if world.rank == 1 else 0.0)


def raise_error_and_shut_down(world: World) -> None:
    """Rank 1 does not wait for the other ranks, although `shutdown` waits for them otherwise."""
    try:
        raise_error(world)
    finally:
        topkube.shutdown()


def exit_with_status(world: World) -> None:
    if world.rank == 1:
        sys.exit(9)
    world.comm.recv(source=1)


def raise_system_exit(world: World) -> None:
    if world.rank == 1:
        raise SystemExit(9)
    world.comm.recv(source=1)


def catch_own_exit(world: World) -> None:
    try:
        sys.exit(9)
    except SystemExit:
        world.agree(True)


def raise_in_a_thread(world: World) -> None:
    def fail_in_background() -> None:
        raise ValueError("an error in a thread")

    if world.rank == 1:
        threading.Thread(target=fail_in_background).start()
    world.comm.recv(source=(world.rank + 1) % world.size)


def raise_in_a_forked_child(world: World) -> None:
    """Raise an error that nothing catches in a forked child, while the ranks continue."""
    if world.rank == 1:
        child = os.fork()
        if not child:
            raise ValueError("an error in a forked child")
        os.waitpid(child, 0)
    assert world.agree(True)


def _end_during_an_all_reduce(world: World, joins: bool, status: int = 0) -> None:
    """End the program of rank 0 while its communication thread waits in an all-reduce. If `joins` is true, the other
    ranks then call the same all-reduce."""
    from topkube.training.ranks import communication_thread  # loads torch, which other cases do without

    ending = Path(sys.argv[2]) / "ending"
    if world.rank == 0:
        has_begun = threading.Event()
        world.cache["submitted"] = communication_thread.submit(
            lambda: (has_begun.set(), topkube.allreduce_(make_ones()))
        )
        has_begun.wait()
        atexit.register(ending.touch)  # runs before the functions that were registered earlier, such as TopKube's
        if status:
            sys.exit(status)
        return
    while not ending.exists():
        time.sleep(0.01)
    if joins:
        topkube.allreduce_(make_ones())
    if status:
        world.comm.recv(source=0)


def end_during_an_all_reduce(world: World) -> None:
    _end_during_an_all_reduce(world, joins=True)


def end_during_an_all_reduce_alone(world: World) -> None:
    _end_during_an_all_reduce(world, joins=False)


def exit_during_an_all_reduce(world: World) -> None:
    _end_during_an_all_reduce(world, joins=False, status=9)


def shut_down_during_a_late_gather(world: World) -> None:
    """With DeAR, rank 0 begins its gathers a second late. Rank 1 shuts down in the meantime: its weights are not used
    any more."""
    from topkube.training.exchange.reduction.reduced_parts import ReducedParts  # other cases do without

    model = torch.nn.Sequential(*[torch.nn.Linear(3072, 3072) for _ in range(4)])  # more than the system's buffers hold
    topkube.broadcast_parameters(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(sgd, model.named_parameters(), aggregation="dense", overlap="dear")
    gather = ReducedParts.gather

    if world.rank == 0:
        ReducedParts.gather = lambda *arguments: (time.sleep(1), gather(*arguments))  # type: ignore[method-assign]
    model(torch.ones(4, 3072)).square().mean().backward()
    optimizer.step()
    if world.rank == 0:
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    topkube.shutdown()


CASES: dict[str, Callable[[World], None]] = {
    "ends-with-a-shutdown-during-a-late-gather": shut_down_during_a_late_gather,
    "absent-neighbour": build_absence(lambda world: 1, "hierarchical"),
    "absent-on-another-node": build_absence(lambda world: world.size - 1, "hitopk"),
    "absent-from-a-ring": build_absence(lambda world: 2, "flat"),
    "absent-from-an-agreement": skip_agreement,
    "absent-from-a-barrier": skip_barrier,
    "absent-from-a-delayed-exchange": skip_step_with_delayed_exchange,
    "absent-from-a-sub-world": skip_all_reduce_of_a_sub_world,
    "absent-from-the-making-of-a-sub-world": skip_creation_of_a_sub_world,
    "elsewhere": wait_elsewhere,
    "loses-its-connections": lose_connections,
    "goes-on-after-a-timeout": lambda world: go_on_after(world, time_out),
    "goes-on-after-an-interrupt": lambda world: go_on_after(world, interrupt),
    "calls-differ": differing.make_different_calls,
    "types-of-a-call-differ": differing.reduce_numbers_of_different_types,
    "sub-worlds-differ": differing.create_different_sub_worlds,
    "lengths-differ-between-nodes": differing.reduce_lengths_that_differ_between_nodes,
    "lengths-differ-inside-a-node": differing.reduce_lengths_that_differ_inside_a_node,
    "lengths-differ-on-a-device": differing.reduce_lengths_that_differ_between_nodes_on_a_device,
    "sizes-differ-between-nodes": differing.reduce_a_small_array_against_a_large_one,
    "types-differ": differing.reduce_arrays_of_different_types,
    "algorithms-differ": differing.use_different_algorithms,
    "densities-differ": differing.use_different_densities,
    "densities-differ-in-the-last-digits": differing.use_densities_that_differ_in_the_last_digits,
    "shapes-differ": differing.use_different_shapes,
    "reduces-during-backward": reduce_during_backward,
    "residual-on-one-rank": differing.use_a_residual_on_one_rank,
    "long-types-differ": differing.gather_types_with_long_names,
    "raises": raise_error,
    "raises-on-a-busy-rank": raise_error_of_a_busy_rank,
    "raises-and-shuts-down": raise_error_and_shut_down,
    "raises-in-a-thread": raise_in_a_thread,
    "exits": exit_with_status,
    "exits-by-raising": raise_system_exit,
    "exits-with-mpi4py-first": exit_with_status,
    "exits-but-is-caught": catch_own_exit,
    "exits-during-an-all-reduce": exit_during_an_all_reduce,
    "ends-during-an-all-reduce": end_during_an_all_reduce,
    "ends-during-an-all-reduce-alone": end_during_an_all_reduce_alone,
    "ends-though-a-child-raises": raise_in_a_forked_child,
}


def main(case: str, directory: Path) -> None:
    if case == "exits-with-mpi4py-first":
        importlib.import_module("mpi4py.MPI")
    if case == "absent-from-init":
        skip_init(directory)
    topkube.init()
    world = worlds.current()
    if case.startswith(("raises", "exits", "ends")):
        CASES[case](world)
        return
    record_error(directory, world.rank, lambda: CASES[case](world))
    end_when_all_have_written(directory, world.size)


def record_error(directory: Path, rank: int, act: Callable[[], object]) -> None:
    """Write to `directory` which error `act` raises on this rank."""
    start = time.monotonic()
    report: dict[str, object] = {"error": ""}
    try:
        act()
    except TopKubeError as error:
        report = {
            "error": type(error).__name__,
            "message": str(error),
            "missing": list(getattr(error, "missing", ())),
        }
    report["seconds"] = time.monotonic() - start
    writing = directory / f"{rank}.writing"
    writing.write_text(json.dumps(report))
    writing.rename(directory / f"{rank}.json")


def end_when_all_have_written(directory: Path, ranks: int) -> NoReturn:
    """End the process when all ranks have written. The ranks are out of step, so MPI_Finalize would not return."""
    while len(list(directory.glob("*.json"))) < ranks:
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
