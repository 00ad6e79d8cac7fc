"""A line of the report of `topkube doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """A line of the report. Training does not work here if a check has the state "fail"."""

    name: str
    state: Literal["ok", "warn", "fail"]
    message: str
    next_step: str = ""


def report_ok(name: str, message: str) -> Check:
    """Return a line that reports that `name` works."""
    return Check(name, "ok", message)
