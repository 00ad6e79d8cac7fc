"""The world of all ranks of this process: its start, its end, and the place of this rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time

from topkube.environment import chooses_malloc, read_process_launch
from topkube.errors import WorldError
from topkube.heap import count_kept_bytes, keep_freed_memory
from topkube.heartbeat import open_heartbeat
from topkube.launch_check import VERSION, check_launch, check_versions
from topkube.links import LinkChoice, count_lanes
from topkube.mpi_exit import end_together
from topkube.mpi_start import explain_mpi_errors, load_mpi
from topkube.processors import count_own_threads, limit_to_cgroup
from topkube.settings import Settings
from topkube.topology import parse_declared_nodes
from topkube.waiting import wait_for_all_ranks
from topkube.world.creation import create_world
from topkube.world.world import World, open_worlds

_MEETING_PAUSE_SECONDS = 1e-3
"""The time between two checks of `shutdown` if all ranks have called it."""


def init(settings: Settings | None = None) -> World:
    """Start MPI if needed, and detect the topology. A second call returns the same world.

    From now on, if one rank's program ends with an exception or a status other than 0, all ranks end (`mpi_exit`).
    Raises WorldError if there is no MPI, if ranks use different MPIs, or if the declared nodes do not match the ranks.
    Raises CollectiveTimeout if a rank does not call this function in time.
    """
    if open_worlds.whole is not None:
        return open_worlds.whole
    settings = settings or Settings.from_environment()
    MPI = load_mpi()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    wait_for_all_ranks(MPI.COMM_WORLD, settings.deadline_seconds)
    with explain_mpi_errors(MPI):
        comm = MPI.COMM_WORLD.Dup()
    library = MPI.Get_library_version().strip("\0").splitlines()[0]
    check_launch(comm.size, library, read_process_launch(), settings.expected_ranks)
    machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
    host, affinity = machine.bcast(comm.rank), frozenset(os.sched_getaffinity(0))
    hosts = check_versions(comm.allgather((host, VERSION)))
    affinities = machine.allgather(affinity)
    processors = limit_to_cgroup(len(frozenset().union(*affinities)))
    threads = count_own_threads(affinity, affinities, processors)
    host_rank = machine.rank
    machine.Free()
    world = open_worlds.whole = create_world(
        MPI,
        comm,
        parse_declared_nodes(settings.ranks_per_node, hosts) if settings.ranks_per_node else hosts,
        tuple(range(comm.size)),
        deadline_seconds=settings.deadline_seconds,
        run_directory=settings.run_path,
        heartbeat=open_heartbeat(settings.run_path, comm.rank) if settings.run_path is not None else None,
        crowding=len(affinities) / processors,
        threads=threads,
        host_rank=host_rank,
        host_size=len(affinities),
        link_choice=LinkChoice(
            settings.links, tuple(hosts), settings.pod_ip, count_lanes(settings.connections, threads)
        ),
    )
    if not chooses_malloc():
        keep_freed_memory(count_kept_bytes(len(affinities)))
    end_together(MPI.COMM_WORLD)
    atexit.register(_drop_worlds)
    return world


def shutdown() -> None:
    """Drop the world and all sub-worlds, and free what MPI holds for them; the next `init` creates a new world. All
    ranks must call this function. It waits for them, and frees nothing if one does not call it before the deadline, or
    while an exception ends the script. MPI itself ends with the process."""
    worlds = _list_worlds()
    _drop_worlds()
    if worlds and sys.exc_info()[0] is None and _meet_at_end(worlds[-1]):
        for world in worlds:
            world.free()
    for world in worlds:
        world.is_closed = True


def _meet_at_end(world: World) -> bool:
    """Wait for all ranks. Return True if all of them came before the deadline. A rank that fails ends this one."""
    deadline, request = time.monotonic() + world.deadline_seconds, world.calls_comm.Ibarrier()
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(_MEETING_PAUSE_SECONDS)
    return True


def _drop_worlds() -> None:
    """Drop all worlds, without a message to other ranks: also at the end of the program."""
    with contextlib.ExitStack() as stack:  # calls the last entry first, and all of them also if one raises an error
        stack.callback(_forget_worlds)
        for world in reversed(_list_worlds()):
            world.drop(stack)


def _forget_worlds() -> None:
    open_worlds.parts.clear()
    open_worlds.whole = None


def _list_worlds() -> list[World]:
    """Return all worlds: sub-worlds, the newest first, and the world of all ranks at the end."""
    return [*reversed(open_worlds.parts), *([open_worlds.whole] if open_worlds.whole is not None else [])]


def current() -> World:
    """Return the world that `init` created. Raises WorldError before `init`."""
    if open_worlds.whole is None:
        raise WorldError("topkube.init() has not been called", next_step="call topkube.init() at the top of the script")
    return open_worlds.whole


def rank() -> int:
    """Return this rank's number, 0 to size - 1."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().size


def local_rank() -> int:
    """Return this rank's number on its node, 0 to local_size - 1."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().local_size


def node() -> int:
    """Return this node's number, 0 to nodes - 1."""
    return current().node


def nodes() -> int:
    """Return the number of nodes."""
    return current().nodes
