"""What is done with gradients: the job's spec.aggregation, checked, and the density warm-up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from topkube.collectives.registry import SELECTIONS, WIRES, find
from topkube.errors import ArgumentError
from topkube.settings import Settings
from topkube.training.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class Aggregation:
    """The same on every rank. `algorithm` is the job's word: auto, dense, or a registered name."""

    algorithm: str
    density: float
    warmup_steps: int
    wire: str
    selection: str
    momentum_correction: bool = False
    bucket_bytes: int = BUCKET_BYTES

    @classmethod
    def of(cls, settings: Settings, **given: object) -> Aggregation:
        """`given` where it is not None, else what `settings` say. Raises ArgumentError."""
        values: dict[str, object] = {
            entry.name: getattr(settings, entry.name, None) for entry in dataclasses.fields(cls)
        }
        values["bucket_bytes"] = BUCKET_BYTES
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.algorithm not in ("auto", "dense"):
            find(self.algorithm)
        if not 0 < self.density <= 1:
            raise ArgumentError(
                f"density = {self.density} is outside (0, 1]", next_step="give the share of entries to send, say 0.01"
            )
        for name, value, choices in (("wire", self.wire, WIRES), ("selection", self.selection, SELECTIONS)):
            if value not in choices:
                raise ArgumentError(f"{name} = {value!r} is unknown", next_step=f"choose one of {', '.join(choices)}")
        for name, number, least in (("warmup_steps", self.warmup_steps, 0), ("bucket_bytes", self.bucket_bytes, 1)):
            if number < least:
                raise ArgumentError(f"{name} = {number} is below {least}", next_step=f"give {least} or more")

    def density_at(self, step: int) -> float:
        """The density of step `step`, from 0: 1 at first, then falling exponentially, the target from `warmup_steps`
        on (the scheme of Lin et al., "Deep Gradient Compression", 2018, section 3.3, with a step for its epochs)."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.density ** (step / self.warmup_steps))
