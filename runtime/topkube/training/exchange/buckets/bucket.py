"""A bucket: parameters that are exchanged together, contiguous in memory during the exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from topkube.collectives.error_feedback import Residual
from topkube.collectives.request import Matrix
from topkube.training.exchange.buckets.gradient_memory import GradientMemory, may_move
from topkube.training.exchange.buckets.parameter import Parameter, view_real

IN_PLACE_BYTES = 2 << 20
"""In an overlapped exchange, a gradient of this size travels from its own memory. Smaller gradients are copied side by
side, because messages of their own would cost more than the copies."""


@dataclass(eq=False)
class Bucket:
    """A bucket of parameters: `parameters[i]` occupies elements starts[i] to starts[i + 1]."""

    dtype: torch.dtype
    is_always_dense: bool
    has_rows: bool = False
    parameters: list[Parameter] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    residual: Residual | None = None
    waiting: int = 0
    """The number of parameters whose gradient this backward has not produced yet."""
    memory: GradientMemory | None = None
    """The memory of the gradients of a part of an overlapped exchange, if they may move."""

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.starts[-1]

    def append(self, parameter: Parameter) -> None:
        self.parameters.append(parameter)
        self.starts.append(self.starts[-1] + parameter.length)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The parameters as matrices: one row per element of their first dimension."""
        return tuple(
            Matrix(start, parameter.length, parameter.length // view_real(parameter.tensor.detach()).shape[0])
            for parameter, start in zip(self.parameters, self.starts, strict=False)
        )

    @cached_property
    def parts(self) -> list[Bucket]:
        """The parts of an overlapped exchange, the same on all ranks: each large parameter by itself, and all others
        together. Read when the bucket is complete."""
        together = Bucket(self.dtype, self.is_always_dense)
        parts = []
        for parameter in self.parameters:
            if parameter.length * self.dtype.itemsize >= IN_PLACE_BYTES:
                parts.append(Bucket(self.dtype, self.is_always_dense))
                parts[-1].append(parameter)
            else:
                together.append(parameter)
        if not together.parameters:
            return parts
        if len(together.parameters) > 1 and all(may_move(parameter.tensor) for parameter in together.parameters):
            together.memory = GradientMemory(together.parameters, self.dtype)
        return [*parts, together]

    def begin_backward(self) -> None:
        """Prepare for the gradients of a backward pass."""
        self.waiting = sum(parameter.tensor.requires_grad for parameter in self.parameters)
        for memory in set(self._memory_of.values()):
            memory.begin_backward()

    def take_in(self, parameter: Parameter) -> bool:
        """Move a gradient that has just been accumulated into the memory of its part. Return False if it stays."""
        memory = self._memory_of.get(parameter.index)
        return memory is not None and memory.take_in(parameter)

    @cached_property
    def _memory_of(self) -> dict[int, GradientMemory]:
        """The memory of each parameter that has one, by the parameter's index."""
        return {p.index: part.memory for part in self.parts if part.memory is not None for p in part.parameters}
