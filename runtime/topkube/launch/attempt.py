"""One attempt on one worker: the proxy, the ranks below it, and what they leave behind as they run and end."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from topkube import pulse
from topkube.errors import LaunchError
from topkube.launch.contract import NODE_NAME_VARIABLE, Message
from topkube.launch.dataset import DatasetProcess
from topkube.launch.environment import defaults, home, single_copy_off, without_peeking
from topkube.launch.memory import memory_kills
from topkube.launch.messages import NodeCache, ProxyEnded, Report, Running, Start, StepDone
from topkube.launch.mpi import Mpi
from topkube.launch.processes import children, descendants, dies_with_parent, kill_descendants, signal_all
from topkube.launch.proxies import proxy_command
from topkube.launch.rank import commands_among, leave_command
from topkube.launch.report import TAIL_BYTES, RankReport, log_path, report_path, tail
from topkube.telemetry.cache_counters import read_totals, reads
from topkube.telemetry.progress import PROGRESS_FILE, read_records

_STEP_SECONDS = 0.5
_LIFE_SECONDS = 2.0
"""Between two signs of life other than steps."""
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PUNCH_BYTES = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Attempt:
    """Starts the proxy at once. `poll` gives what is new; `stop` and `kill` end it."""

    def __init__(
        self,
        start: Start,
        directory: Path,
        command: list[str],
        mpi: Mpi,
        control_port: int,
        inherited: Mapping[str, str],
        dataset: DatasetProcess,
    ) -> None:
        """Raises LaunchError where the proxy cannot be started."""
        self._dataset = dataset
        self._node = inherited.get(NODE_NAME_VARIABLE, "")
        self.ranks, self.directory = start.ranks, directory
        self.reports: dict[int, RankReport] = {}
        self.exit_code = 0
        """The worst of the ranks that have ended."""
        self._logs = {rank: _Log(log_path(directory, rank), rank) for rank in start.ranks}
        self._running = self._over = False
        self._progress = 0
        self._told_step = self._told_life = 0.0
        self._collectives: dict[int, int] = {}
        self._printed = 0
        self._cache: NodeCache | None = None
        self._kills = memory_kills()
        self._kill_at = float("inf")
        directory.mkdir(parents=True)
        leave_command(directory, command, os.getcwd())
        temporary = str(directory.parent)
        environment = {**inherited, **start.environment, "TOPKUBE_RUN_DIRECTORY": str(directory)}
        environment.update(mpi.environment())
        defaults(environment, len(start.ranks))
        single_copy_off(environment)
        without_peeking(environment)
        home(environment, temporary)
        words = proxy_command(start.proxy, mpi, control_port)
        try:
            self.proxy = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise LaunchError(f"{words[0]} cannot be run: {error.strerror}", exit_code=126) from None

    @property
    def oom_kills(self) -> int:
        return memory_kills() - self._kills

    def poll(self) -> list[Message]:
        """What has happened since the last call; prints what the ranks wrote."""
        said: list[Message] = []
        for log in self._logs.values():
            log.relay(sys.stdout.buffer)
        if not self._running and all(log.path.exists() for log in self._logs.values()):
            self._running = True
            said.append(Running())
        endings = [] if self._over else self._endings()
        said += self._steps()
        said += endings
        if time.monotonic() > self._kill_at:
            self.kill()
        return said

    def _steps(self) -> list[Message]:
        now = time.monotonic()
        if now - self._told_step < _STEP_SECONDS and not self._over:
            return []
        self._told_step = now
        new = list(read_records(self.directory / PROGRESS_FILE, self._progress))
        record = new[-1][0] if new else None
        self._progress = new[-1][1] if new else self._progress
        cache = self._read_cache()
        collectives, printed = self._life(now)
        if record is None and not collectives and not printed and (cache is None or cache == self._cache):
            return []
        self._cache = cache
        said = dataclasses.asdict(record) if record else {}
        return [StepDone(record=said, cache=cache, collectives=collectives, printed=printed)]

    def _life(self, now: float) -> tuple[dict[int, int], bool]:
        """Which ranks have entered collectives, how many so far, and whether one has printed, since the last time."""
        if now - self._told_life < _LIFE_SECONDS and not self._over:
            return {}, False
        self._told_life = now
        counts = {rank: pulse.read(self.directory, rank) for rank in self.ranks}
        new = {rank: count for rank, count in counts.items() if count != self._collectives.get(rank, 0)}
        self._collectives |= new
        before, self._printed = self._printed, sum(log.size for log in self._logs.values())
        return new, self._printed != before

    def _read_cache(self) -> NodeCache | None:
        """None where there is no dataset."""
        counted, said = read_totals(self.directory), self._dataset.said()
        if not counted and not said:
            return None
        requests, misses = reads(counted)
        return NodeCache(
            node=self._node,
            requests=requests,
            misses=misses,
            remote_bytes=int(counted.get("remote_bytes", 0)) + int(said.get("remoteBytes") or 0),
            cached_bytes=int(said.get("cachedBytes") or 0),
        )

    def _endings(self) -> list[Message]:
        ended = self.proxy.poll() is not None and not descendants(but=self._dataset.pids())
        open_ranks = [rank for rank in self.ranks if rank not in self.reports]
        there = [path for rank in open_ranks if (path := report_path(self.directory, rank)).exists()]
        said: list[Message] = [self._take(RankReport.read(path)) for path in there]
        if ended and (self.exit_code or self._dataset.told()):
            begun = [rank for rank in self.ranks if rank not in self.reports and self._logs[rank].path.exists()]
            said += [self._take(self._vanished(rank)) for rank in begun]
            self._over = True
            for log in self._logs.values():
                log.relay(sys.stdout.buffer, all_of_it=True)
            code = self.proxy.returncode
            said.append(ProxyEnded(exit_code=code if code >= 0 else 128 - code))
        return said

    def _take(self, report: RankReport) -> Report:
        self.reports[report.rank] = report
        self.exit_code = max(self.exit_code, report.exit_code)
        return Report(report=dataclasses.asdict(report), oom_kills=self.oom_kills)

    def _vanished(self, rank: int) -> RankReport:
        """A rank whose shim was killed together with it."""
        now = time.time()
        lines, traceback = tail(log_path(self.directory, rank))
        return RankReport(
            rank=rank,
            host="",
            command=[],
            started=now,
            ended=now,
            exit_code=128 + signal.SIGKILL,
            signal="SIGKILL",
            told_to_end=self._kill_at < float("inf"),
            out_of_memory=self.oom_kills > 0,
            traceback=traceback,
            tail=lines,
        )

    def all_told(self) -> bool:
        """Whether every rank has been reported or lives. One whose process has ended is about to be reported."""
        return len(self.reports) + len(commands_among(descendants(but=self._dataset.pids()))) >= len(self.ranks)

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more, and `poll` has said so."""
        return self._over

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to the ranks, SIGKILL to all after `grace_seconds`. 0 kills at once."""
        if grace_seconds > 0:
            if self._kill_at == float("inf"):
                signal_all(children(self.proxy.pid), signal.SIGTERM)  # the shims' fronts, which pass it on
            self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)
        else:
            self._kill_at = min(self._kill_at, time.monotonic())
            self.kill()

    def kill(self) -> None:
        """Kills everything below this worker."""
        left = kill_descendants(self._dataset.pids())
        self.proxy.poll()
        if left:
            print(f"topkube worker: could not end processes {left}", file=sys.stderr, flush=True)

    def remove(self) -> None:
        """Removes the attempt's files."""
        shutil.rmtree(self.directory, ignore_errors=True)


class _Log:
    """A rank's log, copied on line by line with the rank in front. What has been copied is given back to the disk,
    except the end, so that a run of weeks does not fill it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._prefix = f"[rank {rank}] ".encode()
        self._file: BinaryIO | None = None
        self._partial = b""
        self._read = self._punched = 0

    @property
    def size(self) -> int:
        """Bytes that were printed."""
        return self._read

    def relay(self, out: BinaryIO, all_of_it: bool = False) -> None:
        if self._file is None:
            try:
                self._file = self.path.open("r+b", buffering=0)
            except OSError:
                return
        for _ in range(64):  # one rank that prints without end must not keep us from the others
            if not (data := self._file.read(1 << 16)):
                break
            self._read += len(data)
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > 1 << 16:
                lines, self._partial = [*lines, self._partial], b""
            out.write(b"".join(self._prefix + line + b"\n" for line in lines))
        if all_of_it and self._partial:
            out.write(self._prefix + self._partial + b"\n")
            self._partial = b""
        out.flush()
        keep = max(0, self._read - TAIL_BYTES)
        if keep - self._punched > _PUNCH_BYTES:
            offset, length = ctypes.c_longlong(self._punched), ctypes.c_longlong(keep - self._punched)
            _libc.fallocate(self._file.fileno(), _PUNCH_HOLE, offset, length)
            self._punched = keep
