"""Waits that leave the processor to other threads, and the wait of all ranks for each other in `topkube.init`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from topkube.control import Control, name_ranks
from topkube.errors import CollectiveTimeout
from topkube.links import Links

_YIELD_SECONDS = 100e-6
"""How long a wait for messages yields the processor and checks again before it begins to sleep."""
_PATIENCE_SECONDS = 2e-3
"""How long the script's thread yields before it sleeps, with a processor for each rank. If one rank sleeps, it wakes up
late, and then the others sleep too: calls in a row would take three times as long."""
_PAUSE_SECONDS = 200e-6
"""The longest sleep between two checks if the machine has a processor for every other rank."""
_IDLE_SECONDS = 8e-6
"""A call of MPI that takes more processor time has moved data. MPI moves a few packets per call over TCP: 32 to 64
KiB."""
_MOST_CALLS = 64
"""The most calls of MPI in a row: other work of the thread must not wait long."""
CHECK_SECONDS = 0.1
"""The time between two calls of `check`."""
_MEETING_TAG = 32_000
"""The first tag of a roll call in `wait_for_all_ranks`, on MPI.COMM_WORLD: a script's own messages have smaller tags.
Every MPI has tags up to 32,767."""

_advances: dict[int, Callable[[], Links | None]] = {}
"""What the waits of a thread call, by the thread's identity."""


def advance_in_waits(advance: Callable[[], Links | None] | None) -> None:
    """Call `advance`, which does not wait, again and again in all waits of this thread from now on: exchanges that
    other ranks wait for then continue. It returns the links whose messages tell when it is to be called, or None if
    nothing tells. None ends that."""
    if advance is None:
        _advances.pop(threading.get_ident(), None)
    else:
        _advances[threading.get_ident()] = advance


def advance_messages(advance: Callable[[], bool]) -> bool:
    """Call `advance`, which calls MPI, again and again while it moves data. Return True as soon as it returns True, and
    False if it moves nothing.

    A wait that sleeps after each call would move 64 KiB per sleep, far less than a fast link. MPI does not report if a
    call has moved data, but its processor time shows it. Its duration does not: after the call, the thread waits for
    the interpreter, which another thread may hold.
    """
    for _ in range(_MOST_CALLS):
        start = time.thread_time()
        if advance():
            return True
        if time.thread_time() - start < _IDLE_SECONDS:
            break
    return False


def choose_patience(crowding: float) -> float:
    """Return how long the script's thread yields while it waits for messages of links, with this many ranks per
    processor."""
    return _PATIENCE_SECONDS / max(1.0, crowding)


def sleep_until_woken(seconds: float, links: Links | None) -> None:
    """Sleep for `seconds`; if `links` is passed, until some of its messages are complete, or it is time to check for
    errors. With 0 seconds, messages are about to arrive, so the thread yields the processor before it sleeps: the
    script's thread for longer than others, which compete with what the script computes."""
    if links is not None:
        is_of_script = threading.current_thread() is threading.main_thread()
        links.wait(CHECK_SECONDS, 0.0 if seconds else links.patience if is_of_script else _YIELD_SECONDS)
    elif seconds:
        time.sleep(seconds)
    else:
        _yield_processor(0.0)


def _yield_processor(_: float) -> None:
    """Yield the processor, in place of a sleep of 0 seconds, which would last for 50 us, the timers' slack."""
    os.sched_yield()


def wait_for_links(links: Links, messages: Any, check: Callable[[float], None], crowding: float) -> None:
    """Wait until `messages`, which `links` has gathered, are complete, as `wait_until` does."""

    def have_arrived() -> bool:
        if not messages.are_complete:
            links.advance()
        return bool(messages.are_complete)

    wait_until(have_arrived, check, crowding, None, lambda seconds: sleep_until_woken(seconds, links), links)


def wait_until(
    ready: Callable[[], bool],
    check: Callable[[float], None],
    crowding: float = 1.0,
    pause_seconds: float | None = None,
    sleep: Callable[[float], object] | None = None,
    links: Links | None = None,
) -> None:
    """Wait until `ready()` is true. `check` gets the seconds since the start about ten times a second, and may raise.

    The wait yields the processor at once and sleeps soon: ranks may outnumber processors, and the thread that computes
    gradients needs the processor more. With more ranks per processor (`crowding`), the wait sleeps longer. Without
    that, 128 waiting ranks would use all the time of two processors. If `pause_seconds` is given, the wait sleeps for
    that long from the start: the caller passes the time that the link needs for the messages. `sleep` takes the place
    of time.sleep, from the start: it returns sooner or later than it is asked to if messages of `links` tell when
    `ready` may change. Without `pause_seconds`, it is asked to sleep for 0 seconds until the yielding is over.
    """
    start = time.monotonic()
    checked, pause, longest = start, 20e-6, _PAUSE_SECONDS * max(1.0, crowding / 2)
    if pause_seconds is not None:
        pause = longest = max(pause_seconds, longest if crowding > 2 else 0.0)
    advance = _advances.get(threading.get_ident())
    while not ready():
        rest = sleep if advance is None or advance() is links else None
        now = time.monotonic()
        if now - start < _YIELD_SECONDS and pause_seconds is None:
            (rest or _yield_processor)(0.0)
            continue
        if now - checked > CHECK_SECONDS:
            checked = now
            check(now - start)
        (rest or time.sleep)(pause)
        pause = min(pause * 1.25, longest)


def wait_for_all_ranks(comm: Any, deadline_seconds: float) -> None:
    """Wait until all ranks of MPI.COMM_WORLD, `comm`, have called this function.

    MPI makes communicators in calls that block: they use a whole processor while they wait, and have no deadline. If
    all ranks have met before, these calls take milliseconds. Raises CollectiveTimeout, which names the absent ranks,
    after `deadline_seconds`.
    """
    if comm.size == 1:
        return
    control = Control(comm, first_tag=_MEETING_TAG)
    request = comm.Ibarrier()

    def check(waited: float) -> None:
        if waited < deadline_seconds and not control.has_seen_roll_call():
            return
        missing = control.call_roll((), "topkube.init()").list_missing(comm.size)
        absent = f"{name_ranks(missing)} did not call it" if missing else "although all ranks called it"
        raise CollectiveTimeout(
            f"topkube.init() did not complete within {deadline_seconds:g} s: {absent}",
            tuple(missing),
            cause="the script does slow work before topkube.init() on some ranks, or a rank failed there",
            next_step="call topkube.init() at the top of the script, or raise TOPKUBE_DEADLINE_SECONDS",
        )

    wait_until(request.Test, check)
