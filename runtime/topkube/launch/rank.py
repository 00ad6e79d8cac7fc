"""`topkube rank -- COMMAND`: the shim around each rank. It writes the rank's log and a report of how the rank ended.

MPI's launchers do not report how a rank ended: Hydra kills the processes that it started as soon as a rank aborts, so a
shim that Hydra started could not write a report. The shim therefore has two processes. The process that MPI starts only
waits (the front). Its child runs the command in a separate session and survives long enough to report (the keeper). The
module imports little, because it is started once per rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from topkube.environment import copy_environment, read_launched_rank
from topkube.errors import LaunchError, SettingsError
from topkube.launch.host.arguments import check_arguments, shorten_command
from topkube.launch.host.environment import list_source_variables
from topkube.launch.host.loopback import remove_loopback_library
from topkube.launch.host.memory_kills import count_memory_kills
from topkube.launch.host.network_devices import list_network_variables
from topkube.launch.host.processes import (
    ProcessIdentity,
    adopt_orphans,
    find_parent,
    kill_descendants,
    prepare_to_die_with_parent,
    reap_orphans,
)
from topkube.launch.host.torch_environment import build_rank_variables, list_accelerate_variables
from topkube.launch.output.rank_log import Echo, OutputCopier, RankLogWriter
from topkube.launch.output.rank_report import (
    RankReport,
    find_abort_code,
    find_log_path,
    name_signal,
    read_tail,
    reserve_report,
    was_killed_for_memory,
)
from topkube.roll_call import RollCall
from topkube.settings import Settings

COMMAND_FILE = "command.json"
"""The file in the run's directory with the command of the ranks, its working directory, and the process that ends the
ranks after their grace period."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWN_END_SECONDS = 0.5
"""The longest time that a command may take to end by itself after its front is gone. A rank that called MPI_Abort ends
by itself."""
_GRACE_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL to a command whose front, or whose `topkube run`, is gone."""
_CHECK_SECONDS = 1.0
"""Time between two checks that `topkube run` is alive."""
_REST_SECONDS, _QUIET_SECONDS = 2.0, 0.2
"""The longest times that processes that a command leaves behind, such as `tee`, may take to print the rest of their
output: in total, and between two pieces of output."""
_KILL_SECONDS = 2.0
"""The longest time that the kernel may take to end processes that a command leaves behind."""
_PROGRAM_CHARACTERS = 1024


def main(arguments: list[str]) -> NoReturn:
    """Run `arguments`, a command after optional --no-echo and --, and exit with its exit code. Without a command, run
    the command in the run's directory (`write_command`)."""
    echo = True
    if arguments[:1] == ["--no-echo"]:
        echo, arguments = False, arguments[1:]
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    guardian = None
    try:
        settings = Settings.from_environment()
        if not command and settings.run_path is not None:
            command, guardian = _read_command(settings.run_path)
    except (SettingsError, OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if not command:
        print("topkube rank: there is no command.\nNext: topkube rank -- python train.py", file=sys.stderr)
        raise SystemExit(2)
    front = os.getpid()
    keeper = os.fork()
    if keeper:
        _wait_for_keeper(keeper)
    _die_with_front(front)
    os.setsid()
    rank = read_launched_rank() or 0
    variables = build_rank_variables(rank, settings)
    if variables:
        variables |= list_accelerate_variables(copy_environment())
    variables |= list_network_variables(variables, copy_environment())
    variables |= list_source_variables(settings, copy_environment())
    code = Keeper(command, rank, settings.run_path, echo, front, variables, guardian).run()
    os._exit(code)


def build_shim_command(python: str) -> list[str]:
    """Return the command of shims for the command that `write_command` has written. `python` does not import modules of
    the working directory: it may be the user's, or a folder in which anybody can write, such as /tmp."""
    return [python, "-P", "-m", __name__, "--no-echo"]


def write_command(directory: Path, command: list[str], working_directory: str, guardian: int | None = None) -> None:
    """Write the command for shims that mpiexec starts without a command. `guardian` is a process of this machine that
    kills ranks after their grace period. If it is gone, the shims do that."""
    text: dict[str, Any] = {"command": command, "directory": working_directory}
    if guardian is not None:
        text["guardian"] = dataclasses.astuple(ProcessIdentity.find(guardian))
    (directory / COMMAND_FILE).write_text(json.dumps(text), encoding="utf-8")


def _read_command(directory: Path) -> tuple[list[str], ProcessIdentity | None]:
    stored = json.loads((directory / COMMAND_FILE).read_text(encoding="utf-8"))
    os.chdir(stored["directory"])
    guardian = stored.get("guardian")
    return [str(word) for word in stored["command"]], ProcessIdentity(*guardian) if guardian else None


def find_commands(pids: list[int]) -> list[int]:
    """Return the processes among `pids` that are ranks' commands: children of a shim that are not shims themselves, and
    that lead a process group in its session. Other children are orphans that the shim has adopted."""
    shims = {pid for pid in pids if _is_shim(pid)}
    return [pid for pid in pids if pid not in shims and find_parent(pid) in shims and _leads_group_of_parent(pid)]


def exclude_shims(pids: list[int]) -> list[int]:
    """Return the processes among `pids` that are neither shims nor parents of shims."""
    shims = {pid for pid in pids if _is_shim(pid)}
    parents = {find_parent(pid) for pid in shims}
    return [pid for pid in pids if pid not in shims and pid not in parents]


def _is_shim(pid: int) -> bool:
    try:
        return __name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]
    except OSError:
        return False


def _leads_group_of_parent(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(find_parent(pid))
    except ProcessLookupError:
        return False


def _die_with_front(front: int) -> None:
    """Make the kernel send this process SIGTERM when the front ends."""
    for number in _STOPS:
        signal.signal(number, lambda *_: None)
    prepare_to_die_with_parent(signal.SIGTERM, front)()


def _wait_for_keeper(keeper: int) -> NoReturn:
    """Pass signals on to the keeper, and exit with its exit code. The front runs this."""
    for number in _STOPS:
        signal.signal(number, lambda received, _: _pass_signal_on(keeper, received))
    _, status = os.waitpid(keeper, 0)
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _pass_signal_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Keeper:
    """The process that runs a rank's command: it copies the output to the log (and to its own output if `echo`), passes
    signals on, and writes the report at the end."""

    def __init__(
        self,
        command: list[str],
        rank: int,
        directory: Path | None,
        echo: bool,
        front: int,
        variables: Mapping[str, str] = MappingProxyType({}),
        guardian: ProcessIdentity | None = None,
    ) -> None:
        self.command, self.rank, self.directory, self.front = command, rank, directory, front
        self.variables = variables
        self.echo = echo or directory is None
        self._guardian = guardian
        self._check_at = float("inf") if guardian is None else time.monotonic() + _CHECK_SECONDS
        self._stop_at = self._kill_at = float("inf")
        self._told_to_end = self._is_alone = False
        self._front_ended: float | None = None

    def run(self) -> int:
        """Run the command. Return its exit code, or 128 plus the number of the signal that ended it."""
        started, kills = time.time(), count_memory_kills()
        # Every process below the command inherits the socket to MPI's proxy, which waits until all copies are closed.
        adopt_orphans()
        log = None
        if self.directory:
            reserve_report(self.directory, self.rank)
            log = RankLogWriter(self.directory, self.rank)

        selector = selectors.DefaultSelector()
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(wake, selectors.EVENT_READ)

        environment = {**copy_environment(), **self.variables}
        remove_loopback_library(environment)
        try:
            # A pipe, not the log file: a command that opens /dev/stdout would truncate the file.
            child = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE if log else None,
                stderr=None if log is None else subprocess.PIPE if self.echo else subprocess.STDOUT,
                close_fds=False,  # MPI reaches its launcher through an inherited socket
                process_group=0,
                preexec_fn=prepare_to_die_with_parent(signal.SIGKILL),
                env=environment,
            )
        except OSError as error:
            text = _explain_start_failure(self.command, error)
            print(f"topkube rank: {text}", file=sys.stderr, flush=True)
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._report(log, started, time.time(), code, None, False, not_started=text)
            return code
        if log:
            for stream, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                if stream is not None:
                    os.set_blocking(stream.fileno(), False)
                    echo = Echo(target.fileno(), lambda: _is_asked_to_end(wake)) if self.echo else None
                    selector.register(stream, selectors.EVENT_READ, OutputCopier(stream.fileno(), log, echo))

        while child.poll() is None:
            self._handle_events(selector, wake, child)
        ended = time.time()
        if os.getppid() != self.front:
            self._front_ended = self._front_ended or ended

        selector.unregister(wake)
        copiers = [key.data for key in selector.get_map().values()]
        _copy_rest(selector)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Processes that the command left behind, such as data loaders.
            os.killpg(child.pid, signal.SIGKILL)
        kill_descendants(seconds=_KILL_SECONDS)  # also those in sessions of their own
        for copier in copiers:
            copier.copy_last()
        signal_number = -child.returncode if child.returncode < 0 else None
        code = 128 + signal_number if signal_number else child.returncode
        self._report(log, started, ended, code, signal_number, count_memory_kills() > kills)
        return code

    def _handle_events(
        self, selector: selectors.BaseSelector, wake: socket.socket, child: subprocess.Popen[bytes]
    ) -> None:
        """Wait for output, a signal or the next deadline, and handle it."""
        now = time.monotonic()
        deadline = min(self._stop_at, self._kill_at, self._check_at)
        for key, _ in selector.select(max(0.0, deadline - now) if deadline < float("inf") else None):
            if key.fileobj is not wake:
                if not key.data.copy_some():
                    selector.unregister(key.fileobj)
                continue
            received = wake.recv(4096)
            stops = [number for number in received if number in _STOPS]
            if stops:
                self._check_guardian(child)
            for number in stops:
                self._stop(child, number)
            if signal.SIGCHLD in received and child.poll() is None:
                reap_orphans(frozenset({child.pid}))
        now = time.monotonic()
        if now >= self._check_at:
            self._check_guardian(child)
        if now >= self._stop_at:
            self._stop_at, self._told_to_end = float("inf"), True
            self._kill_at = now + _GRACE_SECONDS
            child.send_signal(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            child.kill()

    def _check_guardian(self, child: subprocess.Popen[bytes]) -> None:
        """If `topkube run` was killed, ask the command to end, unless that was done, and kill it after the grace
        period: no other process does that."""
        if self._guardian is None or self._is_alone:
            return
        now = time.monotonic()
        self._check_at = now + _CHECK_SECONDS
        if self._guardian.is_alive():
            return
        self._check_at, self._is_alone = float("inf"), True
        self._kill_at = min(self._kill_at, now + _GRACE_SECONDS)
        if not self._told_to_end:
            self._told_to_end = True
            child.send_signal(signal.SIGTERM)

    def _stop(self, child: subprocess.Popen[bytes], number: int) -> None:
        if self._is_alone:
            return  # mpiexec passes on its own end, and a command may take a second signal as a wish to end at once
        if os.getppid() != self.front:
            # MPI has ended this rank. If the command asked for that (MPI_Abort), it ends now with its own exit code.
            self._front_ended = self._front_ended or time.time()
            self._stop_at = min(self._stop_at, time.monotonic() + _OWN_END_SECONDS)
        else:
            self._told_to_end = True
            child.send_signal(number)

    def _report(
        self,
        log: RankLogWriter | None,
        started: float,
        ended: float,
        code: int,
        signal_number: int | None,
        kernel_killed: bool,
        not_started: str | None = None,
    ) -> None:
        if self.directory is None or log is None:
            return
        lines, traceback = read_tail(find_log_path(self.directory, self.rank))
        told_to_end, aborted = self._told_to_end, find_abort_code(lines)
        if self._front_ended:
            # MPI ended this rank first. With MPICH the rank may have asked for that: MPI_Abort waits to be killed.
            ended, told_to_end = self._front_ended, not aborted
            code, signal_number = (aborted, None) if aborted else (code, signal_number)
        roll_call = RollCall.read(self.directory, self.rank, since=started)
        report = RankReport(
            rank=self.rank,
            host=socket.gethostname(),
            command=shorten_command(self.command),
            started=started,
            ended=ended,
            exit_code=code,
            signal=name_signal(signal_number) if signal_number else None,
            told_to_end=told_to_end,
            aborted=aborted is not None,
            out_of_memory=kernel_killed
            and was_killed_for_memory(name_signal(signal_number) if signal_number else None, code, lines),
            not_started=not_started,
            missing=roll_call.missing if roll_call and code else [],
            traceback=traceback if code else None,
            tail=lines if code else [],
            log_bytes=log.written_bytes,
            lost_bytes=log.lost_bytes,
            lost_why=log.lost_why,
        )
        try:
            report.write(self.directory)
        except OSError as error:
            print(
                f"topkube rank: the report of rank {self.rank} cannot be written: {error}", file=sys.stderr, flush=True
            )


def _is_asked_to_end(wake: socket.socket) -> bool:
    """Return True if a signal to end has arrived and was not passed on yet."""
    try:
        return any(number in _STOPS for number in wake.recv(4096, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def _copy_rest(selector: selectors.BaseSelector) -> None:
    """Copy the rest of the output after the command has ended, until every pipe is closed. Processes that it left
    behind may hold a pipe open, for at most `_REST_SECONDS`, and `_QUIET_SECONDS` without output."""
    end = time.monotonic() + _REST_SECONDS
    while selector.get_map() and (seconds_left := end - time.monotonic()) > 0:
        ready = selector.select(min(_QUIET_SECONDS, seconds_left))
        if not ready:
            return
        for key, _ in ready:
            if not key.data.copy_some():
                selector.unregister(key.fileobj)


def _explain_start_failure(command: list[str], error: OSError) -> str:
    """Return why the command could not be started."""
    if isinstance(error, FileNotFoundError):
        return f"the program {command[0][:_PROGRAM_CHARACTERS]!r} does not exist"
    if error.errno == errno.E2BIG:
        try:
            check_arguments(command, copy_environment())
        except LaunchError as problem:
            return str(problem)
    return f"the program {command[0][:_PROGRAM_CHARACTERS]!r} cannot be run: {error.strerror}"


if __name__ == "__main__":
    main(sys.argv[1:])
