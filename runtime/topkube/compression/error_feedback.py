"""Error feedback: what was not sent is kept and added to the next gradient.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018. With momentum correction it is velocity that is
accumulated, not the gradient: Lin et al., "Deep Gradient Compression", 2018, section 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Residual:
    """The unsent part of one shard, and its twin for the step in progress.

    A collective writes residual + gradient, less what it sends, into `pending`; `commit` makes that the residual once
    all ranks agree that the step is finite, `discard` keeps the old one. float32, one value per element of the shard:
    NumPy arrays, or tensors of a torch `device` where one is given.

    With `momentum` above 0 the shard has a velocity as well, with a twin of its own. A collective writes the gradient
    into `pending_velocity` and calls `accumulate`; what it sends it clears in both (`clear`).
    """

    def __init__(self, length: int, momentum: float = 0.0, gain: float = 1.0, device: Any = None) -> None:
        self.momentum, self.gain = momentum, gain
        self.current: Any = _zeros(length, device)
        self.pending: Any = _zeros(length, device)
        self.velocity: Any = _zeros(length if momentum else 0, device)
        self.pending_velocity: Any = _zeros(len(self.velocity), device)

    @property
    def arriving(self) -> Any:
        """Where the gradient goes before the old residual is added."""
        return self.pending_velocity if self.momentum else self.pending

    def accumulate(self) -> None:
        """velocity = momentum * velocity + gain * gradient; residual = residual + velocity."""
        library = np if isinstance(self.current, np.ndarray) else _torch()
        if self.gain != 1:
            self.pending_velocity *= np.float32(self.gain).item()
        library.multiply(self.velocity, np.float32(self.momentum).item(), out=self.pending)
        self.pending_velocity += self.pending
        library.add(self.current, self.pending_velocity, out=self.pending)

    def clear(self, indices: Any) -> None:
        """Entries that are sent. Their velocity goes too (momentum factor masking): it would go on in the direction of
        gradients that are old by then."""
        self.pending[indices] = 0
        if len(self.velocity):
            self.pending_velocity[indices] = 0

    def commit(self) -> None:
        self.current, self.pending = self.pending, self.current
        self.velocity, self.pending_velocity = self.pending_velocity, self.velocity

    def discard(self) -> None:
        """Keeps `current`; `pending` is overwritten by the next step."""

    def __len__(self) -> int:
        return len(self.current)


def _zeros(length: int, device: Any) -> Any:
    return np.zeros(length, np.float32) if device is None else _torch().zeros(length, device=device)


def _torch() -> Any:
    import torch

    return torch
