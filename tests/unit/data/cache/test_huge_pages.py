"""The columns of the memory tier move into huge pages while batches are read, and their bytes stay the same."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from topkube import _kernels
from topkube.data.base.batch import ArrayOf
from topkube.data.cache.memory.huge_pages import map_column, read_huge_page_size
from topkube.data.cache.memory.memory_tier import MemoryTier

HUGE = read_huge_page_size()
BYTES = 3072
SAMPLES = 11 * (HUGE or 1 << 21) // (4 * BYTES)
"""Samples of two whole huge pages, and of most of a third page."""
RECORD = ArrayOf("uint8", (BYTES,))


def can_collapse() -> bool:
    """Return True if this kernel moves files of /dev/shm into huge pages."""
    if not HUGE:
        return False
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(HUGE))
        file.flush()
        return _kernels.collapse_pages(map_column(file.fileno(), HUGE), 0, HUGE) == 0


needs_huge_pages = pytest.mark.skipif(not can_collapse(), reason="this kernel has no MADV_COLLAPSE (Linux 6.1)")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="topkube-test-") as name:
        yield Path(name)


@pytest.fixture
def tier(folder: Path) -> Iterator[MemoryTier]:
    tier = MemoryTier(folder, "huge", SAMPLES, SAMPLES * BYTES)
    yield tier
    tier.close()


def build_data() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (SAMPLES, BYTES), np.uint8)


def admit(tier: MemoryTier, data: npt.NDArray[np.uint8], samples: npt.NDArray[np.int64]) -> None:
    tier.admit(samples, RECORD.decode_many(data[samples].reshape(-1), samples.size))


def check(tier: MemoryTier, data: npt.NDArray[np.uint8], samples: npt.NDArray[np.int64]) -> None:
    batch = tier.gather_present(samples)
    assert batch is not None
    np.testing.assert_array_equal(batch.columns[0], data[samples])


def count_huge_bytes(path: Path) -> int:
    """Return the bytes of huge pages in this process's mappings of the file."""
    total, is_mapping = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_mapping = line.endswith(f" {path}")
        elif is_mapping and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1]) << 10
    return total


@needs_huge_pages
def test_a_full_column_moves_into_huge_pages_while_it_is_read(tier: MemoryTier) -> None:
    data, every = build_data(), np.arange(SAMPLES)
    admit(tier, data, every)
    column = tier.folder / "column-0"
    assert count_huge_bytes(column) == 0
    for _ in range(12):
        check(tier, data, np.random.default_rng(1).permutation(SAMPLES))
    assert count_huge_bytes(column) == column.stat().st_size // HUGE * HUGE > 0


@needs_huge_pages
def test_other_processes_read_the_same_huge_pages(tier: MemoryTier, folder: Path) -> None:
    """Each process has its own mapping, as the second tier of this process does."""
    data, every = build_data(), np.arange(SAMPLES)
    admit(tier, data, every)
    for _ in range(12):
        check(tier, data, every)
    mapped = count_huge_bytes(tier.folder / "column-0")
    other = MemoryTier(folder, "huge", SAMPLES, SAMPLES * BYTES)
    try:
        check(other, data, every)
        assert count_huge_bytes(tier.folder / "column-0") == 2 * mapped
    finally:
        other.close()


@needs_huge_pages
def test_absent_samples_take_no_memory_and_are_right_when_they_come(tier: MemoryTier) -> None:
    data = build_data()
    few, others = np.arange(HUGE // BYTES // 2), np.arange(HUGE // BYTES // 2, SAMPLES)
    admit(tier, data, few)
    column = tier.folder / "column-0"
    blocks = column.stat().st_blocks
    for _ in range(3):
        check(tier, data, few)
    assert column.stat().st_blocks == blocks
    admit(tier, data, others)
    for _ in range(12):
        check(tier, data, np.arange(SAMPLES))
    assert count_huge_bytes(column) > 0, "a page that was not full is tried again"
    assert tier.check() == []


@pytest.mark.skipif(not HUGE, reason="this machine has no transparent huge pages")
@pytest.mark.parametrize(("error", "most_calls"), [(errno.EINVAL, 1), (errno.ENOMEM, 4)])
def test_a_kernel_that_refuses_huge_pages_is_asked_a_few_times_only(
    error: int, most_calls: int, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def refuse(mapped: object, start: int, size: int) -> int:
        calls.append(start)
        return error

    monkeypatch.setattr(_kernels, "collapse_pages", refuse)
    data = build_data()
    admit(tier, data, np.arange(SAMPLES))
    for _ in range(20):
        check(tier, data, np.arange(SAMPLES))
    assert 1 <= len(calls) <= most_calls


def test_a_mapping_begins_at_its_alignment_and_has_the_bytes_of_the_file(folder: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    (folder / "file").write_bytes(data.tobytes())
    file = os.open(folder / "file", os.O_RDONLY)
    try:
        for alignment in (os.sysconf("SC_PAGESIZE"), 1 << 21, 1 << 25):
            mapped = _kernels.map_file(file, data.size, alignment)
            assert mapped.ctypes.data % alignment == 0
            assert not mapped.flags.writeable
            np.testing.assert_array_equal(mapped, data)
    finally:
        os.close(file)
    np.testing.assert_array_equal(mapped, data)  # also when the file is closed


@pytest.mark.skipif(not HUGE, reason="this machine has no transparent huge pages")
def test_every_column_begins_at_a_huge_page(folder: Path) -> None:
    """Otherwise its huge pages cannot be mapped as huge pages."""
    columns = []
    for number, size in enumerate((5000, 70_000, HUGE + 12_345, 200_000)):
        (folder / f"column-{number}").write_bytes(bytes(size))
        with (folder / f"column-{number}").open("rb") as file:
            columns.append(map_column(file.fileno(), size))
    assert [column.ctypes.data % HUGE for column in columns] == [0, 0, 0, 0]


def test_a_mapping_ends_with_its_array(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"x" * 4096)
    file = os.open(path, os.O_RDONLY)
    try:
        part = _kernels.map_file(file, 4096, 1 << 21)[1:3]
    finally:
        os.close(file)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert part.tobytes() == b"xx"
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_wrong_mappings_and_ranges_are_refused(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * 4096)
    with (folder / "file").open("rb") as file:
        mapped = _kernels.map_file(file.fileno(), 4096, 1 << 21)
        for size, alignment in ((0, 1 << 21), (4096, 3 << 12), (4096, 512)):
            with pytest.raises(ValueError, match=r"mapping|alignment"):
                _kernels.map_file(file.fileno(), size, alignment)
    for start, size in ((4097, 0), (0, 4097), (1, 2**64 - 1)):
        with pytest.raises(ValueError, match="outside the mapping"):
            _kernels.collapse_pages(mapped, start, size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _kernels.map_file(-1, 4096, 1 << 21)
