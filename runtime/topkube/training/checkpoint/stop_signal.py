"""The signal by which a run is asked to save a checkpoint and to end."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """SIGTERM, between `watch` and `unwatch`. `has_come` is True after the signal."""

    def __init__(self) -> None:
        self.has_come = False
        self._previous_handler: Any = None

    def watch(self) -> None:
        """Note the signal from now on, in place of the process's handler. Python allows this in the main thread only:
        in another thread, nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._note)

    def unwatch(self) -> None:
        """Restore the process's handler."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
