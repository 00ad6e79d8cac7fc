"""One rank's failure is the end of all: the others would wait for it for ever, and so would its own MPI_Finalize.

An exception that nobody caught aborts the run at once. An exit with a status (`sys.exit(9)`, `raise SystemExit(9)`)
leaves MPI without MPI_Finalize, on which every launcher ends the other ranks with that status. An exit without one is
the end of a rank that is done: it waits in MPI_Finalize for the others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

_ours = False
"""Whether MPI_Finalize is ours to call, not mpi4py's."""
_exit_status = 0
"""What the last `sys.exit` asked for, where the program is not known to have gone on."""


def own_finalize() -> None:
    """Takes MPI_Finalize from mpi4py, which calls it whatever the exit status. To be called before mpi4py loads MPI;
    where a script has loaded it already mpi4py keeps it, and only exceptions and `sys.exit` end all ranks."""
    global _ours
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is not False:
        mpi4py.rc.finalize = False
        _ours = True


def end_together(comm: Any) -> None:
    """From here on what ends this rank's program with an error ends all ranks of `comm`; what ends it well ends MPI."""
    if comm.size > 1:
        _abort_on_exceptions(comm)
    if _ours and _finalize_on_success():
        return
    if _ours:
        from mpi4py import MPI

        atexit.register(MPI.Finalize)
    if comm.size > 1:
        _abort_on_sys_exit(comm)


def all_end() -> None:
    """All ranks have agreed to end, with a status that is no failure of one of them: MPI ends in order."""
    from topkube import _kernels

    _kernels.finalize_in_any_case()


def goes_on() -> None:
    """The program has caught its `sys.exit`."""
    global _exit_status
    _exit_status = 0


def _finalize_on_success() -> bool:
    from mpi4py import MPI

    from topkube import _kernels

    try:
        library = ctypes.CDLL(MPI.__file__)  # finds what mpi4py itself is linked with
        functions = [library.MPI_Finalize, library.MPI_Finalized]
        finalize, is_finalized = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return _kernels.finalize_on_success(finalize, is_finalized)
    except (OSError, AttributeError):
        return False


def _abort_on_exceptions(comm: Any) -> None:
    before, before_in_threads = sys.excepthook, threading.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        _abort(comm)

    def on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
        before_in_threads(arguments)
        if arguments.exc_type is not SystemExit:
            _abort(comm)

    sys.excepthook, threading.excepthook = on_exception, on_thread_exception


def _abort_on_sys_exit(comm: Any) -> None:
    before = sys.exit

    def on_exit(status: Any = None) -> NoReturn:
        global _exit_status
        if threading.current_thread() is threading.main_thread():
            _exit_status = status % 256 if isinstance(status, int) else int(status is not None)
        before(status)

    def at_exit() -> None:
        if _exit_status:
            _abort(comm, _exit_status)

    sys.exit = on_exit
    atexit.register(at_exit)


def _abort(comm: Any, status: int = 1) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    comm.Abort(status)
