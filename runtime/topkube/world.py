"""The world of ranks: MPI communicators, the nodes, the place of this rank, and waits with a deadline.

Only mpi4py calls MPI. MPI runs with MPI_THREAD_MULTIPLE, because training exchanges gradients on a separate thread.
Ranks that share memory form a node. `TOPKUBE_RANKS_PER_NODE=2,2` declares the nodes instead, so that one machine can
act as several nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from topkube.algorithms.cost import list_partners
from topkube.control import Control, build_timeout
from topkube.environment import chooses_malloc, read_process_launch
from topkube.errors import ArgumentError, CollectiveError, WorldError
from topkube.heap import count_kept_bytes, keep_freed_memory
from topkube.heartbeat import Heartbeat, open_heartbeat
from topkube.launch_check import VERSION, check_launch, check_versions
from topkube.links import (
    LinkChoice,
    Links,
    LostConnections,
    are_links_messages,
    count_lanes,
    explain_trouble,
    open_links,
)
from topkube.mpi_exit import end_together, forget_exit
from topkube.mpi_start import agree_on_window, explain_mpi_errors, free_handles, load_mpi, share_window
from topkube.processors import count_own_threads, limit_to_cgroup
from topkube.roll_call import RollCall
from topkube.settings import Settings
from topkube.topology import Nodes, find_nodes_of_ranks, group_by_home, parse_declared_nodes
from topkube.waiting import advance_messages, choose_patience, wait_for_all_ranks, wait_for_links, wait_until


class WaitSeries(IntEnum):
    """The series of waits that a rank counts. Each series has the same order on all ranks, and a separate thread."""

    COLLECTIVE = 0
    """All-reduces and their waits: on the communication thread during training, otherwise on the script's thread. In
    the world of delayed exchanges of weights, on their thread."""
    AGREEMENT = 1
    """Agreements of training (`training/ranks/agreement.py`)."""
    CALL = 2
    """Calls of the script: `barrier`, `reduce` and others (`collectives/coordination/`)."""
    MODEL = 3
    """Collectives inside a model's forward and backward (`training/ranks/model_collectives.py`)."""


@dataclass
class World:
    """The communicators and the topology of a group of ranks.

    `node_comm` joins the ranks of this node; `cross_comm` joins the ranks of equal local rank on all nodes, None for
    surplus ranks (local_rank >= shards). `shards` is the smallest number of ranks on a node: a bucket is divided
    into this many shards. `window` is memory that the ranks of this node share. `calls` counts the collectives that
    this rank has entered; every rank enters all collectives in the same order.
    """

    comm: Any
    node_comm: Any
    cross_comm: Any
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    shards: int
    node_ranks: Nodes
    deadline_seconds: float
    control: Control
    agreement: Any
    calls_comm: Any
    """The communicator of `WaitSeries.CALL`."""
    window: npt.NDArray[np.uint8]
    members: tuple[int, ...]
    """The number of each rank in the world of all ranks. Messages and the names of logs use these numbers."""
    run_directory: Path | None = None
    """The directory for reports of roll calls. None: no reports."""
    heartbeat: Heartbeat | None = None
    """A count of collectives that other processes can read."""
    crowding: float = 1.0
    """Ranks per processor on this machine, over all nodes that this machine acts as."""
    threads: int = 1
    """The number of computing threads of this rank; the ranks of a machine share its processors."""
    counts: list[int] = field(default_factory=lambda: [0] * len(WaitSeries))
    """How many waits of each series this rank has entered."""
    entered: list[float] = field(default_factory=lambda: [0.0] * len(WaitSeries))
    """When this rank entered the last wait of each series (monotonic)."""
    host_rank: int = 0
    """The number of this rank among all ranks of its machine, which may act as several nodes."""
    host_size: int = 1
    """How many ranks this machine runs."""
    link_choice: LinkChoice = field(default_factory=lambda: LinkChoice("mpi", ()))
    links: Links | None = None
    """The messages of `cross_comm`'s ranks over TCP connections of our own; None if MPI carries them."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """What `shutdown` and `close` call before they drop the world, last entry first."""
    handles: list[Any] = field(default_factory=list)
    """The communicators and windows of MPI that `shutdown` and `close` free, last entry first. Higher floors add
    theirs."""
    is_closed: bool = False
    """True after `shutdown` or `close`."""
    _lost_connections: LostConnections = field(default_factory=LostConnections)
    cache: dict[str, Any] = field(default_factory=dict)
    """Objects that higher floors keep as long as the world lives: work buffers, the shared-memory object."""

    def __post_init__(self) -> None:
        if self.links is not None:
            self.links.patience = choose_patience(self.crowding)

    @property
    def cross_links(self) -> Any:
        """What carries messages of host memory between the ranks of `cross_comm`: `links`, or `cross_comm` itself."""
        return self.links if self.links is not None else self.cross_comm

    @functools.cached_property
    def largest_node(self) -> int:
        """The ranks of the node that has the most."""
        return max(map(len, self.node_ranks))

    @property
    def calls(self) -> int:
        """The number of collectives that this rank has entered."""
        return self.counts[WaitSeries.COLLECTIVE]

    @property
    def crowded(self) -> bool:
        """True if this machine runs more ranks than it has processors."""
        return self.crowding > 1

    def enter(self, series: WaitSeries = WaitSeries.COLLECTIVE) -> None:
        """Count a wait of `series`, and store its start time. Raises WorldError if the world is closed."""
        forget_exit()
        if self.is_closed:
            raise WorldError(
                "this world was closed", next_step="create another one: topkube.init(), topkube.new_world()"
            )
        self.counts[series] += 1
        self.entered[series] = time.monotonic()
        if self.heartbeat is not None:
            self.heartbeat.beat()

    def agree(self, flag: bool) -> bool:
        """Return True if `flag` is true on every rank. A collective with a deadline, for one thread at a time."""
        return bool(self.gather_small(np.array([flag], np.float64)).all())

    def sum_small(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum over ranks of a few float64 values (shape (n,)), in rank order: the same bits on all ranks. A
        collective with a deadline, for one thread at a time."""
        total: npt.NDArray[np.float64] = np.zeros(values.size)
        for row in self.gather_small(values):
            total += row
        return total

    def gather_small(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the float64 values (shape (n,)) of all ranks: shape (size, n)."""
        self.enter()
        gathered = np.empty((self.size, values.size))
        if self.size == 1:
            gathered[0] = values
        else:
            self.wait([self.agreement.Iallgather(values, gathered)], "an agreement")
        return gathered

    def wait(
        self,
        requests: Any,
        what: str,
        meanwhile: Callable[[], None] | None = None,
        series: WaitSeries = WaitSeries.COLLECTIVE,
    ) -> None:
        """Wait until all `requests`, a list of MPI's or of messages of `links`, or what `links` has gathered, are
        complete. The wait calls `meanwhile` regularly, and `meanwhile` may raise.

        Raises CollectiveTimeout with the ranks that did not arrive, after the deadline.
        """
        from mpi4py.MPI import Request

        if self.links is not None and (not isinstance(requests, list) or are_links_messages(requests)):
            messages = self.links.gather(requests) if isinstance(requests, list) else requests
            check = self._build_check(what, meanwhile, series)
            wait_for_links(self.links, messages, check, self.crowding)
            return

        def complete() -> bool:
            return advance_messages(lambda: bool(Request.Testall(requests)))

        self.wait_until(complete, what, meanwhile, series)

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        meanwhile: Callable[[], None] | None = None,
        series: WaitSeries = WaitSeries.COLLECTIVE,
        pause_seconds: float | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """Wait as `wait` does, until `ready()` is true (`waiting.wait_until`)."""
        check = self._build_check(what, meanwhile, series)
        wait_until(ready, check, self.crowding, pause_seconds, sleep, self.links)

    def _build_check(
        self, what: str, meanwhile: Callable[[], None] | None, series: WaitSeries
    ) -> Callable[[float], None]:
        """Return what a wait calls from time to time with the seconds that it has waited."""

        def check(waited: float) -> None:
            self.check_roll_call(what, series)
            self._check_links(what)
            if meanwhile is not None:
                meanwhile()
            if waited > self.deadline_seconds:
                self.give_up(what, series)

        return check

    def _check_links(self, what: str) -> None:
        """Raise CollectiveError if messages wait for a rank whose connection is lost."""
        if self.links is None or (lost := self._lost_connections.find(self.links)) is None:
            return
        peer, trouble = lost
        rank = self.members[self.node_ranks[peer][self.local_rank]]
        cause, next_step = explain_trouble(rank, trouble)
        raise CollectiveError(f"{what}: rank {rank} {trouble}", cause=cause, next_step=next_step)

    def check_roll_call(self, what: str, series: WaitSeries = WaitSeries.COLLECTIVE) -> None:
        """Join a roll call if another rank has begun one. Raises CollectiveError in a thread that must leave its waits
        (`leave_waits`)."""
        if threading.get_ident() in _leaving:
            raise CollectiveError(
                f"{what} was left: this rank's program has ended",
                cause="the script ended, or exited with a status, while gradients were exchanged",
                next_step="end the script on all ranks after the same step",
            )
        if self.control.has_seen_roll_call():
            self.give_up(what, series)

    def give_up(self, what: str, series: WaitSeries = WaitSeries.COLLECTIVE) -> NoReturn:
        """Begin a roll call and raise CollectiveTimeout.

        The rank that times out first may wait for a neighbour that waits too, so its neighbour is not always the
        missing rank. A roll call asks all ranks; the ranks that do not answer are missing.
        """
        waited_for, number = time.monotonic() - self.entered[series], self.counts[series]
        place, own = f"{what} ({series.name.lower()} {number})", self.members[self.rank]
        roll = self.control.call_roll(self.counts, place)
        missing = self.translate_ranks(roll.list_missing(self.size, series, number))
        if not missing and waited_for < self.deadline_seconds / 2:
            missing = (own,)
        if self.run_directory is not None:
            RollCall(own, what, number, list(missing), waited_for, time.time()).write(self.run_directory)
        other_waits = {other: self.translate_ranks(ranks) for other, ranks in roll.group_other_waits(place).items()}
        raise build_timeout(place, own, missing, other_waits, self.deadline_seconds)

    def close(self) -> None:
        """Free the communicators and the shared memory of a sub-world. All of its ranks call this together, when no
        rank uses it any more. Raises ArgumentError for the world of all ranks, and CollectiveTimeout if a rank does not
        call this function."""
        if self is _world:
            raise ArgumentError("this is the world of all ranks", next_step="call topkube.shutdown()")
        self.enter(WaitSeries.CALL)
        if self.size > 1:
            self.wait([self.calls_comm.Ibarrier()], "close()", series=WaitSeries.CALL)
        _sub_worlds[:] = [world for world in _sub_worlds if world is not self]
        with contextlib.ExitStack() as stack:
            self._drop(stack)
        self._free()

    def _drop(self, stack: contextlib.ExitStack) -> None:
        """Have `stack` call what belongs to the end of the world, also if a part of it raises an error."""
        stack.callback(self.cache.clear)
        for end in self.at_end:
            stack.callback(end)
        self.at_end.clear()

    def _free(self) -> None:
        """Free what MPI holds for the world. All of its ranks call this together."""
        self.is_closed, self.window = True, np.zeros(0, np.uint8)  # the memory of the window disappears
        handles, self.handles = self.handles[::-1], []
        free_handles(handles)

    def translate_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers that `ranks` of this world have in the world of all ranks."""
        return tuple(self.members[rank] for rank in ranks)


_MEETING_PAUSE_SECONDS = 1e-3
"""The time between two checks of `shutdown` if all ranks have called it."""
_leaving: set[int] = set()
"""The identities of the threads that must leave their waits."""


def leave_waits(thread: int) -> None:
    """End the waits of the thread with this identity within a tenth of a second, with a CollectiveError. Only for the
    end of a program: afterwards this rank is out of step with the others."""
    _leaving.add(thread)


_world: World | None = None
_sub_worlds: list[World] = []


def init(settings: Settings | None = None) -> World:
    """Start MPI if needed, and detect the topology. A second call returns the same world.

    From now on, if one rank's program ends with an exception or a status other than 0, all ranks end (`mpi_exit`).
    Raises WorldError if there is no MPI, if ranks use different MPIs, or if the declared nodes do not match the ranks.
    Raises CollectiveTimeout if a rank does not call this function in time.
    """
    global _world
    if _world is not None:
        return _world
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
    _world = _create_world(
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
    return _world


def create_sub_world(parent: World, ranks: Sequence[int], has_window: bool = True) -> World | None:
    """Return the world of `ranks` of `parent`, in their order, on these ranks, and None on other ranks. All ranks of
    `parent` must call this function; `topkube.new_world` first checks that they agree. A world without a window
    (`has_window`) needs no shared memory; its ranks exchange between nodes only."""
    from mpi4py import MPI

    member = {rank: number for number, rank in enumerate(ranks)}
    with explain_mpi_errors(MPI):
        comm = parent.comm.Split(0 if parent.rank in member else MPI.UNDEFINED, member.get(parent.rank, 0))
    if comm == MPI.COMM_NULL:
        return None
    homes = find_nodes_of_ranks(parent.node_ranks)
    world = _create_world(
        MPI,
        comm,
        [homes[rank] for rank in ranks],
        parent.translate_ranks(ranks),
        has_window=has_window,
        is_sub_world=True,
        deadline_seconds=parent.deadline_seconds,
        run_directory=parent.run_directory,
        heartbeat=parent.heartbeat,
        crowding=parent.crowding,
        threads=parent.threads,
        host_rank=parent.host_rank,
        host_size=parent.host_size,
        link_choice=parent.link_choice.select(ranks),
    )
    _sub_worlds.append(world)
    return world


def _create_world(
    MPI: Any,
    comm: Any,
    homes: Sequence[int],
    members: tuple[int, ...],
    crowding: float,
    link_choice: LinkChoice,
    has_window: bool = True,
    is_sub_world: bool = False,
    **more: Any,
) -> World:
    """Return the world of all ranks of `comm`; `homes` has the node of each rank. All ranks must call this function."""
    node_ranks = group_by_home(homes)
    node = find_nodes_of_ranks(node_ranks)[comm.rank]
    shards = min(map(len, node_ranks))
    handles, window, links = [comm], np.zeros(0, np.uint8), None
    try:
        with explain_mpi_errors(MPI):
            handles.append(node_comm := comm.Split(node, comm.rank))
            window_bytes = agree_on_window(MPI, comm, node_comm, is_sub_world) if has_window else 0
            # By node: the rank of a node among the others is its number for all local ranks, in whatever order ranks
            # come.
            cross = comm.Split(node_comm.rank if node_comm.rank < shards else MPI.UNDEFINED, node)
            if cross != MPI.COMM_NULL:
                handles.append(cross)
            control, agreement, calls_comm = duplicates = [comm.Dup() for _ in range(3)]
            handles += duplicates
            if has_window:
                window, handle = share_window(MPI, node_comm, window_bytes)
                handles += [handle] if handle is not None else []
    except WorldError:
        free_handles(handles[::-1])
        raise
    if cross != MPI.COMM_NULL:
        equals = [ranks[node_comm.rank] for ranks in node_ranks]
        links = open_links(cross, equals, link_choice, list_partners(cross.rank, cross.size))
    world = World(
        comm=comm,
        node_comm=node_comm,
        cross_comm=None if cross == MPI.COMM_NULL else cross,
        rank=comm.rank,
        size=comm.size,
        local_rank=node_comm.rank,
        local_size=node_comm.size,
        node=node,
        nodes=len(node_ranks),
        shards=shards,
        node_ranks=node_ranks,
        control=Control(control, crowding),
        agreement=agreement,
        calls_comm=calls_comm,
        window=window,
        handles=handles,
        members=members,
        crowding=crowding,
        link_choice=link_choice,
        links=links,
        **more,
    )
    if links is not None:
        world.at_end.append(links.close)
    return world


def shutdown() -> None:
    """Drop the world and all sub-worlds, and free what MPI holds for them; the next `init` creates a new world. All
    ranks must call this function. It waits for them, and frees nothing if one does not come before the deadline, or if
    an exception is on its way out of the script. MPI itself ends with the process."""
    worlds = [*reversed(_sub_worlds), *([_world] if _world is not None else [])]
    _drop_worlds()
    if worlds and sys.exc_info()[0] is None and _meet_at_end(worlds[-1]):
        for world in worlds:
            world._free()
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
    """Drop all worlds, without a word to other ranks: also at the end of the program."""
    with contextlib.ExitStack() as stack:  # calls the last entry first, and all of them also if one raises an error
        stack.callback(_forget_worlds)
        for world in [*([_world] if _world is not None else []), *reversed(_sub_worlds)]:
            world._drop(stack)


def _forget_worlds() -> None:
    global _world
    _sub_worlds.clear()
    _world = None


def current() -> World:
    """Return the world that `init` created. Raises WorldError before `init`."""
    if _world is None:
        raise WorldError("topkube.init() has not been called", next_step="call topkube.init() at the top of the script")
    return _world


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
