"""How an attempt ended, in the words of a TrainingJob's status: one reason, the rank, its pod, its last lines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from topkube.errors import LaunchError
from topkube.job import FirstFailure
from topkube.launch.contract import Ending
from topkube.launch.report import RankReport, diagnose, first_failure

LOG_TAIL_BYTES = 4096
TERMINATED = 128 + signal.SIGTERM
_MESSAGE_CHARACTERS = 1024


def reason_of(report: RankReport) -> str:
    """One word for a rank's end."""
    if report.not_started is not None:
        return "CommandNotFound" if report.exit_code == 127 else "CommandNotRunnable"
    if report.out_of_memory:
        return "OOMKilled"
    if report.signal is not None:
        return report.signal
    kind = (report.error or "").partition(":")[0].rpartition(".")[2]
    if kind == "CollectiveTimeout" or report.missing:
        return "CollectiveTimeout"
    return "MpiAbort" if report.aborted and not report.traceback else "Error"


def describe(report: RankReport, pod: Callable[[int], str], node: int) -> FirstFailure:
    """The failure that `report` tells. A hung collective is laid to the first rank that never came to it."""
    what, cause, next_step = diagnose(report, node)
    if report.not_started is not None:
        cause, next_step = "a mistyped command, or an image without it", "correct spec.template's command or image"
    missing = [rank for rank in report.missing if rank != report.rank]
    message = what + (f". Likely cause: {cause}" if cause else "")
    if next_step and "run directory" not in next_step:
        message += f". Next: {next_step}"
    return FirstFailure(
        pod=pod(missing[0] if missing else report.rank),
        rank=missing[0] if missing else report.rank,
        reason=reason_of(report),
        exit_code=report.exit_code,
        message=message[:_MESSAGE_CHARACTERS],
        log_tail=tail_of(report.tail),
    )


def tail_of(lines: Iterable[str]) -> str | None:
    """The last lines that fit the status."""
    text = "\n".join(lines)
    while len(text) > LOG_TAIL_BYTES or len(text.encode()) > LOG_TAIL_BYTES:
        text = text[max(1, len(text) - LOG_TAIL_BYTES, len(text) // 64) :]
    return text or None


def first_failure_of(reports: Iterable[RankReport], pod: Callable[[int], str], node: int) -> FirstFailure | None:
    """The first failure among the reports of one node."""
    report = first_failure(reports)
    return describe(report, pod, node) if report is not None else None


def refused(error: LaunchError, reason: str, attempt: int = 1) -> Ending:
    """The last words of a process that could not begin."""
    failure = FirstFailure(reason=reason, exit_code=error.exit_code, message=str(error)[:_MESSAGE_CHARACTERS])
    return Ending(attempt=attempt, state="Failed", exit_code=error.exit_code, first_failure=failure)


def leave(termination_log: Path, ending: Ending) -> None:
    """Writes the termination message; prints it where that cannot be written (outside a container)."""
    try:
        termination_log.write_text(ending.message(), encoding="utf-8")
    except OSError:
        print(f"topkube: {ending.text()}", file=sys.stderr, flush=True)
