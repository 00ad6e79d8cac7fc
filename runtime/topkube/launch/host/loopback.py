"""The library that binds mpiexec to loopback (csrc/loopback.cpp): its path, and its place in LD_PRELOAD."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_PRELOAD = "LD_PRELOAD"


def find_loopback_library() -> Path | None:
    """Return the library that binds mpiexec to loopback; None if this installation was built without it, or if
    LD_PRELOAD cannot hold its path."""
    kernels = importlib.util.find_spec("topkube._kernels")
    if kernels is None or kernels.origin is None:
        return None
    library = Path(kernels.origin).parent / "_loopback.so"
    return library if library.exists() and not re.search(r"[:\s]", str(library)) else None


def add_loopback_library(environment: dict[str, str]) -> None:
    """Preload the library into processes with `environment`, after the libraries that it already names: some of them
    must be the first."""
    if library := find_loopback_library():
        present = environment.get(_PRELOAD)
        environment[_PRELOAD] = f"{present}:{library}" if present else str(library)


def remove_loopback_library(environment: dict[str, str]) -> None:
    """Undo `add_loopback_library`."""
    library = find_loopback_library()
    present = environment.get(_PRELOAD, "")
    if library is None or not present.endswith(str(library)):
        return
    before = present.removesuffix(str(library)).removesuffix(":")
    if before:
        environment[_PRELOAD] = before
    else:
        del environment[_PRELOAD]
