"""How a rank ended: what its shim writes down, and which of all reports tells the story of a failed run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topkube import errors

ERRORS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.TopKubeError)
}
"""Names of our own errors, whose messages carry cause and next step."""
TAIL_BYTES = 64 << 10
TAIL_LINES = 20
_SAME_MOMENT_SECONDS = 1.0
# What torch's DataLoader, concurrent.futures and others print of a process of theirs that was killed.
_CHILD_KILLED = ("killed by signal: Killed", "BrokenProcessPool", "died with <Signals.SIGKILL")


def log_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def report_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


@dataclass(frozen=True)
class RankReport:
    """One rank's end. Times are Unix seconds. `exit_code` is 128 and the signal's number where a signal ended it, as
    in a shell;
    `told_to_end` says that it was stopped from outside, so that its end is no cause of anything."""

    rank: int
    host: str
    command: list[str]
    started: float
    ended: float
    exit_code: int
    signal: str | None = None
    told_to_end: bool = False
    aborted: bool = False
    """Whether its MPI announced that this rank ended the run (MPI_Abort, or a fatal error inside MPI)."""
    out_of_memory: bool = False
    not_started: str | None = None
    """Why the command could not be started at all."""
    missing: list[int] = field(default_factory=list)
    """Ranks that never came to the collective on which this one gave up."""
    traceback: str | None = None
    tail: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Writes rank-N.json in one piece."""
        path = report_path(directory, self.rank)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> RankReport:
        return cls.of(json.loads(path.read_text()))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> RankReport:
        """The report in plain data; names that this version does not know are passed over."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})

    @property
    def error(self) -> str | None:
        """The last line of the traceback: 'ValueError: boom'."""
        lines = [line for line in (self.traceback or "").splitlines() if line[:1].strip()]
        return lines[-1] if len(lines) > 1 else None


def killed_for_memory(signal_name: str | None, exit_code: int, lines: Iterable[str]) -> bool:
    """Whether a rank that ended where the kernel has killed for memory ended for that: it was killed itself, or one of
    its own processes was, such as a data loader, and it failed over that."""
    if signal_name is not None:
        return signal_name == "SIGKILL"
    return exit_code != 0 and any(words in line for line in lines for words in _CHILD_KILLED)


def read_all(directory: Path, ranks: int) -> list[RankReport]:
    """The reports that are there, by rank."""
    paths = [report_path(directory, rank) for rank in range(ranks)]
    return [RankReport.read(path) for path in paths if path.exists()]


def first_failure(reports: Iterable[RankReport]) -> RankReport | None:
    """The rank that failed first, by time. Ranks that were stopped from outside do not count, and neither do those
    whose failure another's explains, in the same moment: ranks that fell silently as another aborted (MPICH's library
    ends them with 1 as it loses its launcher), and ranks that aborted in native code as another was killed (the
    transport's way to say that its peer is gone)."""
    failed = sorted((one for one in reports if one.exit_code and not one.told_to_end), key=lambda one: one.ended)
    for report in failed:
        silent = report.traceback is None and report.signal is None and not report.aborted
        moment = [one for one in failed if one.ended < report.ended + _SAME_MOMENT_SECONDS]
        by_abort = silent and any(one.aborted for one in moment)
        by_kill = report.signal == "SIGABRT" and any(one.signal == "SIGKILL" for one in moment)
        if not by_abort and not by_kill:
            return report
    return None


def tail(log: Path) -> tuple[list[str], str | None]:
    """The last lines of a log, and the last Python traceback in them."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return [], None
    lines = text.splitlines()
    return lines[-TAIL_LINES:], _last_traceback(lines)


def abort_code(lines: list[str]) -> int | None:
    """The exit code of the MPI_Abort that MPICH announces in a rank's last lines; None where it announces none."""
    found = [re.match(r"Abort\((-?\d+)\) on node \d+ \(rank", line) for line in lines]
    return next((int(match.group(1)) % 256 or 1 for match in reversed(found) if match), None)


def _last_traceback(lines: list[str]) -> str | None:
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return None
    # Chained exceptions belong together: go back over "During handling of…" and "… direct cause of…".
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = "\n".join(lines[earlier + 1 : start])
        if "\nDuring handling of the above" not in between and "\nThe above exception was the direct" not in between:
            break
        start = earlier
    end = starts[-1] + 1
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
        end += 1
    while end + 1 < len(lines) and not _new_output(lines[end + 1]):
        end += 1
    return "\n".join(lines[start : end + 1])


def _new_output(line: str) -> bool:
    """Whether a line behind the exception's own is something else: messages of several lines go on indented or as a
    list."""
    return not re.match(r"\s+\S|- ", line)


def diagnose(report: RankReport, node: int) -> tuple[str, str, str]:
    """What happened to the first failing rank, the likely cause, the next step."""
    seconds = max(0.0, report.ended - report.started)
    who = f"rank {report.rank} (node {node}) failed first, {seconds:.1f} s after its start"
    log = f"read {report_path(Path(), report.rank).with_suffix('.log')} in the run directory"
    command = " ".join(report.command)
    if report.not_started is not None:
        return (
            f"{who}: exit code {report.exit_code}, {report.not_started}",
            "the job's command is written for the container's image, or mistyped",
            "install it here, or correct command in spec.template's container",
        )
    if report.out_of_memory:
        whom = "it" if report.signal else "a process of it"
        return (
            f"{who}: the kernel killed {whom} for memory (OOMKilled, exit code {report.exit_code})",
            "the ranks together need more memory than this machine or its cgroup has",
            "use a smaller batch or model, or fewer ranks (--workers, --slots)",
        )
    if report.signal is not None:
        return (f"{who}: killed by {report.signal} (exit code {report.exit_code})", *_signal_advice(report.signal, log))
    error = report.error or ""
    kind = error.partition(":")[0].rpartition(".")[2]
    what = f"{who}: exit code {report.exit_code}" + (f", {error}" if error else "")
    own = re.fullmatch(r"(.*?)\.(?: Likely cause: (.*?)\.)?(?: Next: (.*)\.)", error)
    if kind in ERRORS and own:
        return f"{who}: exit code {report.exit_code}, {own[1]}", own[2] or "", own[3]
    if kind in ("ModuleNotFoundError", "ImportError"):
        return what, "a package that the script needs is missing here", "install it into this Python and run again"
    no_module = next((line for line in report.tail if ": No module named " in line or "can't open file" in line), None)
    if no_module:
        return (
            f"{what}, {no_module}",
            "the script or module is not where the command looks for it",
            f"try it: {command}",
        )
    return what, "", log


def _signal_advice(name: str, log: str) -> tuple[str, str]:
    if name == "SIGKILL":
        return "a person or a supervisor killed it; the kernel counted no out-of-memory kill", f"{log}, then dmesg"
    if name == "SIGBUS":
        return "/dev/shm is full: the shared windows did not fit", "make it larger (topkube doctor shows its size)"
    if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
        return "a crash inside native code; the lines above show where Python was", log
    return "something outside the job sent this signal", log


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
