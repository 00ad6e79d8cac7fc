"""A finished run in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from topkube.telemetry.bar import bytes_sent, duration, rate, reduction, size
from topkube.telemetry.history import PARTS, History

EDGE = 10
"""First and last loss are means over this many steps: one batch's loss says little."""


@dataclass(frozen=True)
class Summary:
    """What a run did. Losses are None where the script reported none. Seconds are per step, bytes sums over all
    ranks."""

    steps: int
    total_steps: int | None
    first_loss: float | None
    final_loss: float | None
    samples_per_second: float | None
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    bytes_between_nodes: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    """What a dense ring would have sent where `bytes_between_nodes` were counted (with one node: `bytes_sent`)."""
    skipped_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def summarize(history: History, nodes: int, ranks: int) -> Summary:
    losses = [loss for loss in history.losses if math.isfinite(loss)]
    steps = len(history.steps)
    edge = max(1, min(EDGE, len(losses) // 2))
    return Summary(
        steps=history.last.step if history.last else 0,
        total_steps=history.total_steps,
        first_loss=sum(losses[:edge]) / edge if losses else None,
        final_loss=sum(losses[-edge:]) / edge if losses else None,
        samples_per_second=history.samples_per_second,
        seconds_per_step={part: sum(history.seconds[part]) / steps for part in PARTS} if steps else {},
        bytes_between_nodes=sum(history.between),
        bytes_sent=sum(history.sent),
        bytes_dense=bytes_sent(history, nodes, ranks)[1],
        skipped_steps=history.last.skipped_steps if history.last else 0,
    )


def rows(summary: Summary, history: History, nodes: int, ranks: int, wall_seconds: float) -> list[tuple[str, str]]:
    """The summary as (name, value) for a table."""
    found = [("steps", f"{summary.steps}" + (f" of {summary.total_steps}" if summary.total_steps else ""))]
    found.append(("time", duration(wall_seconds)))
    if summary.first_loss is not None and summary.final_loss is not None:
        found.append(("loss", f"{summary.first_loss:.4g} → {summary.final_loss:.4g}"))
    if summary.samples_per_second:
        found.append(("samples per second", rate(summary.samples_per_second)))
    step = sum(summary.seconds_per_step.values())
    if step > 0:
        shares = [f"{part} {seconds / step:.0%}" for part, seconds in summary.seconds_per_step.items()]
        found.append(("time per step", f"{1000 * step:.1f} ms: " + ", ".join(shares)))
    where = "sent between nodes" if nodes > 1 else "sent inside the node"
    if summary.bytes_dense:
        found.append((where, f"{reduction(history, nodes, ranks)} ({size(summary.bytes_dense)})"))
    found.append(("skipped steps", str(summary.skipped_steps)))
    return found
