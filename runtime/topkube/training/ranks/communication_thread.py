"""The communication thread of the process, which runs all exchanges of training in one order.

Collectives match by order, so all communication of training goes through the thread's queue, first in, first out.
`submit` never waits: a gradient stays in `.grad` until it is exchanged, and the thread stages one bucket at a time, so
a long queue needs no memory. Delayed exchanges of weights have a thread and a world of their own (`open_thread`), so
that agreements and gradients of the next step do not wait for them.

A thread must not outlive the interpreter: a thread that returns from a kernel or from MPI while Python ends aborts
the process. The end of the program therefore waits for the current work, up to the deadline of a collective. If the
script exits with a status, it waits only briefly, because the other ranks are about to be ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from topkube.errors import TopKubeError, WorldError
from topkube.links import Links
from topkube.mpi_exit import get_exit_status, is_rank
from topkube.telemetry.trace import COMMUNICATION_THREAD
from topkube.world import current, leave_waits

T = TypeVar("T")
_BRIEFLY_SECONDS = 0.5
"""How long an exit with a status waits for the current work."""
_LEAVE_SECONDS = 5.0
"""How long the thread may take to leave its waits, which check for the end ten times per second."""


class CommunicationThread:
    """A thread that runs its queue of work in order, until `close`. A script that fails does not wait for the thread,
    which is a daemon: the end of the script ends all ranks."""

    def __init__(self, name: str = COMMUNICATION_THREAD) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closing = False
        self._advance: Callable[[], float | None] | None = None
        self._links: Links | None = None
        self._is_awaited = False
        self._failure: BaseException | None = None
        """An error of `advance` that no future holds yet."""
        self._leaves = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Add `work` to the queue. The future holds its result, or the error that it raised."""
        future: Future[T] = Future()
        self._queue.put((work, future))
        self._wake()
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` after all earlier work, and return its result. Raises the error that it raised."""
        return self.submit(work).result()

    def advance_meanwhile(
        self, advance: Callable[[], float | None], is_awaited: bool = False, links: Links | None = None
    ) -> None:
        """Call `advance` while the queue is empty, until it returns None. Otherwise it returns the seconds until its
        next call; new work is not delayed. If other ranks may wait for it at the end of the program (`is_awaited`),
        the end waits too. Messages of `links` that are complete call it sooner. Called in the thread itself."""
        self._advance, self._is_awaited, self._links = advance, is_awaited, links

    def _wake(self) -> None:
        """End the wait of the thread, if it waits for messages."""
        links = self._links
        if links is not None:
            links.wake()

    def finish(self, last: Callable[[], None] = lambda: None) -> None:
        """Run `last` after all earlier work, and wait for it, unless the thread ends. Errors of the earlier work stay
        in its futures; those of `last` are raised."""
        if self._thread.is_alive() and not self._closing:
            self.run(last)

    def close(self, seconds: float) -> None:
        """End the thread. It finishes the queued work first, for up to `seconds`, and then leaves its waits."""
        self._closing = True
        self._queue.put(None)
        self._wake()
        self._thread.join(seconds)
        if self._thread.is_alive() and self._thread.ident is not None:
            self._leaves.set()
            self._wake()
            leave_waits(self._thread.ident)
            self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        with torch.no_grad():
            self._work()

    def _work(self) -> None:
        while (entry := self._take_next()) is not None:
            work, future = entry
            del entry
            # Each reference is dropped before the next step can wait or wake a waiter: it would keep the bucket's
            # gradients alive until the next bucket, or an optimizer that its script has just deleted.
            try:
                self._raise_failure()
                result = work()
            except BaseException as error:
                del work
                future.set_exception(error)
                if self._closing:
                    _report_at_end(error)
                    return
            else:
                del work
                future.set_result(result)
                del result
            del future
        while self._advance is not None and self._is_awaited and not self._leaves.is_set():
            pause = self._advance()
            if pause is None:
                self._advance = None
            else:
                self._wait_at_end(pause)
        if self._advance is not None:  # messages are under way: their buffers must outlive the interpreter
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._advance))

    def _wait_at_end(self, pause: float) -> None:
        if self._links is not None:
            self._links.wait(pause)
        else:
            self._leaves.wait(pause)

    def _take_next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        """Return the next entry of the queue. Advance the messages that are under way until there is an entry."""
        while self._advance is not None:
            try:
                pause = self._advance()
                if pause is None:
                    self._advance = None
                    break
                try:
                    return self._queue.get_nowait() if self._links is not None else self._queue.get(timeout=pause)
                except Empty:
                    if self._links is not None:
                        self._links.wait(pause)
            except BaseException as error:  # the next work raises it: a thread that ends would leave all futures open
                self._failure, self._advance = error, None
        return self._queue.get()

    def _raise_failure(self) -> None:
        """Raise the error of an earlier `advance`, once."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def _report_at_end(error: BaseException) -> None:
    """Print a warning about an error at the end of the program, when nothing waits for the result. Never free the
    error, because its frames hold the buffers of unfinished messages, which must outlive the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
    if not get_exit_status():
        what = "the program ended during an exchange"
        cause = error if isinstance(error, TopKubeError) else f"{type(error).__name__}: {error}"
        print(f"topkube: warning: {what}: {cause}", file=sys.stderr, flush=True)


_threads: dict[str, CommunicationThread] = {}
"""The threads of this process by name."""


def submit(work: Callable[[], T]) -> Future[T]:
    """Add `work` to the queue of the process's communication thread. The future holds its result, or the error that it
    raised."""
    return open_thread().submit(work)


def run(work: Callable[[], T]) -> T:
    """Run `work` in the process's communication thread after all earlier work, and return its result. Raises the error
    that it raised."""
    return open_thread().run(work)


def advance_meanwhile(
    advance: Callable[[], float | None], is_awaited: bool = False, links: Links | None = None
) -> None:
    """Call `advance` while the queue of the process's communication thread is empty (see
    `CommunicationThread.advance_meanwhile`)."""
    open_thread().advance_meanwhile(advance, is_awaited, links)


def make_done(result: T) -> Future[T]:
    """Return a future that holds `result` already, for work that needs no thread."""
    if result is True:
        return _DONE  # type: ignore[return-value]
    future: Future[T] = Future()
    future.set_result(result)
    return future


_DONE: Future[bool] = Future()
"""A future that holds True, as almost all of `make_done` do: to create one takes longer than to use it."""
_DONE.set_result(True)


def open_thread(name: str = COMMUNICATION_THREAD) -> CommunicationThread:
    """Return the process's thread called `name`, by default the communication thread. It starts on first use."""
    if name not in _threads:
        if not _threads:
            atexit.register(_close)  # runs before the end of MPI, which `init` has registered earlier
        _threads[name] = CommunicationThread(name)
    return _threads[name]


def finish(name: str, last: Callable[[], None] = lambda: None) -> None:
    """Wait for the work of the process's thread called `name`, and for `last` after it, if the thread has started."""
    if name in _threads:
        _threads[name].finish(last)


def _close() -> None:
    """End the threads at the end of the program."""
    if not is_rank():
        return
    seconds = _BRIEFLY_SECONDS
    if not get_exit_status():
        with contextlib.suppress(WorldError):  # after `shutdown`
            seconds = current().deadline_seconds + _LEAVE_SECONDS
    for thread in _threads.values():
        thread.close(seconds)
