"""Error feedback: what was not sent is kept and added to the next gradient.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018. Momentum correction accumulates
velocity in place of the gradient: Lin et al., "Deep Gradient Compression", 2018, section 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube.kernels import PreviousThreshold


class Residual:
    """The unsent part of one shard: what training still owes, and the copies that a step in progress needs.

    A collective writes residual + gradient, less what it sends, into `pending`. `accept` makes that the residual that
    the next collective adds, once all ranks agree that the exchange is finite. The optimizer's step then makes it
    final (`commit`), or the gradients are thrown away and the residual of the last step returns (`discard`). float32,
    one value per element of the shard: NumPy arrays, or tensors of a torch `device` if `device` is set. Two copies are
    held; a third one exists only while several exchanges add up to one step.

    `loss_scale` is the factor that a gradient scaler had put on the gradients of the last exchange: the residual's
    unit. `rescale` changes it.

    With `momentum` above 0 the shard has a velocity as well (`has_velocity`), with copies of its own, and keeps it if a
    schedule sets `momentum` to 0 later. A collective writes the gradient into `pending_velocity` and calls
    `accumulate`; `clear` clears the entries that it sends in both.

    `factors` are small arrays that an algorithm keeps from one exchange to the next beside the residual: the factors of
    a low rank, one array per matrix. A collective leaves their successors in `pending_factors`.

    `threshold` is the magnitude at which the next selection on a GPU begins. It never changes a result, so it is
    neither undone nor saved.
    """

    def __init__(self, length: int, momentum: float = 0.0, gain: float = 1.0, device: Any = None) -> None:
        self.momentum, self.gain = momentum, gain
        self.has_velocity = momentum > 0
        self.loss_scale = 1.0
        self.current: Any = _allocate_zeros(length, device)
        self.pending: Any = _allocate_zeros(length, device)
        self.velocity: Any = _allocate_zeros(length if momentum else 0, device)
        self.pending_velocity: Any = _allocate_zeros(len(self.velocity), device)
        self.factors: list[Any] = []
        self.pending_factors: list[Any] = []
        self.threshold = PreviousThreshold(device)
        self._committed_factors: list[Any] = []
        self._committed: tuple[Any, Any] | None = None
        self._has_spare = True

    @property
    def is_tentative(self) -> bool:
        """True between `accept` and `commit` or `discard`."""
        return self._committed is not None

    @property
    def committed(self) -> tuple[Any, Any]:
        """The residual and the velocity as the last step left them."""
        return self._committed or (self.current, self.velocity)

    @property
    def committed_factors(self) -> list[Any]:
        """The factors as the last step left them."""
        return self._committed_factors if self.is_tentative else self.factors

    @property
    def arriving(self) -> Any:
        """The buffer that receives the gradient before the old residual is added."""
        return self.pending_velocity if self.has_velocity else self.pending

    def prepare(self) -> None:
        """Make room for an exchange. Call it before a collective that uses this residual."""
        if not self._has_spare:
            self.pending, self.pending_velocity = _allocate_like(self.current), _allocate_like(self.velocity)
            self._has_spare = True

    def accumulate(self) -> None:
        """velocity = momentum * velocity + gain * gradient; residual = residual + velocity. If several exchanges add up
        to one step, the momentum counts in the first one: later ones add gain * gradient to both."""
        library = np if isinstance(self.current, np.ndarray) else _import_torch()
        if self.gain != 1:
            self.pending_velocity *= np.float32(self.gain).item()
        if self.is_tentative:
            library.add(self.current, self.pending_velocity, out=self.pending)
            self.pending_velocity += self.velocity
            return
        library.multiply(self.velocity, np.float32(self.momentum).item(), out=self.pending)
        self.pending_velocity += self.pending
        library.add(self.current, self.pending_velocity, out=self.pending)

    def clear(self, indices: Any) -> None:
        """Clear entries that are sent. Their velocity goes too (momentum factor masking): it would continue in the
        direction of gradients that are old by then."""
        self.pending[indices] = 0
        if len(self.velocity):
            self.pending_velocity[indices] = 0

    def accept(self) -> None:
        """Make `pending` the residual that the next exchange adds. `discard` can still undo it."""
        arrived = self.pending, self.pending_velocity
        if self._committed is None:
            self._committed, self._committed_factors = (self.current, self.velocity), self.factors
            self._has_spare = False
        else:
            self.pending, self.pending_velocity = self.current, self.velocity
        self.current, self.velocity = arrived
        self.factors = self.pending_factors

    def commit(self) -> None:
        """Make `current` final, after the optimizer's step."""
        if self._committed is not None:
            self.pending, self.pending_velocity = self._committed
            self._committed, self._has_spare = None, True

    def discard(self) -> None:
        """Return to the residual of the last step, after the gradients were thrown away."""
        if self._committed is not None:
            self.pending, self.pending_velocity = self.current, self.velocity
            self.current, self.velocity = self._committed
            self.factors = self._committed_factors
            self._committed, self._has_spare = None, True

    def discard_range(self, start: int, stop: int) -> None:
        """Return to the residual of the last step for the elements [start, stop) of the shard."""
        if self._committed is not None:
            self.current[start:stop] = self._committed[0][start:stop]
            if len(self.velocity):
                self.velocity[start:stop] = self._committed[1][start:stop]

    def rescale(self, loss_scale: float) -> None:
        """Express residual and velocity in the units of gradients that are multiplied by `loss_scale`."""
        if loss_scale == self.loss_scale:
            return
        factor = loss_scale / self.loss_scale
        for values in (self.current, self.velocity, *(self._committed or ())):
            values *= factor
        self.loss_scale = loss_scale

    def __len__(self) -> int:
        return len(self.current)


def _allocate_zeros(length: int, device: Any) -> Any:
    if device is None:
        return np.zeros(length, np.float32)
    torch = _import_torch()
    return torch.zeros(length, dtype=torch.float32, device=device)  # a script may have set another default dtype


def _import_torch() -> Any:
    import torch

    return torch


def _allocate_like(values: Any) -> Any:
    return np.empty_like(values) if isinstance(values, np.ndarray) else _import_torch().empty_like(values)
