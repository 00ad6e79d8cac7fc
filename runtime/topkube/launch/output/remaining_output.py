"""The wait for the reader of a pod's output after a run, and the bytes of the ranks' output that are lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from topkube.launch.output.pod_output import PodOutput

_CHECK_SECONDS = 0.05
_STALL_SECONDS, _DRAIN_SECONDS = 10.0, 600.0
"""The longest waits for the reader of this pod's output after the run: while the reader reads nothing, and in total."""
_LAST_SECONDS = 3.0
"""The longest wait in a pod that was asked to end, after its ranks' grace period: less than the pod has left."""


class RemainingOutput:
    """The ranks' output that `output` has not printed yet."""

    def __init__(self, output: PodOutput) -> None:
        self._output = output
        self.lost_log_bytes = 0
        """Bytes of output that the ranks' logs could not store."""

    async def wait_until_printed(self, is_terminated: Callable[[], bool]) -> int:
        """Wait while the reader of the output reads, no longer than `_DRAIN_SECONDS`, and not in a pod that
        `is_terminated`. Return the number of bytes of the ranks' output that were not printed."""
        start = time.monotonic()
        while not self._output.is_idle:
            await asyncio.sleep(_CHECK_SECONDS)
            is_late = time.monotonic() - start > _DRAIN_SECONDS
            if is_late or self._output.count_stalled_seconds(start) > _STALL_SECONDS or is_terminated():
                break
        return self.lost_log_bytes + self._output.lost_bytes + self._output.waiting_bytes

    def close(self, grace_end: float | None) -> int:
        """Wait for the reader of the output, within limits, and end the output. `grace_end`: the end (monotonic) of the
        ranks' grace period in a pod that was asked to end; else None. Return the number of bytes of the ranks' output
        that are lost."""
        stall, most = _STALL_SECONDS, _DRAIN_SECONDS
        if grace_end is not None:
            stall, most = _LAST_SECONDS, max(0.0, grace_end - time.monotonic()) + _LAST_SECONDS
        return self.lost_log_bytes + self._output.close(stall, most)
