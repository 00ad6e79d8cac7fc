"""The summary of a finished run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from topkube.telemetry.bar import count_sent_bytes, describe_sent_bytes, format_bytes, format_duration, format_rate
from topkube.telemetry.history import DATA, PARTS, History

EDGE = 10
"""The first and the last loss are means over this many steps, because the loss of a single batch varies."""


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Losses are None if the script reported no loss. Seconds are per step; bytes are sums over
    all ranks. Without measured steps, there are no seconds, and bytes are None."""

    steps: int
    total_steps: int | None
    first_loss: float | None
    final_loss: float | None
    loss_steps: int
    """The first and the final loss are each the mean over this many steps; 0 if the script reported no loss."""
    samples_per_second: float | None
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    bytes_between_nodes: int | None = None
    bytes_sent: int | None = None
    bytes_dense: int | None = None
    """The bytes that a dense ring would have sent between nodes (with one node: inside the node)."""
    skipped_steps: int = 0
    choice: str | None = None
    """What `auto` or `dense` stood for, and why; None if the job named its algorithm."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def summarize(history: History, nodes: int, ranks: int) -> Summary:
    """Return the summary of a run of `ranks` ranks on `nodes` nodes."""
    steps, is_measured = len(history.steps), history.is_measured
    first_loss, final_loss, loss_steps = average_edge_losses(history.losses)
    return Summary(
        steps=history.last.step if history.last else 0,
        total_steps=history.total_steps,
        first_loss=first_loss,
        final_loss=final_loss,
        loss_steps=loss_steps,
        samples_per_second=history.samples_per_second,
        seconds_per_step={part: sum(history.seconds[part]) / steps for part in PARTS} if is_measured else {},
        bytes_between_nodes=sum(history.between) if is_measured else None,
        bytes_sent=sum(history.sent) if is_measured else None,
        bytes_dense=count_sent_bytes(history, nodes, ranks)[1] if is_measured else None,
        skipped_steps=history.last.skipped_steps if history.last else 0,
        choice=history.last.choice if history.last else None,
    )


def average_edge_losses(losses: Iterable[float]) -> tuple[float | None, float | None, int]:
    """Return the mean of the first losses and of the last losses, and the number of steps of each mean. Losses that
    are not finite do not count. Without losses: None, None, 0."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return None, None, 0
    edge = max(1, min(EDGE, len(finite) // 2))
    return sum(finite[:edge]) / edge, sum(finite[-edge:]) / edge, edge


def describe_mean(count: int) -> str:
    """Return the words for a mean over `count` steps at the end of a run: "mean of the last 10 steps"."""
    return f"mean of the last {count} steps" if count > 1 else "the last step"


def list_rows(summary: Summary, history: History, nodes: int, ranks: int, wall_seconds: float) -> list[tuple[str, str]]:
    """Return the summary as (name, value) pairs for a table."""
    table = [("steps", f"{summary.steps}" + (f" of {summary.total_steps}" if summary.total_steps else ""))]
    table.append(("time", format_duration(wall_seconds)))
    if summary.first_loss is not None and summary.final_loss is not None:
        count = summary.loss_steps
        means = f"means of the first and the last {count} steps" if count > 1 else "the first and the last step"
        table.append(("loss", f"{summary.first_loss:.4g} → {summary.final_loss:.4g} ({means})"))
    if summary.samples_per_second:
        table.append(("samples per second", format_rate(summary.samples_per_second)))
    step = sum(summary.seconds_per_step.values())
    if step > 0:
        parts = summary.seconds_per_step.items()
        shares = [f"{part} {seconds / step:.0%}" for part, seconds in parts if part != DATA or seconds / step >= 0.005]
        table.append(("time per step", f"{1000 * step:.1f} ms: " + ", ".join(shares)))
    level = "sent between nodes" if nodes > 1 else "sent inside the node"
    if summary.bytes_dense:
        table.append((level, f"{describe_sent_bytes(history, nodes, ranks)} ({format_bytes(summary.bytes_dense)})"))
    table.append(("skipped steps", str(summary.skipped_steps)))
    if summary.choice is not None:
        table.append(("algorithm", summary.choice))
    return table
