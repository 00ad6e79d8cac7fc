"""The options of `topkube logs`."""

from __future__ import annotations

from dataclasses import dataclass

from topkube.cli.cluster.api import ClusterLocation


@dataclass(frozen=True)
class LogOptions:
    """The options of the command line."""

    job: str
    location: ClusterLocation
    follow: bool = True
    workers: list[int] | None = None
    """None: all workers and the launcher."""
    tail: int | None = None
    timestamps: bool = False
    json: bool = False
    timeout_seconds: float | None = None
    """The time to follow the job; None: until it ends."""
