"""The signal by which a run is asked to save a checkpoint and to end."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """SIGTERM, between `watch` and `unwatch`. `has_come` is True after the signal. Processes that the script forks
    meanwhile, such as those of multiprocessing, end by the signal as they would without a run."""

    def __init__(self) -> None:
        self.has_come = False
        self._previous_handler: Any = None

    def watch(self) -> None:
        """Note the signal from now on, in place of the process's handler. Python allows this in the main thread only:
        in another thread, nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._note)
            _watching.append(self)

    def unwatch(self) -> None:
        """Restore the process's handler."""
        if self in _watching:
            _watching.remove(self)
            self._restore()

    def _restore(self) -> None:
        if self._previous_handler is not None:  # else the handler is not Python's
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True


_watching: list[StopSignal] = []
"""The objects of this process that note the signal. The first one has the handler of the process."""
_forking = threading.local()
"""The signals that were blocked in this thread before it forked."""


def _block_before_fork() -> None:
    """Let the signal wait until a child has its own handler: Python drops signals that arrive before."""
    if _watching:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    if (blocked := _forking.__dict__.pop("blocked", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _restore_in_child() -> None:
    while _watching:
        _watching.pop()._restore()
    _unblock()


os.register_at_fork(before=_block_before_fork, after_in_parent=_unblock, after_in_child=_restore_in_child)
