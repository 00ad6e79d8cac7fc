"""Numbers that a process shares with the workers of its data loader."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any


class SharedNumbers:
    """`count` integers of 64 bits, 0 at first. Forks of this process, and processes that it starts with
    `multiprocessing`, share them. Other copies (`copy`, `pickle`) have numbers of their own."""

    def __init__(self, count: int) -> None:
        file = os.memfd_create("topkube-numbers", os.MFD_CLOEXEC)
        os.ftruncate(file, 8 * count)
        self._map(file)

    def _map(self, file: int) -> None:
        self._file = file
        self._numbers = memoryview(mmap.mmap(file, 0)).cast("q")

    def __getitem__(self, index: int) -> int:
        return int(self._numbers[index])

    def __setitem__(self, index: int, number: int) -> None:
        self._numbers[index] = number

    @contextmanager
    def locked(self) -> Iterator[None]:
        """In this context, no other process is in such a context of the same numbers. For one thread at a time."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Callable[..., SharedNumbers], tuple[Any]]:
        if get_spawning_popen() is None:
            return _copy_numbers, (self._numbers.tolist(),)
        return _open_numbers, (DupFd(self._file),)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _copy_numbers(numbers: Sequence[int]) -> SharedNumbers:
    copied = SharedNumbers(len(numbers))
    for index, number in enumerate(numbers):
        copied[index] = number
    return copied


def _open_numbers(handle: Any) -> SharedNumbers:
    """Return the numbers of the process that has started this process."""
    opened = SharedNumbers.__new__(SharedNumbers)
    opened._map(handle.detach())
    return opened
