"""Messages that must reach every rank although no rank waits for them: roll calls, and reports of a mismatch (ranks
that entered different collectives).

In a large world no rank sends to all others: at 4,096 ranks that would be 16 million messages and as many
connections. A rank sends what it has learned to its neighbours at distances of powers of two, in both directions, and
each neighbour passes on what is new to it. Every message therefore reaches all ranks after at most half as many hops as
the number of ranks has binary digits, and it passes around whole nodes that are silent. Two ranks can miss each other
only if most ranks of a large world are silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.errors import CollectiveTimeout

_FIRST_TAG = 1
"""The tag of answers on the control communicator. The next tag is that of reports of a mismatch."""
_QUIET_SECONDS = 1.5
"""A roll call ends if no new answer arrives for this time. Ranks that wait check the control communicator about ten
times a second."""
_LONGEST_QUIETS = 4
"""A roll call always ends after this many times `_QUIET_SECONDS`."""
_PAUSE_SECONDS = 1e-3
"""The time between two checks of a rank for messages of a roll call."""
_SEND_SECONDS = 10e-3
"""The time between two sends of what a rank has learned."""
_PATIENCE_RANKS = 8
"""With more ranks per processor, a roll call lasts longer in proportion, because each rank runs less often."""
_LEAVE_SECONDS = 0.2
"""How long a rank waits until its messages are sent. Messages to absent ranks may never be sent; MPI keeps them."""
_LISTED_RANKS = 8
_LISTED_WAITS = 3
"""The most ranks, and the most places in which other ranks wait, that a message lists."""
_DIRECT_RANKS = 64
"""In a world of at most this many ranks, every rank sends to all others."""

Answers = npt.NDArray[np.void]
SERIES = 4
"""How many series of waits a rank counts, each with its own numbers (`topkube.world.WaitSeries`)."""
ANSWER = np.dtype([("rank", np.int32), ("counts", np.int64, (SERIES,)), ("what", "S60")])
"""One rank's answer: how many waits of each series it has entered, and what it waits for."""


def list_neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks that `rank` sends to: all others among up to 64 ranks, otherwise the ranks at distances 1, 2, 4,
    ... in both directions."""
    if size <= _DIRECT_RANKS:
        return [other for other in range(size) if other != rank]
    distances = [1 << power for power in range((size - 1).bit_length())]
    neighbours = {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}
    return sorted(neighbours - {rank})


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 3": at most eight numbers, then the count of the other ranks."""
    listed = ", ".join(str(rank) for rank in ranks[:_LISTED_RANKS])
    listed += f" and {len(ranks) - _LISTED_RANKS} more" if len(ranks) > _LISTED_RANKS else ""
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def build_timeout(
    place: str, own: int, missing: Sequence[int], other_waits: Mapping[str, Sequence[int]], deadline_seconds: float
) -> CollectiveTimeout:
    """Return the error of rank `own`, which waited for `place` until the deadline. `missing`: the ranks that did not
    arrive. `other_waits`: the ranks that wait in another place, by that place."""
    if tuple(missing) == (own,):
        return CollectiveTimeout(
            f"rank {own} arrived at {place} after the others had given up",
            (own,),
            cause="this rank was slower than the deadline allows: data loading, a checkpoint, a debugger",
            next_step="raise TOPKUBE_DEADLINE_SECONDS, or make the ranks do equal work between collectives",
        )
    waited = f"{place} did not complete within {deadline_seconds:g} s"
    shown = list(other_waits.items())[:_LISTED_WAITS]
    elsewhere = "; ".join(f"{name_ranks(ranks)} waited for {other}" for other, ranks in shown)
    elsewhere = f" ({elsewhere})" if elsewhere else ""
    if not missing and any(_is_same_wait(place, other) for other in other_waits):
        return CollectiveTimeout(
            f"{waited}, although every rank arrived{elsewhere}",
            cause="ranks wait in different places: they took different branches",
            next_step="make every rank enter the same collectives in the same order",
        )
    if not missing:
        return CollectiveTimeout(
            f"{waited}, although every rank arrived{elsewhere}",
            cause="the network between nodes is slower than the deadline allows, or a connection is stuck",
            next_step="run `topkube bench allreduce` under mpiexec, or raise TOPKUBE_DEADLINE_SECONDS",
        )
    return CollectiveTimeout(
        f"{waited}: {name_ranks(missing)} never arrived{elsewhere}",
        tuple(missing),
        cause="a rank failed, hangs, or skipped a collective that others entered",
        next_step="read that rank's output; every rank must enter the same collectives in the same order",
    )


def _is_same_wait(place: str, other: str) -> bool:
    """Return True if two places, "what (series number)", are the same wait of their ranks: all ranks have the same
    place there, unless they took different branches. A rank in a later wait may just be ahead of the others."""
    return place != other and place.rpartition(" (")[2] == other.rpartition(" (")[2]


class Roll:
    """The answers that one rank has received in a roll call, at most one per rank. Pure: it neither sends nor waits."""

    def __init__(self, own: Answers) -> None:
        self.answers: dict[int, Any] = {}
        self._new_answers: list[Any] = []
        self.add(own)

    def add(self, answers: Answers) -> bool:
        """Add the `answers`. Return True if an answer is new."""
        new = [answer for answer in answers if int(answer["rank"]) not in self.answers]
        self.answers.update({int(answer["rank"]): answer for answer in new})
        self._new_answers += new
        return bool(new)

    def take_new(self) -> Answers:
        """Return the answers that were added since the last call."""
        answers, self._new_answers = np.array(self._new_answers, ANSWER), []
        return answers

    def list_missing(self, size: int, series: int = 0, number: int = 0) -> list[int]:
        """Return the ranks of `size` that have not entered wait `number` of `series`, or have not answered. Number 0
        means before the first wait."""
        return [
            rank
            for rank in range(size)
            if rank not in self.answers or int(self.answers[rank]["counts"][series]) < number
        ]

    def group_other_waits(self, what: str) -> dict[str, list[int]]:
        """Return the ranks that wait for something other than `what`, by what they wait for."""
        places: dict[str, list[int]] = {}
        for rank in sorted(self.answers):
            place = bytes(self.answers[rank]["what"]).decode(errors="replace")
            if place != shorten(what).decode(errors="replace"):
                places.setdefault(place, []).append(rank)
        return places


def shorten(what: str) -> bytes:
    """Return `what` as an answer stores it: its first 60 bytes."""
    return what.encode()[: ANSWER["what"].itemsize]


class Control:
    """The control communicator `comm` of one world, for roll calls and reports of a mismatch. Any thread can use it; a
    lock admits one thread at a time. `crowding` is the number of ranks per processor."""

    def __init__(self, comm: Any, crowding: float = 1.0, first_tag: int = _FIRST_TAG) -> None:
        self._comm = comm
        self._roll_call_tag, self._mismatch_tag = first_tag, first_tag + 1
        self._slowness = max(1.0, crowding / 2)
        self._quiet_seconds = _QUIET_SECONDS * max(1.0, crowding / _PATIENCE_RANKS)
        self._lock = threading.Lock()
        self._roll: Roll | None = None
        self._sends: list[Any] = []
        """Buffers and requests of answers that may not have left."""
        self._reports: list[Any] = []
        """The buffer and the requests of this rank's report of a mismatch."""

    def has_seen_roll_call(self) -> bool:
        """Return True if another rank has begun a roll call."""
        return self._has_message(self._roll_call_tag)

    def call_roll(self, counts: Sequence[int], what: str) -> Roll:
        """Begin a roll call, or join one, and return the answers. A second call returns the answers of the first. Empty
        `counts` mean that this rank has not entered a wait yet."""
        with self._lock:
            if self._roll is None:
                own = np.zeros(1, ANSWER)
                own[0] = (self._comm.rank, tuple(counts) or (0,) * SERIES, shorten(what))
                self._roll = Roll(own)
                self._exchange(self._roll)
            return self._roll

    def report_mismatch(self) -> None:
        """Inform all ranks that two ranks entered different collectives. A rank that receives the report passes it on,
        once."""
        with self._lock:
            if not self._reports:
                nothing = np.zeros(1, np.int64)
                neighbours = list_neighbours(self._comm.rank, self._comm.size)
                self._reports = [nothing, *(self._comm.Isend(nothing, rank, self._mismatch_tag) for rank in neighbours)]

    def has_seen_mismatch(self) -> bool:
        """Return True if another rank has reported a mismatch."""
        return self._has_message(self._mismatch_tag)

    def _has_message(self, tag: int) -> bool:
        from mpi4py import MPI

        return bool(self._comm.Iprobe(MPI.ANY_SOURCE, tag))

    def _exchange(self, roll: Roll) -> None:
        from mpi4py import MPI

        comm, status, sends = self._comm, MPI.Status(), list[tuple[Answers, Any]]()
        neighbours = list_neighbours(comm.rank, comm.size)

        def send_new() -> None:
            answers = roll.take_new()
            if answers.size:
                sends.extend(
                    (answers, comm.Isend(answers.view(np.uint8), rank, self._roll_call_tag)) for rank in neighbours
                )

        quiet, longest = self._quiet_seconds, _LONGEST_QUIETS * self._quiet_seconds
        pause, between_sends = _PAUSE_SECONDS * self._slowness, _SEND_SECONDS * self._slowness

        start = last_answer = last_send = time.monotonic()
        send_new()
        while len(roll.answers) < comm.size:
            now = time.monotonic()
            if now > min(last_answer + quiet, start + longest):
                break
            if comm.Iprobe(MPI.ANY_SOURCE, self._roll_call_tag, status):
                arrived = np.empty(status.Get_count(MPI.BYTE) // ANSWER.itemsize, ANSWER)
                comm.Recv(arrived.view(np.uint8), status.source, self._roll_call_tag)
                if roll.add(arrived):
                    last_answer = now
                continue
            if now - last_send > between_sends:
                last_send = now
                send_new()
            time.sleep(pause)

        send_new()
        deadline = time.monotonic() + _LEAVE_SECONDS * self._slowness
        while not MPI.Request.Testall([request for _, request in sends]) and time.monotonic() < deadline:
            time.sleep(pause)
        self._sends.append(sends)
