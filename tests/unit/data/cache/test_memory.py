"""The cache in memory: all processes of a node share one copy, the last process removes it, and damage is found."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from openers import Opener, check_samples
from processes import fork, wait_for_end
from remotes import write_files

from topkube.data import ArrayOf

RECORD = ArrayOf("uint8", (3072,))


def test_check_detects_bits_that_flipped_in_memory(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=False)
    check_samples(dataset, data)
    (column,) = open_dataset.memory.glob("*/memory-*/column-0")  # all samples, one after the other
    with column.open("r+b") as file:
        file.seek(7 * 3072 + 5)
        file.write(bytes([data[7, 5] ^ 1]))
    memory: Any = dataset._samples.memory
    assert memory.check() == [7]
    check_samples(dataset, data)
    assert memory.check() == []


def test_memory_is_one_copy_for_all_processes_and_the_last_removes_it(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)
    first = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=False)
    check_samples(first, data)
    second = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=False)
    check_samples(second, data)
    assert second.statistics()["memory_misses"] == 0
    assert second.statistics()["memory_used_bytes"] == data.nbytes
    open_dataset.close()
    assert not [path for path in open_dataset.memory.rglob("*") if path.is_file()]


def test_memory_of_killed_processes_is_not_used(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)

    def train() -> None:
        check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)
        (column,) = open_dataset.memory.glob("*/memory-*/column-0")
        column.write_bytes(bytes(data.nbytes))  # wrong samples, if another process read them
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for_end(fork(train)) == -signal.SIGKILL
    check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)
