"""The termination messages of launcher and worker: how an attempt ended, in the terms of a TrainingJob's status."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from topkube.errors import LaunchError
from topkube.job import FirstFailure
from topkube.launch.contract import Ending
from topkube.launch.output.rank_error import classify_error
from topkube.launch.output.rank_report import RankReport, diagnose_report, select_first_failure

LOG_TAIL_BYTES = 4096
TERMINATED = 128 + signal.SIGTERM
_MESSAGE_CHARACTERS = 1024


def find_reason(report: RankReport) -> str:
    """Return the reason for a rank's end, in one word."""
    if report.not_started is not None:
        return "CommandNotFound" if report.exit_code == 127 else "CommandNotRunnable"
    if report.out_of_memory:
        return "OOMKilled"
    if report.signal is not None:
        return report.signal
    kind = (report.error or "").partition(":")[0].rpartition(".")[2]
    if kind == "CollectiveTimeout" or report.missing:
        return "CollectiveTimeout"
    return classify_error(report) or ("MpiAbort" if report.aborted and not report.traceback else "Error")


def describe_failure(report: RankReport, pod: Callable[[int], str], place: str) -> FirstFailure:
    """Return the failure in `report`. `pod` returns the pod of a rank; `place` names where the rank ran, for example
    "worker 1". If a collective hung, the failure names the first rank that never entered it."""
    what, cause, next_step = diagnose_report(report, place)
    if report.not_started is not None:
        cause, next_step = "a mistyped command, or an image without it", "correct spec.template's command or image"
    missing = [rank for rank in report.missing if rank != report.rank]
    message = what + (f". Likely cause: {cause}" if cause else "")
    if next_step and "run directory" not in next_step:
        message += f". Next: {next_step}"
    return FirstFailure(
        pod=pod(missing[0] if missing else report.rank),
        rank=missing[0] if missing else report.rank,
        reason=find_reason(report),
        exit_code=report.exit_code,
        message=message[:_MESSAGE_CHARACTERS],
        log_tail=join_last_lines(report.tail),
    )


def join_last_lines(lines: Iterable[str]) -> str | None:
    """Return the last lines, as many as fit the status; None if there are none."""
    text = "\n".join(lines)
    while len(text) > LOG_TAIL_BYTES or len(text.encode()) > LOG_TAIL_BYTES:
        text = text[max(1, len(text) - LOG_TAIL_BYTES, len(text) // 64) :]
    return text or None


def describe_first_failure(reports: Iterable[RankReport], pod: Callable[[int], str], place: str) -> FirstFailure | None:
    """Return the first failure among the reports of a worker; None if there is none. See `describe_failure`."""
    report = select_first_failure(reports)
    return describe_failure(report, pod, place) if report is not None else None


def build_ending_before_start(error: LaunchError, reason: str, attempt: int = 1) -> Ending:
    """Return the ending of a launcher or worker that could not start."""
    failure = FirstFailure(reason=reason, exit_code=error.exit_code, message=str(error)[:_MESSAGE_CHARACTERS])
    return Ending(attempt=attempt, state="Failed", exit_code=error.exit_code, first_failure=failure)


def build_ending_by_error(error: Exception, attempt: int) -> Ending:
    """Return the ending of a launcher or worker that an unexpected error ends."""
    if isinstance(error, LaunchError):
        return build_ending_before_start(error, "LaunchFailed", attempt)
    message = f"{type(error).__name__}: {error}. Likely cause: a bug in TopKube. Next: report it, with this pod's log"
    failure = FirstFailure(reason="LaunchFailed", exit_code=1, message=message[:_MESSAGE_CHARACTERS])
    return Ending(attempt=attempt, state="Failed", exit_code=1, first_failure=failure)


def write_ending(termination_log: Path, ending: Ending, quiet: bool = False) -> None:
    """Write the termination message. If the file cannot be written (outside a container), print it, unless `quiet`."""
    try:
        termination_log.write_text(ending.to_message(), encoding="utf-8")
    except OSError:
        if not quiet:
            print(f"topkube: {ending.to_json()}", file=sys.stderr, flush=True)


def clear_ending(termination_log: Path) -> None:
    """Empty the termination message, because it is no longer true."""
    with contextlib.suppress(OSError):
        termination_log.write_text("", encoding="utf-8")
