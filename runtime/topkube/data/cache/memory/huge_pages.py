"""Huge pages for the columns of the memory tier.

Files in /dev/shm have small pages (4 KiB) on most machines, also if other memory has huge pages. A shuffled batch reads
each record from another page, and finding the address of that page takes about as long as copying the record. Since
Linux 6.1, a process can move a range of such a file into huge pages (2 MiB), with the usual settings of /dev/shm and of
transparent huge pages. Other kernels refuse; then the pages stay small. Source: madvise(2), MADV_COLLAPSE.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from topkube import _kernels

_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LARGEST = 32 << 20
"""Larger huge pages (512 MiB on some ARM machines) would take too long to move between two batches."""
_PASSES = 4
"""The number of times that a process tries all pages of a column. If samples of a page are absent, the page is tried in
the next pass."""
_MOST_FAILURES = 4
"""After this many failures in a row, a process moves no more pages: the kernel has no free huge pages, and searching
for them takes time."""
_PRESENT = 1

Bytes = npt.NDArray[np.uint8]


def read_huge_page_size() -> int:
    """Return the bytes of a huge page; 0 if this machine has no transparent huge pages, or too large ones."""
    try:
        size = int(_SIZE_FILE.read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST else 0


def map_column(file: int, size: int) -> Bytes:
    """Return the first `size` bytes of an open file, mapped read-only so that its huge pages can be used. Raises
    OSError."""
    return _kernels.map_file(file, size, read_huge_page_size() or os.sysconf("SC_PAGESIZE"))


class HugePages:
    """Moves the small pages of one column into huge pages, one huge page per call, so that no batch waits for long.

    column: an array from `map_column`. record_bytes: the bytes of a sample in the column. present: a byte per sample,
    1 if the sample is present. moved: a byte per huge page of the column, 1 if a process has moved the page or is
    moving it. The processes of a node share `moved`, so that they share the work.
    """

    def __init__(self, column: Bytes, record_bytes: int, present: Bytes, moved: Bytes) -> None:
        self._column, self._record_bytes, self._present, self._moved = column, record_bytes, present, moved
        self._size = read_huge_page_size()
        self._count = count_huge_pages(column.size)
        self._calls_left = self._count * _PASSES
        """The calls of `advance` that this process still makes."""
        self._failures = 0
        """The failures since the last page was moved."""
        self._next_page = os.getpid() * 31 % max(self._count, 1)  # processes begin at different pages

    @property
    def is_over(self) -> bool:
        """True if this process moves no more pages."""
        return self._calls_left <= 0

    def advance(self) -> None:
        """Move the next huge page whose samples are all present."""
        if self.is_over:
            return
        skipped = int(self._moved[self._next_page :].argmin())  # the pages before the first page that is not moved
        if self._moved[self._next_page + skipped]:
            self._calls_left -= self._count - self._next_page
            self._next_page = 0
            if self._moved.all():
                self._calls_left = 0
            return
        number = self._next_page + skipped
        self._calls_left -= skipped + 1
        self._next_page = (number + 1) % self._count
        if self._has_all_samples(number):
            self._moved[number] = 1  # other processes then skip the page
            error = _kernels.collapse_pages(self._column, number * self._size, self._size)
            self._failures = self._failures + 1 if error else 0
            if error:
                self._moved[number] = 0
            if error == errno.EINVAL or self._failures == _MOST_FAILURES:  # EINVAL: this kernel cannot do it
                self._calls_left = 0

    def _has_all_samples(self, number: int) -> bool:
        """Return True if all samples of a huge page are present: an absent sample has no memory yet."""
        first = number * self._size // self._record_bytes
        stop = -(-(number + 1) * self._size // self._record_bytes)
        return bool((self._present[first:stop] == _PRESENT).all())


def count_huge_pages(size: int) -> int:
    """Return the number of whole huge pages in a column of `size` bytes."""
    huge = read_huge_page_size()
    return size // huge if huge else 0
