"""The cache in memory: all processes of a node share one copy, the last process removes it, and damage is found."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from openers import Opener, check_samples, wait_until
from processes import fork, wait_for_end
from remotes import write_files

from topkube.data import ArrayOf
from topkube.data.cache.memory_folder import remove_unused_memory
from topkube.settings import Settings

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
    assert not list_files(open_dataset.memory)


def list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_memory_is_freed_if_a_script_ends_without_closing_its_dataset(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 30)
    script = (
        "import sys, numpy; from topkube.data import ArrayOf, CachedDataset\n"
        "dataset = CachedDataset(sys.argv[1], cache_directory=sys.argv[2], memory_directory=sys.argv[3],"
        " decode=ArrayOf('uint8', (3072,)), memory_limit=1 << 20)\n"
        "assert len(dataset.__getitems__(range(30))) == 30\n"
    )
    folders = [str(path) for path in (tmp_path / "source", open_dataset.cache, open_dataset.memory)]
    subprocess.run([sys.executable, "-c", script, *folders], check=True)
    assert not list_files(open_dataset.memory)


def test_memory_is_freed_when_a_dataset_is_deleted(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 30)
    for prefetch in (True, False):
        open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20, prefetch=prefetch)[3]
        open_dataset.opened.clear()
        gc.collect()
        wait_until(lambda: not list_files(open_dataset.memory))


def test_memory_of_killed_processes_is_freed_by_the_next_job(tmp_path: Path, open_dataset: Opener) -> None:
    """The next job may have another dataset, or another decode function."""
    for name in ("first", "second"):
        write_files(tmp_path / name, 30)

    def train() -> None:
        open_dataset(tmp_path / "first", decode=RECORD, memory_limit=1 << 20)[3]
        os.kill(os.getpid(), signal.SIGKILL)

    used = open_dataset(tmp_path / "second", decode=RECORD, memory_limit=1 << 20)
    assert wait_for_end(fork(train)) == -signal.SIGKILL
    assert len(list(open_dataset.memory.glob("*/memory-*/column-0"))) == 2
    open_dataset(tmp_path / "second", decode=lambda raw: raw[:3], fingerprint="3", memory_limit=1 << 20)
    assert len(list(open_dataset.memory.glob("*/memory-*/cells"))) == 2, "the tier of the living job is still there"
    assert used[3].nbytes == 3072


def test_what_killed_processes_left_in_memory_can_be_removed(tmp_path: Path, open_dataset: Opener) -> None:
    for name in ("killed", "living"):
        write_files(tmp_path / name, 30)

    def train() -> None:
        open_dataset(tmp_path / "killed", decode=RECORD, memory_limit=1 << 20)[3]
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for_end(fork(train)) == -signal.SIGKILL
    before = set(list_files(open_dataset.memory))
    open_dataset(tmp_path / "living", decode=RECORD, memory_limit=1 << 20)[3]
    of_living = set(list_files(open_dataset.memory)) - before
    remove_unused_memory(Settings(cache_memory_directory=str(open_dataset.memory)))
    assert len(before) > 3
    assert of_living <= set(list_files(open_dataset.memory))
    assert not before & set(list_files(open_dataset.memory))
    open_dataset.close()
    assert not list_files(open_dataset.memory)


def test_memory_in_a_folder_that_another_user_prepared_is_not_removed(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "theirs", 2)
    (tmp_path / "theirs/memory-x.users").touch()
    (tmp_path / "theirs/memory-x").symlink_to(tmp_path / "theirs/a")
    open_dataset.memory.mkdir()
    (open_dataset.memory / f"topkube-{os.geteuid()}").symlink_to(tmp_path / "theirs")
    before = list_files(tmp_path)
    remove_unused_memory(Settings(cache_memory_directory=str(open_dataset.memory)))
    assert list_files(tmp_path) == before


def test_memory_of_killed_processes_is_not_used(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 30)

    def train() -> None:
        check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)
        (column,) = open_dataset.memory.glob("*/memory-*/column-0")
        column.write_bytes(bytes(data.nbytes))  # wrong samples, if another process read them
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for_end(fork(train)) == -signal.SIGKILL
    check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)
