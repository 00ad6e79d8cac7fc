"""Fills the memory tier in the background, once the disk tier has what it will get.

A node reads only its part of the first epoch. Without this, samples that another node had would be decoded when they
are first asked for, epoch after epoch: after e epochs on N nodes a share of (1 - 1/N)^e is still missing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from topkube.data.fill import Filler
from topkube.data.listing import Longs
from topkube.data.memory_tier import MemoryTier
from topkube.errors import TopKubeError

_CHUNK_BYTES = 2 << 20
"""Decoded at once: the loop waits for its processor no longer than that takes."""
_LEAST_PAUSE_SECONDS = 0.001


class MemoryFiller:
    """A thread that reads what the tier lacks of `shards`, this rank's share of what `filler` brings.

    starts: the first sample of each shard, (shards + 1,). keep: a method that decodes samples and keeps them in the
    tier; its object lives no longer because of this one. At least half of the time the thread rests: it is training's
    processor.
    """

    def __init__(
        self,
        tier: MemoryTier,
        filler: Filler,
        shards: Sequence[int],
        starts: Longs,
        record_bytes: int,
        keep: Callable[[Longs], object],
    ) -> None:
        self._tier, self._filler, self._shards, self._starts = tier, filler, shards, starts
        self._keep = weakref.WeakMethod(keep)
        self._chunk = max(1, _CHUNK_BYTES // max(record_bytes, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="topkube-memory-fill", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._filler.wait()
            for number in self._shards:
                samples = np.arange(self._starts[number], self._starts[number + 1])
                for at in range(0, samples.size, self._chunk):
                    chunk = samples[at : at + self._chunk]
                    missing = chunk[~self._tier.has(chunk)]
                    keep = self._keep()
                    if keep is None or self._stop.is_set() or self._tier.frozen:
                        return
                    if missing.size:
                        begun = time.monotonic()
                        keep(missing)
                        del keep
                        self._stop.wait(max(time.monotonic() - begun, _LEAST_PAUSE_SECONDS))
        except TopKubeError:  # whoever reads the sample is told
            return

    def close(self) -> None:
        """Ends after the chunk at hand. The filler must be closed before."""
        self._stop.set()
        self._thread.join(10)
