"""Ranks as forks of one process that has imported torch: 32 of them start in the time of one, and share its memory.

`forking.py serve SOCKET MODULE…` imports the modules and waits. mpiexec starts `forking.py rank SOCKET SCRIPT …` for
every rank, a process that imports next to nothing: it hands its environment and its files to the server, whose fork
becomes the rank and runs SCRIPT. The rank dies with the process that mpiexec started, and that process ends as the rank
ended. MPI is loaded in the forks only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

_FIRST_PART = 1 << 20
"""Most bytes of a request that are sent together with the rank's files."""


def serve(path: str, modules: list[str]) -> None:
    """Fork a rank for every caller, until this process is killed. Return in the forks only."""
    import faulthandler
    import gc
    import importlib
    import select

    faulthandler.enable()

    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise the garbage collection of each rank would write to the shared memory, and so copy it
    _hide_frozen_objects()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".making")
    listener.listen(256)
    os.rename(path + ".making", path)
    wake, waker = socket.socketpair()  # the end of a fork wakes select
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            while callers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with callers.pop(pid) as caller, contextlib.suppress(OSError):
                    caller.send(str(os.waitstatus_to_exitcode(status)).encode())
        if listener in ready:
            caller, _ = listener.accept()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for parents_socket in (listener, wake, waker, *callers.values()):
                    parents_socket.close()
                _become(caller)
                return
            callers[pid] = caller


def _hide_frozen_objects() -> None:
    """Let `gc.get_freeze_count` count only the objects that a rank's script freezes. Training searches frozen objects
    for optimizers that are gone. In the 300,000 frozen objects of this process, a search for each new optimizer would
    take 0.2 s."""
    import gc

    count_frozen, hidden = gc.get_freeze_count, gc.get_freeze_count()
    gc.get_freeze_count = lambda: max(0, count_frozen() - hidden)


def _become(caller: socket.socket) -> None:
    """Take over the caller's environment, directory and files in this fork. It dies with the caller."""
    import fcntl

    length = int.from_bytes(caller.recv(8, socket.MSG_WAITALL), "little")
    text, files, _, _ = socket.recv_fds(caller, min(length, _FIRST_PART), 16)
    while len(text) < length:
        text += caller.recv(length - len(text))
    request = json.loads(text)
    first_free = max(request["files"]) + 1  # PMI_FD grows with the number of ranks: with 127 ranks it can be 512
    moved_files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first_free) for file in files]
    own_caller = fcntl.fcntl(caller.fileno(), fcntl.F_DUPFD_CLOEXEC, first_free)
    for file in (*files, caller.detach()):
        os.close(file)
    for file, number in zip(moved_files, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    # The kernel sends this process SIGKILL when the caller's end of the socket is closed.
    fcntl.fcntl(own_caller, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own_caller, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    fcntl.fcntl(own_caller, fcntl.F_SETFL, fcntl.fcntl(own_caller, fcntl.F_GETFL) | os.O_ASYNC)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = request["arguments"]


def run() -> None:
    """Run the script and end this fork. The interpreter is not finalized, because that would copy all that ranks
    share. If the rank's environment has `FORKS_END_AS_PYTHON_DOES`, the fork ends as any Python process does."""
    import atexit
    import ctypes
    import runpy

    import memory

    memory.at_start = memory.measure_own_memory()
    if "FORKS_END_AS_PYTHON_DOES" in os.environ:
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).exit(code)  # libc's: it ends MPI


def stand_for_rank(path: str, arguments: list[str]) -> int:
    """Ask the server for a fork, and wait until the fork ends. Return its exit code."""
    call = socket.socket(socket.AF_UNIX)
    call.connect(path)
    files = [0, 1, 2] + ([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd(), "files": files}
    text = json.dumps(request).encode()
    call.sendall(len(text).to_bytes(8, "little"))
    socket.send_fds(call, [text[:_FIRST_PART]], files)
    for file in files:
        os.close(file)  # only the rank has these files: a reader of its output then sees where the output ends
    status = int(call.recv(16) or b"1")
    if status < 0:
        os.kill(os.getpid(), -status)
    return status % 256


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        os._exit(stand_for_rank(sys.argv[2], sys.argv[3:]))
    serve(sys.argv[2], sys.argv[3:])
    run()
