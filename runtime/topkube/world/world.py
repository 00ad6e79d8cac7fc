"""The class of worlds: communicators, nodes, the place of this rank, and waits with a deadline."""

from __future__ import annotations

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

from topkube.control import Control, build_timeout
from topkube.errors import ArgumentError, CollectiveError, MismatchError, WorldError
from topkube.heartbeat import Heartbeat
from topkube.links import (
    LinkChoice,
    Links,
    LostConnections,
    are_links_messages,
    explain_trouble,
    explain_used_up_files,
)
from topkube.mpi_exit import forget_exit
from topkube.mpi_start import free_handles
from topkube.roll_call import RollCall
from topkube.topology import Nodes
from topkube.waiting import advance_messages, choose_patience, wait_for_links, wait_until

LONG_WAIT_SECONDS = 10.0
"""After this time, a wait checks if other ranks can connect to this one."""


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
    out_of_step: str = ""
    """The error with which this rank has left a collective before its end; "" if there was none."""
    _lost_connections: LostConnections = field(default_factory=LostConnections)
    _has_warned: bool = False
    _process: int = field(default_factory=os.getpid)
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
        """Count a wait of `series`, and store its start time. Raises CollectiveError if this rank has left a collective
        before its end: others may have its result. Raises WorldError if the world is closed, or in a child that the
        rank has forked: it has the same connections, and would take the messages of the rank. A child of a single rank
        may train alone."""
        forget_exit()
        if self.size > 1 and os.getpid() != self._process:
            raise WorldError(
                f"this process is a child of rank {self.members[self.rank]}, and only the rank itself can take part in"
                " what ranks do together",
                cause="a worker of a DataLoader, or another process that the script forked, called a function of"
                " topkube",
                next_step="call it in the rank's own process",
            )
        if self.is_closed:
            raise WorldError(
                "this world was closed", next_step="create another one: topkube.init(), topkube.new_world()"
            )
        if self.out_of_step:
            raise CollectiveError(
                f"rank {self.members[self.rank]} has left a collective before its end, so it is out of step with the"
                " other ranks",
                cause=f"the script went on after an error: {self.out_of_step}",
                next_step="let such an error end the script, and start it again from its last checkpoint",
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
            try:
                wait_for_links(self.links, messages, check, self.crowding)
            except BaseException as error:
                self.leave_collective(error, messages, meanwhile)
                raise
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
        try:
            wait_until(ready, check, self.crowding, pause_seconds, sleep, self.links)
        except BaseException as error:
            self.leave_collective(error, ready, meanwhile)
            raise

    def leave_collective(self, error: BaseException, *users: Any) -> None:
        """Note that `error` has ended a collective of this rank before its end. MPI may still write to the memory of
        its messages, and read it: that of `users`, and of the frames that the error has passed, is kept. A mismatch
        leaves no rank out of step: all ranks raise it before they use a value."""
        if self.size == 1:
            return
        _kept_messages.append((users, error.__traceback__))
        if not self.out_of_step and not isinstance(error, MismatchError):
            what = getattr(error, "what", "") or str(error)
            self.out_of_step = f"{type(error).__name__}: {what}" if what else type(error).__name__

    def _build_check(
        self, what: str, meanwhile: Callable[[], None] | None, series: WaitSeries
    ) -> Callable[[float], None]:
        """Return what a wait calls from time to time with the seconds that it has waited."""

        def check(waited: float) -> None:
            self.check_roll_call(what, series)
            self._check_links(what)
            if meanwhile is not None:
                meanwhile()
            if waited > LONG_WAIT_SECONDS:
                self._warn_of_used_up_files()
            if waited > self.deadline_seconds:
                self.give_up(what, series)

        return check

    def _warn_of_used_up_files(self) -> None:
        """Print a warning, once, if this process can open no more files: the connection of another rank, also that of
        MPI, then waits until the deadline."""
        if not self._has_warned and (warning := explain_used_up_files(self.members[self.rank])):
            self._has_warned = True
            print(warning, file=sys.stderr, flush=True)

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
        error = build_timeout(place, own, missing, other_waits, self.deadline_seconds)
        self.leave_collective(error)
        raise error

    def close(self) -> None:
        """Free the communicators and the shared memory of a sub-world. All of its ranks call this together, when no
        rank uses it any more. Raises ArgumentError for the world of all ranks, and CollectiveTimeout if a rank does not
        call this function."""
        if self is open_worlds.whole:
            raise ArgumentError("this is the world of all ranks", next_step="call topkube.shutdown()")
        self.enter(WaitSeries.CALL)
        if self.size > 1:
            self.wait([self.calls_comm.Ibarrier()], "close()", series=WaitSeries.CALL)
        open_worlds.parts[:] = [world for world in open_worlds.parts if world is not self]
        with contextlib.ExitStack() as stack:
            self.drop(stack)
        self.free()

    def drop(self, stack: contextlib.ExitStack) -> None:
        """Have `stack` call what belongs to the end of the world, also if a part of it raises an error."""
        stack.callback(self.cache.clear)
        for end in self.at_end:
            stack.callback(end)
        self.at_end.clear()

    def free(self) -> None:
        """Free what MPI holds for the world. All of its ranks call this together."""
        self.is_closed, self.window = True, np.zeros(0, np.uint8)  # the memory of the window disappears
        handles, self.handles = self.handles[::-1], []
        free_handles(handles)

    def translate_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers that `ranks` of this world have in the world of all ranks."""
        return tuple(self.members[rank] for rank in ranks)


_kept_messages: list[Any] = []
"""What holds the memory of messages that were under way when an error ended a collective."""
_leaving: set[int] = set()
"""The identities of the threads that must leave their waits."""


def leave_waits(thread: int) -> None:
    """End the waits of the thread with this identity within a tenth of a second, with a CollectiveError. Only for the
    end of a program: afterwards this rank is out of step with the others."""
    _leaving.add(thread)


class OpenWorlds:
    """The worlds of this process that were not closed: the world of all ranks, None before `init`, and sub-worlds."""

    def __init__(self) -> None:
        self.whole: World | None = None
        self.parts: list[World] = []


open_worlds = OpenWorlds()
