"""The profile of a step of one rank: the seconds of forward, of backward up to each gradient, and of the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gradient:
    """A gradient of `elements` values of `itemsize` bytes. `seconds` is the time of backward from the gradient before
    it, or from the start of backward; `forward` is the time of forward from the first use of its parameter to that of
    the next parameter, None if unknown. A gradient that `is_always_dense` is never compressed, and neither is a
    gradient with few elements (training/exchange/buckets/fusion.py)."""

    name: str
    elements: int
    seconds: float
    itemsize: int = 4
    is_always_dense: bool = False
    forward: float | None = None


@dataclass(frozen=True)
class HostCost:
    """The processor time of the communication thread for one bucket, on a cluster of `nodes` with `slots` ranks each:
    `fixed` seconds, and seconds `per_element`, which is 0 if only small buckets were measured. `before` is the share of
    it that comes before the bucket's messages."""

    nodes: int
    slots: int
    fixed: float
    per_element: float
    before: float


@dataclass(frozen=True)
class StepProfile:
    """The profile of a step of a rank without any exchange, in seconds. `gradients` come in the order of backward.
    `update` is the optimizer's step, `other` the rest of the loop in the same thread, `data` the time in which the
    input pipeline prepares a batch. `spread` is the relative standard deviation of the compute time over ranks. `host`
    holds measured costs of the communication thread by algorithm, `latency` the measured time of one short message,
    None if unknown. `on_cpu` is False if a GPU computes: exchanges then use the pipeline of the device."""

    name: str
    forward: float
    gradients: tuple[Gradient, ...]
    update: float = 0.0
    other: float = 0.0
    data: float = 0.0
    spread: float = 0.0
    host: Mapping[str, HostCost] = field(default_factory=dict)
    latency: float | None = None
    on_cpu: bool = True
    cores: int | None = None
    """Processor cores of the machine that was traced, None if unknown or if a GPU computes."""
    bucket_bytes: int | None = None

    @property
    def elements(self) -> int:
        return sum(gradient.elements for gradient in self.gradients)

    @property
    def backward(self) -> float:
        return sum(gradient.seconds for gradient in self.gradients)

    @property
    def forward_seconds(self) -> tuple[float, ...]:
        """The seconds of forward with each parameter, in the order of `gradients`. Parts that are unknown are in
        proportion to those of backward. The sum is `forward`."""
        parts = [g.seconds if g.forward is None else g.forward for g in self.gradients]
        whole = sum(parts)
        if not whole:
            return tuple(self.forward / len(parts) for _ in parts)
        return tuple(self.forward * part / whole for part in parts)

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward

    @property
    def serial(self) -> float:
        """Seconds of all that the thread of the script does in a step."""
        return self.compute + self.update + self.other

    def scale_batch(self, factor: float) -> StepProfile:
        """Return the profile of a batch that is `factor` times as large."""
        gradients = tuple(
            dataclasses.replace(
                g, seconds=g.seconds * factor, forward=None if g.forward is None else g.forward * factor
            )
            for g in self.gradients
        )
        return dataclasses.replace(self, forward=self.forward * factor, gradients=gradients, data=self.data * factor)


UNIFORM_LAYERS = 32
"""The layers of a model of which only the size is known."""
FORWARD_SHARE = 1 / 3
"""The share of forward in forward and backward of a model whose times were not measured. Backward multiplies twice per
layer: for the gradient of the input and for that of the weight."""


def build_uniform_profile(elements: int, compute: float) -> StepProfile:
    """Return the profile of a model with `elements` parameters in equal layers, which needs `compute` seconds for
    forward and backward."""
    layers = max(1, min(UNIFORM_LAYERS, elements))
    sizes = [elements * (i + 1) // layers - elements * i // layers for i in range(layers)]
    backward = compute * (1 - FORWARD_SHARE)
    gradients = tuple(Gradient(f"layer {layers - i}", size, backward / layers) for i, size in enumerate(sizes))
    return StepProfile(
        f"{elements:,} parameters in {layers} equal layers", compute * FORWARD_SHARE, gradients, on_cpu=False
    )
