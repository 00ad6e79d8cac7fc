"""Saves at the same time as training: what they write, and how they fail."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed_runs import build_training, claim_store, list_names, open_store, save_value

import topkube
from topkube.errors import CheckpointError, StorageError
from topkube.settings import Settings
from topkube.training.checkpoint import CheckpointStore, host_copies, reader
from topkube.training.checkpoint import save as save_module
from topkube.training.checkpoint.format import state_file
from topkube.training.checkpoint.format.state_file import write_state
from topkube.training.checkpoint.host_memory import find_available_bytes
from topkube.training.checkpoint.run_claim import Claim
from topkube.training.checkpoint.stages import Stages

FORKING = Path(__file__).with_name("forking_script.py")
SECONDS = 60


class Gate:
    """Holds every write of a state until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(save_module, "write_state", self._write)

    def _write(self, *arguments: Any) -> object:
        self.reached.set()
        assert self.opened.wait(SECONDS)
        return write_state(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    topkube.init()
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def begin_checkpoint(store: CheckpointStore, step: int) -> None:
    """Begin a save, and begin to write its files."""
    store.begin(step, lambda: {"value": torch.tensor(float(step))}, {"residuals": {}})
    save = store._save
    assert save is not None
    assert futures.wait([save.work], SECONDS).done
    store.advance()


def train_steps(run: topkube.training.Run, model: torch.nn.Module, optimizer: Any, total: int) -> Iterator[int]:
    """Train, and yield the number of each step after its update."""
    for x in run.progress([torch.ones(4, 20)] * total):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield run.step + 1


def test_training_continues_while_a_checkpoint_is_written_and_the_checkpoint_is_that_of_its_step(
    tmp_path: Path, gate: Gate
) -> None:
    model, optimizer = build_training()
    expected: dict[str, torch.Tensor] = {}
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=5, checkpoint_keep=9)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for step in train_steps(run, model, optimizer, 9):
            if step == 5:
                expected = {name: value.clone() for name, value in model.state_dict().items()}
            if step == 9:
                assert gate.reached.wait(SECONDS)
                assert list_names(tmp_path) == [".step-00000005.run-00001.tmp"]
                gate.opened.set()
    assert list_names(tmp_path) == ["step-00000005.run-00001", "step-00000009.run-00001"]
    saved = torch.load(tmp_path / "step-00000005.run-00001" / "shared.pt", weights_only=True)["model"]
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert not torch.equal(saved["0.weight"], model.state_dict()["0.weight"])


def test_training_continues_while_storage_takes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that begins to hang between two saves hangs at the first call of the next save."""
    check, reached, answered = Claim.check, threading.Event(), threading.Event()

    def check_late(claim: Claim) -> None:
        reached.set()
        assert answered.wait(SECONDS)
        check(claim)

    monkeypatch.setattr(Claim, "check", check_late)
    model, optimizer = build_training()
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=5, checkpoint_keep=9)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for step in train_steps(run, model, optimizer, 9):
            if step == 9:
                assert reached.wait(SECONDS)
                assert list_names(tmp_path) == []
                answered.set()
    assert list_names(tmp_path) == ["step-00000005.run-00001", "step-00000009.run-00001"]


def test_a_checkpoint_is_published_while_training_continues(tmp_path: Path) -> None:
    model, optimizer = build_training()
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=2)
    seen = 0
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for x in run.progress([torch.ones(4, 20)] * 100_000):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if list_names(tmp_path, "step-00000002*"):
                seen = run.step
                break
    assert 2 <= seen < 99_999


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: Gate) -> None:
    checkpoints = claim_store(tmp_path)
    begin_checkpoint(checkpoints, 1)
    threading.Timer(0.05, gate.opened.set).start()
    checkpoints.finish()
    begin_checkpoint(checkpoints, 2)
    checkpoints.finish()
    assert list_names(tmp_path) == ["step-00000001.run-00001", "step-00000002.run-00001"]


def test_a_removed_temporary_folder_is_not_reported_as_a_full_disk(tmp_path: Path, gate: Gate) -> None:
    checkpoints = claim_store(tmp_path)
    begin_checkpoint(checkpoints, 1)
    shutil.rmtree(tmp_path / ".step-00000001.run-00001.tmp")
    gate.opened.set()
    with pytest.raises(StorageError, match=r"step 1 could not be written.*removed the temporary folder") as e:
        checkpoints.finish()
    assert "no space" not in str(e.value)
    save_value(checkpoints, 2)
    assert list_names(tmp_path) == ["step-00000002.run-00001"]


def test_a_run_that_is_taken_over_while_it_writes_publishes_nothing(tmp_path: Path, gate: Gate) -> None:
    lost = claim_store(tmp_path)
    begin_checkpoint(lost, 1)
    claim_store(tmp_path, attempt=2)
    gate.opened.set()
    with pytest.raises(CheckpointError, match="has taken over"):
        lost.finish()
    assert list_names(tmp_path, "step-*") == []


def test_storage_that_hangs_costs_a_deadline_once_and_is_used_again_when_it_answers(tmp_path: Path, gate: Gate) -> None:
    world = dataclasses.replace(topkube.world.current(), deadline_seconds=0.1)
    checkpoints = CheckpointStore(tmp_path, 2, world)
    checkpoints.claim()
    begin_checkpoint(checkpoints, 1)
    hanging = checkpoints._save
    assert hanging is not None
    with pytest.raises(StorageError, match=r"step 1 .*nothing was written for 0.1 s.*the storage does not answer"):
        checkpoints.finish()
    with pytest.raises(StorageError, match="an earlier checkpoint still hangs"):
        begin_checkpoint(checkpoints, 2)
    gate.opened.set()
    assert futures.wait([hanging.work], SECONDS).done
    checkpoints._stages._world = dataclasses.replace(world, deadline_seconds=SECONDS)  # other disks may be slow too
    save_value(checkpoints, 3)
    assert list_names(tmp_path) == ["step-00000003.run-00001"]


def test_storage_that_is_slow_to_sync_a_large_file_does_not_count_as_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes many GB at once, and writes them to the storage when the file is synced."""
    synced = 0

    def sync_slowly(file: Any) -> None:
        nonlocal synced
        size = os.fstat(file.fileno()).st_size
        time.sleep(2.0 * max(0, size - synced) / (1 << 20))
        synced = max(synced, size)

    topkube.init()
    monkeypatch.setattr(state_file, "_CHUNK", 1 << 14)
    monkeypatch.setattr(state_file, "_MOST_UNSYNCED", 1 << 16)
    checkpoints = CheckpointStore(tmp_path, 2, dataclasses.replace(topkube.world.current(), deadline_seconds=1.0))
    checkpoints.claim()
    monkeypatch.setattr(state_file, "sync", sync_slowly)
    checkpoints.save(1, lambda: {"value": torch.zeros(1 << 18)}, {"residuals": {}})
    assert list_names(tmp_path) == ["step-00000001.run-00001"]


def test_storage_that_is_slow_to_remove_a_checkpoint_does_not_count_as_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def unlink_slowly(path: Any, **options: Any) -> None:
        time.sleep(0.2)
        unlink(path, **options)

    topkube.init()
    world = dataclasses.replace(topkube.world.current(), deadline_seconds=1.0)
    checkpoints = CheckpointStore(tmp_path, 1, world)
    checkpoints.claim()
    save_value(checkpoints, 1)
    for number in range(12):
        (tmp_path / "step-00000001.run-00001" / f"rank-{number:05d}.pt").touch()
    monkeypatch.setattr(os, "unlink", unlink_slowly)
    save_value(checkpoints, 2)
    assert list_names(tmp_path) == ["step-00000002.run-00001"]


def test_storage_that_does_not_answer_a_read_costs_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topkube.init()
    save_value(claim_store(tmp_path), 1)
    answered = threading.Event()
    monkeypatch.setattr(reader, "read_state", lambda *arguments: answered.wait(SECONDS))
    world = dataclasses.replace(topkube.world.current(), deadline_seconds=0.1)
    with pytest.raises(StorageError, match=r"cannot be read: nothing was read for 0.1 s.*the storage does not answer"):
        CheckpointStore(tmp_path, 2, world).load(0, 1)
    answered.set()


def test_a_script_that_fails_leaves_no_thread_and_publishes_nothing(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = build_training()
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=1)

    def fail() -> None:
        with topkube.checkpointing(model, optimizer, settings=settings) as run:
            for step in train_steps(run, model, optimizer, 9):
                if step == 2:
                    gate.opened.set()
                    raise KeyError("the script's own")

    with pytest.raises(KeyError):
        fail()
    end = time.monotonic() + SECONDS
    while "topkube-checkpoint" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert list_names(tmp_path, "step-*") == []


def test_a_process_that_is_forked_while_a_state_is_written_does_not_change_the_file(tmp_path: Path) -> None:
    """The child ends normally, and would write the buffers that it has inherited."""
    ended = subprocess.run(
        [sys.executable, str(FORKING), str(tmp_path / "state.pt")],
        capture_output=True,
        text=True,
        timeout=280,  # a process that starts torch on a busy machine may take a minute
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["child", "equal"], ended.stdout


def test_residuals_in_a_state_dict_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save writes the residuals while training continues, without another copy."""
    topkube.init()
    model = torch.nn.Linear(40, 40)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(
        plain, model.named_parameters(), aggregation="hitopk", density=0.05, warmup_steps=0
    )

    def train_step(number: int) -> None:
        model(torch.full((2, 40), float(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step(1)
    pieces = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
    before = {name: [values.clone() for _, values in entries] for name, entries in pieces.items()}
    assert any(values.any() for entries in before.values() for values in entries)
    for number in range(2, 6):
        train_step(number)
    for name, entries in pieces.items():
        assert all(
            torch.equal(values, value_before) for (_, values), value_before in zip(entries, before[name], strict=True)
        )


def test_agreements_about_checkpoints_do_not_grow_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank acts as rank 0 of 4,096 ranks: a few numbers of each rank are gathered once."""
    size, gathered = 4096, []

    def gather(self: Stages, values: Any) -> np.ndarray:
        gathered.append(len(values))
        return np.tile(np.array(values, np.float64), (size, 1))

    monkeypatch.setattr(Stages, "gather", gather)
    monkeypatch.setattr("topkube.training.checkpoint.store.await_files", lambda folder, files: None)
    topkube.init()
    world = dataclasses.replace(
        topkube.world.current(), size=size, node_ranks=tuple(tuple(range(n, n + 8)) for n in range(0, size, 8))
    )
    checkpoints = CheckpointStore(tmp_path, 2, world)
    checkpoints.claim()
    checkpoints.save(1, dict, {"residuals": {"copy": 0, "copies": 512}})
    assert max(gathered) <= 6
    manifest = (tmp_path / "step-00000001.run-00001" / "checkpoint.json").read_text()
    assert manifest.count("rank-") == size
    assert open_store(tmp_path) is not None


# Memory


def test_without_memory_for_a_copy_training_waits_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_copies, "find_available_bytes", lambda: 1000.0)
    model, optimizer = build_training()
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=2, checkpoint_keep=9)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        seen = [(step, len(list_names(tmp_path, "step-*"))) for step in train_steps(run, model, optimizer, 5)]
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert capfd.readouterr().err.count("host memory has no room for a copy") == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4096.0),
        ({"memory.max": "3000", "memory.current": "2500", "memory.stat": "active_file 100\ninactive_file 200"}, 800.0),
        ({"memory.max": "max", "memory.current": "2500", "memory.stat": "active_file 1\ninactive_file 2"}, 4096.0),
        (
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2500",
                "memory/memory.stat": "total_active_file 100\ntotal_inactive_file 200",
            },
            800.0,
        ),
    ],
)
def test_available_memory_is_that_of_the_machine_or_of_the_cgroup(
    files: dict[str, str], expected: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    assert find_available_bytes(tmp_path, tmp_path / "none", machine) == expected


def test_training_that_waits_for_slow_storage_prints_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("topkube.training.run_checkpoints._LONG_WAIT_SECONDS", 0.0)
    model, optimizer = build_training()
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=1, checkpoint_keep=9)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        assert list(train_steps(run, model, optimizer, 4)) == [1, 2, 3, 4]
    output = capfd.readouterr().err
    assert output.count("training waited") == 1
    assert "Next: raise spec.checkpoint.everySteps" in output
    assert len({name[:13] for name in list_names(tmp_path, "step-*")}) == 4
