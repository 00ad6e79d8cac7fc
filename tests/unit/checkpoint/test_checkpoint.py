"""Checkpoints on one rank after a kill, on a full disk, with damage, and beside a run that was given up."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import build_training, list_names, load_value, open_store, save_value, train
from torch import nn

import topkube
from topkube.errors import CheckpointError, StorageError
from topkube.settings import Settings
from topkube.telemetry.progress import read_records
from topkube.training.checkpoint import save as save_module
from topkube.training.checkpoint.format import state_file
from topkube.training.run import Run

SAVING_SCRIPT = Path(__file__).with_name("saving_script.py")


@pytest.fixture(autouse=True)
def world() -> None:
    topkube.init()


def test_a_finished_run_does_nothing_again_and_old_checkpoints_go(tmp_path: Path) -> None:
    train(tmp_path, 7)
    assert list_names(tmp_path) == ["step-00000006.run-00001", "step-00000007.run-00001"]
    assert train(tmp_path, 7).step == 7
    assert list_names(tmp_path) == ["step-00000006.run-00001", "step-00000007.run-00001"]
    assert train(tmp_path, 9).step == 9
    assert list_names(tmp_path) == ["step-00000008.run-00003", "step-00000009.run-00003"]


def test_files_of_an_interrupted_save_are_ignored_and_removed(tmp_path: Path) -> None:
    train(tmp_path, 4)
    (tmp_path / ".step-00000006.run-00001.tmp").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert train(tmp_path, 5).step == 5
    assert list_names(tmp_path) == ["step-00000004.run-00001", "step-00000005.run-00002", "step-notes"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda place: os.truncate(place / "shared.pt", 100),
    "a flipped bit": lambda place: flip_a_bit(place / "shared.pt"),
    "a flipped bit in a rank's file": lambda place: flip_a_bit(place / "rank-00000.pt"),
    "a rank's file missing": lambda place: (place / "rank-00000.pt").unlink(),
    "no manifest": lambda place: (place / "checkpoint.json").unlink(),
    "half a manifest": lambda place: os.truncate(place / "checkpoint.json", 60),
    "a manifest of something else": lambda place: (place / "checkpoint.json").write_text('{"format": 1, "files": []}'),
    "an empty directory": lambda place: (shutil.rmtree(place), place.mkdir()),
}


@pytest.fixture
def prompt_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that shows new files at once."""
    monkeypatch.setattr(state_file, "SEEN_WITHIN_SECONDS", 0.0)


@pytest.mark.usefixtures("prompt_storage")
@pytest.mark.parametrize("damage", DAMAGES)
def test_after_a_damaged_checkpoint_is_found_the_checkpoint_before_is_loaded(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = open_store(tmp_path)
    checkpoints.claim()
    for step in (10, 20, 30):
        save_value(checkpoints, step, step / 10)
    DAMAGES[damage](tmp_path / "step-00000030.run-00001")
    second = open_store(tmp_path)
    second.claim()
    loaded = second.load(0, 1)
    assert loaded is not None
    assert (loaded.checkpoint.step, float(loaded.shared["value"])) == (20, 2.0)
    warning = capfd.readouterr().err
    assert "step-00000030.run-00001" in warning
    assert "going back" in warning
    save_value(second, 25)  # the damaged checkpoint does not count, and stays for a person to examine
    assert list_names(tmp_path) == [
        "damaged-step-00000030.run-00001",
        "step-00000020.run-00001",
        "step-00000025.run-00002",
    ]


@pytest.mark.usefixtures("prompt_storage")
def test_a_run_with_damaged_checkpoints_only_does_not_start_from_the_beginning(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for path in tmp_path.glob("step-*/shared.pt"):
        os.truncate(path, 10)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* can be read.*empty the directory"):
        train(tmp_path, 6)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_same_step_can_be_saved_again(keep: int, tmp_path: Path) -> None:
    checkpoints = open_store(tmp_path, keep=keep)
    checkpoints.claim()
    for value in (1.0, 2.0, 3.0, 4.0):
        save_value(checkpoints, 5, value)
        assert load_value(tmp_path) == value
    assert len(list_names(tmp_path)) == keep


# A run that continues after another attempt has begun


def test_a_replaced_attempt_cannot_write(tmp_path: Path) -> None:
    lost = open_store(tmp_path, attempt=1)
    lost.claim()
    save_value(lost, 10, 1.0)
    newer = open_store(tmp_path, attempt=2)
    newer.claim()
    with pytest.raises(CheckpointError, match=r"attempt 2 of a run has taken over"):
        save_value(lost, 20, 9.0)
    save_value(newer, 15, 2.0)
    save_value(newer, 16, 3.0)
    before = list_names(tmp_path)
    with pytest.raises(CheckpointError, match="has taken over"):
        save_value(lost, 30, 9.0)
    assert list_names(tmp_path) == before == ["step-00000015.run-00002", "step-00000016.run-00002"]
    assert load_value(tmp_path) == 3.0


def test_a_late_checkpoint_of_a_lost_attempt_is_ignored(tmp_path: Path) -> None:
    """The lost attempt checks its claim, is suspended, and publishes after the newer attempt has begun. Its checkpoint
    has the name of its own run."""
    lost = open_store(tmp_path, attempt=1)
    lost.claim()
    save_value(lost, 10, 1.0)
    newer = open_store(tmp_path, attempt=2)
    newer.claim()
    save_value(newer, 11, 2.0)
    (tmp_path / ".run-00002").rename(tmp_path / "hidden")
    save_value(lost, 40, 9.0)
    (tmp_path / "hidden").rename(tmp_path / ".run-00002")
    assert load_value(tmp_path) == 2.0


def test_an_attempt_that_comes_late_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path, attempt=3, job="a").claim()
    with pytest.raises(CheckpointError, match=r"attempt 3 of this job uses .* this is attempt 2"):
        open_store(tmp_path, attempt=2, job="a").claim()
    open_store(tmp_path, attempt=3, job="a").claim()  # a person starts the same attempt again
    open_store(tmp_path, attempt=1, job="another of the same name").claim()


def test_claims_do_not_pile_up(tmp_path: Path) -> None:
    for attempt in range(1, 41):
        open_store(tmp_path, attempt=attempt).claim()
    assert len(list(tmp_path.glob(".run-*"))) <= 16
    with pytest.raises(CheckpointError, match="attempt 40"):
        open_store(tmp_path, attempt=39).claim()


# A disk that refuses


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let the kernel refuse to grow a file further, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_training_continues_if_the_disk_refuses_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state = state_file.write_state

    def write_or_refuse(path: Path, *arguments: Any) -> state_file.FileDigest:
        if 4 <= int(path.parent.name[6:14]) <= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_state(path, *arguments)

    monkeypatch.setattr(save_module, "write_state", write_or_refuse)
    kept: list[list[str]] = []
    monkeypatch.setattr(
        topkube.training.Run,
        "_end_step",
        call_after(topkube.training.Run._end_step, lambda: kept.append(list_names(tmp_path, "step-*"))),
    )
    run = train(tmp_path, 11, run_directory=str(tmp_path / "run"))
    assert run.failed_checkpoints == 3
    assert kept[3] == kept[8] == ["step-00000002.run-00001"], (
        "the older checkpoint stays, and no incomplete checkpoint is published"
    )
    assert list_names(tmp_path) == ["step-00000010.run-00001", "step-00000011.run-00001"]
    output = capfd.readouterr().err
    assert (
        output.count("training continues without this checkpoint: the checkpoint of step 4 could not be written") == 1
    )
    assert "No space left on device" in output
    assert output.count("warning") == 1
    assert "the checkpoint of step 10 is written: checkpoints work again" in output
    records = [record for record, _ in read_records(tmp_path / "run" / "progress.jsonl")]
    counts = [record.failed_checkpoints for record in records]
    assert counts == sorted(counts), "the count only grows"
    assert {record.checkpoint_step for record in records[3:9]} == {2}


def call_after(function: Callable[..., object], after: Callable[[], object]) -> Callable[..., object]:
    def call_both(*arguments: object) -> object:
        result = function(*arguments)
        after()
        return result

    return call_both


def find_living_runs() -> list[Run]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is Run]


def test_a_run_whose_last_checkpoint_is_refused_fails(tmp_path: Path) -> None:
    handler, before = signal.getsignal(signal.SIGTERM), find_living_runs()
    with (
        limit_file_size(3000),
        pytest.raises(StorageError, match=r"checkpoint of step 3 could not be written.*no space"),
    ):
        train(tmp_path, 3, checkpoint_every=100)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert len(find_living_runs()) == len(before), "the runs of earlier tests are held by `before`"


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    claim.mkdir(mode=0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(StorageError, match=r"cannot be used: .*Permission denied.*mounted read-only"):
            train(claim, 3)
    finally:
        os.seteuid(user)


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with pytest.raises(
        CheckpointError, match=r"(?s)step-00000002.run-00001 .* belongs to another model .*size mismatch"
    ):
        train(tmp_path, 4, width=32)
    assert train(tmp_path, 4).step == 4


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    manifest = tmp_path / "step-00000002.run-00001" / "checkpoint.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 3}))
    with pytest.raises(CheckpointError, match="has format 3, this version reads up to 2"):
        train(tmp_path, 4)


# SIGKILL and SIGTERM


def test_a_run_that_is_killed_while_saving_continues_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL comes before each change of the directory. At most the save that runs then is lost, and the run ends with
    the same weights. Every step is saved; the save of the step before the last reported step may still run when
    SIGKILL comes."""
    ended = subprocess.run(
        [sys.executable, str(SAVING_SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr
    runs = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(runs) > 25, "each save has several moments in which it can be killed"
    for run in runs:
        assert run["equal"], run
        assert run["resumed"] >= run["done"] - 2, run
    assert not runs[-1]["killed"]
    assert runs[-1]["checkpoints"] == ["step-00000003.run-00001"]


@pytest.mark.parametrize("moment", ["before the first step", "while data is loaded", "while a checkpoint is written"])
def test_sigterm_saves_and_ends_with_143(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="dense")

    def end() -> None:
        signal.raise_signal(signal.SIGTERM)

    def batches() -> Iterator[torch.Tensor]:
        for number in range(100):
            if moment == "while data is loaded" and number == 3:
                end()
            yield torch.randn(4, 20)

    class Ending:
        def state_dict(self) -> dict[str, int]:
            if moment == "while a checkpoint is written":
                end()
            return {}

    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=5)
    run = topkube.checkpointing(model, optimizer, settings=settings, ending=Ending())

    def train_on() -> None:
        with run:
            if moment == "before the first step":
                end()
            for x in run.progress(batches()):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(SystemExit) as ended:
        train_on()
    assert ended.value.code == 143
    first = {"before the first step": 1, "while data is loaded": 4, "while a checkpoint is written": 6}[moment]
    [*_, newest] = list_names(tmp_path)
    assert newest in (f"step-{first:08d}.run-00001", f"step-{first + 1:08d}.run-00001")
    assert run.step == int(newest[5:13])


@pytest.mark.parametrize("status", [None, 0, 3, "an error"])
def test_an_exit_without_an_error_saves_the_last_step(status: int | str | None, tmp_path: Path) -> None:
    model, optimizer = build_training()
    settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=100)

    def train_on() -> None:
        with topkube.checkpointing(model, optimizer, settings=settings) as run:
            for x in run.progress([torch.ones(4, 20)] * 9):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step == 4:
                    sys.exit(status)

    with pytest.raises(SystemExit) as ended:
        train_on()
    assert ended.value.code == status
    assert list_names(tmp_path, "step-*") == ([] if status else ["step-00000005.run-00001"])


def test_a_process_that_the_script_forks_ends_by_sigterm(tmp_path: Path) -> None:
    """Otherwise `Process.terminate()` would do nothing, and a pool of multiprocessing would wait for ever."""
    model, optimizer = build_training()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=str(tmp_path))),
        topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=str(tmp_path / "inner"))),
    ):
        sleeper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        sleeper.start()
        sleeper.terminate()
        sleeper.join(30)
        ended = sleeper.exitcode
        sleeper.kill()
    assert ended == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_fork_that_leaves_the_run_saves_nothing(tmp_path: Path) -> None:
    model, optimizer = build_training()
    settings, child, status = Settings(checkpoint_directory=str(tmp_path)), -1, -1
    try:
        with topkube.checkpointing(model, optimizer, settings=settings) as run:
            for x in run.progress([torch.ones(4, 20)] * 3):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step == 1:
                    child = os.fork()
                    if not child:
                        sys.exit(0)
                    status = os.waitpid(child, 0)[1]
    finally:
        if not child:
            os._exit(len(list_names(tmp_path)))
    assert status == 0
    assert list_names(tmp_path, "step-*") == ["step-00000003.run-00001"]
