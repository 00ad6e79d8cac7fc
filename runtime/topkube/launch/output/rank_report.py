"""The reports of how ranks ended, and the rank that failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topkube import errors

ERRORS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.TopKubeError)
}
"""Names of TopKube's errors, whose messages contain the cause and the next step."""
TAIL_BYTES = 64 << 10
TAIL_LINES = 20
_RESERVED_BYTES, _BRIEF_BYTES = 32 << 10, 2 << 10
"""The space that is reserved on the disk for a report; the characters of its traceback and its tail on a full disk."""
_SAME_MOMENT_SECONDS = 1.0
"""Ranks that fail within this time count as failed at the same moment."""
_OPEN_MPI_LOST_PEER = (14, 75)
"""Exit codes of a rank that Open MPI ended because a connection to another rank was closed: MPI_ERR_UNKNOWN and
MPI_ERR_PROC_FAILED. Open MPI prints the reason in mpiexec's output, not in the rank's log."""
_LARGEST_NUMBER = 1 << 62
"""A report with a larger number is not valid."""
# Messages of torch's DataLoader, concurrent.futures and others about a killed child process.
_CHILD_KILLED = ("killed by signal: Killed", "BrokenProcessPool", "died with <Signals.SIGKILL")


def find_log_path(directory: Path, rank: int) -> Path:
    """Return the path of the rank's log in the run directory."""
    return directory / f"rank-{rank}.log"


def find_report_path(directory: Path, rank: int) -> Path:
    """Return the path of the rank's report in the run directory."""
    return directory / f"rank-{rank}.json"


@dataclass(frozen=True)
class RankReport:
    """The end of a rank. Times are Unix seconds. `exit_code` is 128 plus the number of the signal if a signal ended it,
    as in a shell. `told_to_end` is True if the rank was stopped from outside, so that its end is not the cause of a
    failure."""

    rank: int
    host: str
    command: list[str]
    started: float
    ended: float
    exit_code: int
    signal: str | None = None
    told_to_end: bool = False
    aborted: bool = False
    """True if MPI printed that this rank ended the run (MPI_Abort, or a fatal error inside MPI)."""
    out_of_memory: bool = False
    not_started: str | None = None
    """Why the command could not be started; None if it was started."""
    missing: list[int] = field(default_factory=list)
    """Ranks that never entered the collective in which this rank timed out."""
    traceback: str | None = None
    tail: list[str] = field(default_factory=list)
    log_bytes: int | None = None
    """Bytes that the shim has written to the log; None if they were not counted."""
    lost_bytes: int = 0
    """Bytes of output that are not in the log, for the reason `lost_why`."""
    lost_why: str = ""

    def write(self, directory: Path) -> None:
        """Write rank-N.json atomically. On a full disk, write into the space that `reserve_report` has allocated, and
        shorten the report if needed. Raises OSError if that fails too."""
        path, part = find_report_path(directory, self.rank), _name_part(directory, self.rank)
        try:
            _overwrite(part, dataclasses.asdict(self))
        except OSError:
            _overwrite(part, dataclasses.asdict(self.shorten(_BRIEF_BYTES)))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> RankReport:
        """Read a report. Raises OSError, and ValueError if the file does not contain a report."""
        return cls.parse(json.loads(path.read_text()))

    def shorten(self, most: int) -> RankReport:
        """Return the report with at most `most` characters of the traceback (its end), and as many of the tail."""
        tail, characters_left = list[str](), most
        for line in reversed(self.tail):
            tail.insert(0, line[-characters_left:] if characters_left else "")
            characters_left -= len(tail[0]) + 1
            if characters_left <= 0:
                break
        traceback = self.traceback
        if traceback and len(traceback) > most:
            head, end = traceback.partition("\n")[0][: most // 4], traceback[-(most - most // 4) :]
            traceback = f"{head}\n  …\n{end}"
        return dataclasses.replace(self, traceback=traceback, tail=tail)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> RankReport:
        """Return the report in `data`, without fields that this version does not have. Raises ValueError if `data`
        is not a report."""
        field_names = {entry.name for entry in dataclasses.fields(cls)}
        try:
            report = cls(**{name: value for name, value in data.items() if name in field_names})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"this is not a report of a rank: {error}") from None
        numbers = (report.rank, report.exit_code, report.lost_bytes, report.log_bytes or 0)
        texts = (report.host, report.lost_why, report.signal or "", report.not_started or "", report.traceback or "")
        is_valid = all(isinstance(number, int) and abs(number) < _LARGEST_NUMBER for number in numbers)
        is_valid = is_valid and all(isinstance(text, str) for text in texts)
        is_valid = is_valid and all(
            isinstance(number, int | float) and abs(number) < _LARGEST_NUMBER
            for number in (report.started, report.ended)
        )
        for words, kind in ((report.command, str), (report.tail, str), (report.missing, int)):
            is_valid = is_valid and isinstance(words, list) and all(isinstance(word, kind) for word in words)
        if not is_valid:
            raise ValueError("this is not a report of a rank: a value has the wrong type")
        return report

    @property
    def error(self) -> str | None:
        """The last line of the traceback: 'ValueError: boom'."""
        lines = [line for line in (self.traceback or "").splitlines() if line[:1].strip()]
        return lines[-1] if len(lines) > 1 else None


def reserve_report(directory: Path, rank: int) -> None:
    """Allocate space on the disk for the report of `rank`, so that it can be written after a log has filled the
    disk."""
    with contextlib.suppress(OSError), _name_part(directory, rank).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)


def _name_part(directory: Path, rank: int) -> Path:
    return find_report_path(directory, rank).with_suffix(f".{os.getpid()}.part")


def _overwrite(part: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=1).encode() + b"\n"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        remaining = memoryview(text)
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
        os.ftruncate(file, len(text))
    finally:
        os.close(file)


def was_killed_for_memory(signal_name: str | None, exit_code: int, lines: Iterable[str]) -> bool:
    """Return True if a kill for memory explains the end of a rank. The caller knows that the kernel has killed a
    process meanwhile: the rank itself, or one of its processes, such as a data loader, after which the rank failed."""
    if signal_name is not None:
        return signal_name == "SIGKILL"
    return exit_code != 0 and any(words in line for line in lines for words in _CHILD_KILLED)


def read_reports(directory: Path, ranks: int) -> list[RankReport]:
    """Return the existing reports, by rank. A file that is no report is left out: a script may write anything into the
    run's directory, and at the end of a rank its shim replaces the file."""
    reports = []
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            reports.append(RankReport.read(find_report_path(directory, rank)))
    return reports


def select_first_failure(reports: Iterable[RankReport]) -> RankReport | None:
    """Return the report of the rank that failed first, by time; None if no rank failed. Ranks that were stopped from
    outside do not count. Ranks that failed at the same moment as another rank do not count if that rank explains their
    failure: ranks that ended without a message when another rank aborted (MPICH's library ends them with 1 when it
    loses its launcher), ranks that aborted in native code when another rank was killed (so the transport reports that
    its peer is gone), and ranks that Open MPI ended because their peer was gone."""
    failed = sorted(
        (report for report in reports if report.exit_code and not report.told_to_end), key=lambda report: report.ended
    )
    first_abort = next((report.ended for report in failed if report.aborted), float("inf"))
    first_kill = next((report.ended for report in failed if report.signal == "SIGKILL"), float("inf"))
    first_own_failure = next((report.ended for report in failed if not _has_lost_peer(report)), float("inf"))
    for report in failed:
        moment = report.ended + _SAME_MOMENT_SECONDS
        by_abort = _is_silent(report) and first_abort < moment
        by_kill = report.signal == "SIGABRT" and first_kill < moment
        by_lost_peer = _has_lost_peer(report) and first_own_failure < moment
        if not by_abort and not by_kill and not by_lost_peer:
            return report
    return None


def select_leaver(reports: Collection[RankReport], failed: RankReport | None) -> RankReport | None:
    """Return the report of the rank that ended with exit code 0 at the moment at which others were ended because of
    that: by MPI, which expects MPI_Finalize of every rank, or by the loss of their peer. A victim may be noted first,
    because it sees the closed connection before the rank's shim sees the end. Return None if there is no such rank, or
    if `failed`, the rank that failed first, is not the victim of a lost peer. Use it only if a run has failed."""
    if failed is not None and not _has_lost_peer(failed):
        return None
    victims = [report.ended for report in reports if report.told_to_end or _has_lost_peer(report)]
    first = min(victims, default=float("-inf"))
    leavers = [
        report
        for report in reports
        if report.exit_code == 0 and not report.told_to_end and abs(first - report.ended) < _SAME_MOMENT_SECONDS
    ]
    return min(leavers, key=lambda report: report.ended, default=None)


def diagnose_leaver(report: RankReport, reports: Iterable[RankReport], ranks: int, place: str) -> tuple[str, str, str]:
    """Return what happened if a rank ended with exit code 0 while others of the `ranks` ranks still ran, the likely
    cause, and the next step. `reports` are those of all ranks that have ended. `place` as in `diagnose_report`."""
    others = ranks - 1 - sum(other.ended < report.ended - _SAME_MOMENT_SECONDS for other in reports)
    seconds = max(0.0, report.ended - report.started)
    return (
        f"rank {report.rank} ({place}) ended with exit code 0, {seconds:.1f} s after its start, while {others} other"
        f" rank{'s' if others > 1 else ''} still ran",
        "its script left without MPI_Finalize, as os._exit(0) does, or never called MPI while others did",
        "end all ranks in the same way, and let a rank that cannot continue raise an error",
    )


def _is_silent(report: RankReport) -> bool:
    return report.traceback is None and report.signal is None and not report.aborted


def _has_lost_peer(report: RankReport) -> bool:
    return _is_silent(report) and report.exit_code in _OPEN_MPI_LOST_PEER


def read_tail(log: Path) -> tuple[list[str], str | None]:
    """Return the last lines of a log, and the last Python traceback in them; None if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return [], None
    lines = text.splitlines()
    return lines[-TAIL_LINES:], _find_last_traceback(lines)


def find_abort_code(lines: list[str]) -> int | None:
    """Return the exit code of the MPI_Abort that MPICH prints in a rank's last lines; None if it prints none."""
    matches = [re.match(r"Abort\((-?\d+)\) on node \d+ \(rank", line) for line in lines]
    return next((int(match.group(1)) % 256 or 1 for match in reversed(matches) if match), None)


def _find_last_traceback(lines: list[str]) -> str | None:
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return None
    # Chained exceptions belong together: include "During handling of…" and "… direct cause of…".
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = "\n".join(lines[earlier + 1 : start])
        if "\nDuring handling of the above" not in between and "\nThe above exception was the direct" not in between:
            break
        start = earlier
    end = starts[-1] + 1
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
        end += 1
    while end + 1 < len(lines) and not _is_other_output(lines[end + 1]):
        end += 1
    return "\n".join(lines[start : end + 1])


def _is_other_output(line: str) -> bool:
    """Return True if a line after the exception's message is other output: the lines of a longer message are indented
    or form a list."""
    return not re.match(r"\s+\S|- ", line)


def diagnose_report(report: RankReport, place: str) -> tuple[str, str, str]:
    """Return what happened to the rank that failed first, the likely cause, and the next step. `place` names where the
    rank ran: "node 1", or "worker 1" in a pod."""
    seconds = max(0.0, report.ended - report.started)
    who = f"rank {report.rank} ({place}) failed first, {seconds:.1f} s after its start"
    log = f"read {find_report_path(Path(), report.rank).with_suffix('.log')} in the run directory"
    command = " ".join(report.command)
    if report.not_started is not None:
        return (
            f"{who}: exit code {report.exit_code}, {report.not_started}",
            "the job's command is for the container's image, or it is mistyped",
            "install the program here, or correct the command in spec.template's container",
        )
    if report.out_of_memory:
        victim = "the rank" if report.signal else "a process of the rank"
        return (
            f"{who}: the kernel killed {victim} for memory (OOMKilled, exit code {report.exit_code})",
            "the ranks together need more memory than this machine or its cgroup has",
            "use a smaller batch or model, or fewer ranks (--workers, --slots)",
        )
    if report.signal is not None:
        return (
            f"{who}: killed by {report.signal} (exit code {report.exit_code})",
            *_explain_signal(report.signal, log),
        )
    error = report.error or ""
    kind = error.partition(":")[0].rpartition(".")[2]
    what = f"{who}: exit code {report.exit_code}" + (f", {error}" if error else "")
    message = re.fullmatch(r"(.*?)\.(?: Likely cause: (.*?)\.)?(?: Next: (.*)\.)", error)
    if kind in ERRORS and message:
        return f"{who}: exit code {report.exit_code}, {message[1]}", message[2] or "", message[3]
    if kind in ("ModuleNotFoundError", "ImportError"):
        return what, "a package that the script needs is not installed", "install it into this Python and run again"
    no_module = next((line for line in report.tail if ": No module named " in line or "can't open file" in line), None)
    if no_module:
        return (
            f"{what}, {no_module}",
            "the script or module does not exist where the command expects it",
            f"run the command by hand: {command}",
        )
    return what, "", log


def _explain_signal(name: str, log: str) -> tuple[str, str]:
    if name == "SIGKILL":
        return (
            "a person or a supervisor killed the rank; the kernel counted no out-of-memory kill",
            f"{log}, then dmesg",
        )
    if name == "SIGBUS":
        return (
            "/dev/shm is full: the shared windows did not fit",
            "make /dev/shm larger (topkube doctor shows its size)",
        )
    if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
        return "a crash inside native code; the lines above show where Python was", log
    return "something outside the job sent this signal", log


def name_signal(number: int) -> str:
    """Return the name of a signal, for example 'SIGKILL'."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
