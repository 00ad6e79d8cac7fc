"""A bucket: parameters that are exchanged together, contiguous in memory during the exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from topkube.collectives.error_feedback import Residual
from topkube.collectives.request import Matrix
from topkube.training.exchange.buckets.gradient_memory import GradientMemory, may_move
from topkube.training.exchange.buckets.parameter import Parameter, view_real

IN_PLACE_BYTES = 2 << 20
"""In an overlapped exchange, a gradient of this size travels from its own memory. Smaller gradients are copied side by
side, because messages of their own would cost more than the copies."""


Intake = Literal["moves into its part", "moves into the bucket", "stays", "is only read"]
"""What happens to a gradient when it arrives: it moves into the memory of its part or of the whole bucket; or it stays
where it is, and the exchange changes it, or only reads it."""


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
    intake: Intake = "stays"
    """What happens to the gradients of this backward when they arrive."""
    memory: GradientMemory | None = None
    """The memory in which the gradients lie side by side, if they may move: of a part of an overlapped exchange, or of
    a bucket that is exchanged as a whole."""

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.starts[-1]

    @cached_property
    def holds_small(self) -> bool:
        """True if a parameter is always exchanged dense: the bucket is then never compressed or rounded. Read when the
        bucket is complete."""
        return self.is_always_dense or any(parameter.is_always_dense for parameter in self.parameters)

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

    def begin_backward(self, intake: Intake, moves_all: bool) -> None:
        """Prepare for the gradients of a backward pass. With `moves_all`, small gradients move too when they arrive."""
        self.intake = intake
        self.waiting = sum(parameter.tensor.requires_grad for parameter in self.parameters)
        for parameter in self.parameters:
            parameter.is_deferred = False
        if intake == "moves into the bucket":
            self._open_memory()
        for memory in {*self._memory_of.values(), *([self.memory] if self.memory is not None else [])}:
            memory.begin_backward(moves_all)

    def take_in(self, parameter: Parameter) -> bool:
        """Move a gradient that has just been accumulated into the memory of its part, or of the whole bucket. Return
        False if it stays."""
        memory = None
        if self.intake == "moves into its part":
            memory = self._memory_of.get(parameter.index)
        elif self.intake == "moves into the bucket":
            memory = self._open_memory()
        return memory is not None and memory.take_in(parameter)

    def _open_memory(self) -> GradientMemory | None:
        """Return the memory of the whole bucket, None if some of its gradients must stay where they are."""
        if self.memory is None and self._may_move:
            self.memory = GradientMemory(self.parameters, self.dtype)
        return self.memory

    @cached_property
    def _may_move(self) -> bool:
        return all(may_move(parameter.tensor) for parameter in self.parameters)

    @cached_property
    def _memory_of(self) -> dict[int, GradientMemory]:
        """The memory of each parameter that has one in an overlapped exchange, by the parameter's index."""
        return {p.index: part.memory for part in self.parts if part.memory is not None for p in part.parameters}
