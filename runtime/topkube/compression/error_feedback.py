"""Error feedback: what was not sent is kept and added to the next gradient.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.
"""

from __future__ import annotations

import numpy as np

from topkube.arrays import Array


class Residual:
    """The unsent part of one shard, and its twin for the step in progress.

    A collective writes residual + gradient, less what it sends, into `pending`; `commit` makes that the residual once
    all ranks agree that the step is finite, `discard` keeps the old one. float32, one value per element of the shard.
    """

    def __init__(self, length: int) -> None:
        self.current: Array = np.zeros(length, np.float32)
        self.pending: Array = np.zeros(length, np.float32)

    def commit(self) -> None:
        self.current, self.pending = self.pending, self.current

    def discard(self) -> None:
        """Keeps `current`; `pending` is overwritten by the next step."""
