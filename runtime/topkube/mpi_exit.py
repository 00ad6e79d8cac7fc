"""The end of all ranks when a rank fails. Otherwise the other ranks would wait for it for ever.

An uncaught exception aborts the run at once. An exit with a status (`sys.exit(9)`, `raise SystemExit(9)`) leaves MPI
without MPI_Finalize, so every launcher ends the other ranks with that status. An exit without a status is the normal
end of a rank: it waits in MPI_Finalize for the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, NoReturn

from topkube.errors import CheckpointError

_REASON_SECONDS = 3.0
"""How long a rank waits if only other ranks have the reason of its error: one of them prints it and ends all ranks."""

_finalizes = False
"""True if this module calls MPI_Finalize instead of mpi4py."""
_exit_status = 0
"""The status of the last `sys.exit`; 0 if the program has continued since."""
_process = 0
"""The process id of the rank. A fork of the rank, such as a data loader's worker, has the same hooks, but ends
alone."""


def take_over_finalize() -> None:
    """Make this module call MPI_Finalize. mpi4py would call it whatever the exit status is. Call this before mpi4py
    loads MPI. If a script has loaded MPI already, mpi4py calls MPI_Finalize, and only exceptions and `sys.exit` end all
    ranks."""
    global _finalizes
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is not False:
        mpi4py.rc.finalize = False
        _finalizes = True


def end_together(comm: Any) -> None:
    """From now on, end all ranks of `comm` if this rank's program ends with an error, and finalize MPI if it ends
    without an error."""
    global _process
    if _process == os.getpid():  # a second world of the same ranks
        return
    _process = os.getpid()
    if comm.size > 1:
        _abort_on_exceptions(comm)
    _record_sys_exit()
    if _finalizes and _finalize_on_success():
        return
    if _finalizes:
        atexit.register(_finalize)
    if comm.size > 1:
        atexit.register(_abort_on_sys_exit, comm)


def finalize_at_exit() -> None:
    """Finalize MPI at exit whatever the exit status is: all ranks have agreed to end, and no rank has failed."""
    from topkube import _kernels

    _kernels.finalize_in_any_case()


def forget_exit() -> None:
    """Forget the last `sys.exit`: the program has caught it, because it enters a collective. Calls from the
    communication thread change nothing."""
    global _exit_status
    if _exit_status and threading.current_thread() is threading.main_thread():
        _exit_status = 0


def get_exit_status() -> int:
    """Return the status of the last `sys.exit`; 0 if there was none, or if the program has continued since."""
    return _exit_status


def is_rank() -> bool:
    """Return True in the process that joined the world, False in its forks."""
    return os.getpid() == _process


def _finalize() -> None:
    if is_rank():
        from mpi4py import MPI

        MPI.Finalize()


def _finalize_on_success() -> bool:
    from mpi4py import MPI

    from topkube import _kernels

    try:
        library = ctypes.CDLL(MPI.__file__)  # the library that mpi4py is linked with
        functions = [library.MPI_Finalize, library.MPI_Finalized]
        finalize, is_finalized = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return _kernels.finalize_on_success(finalize, is_finalized)
    except (OSError, AttributeError):
        return False


def _abort_on_exceptions(comm: Any) -> None:
    previous_hook, previous_thread_hook = sys.excepthook, threading.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, CheckpointError) and error.is_of_others:
            time.sleep(_REASON_SECONDS)
        previous_hook(kind, error, trace)
        _abort(comm)

    def on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
        previous_thread_hook(arguments)
        if arguments.exc_type is not SystemExit:
            _abort(comm)

    sys.excepthook, threading.excepthook = on_exception, on_thread_exception


def _record_sys_exit() -> None:
    previous_exit = sys.exit

    def on_exit(status: Any = None) -> NoReturn:
        global _exit_status
        if threading.current_thread() is threading.main_thread():
            _exit_status = status % 256 if isinstance(status, int) else int(status is not None)
        previous_exit(status)

    sys.exit = on_exit


def _abort_on_sys_exit(comm: Any) -> None:
    if _exit_status:
        _abort(comm, _exit_status)


def _abort(comm: Any, status: int = 1) -> None:
    if not is_rank():
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    comm.Abort(status)
