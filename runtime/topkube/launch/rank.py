"""`topkube rank -- COMMAND`: the shim around each rank. It keeps the rank's log and writes down how it ended.

MPI's own launchers do not tell: Hydra kills what it started the moment one rank aborts, so a shim that Hydra knows
could not
report. Hence two processes: the one that MPI started only waits (the front), and its child, in a session of its own,
runs the
command and survives long enough to report (the keeper). Imports are few: this is started once per rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, NoReturn

from topkube.errors import SettingsError
from topkube.launch.memory import memory_kills
from topkube.launch.mpi import rank_of
from topkube.launch.processes import dies_with_parent, parent_of
from topkube.launch.report import RankReport, abort_code, killed_for_memory, log_path, signal_name, tail
from topkube.roll_call import RollCall
from topkube.settings import Settings

COMMAND_FILE = "command.json"
"""In the run's directory: what a shim without a command of its own runs, and where."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWN_END_SECONDS = 0.5
"""How long a command may take to end by itself once its front is gone: a rank that called MPI_Abort is about to."""
_GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL to a command whose front is gone."""


def main(arguments: list[str]) -> NoReturn:
    """Runs `arguments`, a command behind optional --no-echo and --, and ends as it ended. Without a command it takes
    the one that a worker has left in the run's directory."""
    echo = True
    if arguments[:1] == ["--no-echo"]:
        echo, arguments = False, arguments[1:]
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    try:
        settings = Settings.from_environment()
        if not command and settings.run_path is not None:
            command = _left_command(settings.run_path)
    except (SettingsError, OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if not command:
        print("topkube rank: no command.\nNext: topkube rank -- python train.py", file=sys.stderr)
        raise SystemExit(2)
    front = os.getpid()
    keeper = os.fork()
    if keeper:
        _wait(keeper)
    dies_with_parent_now(front)
    os.setsid()
    code = Keeper(command, rank_of(os.environ) or 0, settings.run_path, echo, front).run()
    os._exit(code)


def leave_command(directory: Path, command: list[str], working_directory: str) -> None:
    """For the shims of ranks that mpiexec starts without knowing their command."""
    text = json.dumps({"command": command, "directory": working_directory})
    (directory / COMMAND_FILE).write_text(text, encoding="utf-8")


def _left_command(directory: Path) -> list[str]:
    left = json.loads((directory / COMMAND_FILE).read_text(encoding="utf-8"))
    os.chdir(left["directory"])
    return [str(word) for word in left["command"]]


def commands_among(pids: list[int]) -> list[int]:
    """Those of these living processes that are ranks' commands: children of a shim that are no shims themselves."""
    shims = {pid for pid in pids if _is_shim(pid)}
    return [pid for pid in pids if pid not in shims and parent_of(pid) in shims]


def _is_shim(pid: int) -> bool:
    try:
        return __name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]
    except OSError:
        return False


def dies_with_parent_now(front: int) -> None:
    """This process gets SIGTERM when the front ends."""
    for number in _STOPS:
        signal.signal(number, lambda *_: None)
    dies_with_parent(signal.SIGTERM, front)()


def _wait(keeper: int) -> NoReturn:
    """The front: passes signals on and ends as the keeper ends."""
    for number in _STOPS:
        signal.signal(number, lambda received, _: _pass_on(keeper, received))
    _, status = os.waitpid(keeper, 0)
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Keeper:
    """Runs one command: output to the log (and on, where `echo`), signals passed on, the report at the end."""

    def __init__(self, command: list[str], rank: int, directory: Path | None, echo: bool, front: int) -> None:
        self.command, self.rank, self.directory, self.front = command, rank, directory, front
        self.echo = echo or directory is None
        self._stop_at = self._kill_at = float("inf")
        self._told = False
        self._front_ended: float | None = None

    def run(self) -> int:
        """Returns the exit code: the command's, or 128 and its signal's number."""
        started, kills = time.time(), memory_kills()
        log = log_path(self.directory, self.rank).open("ab") if self.directory else None
        selector = selectors.DefaultSelector()
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(wake, selectors.EVENT_READ)
        output = subprocess.PIPE if self.echo and log else (log or None)
        try:
            child = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=output if output in (None, subprocess.PIPE) else subprocess.STDOUT,
                close_fds=False,  # MPI talks to its launcher through an inherited socket
                process_group=0,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            reason = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be run: {error.strerror}"
            text = f"the program {self.command[0]!r} {reason}"
            print(f"topkube rank: {text}", file=sys.stderr, flush=True)
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._report(started, time.time(), code, None, False, not_started=text)
            return code
        if log and output == subprocess.PIPE:
            for stream, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, target.buffer)
        while child.poll() is None:
            self._turn(selector, wake, child, log)
        ended = time.time()
        if os.getppid() != self.front:
            self._front_ended = self._front_ended or ended
        if log and output == subprocess.PIPE:
            self._copy_rest(selector, wake, log)
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # what the command left behind, such as data loaders
            os.killpg(child.pid, signal.SIGKILL)
        number = -child.returncode if child.returncode < 0 else None
        code = 128 + number if number else child.returncode
        self._report(started, ended, code, number, memory_kills() > kills)
        return code

    def _turn(
        self,
        selector: selectors.BaseSelector,
        wake: socket.socket,
        child: subprocess.Popen[bytes],
        log: IO[bytes] | None,
    ) -> None:
        now = time.monotonic()
        next_look = min(self._stop_at, self._kill_at)
        for key, _ in selector.select(max(0.0, next_look - now) if next_look < float("inf") else None):
            if key.fileobj is not wake:
                assert log is not None
                _copy(selector, key, log)
                continue
            for number in wake.recv(4096):
                if number in _STOPS:
                    self._stop(child, number)
        now = time.monotonic()
        if now >= self._stop_at:
            self._stop_at, self._told = float("inf"), True
            self._kill_at = now + _GRACE_SECONDS
            child.send_signal(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            child.kill()

    def _stop(self, child: subprocess.Popen[bytes], number: int) -> None:
        if os.getppid() != self.front:
            # MPI has ended this rank. If the command itself asked for that it ends now, with the code that tells why.
            self._front_ended = self._front_ended or time.time()
            self._stop_at = min(self._stop_at, time.monotonic() + _OWN_END_SECONDS)
        else:
            self._told = True
            child.send_signal(number)

    @staticmethod
    def _copy_rest(selector: selectors.BaseSelector, wake: socket.socket, log: IO[bytes]) -> None:
        selector.unregister(wake)
        while selector.get_map() and (ready := selector.select(0)):
            for key, _ in ready:
                _copy(selector, key, log)

    def _report(
        self,
        started: float,
        ended: float,
        code: int,
        number: int | None,
        kernel_killed: bool,
        not_started: str | None = None,
    ) -> None:
        if self.directory is None:
            return
        lines, traceback = tail(log_path(self.directory, self.rank))
        told, aborted = self._told, abort_code(lines)
        if self._front_ended:
            # MPI ended this rank first. With MPICH it may have asked for that itself: MPI_Abort waits to be killed.
            ended, told = self._front_ended, not aborted
            code, number = (aborted, None) if aborted else (code, number)
        roll_call = RollCall.read(self.directory, self.rank, since=started)
        RankReport(
            rank=self.rank,
            host=socket.gethostname(),
            command=self.command,
            started=started,
            ended=ended,
            exit_code=code,
            signal=signal_name(number) if number else None,
            told_to_end=told,
            aborted=aborted is not None,
            out_of_memory=kernel_killed and killed_for_memory(signal_name(number) if number else None, code, lines),
            not_started=not_started,
            missing=roll_call.missing if roll_call and code else [],
            traceback=traceback if code else None,
            tail=lines if code else [],
        ).write(self.directory)


def _copy(selector: selectors.BaseSelector, key: selectors.SelectorKey, log: IO[bytes]) -> None:
    """Copies what a pipe holds to the log and to our own output."""
    try:
        data = os.read(key.fd, 1 << 16)
    except BlockingIOError:
        return
    if not data:
        selector.unregister(key.fileobj)
        return
    log.write(data)
    log.flush()
    with contextlib.suppress(BrokenPipeError):
        key.data.write(data)
        key.data.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
