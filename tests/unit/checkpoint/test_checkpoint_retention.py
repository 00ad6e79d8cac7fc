"""The checkpoints of a directory that are kept, removed and loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import claim_store, list_names, load_value, open_store, save_value, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import topkube
from topkube.errors import CheckpointError, StorageError
from topkube.training.checkpoint import save as save_module
from topkube.training.checkpoint.format import state_file
from topkube.training.checkpoint.format.state_file import FileDigest
from topkube.training.checkpoint.residual_shares import compute_shares, recut
from topkube.training.checkpoint.save import await_files


@pytest.fixture(autouse=True)
def world() -> None:
    topkube.init()


def copy_visible(old: Path, new: Path) -> None:
    """Copy as `cp -r old/* new/` does, without hidden names."""
    new.mkdir()
    for path in old.iterdir():
        if not path.name.startswith("."):
            shutil.copytree(path, new / path.name)


def test_a_run_in_a_copied_folder_continues_and_so_does_the_next_run(tmp_path: Path) -> None:
    """Claims are hidden files, so the copy has none. The new run must still come after the copied runs."""
    for steps in (4, 6, 8):
        train(tmp_path / "old", steps)
    copy_visible(tmp_path / "old", tmp_path / "new")
    assert train(tmp_path / "new", 14).step == 14
    assert list_names(tmp_path / "new") == ["step-00000012.run-00004", "step-00000014.run-00004"]
    resumed = open_store(tmp_path / "new").load(0, 1)
    assert resumed is not None
    assert resumed.checkpoint.step == 14


def test_an_older_checkpoint_is_removed_only_if_enough_newer_checkpoints_are_known_to_be_whole(tmp_path: Path) -> None:
    first = claim_store(tmp_path, keep=3)
    for step in (10, 20, 30):
        save_value(first, step)
    second = claim_store(tmp_path, keep=3)
    assert second.load(0, 1) is not None
    save_value(second, 40)
    assert list_names(tmp_path, "step-*") == [
        "step-00000010.run-00001",
        "step-00000020.run-00001",
        "step-00000030.run-00001",
        "step-00000040.run-00002",
    ], "this run has not read step 20: it may be damaged, and step 10 may be needed"
    save_value(second, 50)
    assert list_names(tmp_path, "step-*") == [
        "step-00000030.run-00001",
        "step-00000040.run-00002",
        "step-00000050.run-00002",
    ]


@settings(
    max_examples=40,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(
    actions=st.lists(st.sampled_from(["save", "save", "save", "damage", "restart"]), max_size=10),
    keep=st.integers(1, 3),
)
def test_the_newest_whole_checkpoint_is_found_and_none_that_was_found_damaged_is_removed(
    actions: list[str], keep: int, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_file, "SEEN_WITHIN_SECONDS", 0.0)
        current, step = claim_store(tmp_path, keep=keep), 0
        damaged: set[str] = set()
        damaged_folders: set[str] = set()
        for action in actions:
            newest_first = sorted(list_names(tmp_path, "step-*"), key=lambda name: (name[18:], name), reverse=True)
            if action == "save":
                step += 1
                save_value(current, step, step)
            elif action == "damage" and newest_first:
                (tmp_path / newest_first[0] / "shared.pt").write_bytes(b"")
                damaged.add(newest_first[0])
            elif action == "restart":
                current = claim_store(tmp_path, keep=keep)
                whole = next((name for name in newest_first if name not in damaged), None)
                if newest_first and whole is None:
                    with pytest.raises(CheckpointError, match="can be read"):
                        current.load(0, 1)
                    return
                loaded = current.load(0, 1)
                assert (loaded.checkpoint.name if loaded else None) == whole
                skipped = newest_first[: newest_first.index(whole)] if whole else []
                damaged_folders.update(skipped)
            present = {name.removeprefix("damaged-") for name in list_names(tmp_path)}
            assert damaged_folders <= present


@pytest.mark.parametrize("name", ["shared.pt", "rank-00000.pt", "checkpoint.json"])
def test_a_load_waits_for_a_file_that_is_not_visible_yet(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(claim_store(tmp_path), 10, 1.0)
    save_value(claim_store(tmp_path), 20, 2.0)
    folder = tmp_path / "step-00000020.run-00002"
    (folder / name).rename(tmp_path / "unseen")
    listed, listings = os.listdir, 0

    def listdir(path: Path) -> list[str]:
        nonlocal listings
        listings += 1
        if listings == 3:
            (tmp_path / "unseen").rename(folder / name)
        return listed(path)

    monkeypatch.setattr(state_file.os, "listdir", listdir)
    assert load_value(tmp_path) == 2.0
    assert listings >= 3


@pytest.mark.parametrize(("failures", "expected"), [(2, 2.0), (10**9, 1.0)])
def test_storage_that_fails_for_some_seconds_is_no_damage(
    failures: int, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of network storage return EIO while its server restarts."""
    save_value(claim_store(tmp_path), 10, 1.0)
    save_value(claim_store(tmp_path), 20, 2.0)
    open_path, failed = Path.open, 0

    def open_or_fail(path: Path, *arguments: Any, **options: Any) -> object:
        nonlocal failed
        if path.parent.name == "step-00000020.run-00002" and path.suffix == ".pt" and failed < failures:
            failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)
    monkeypatch.setattr(state_file, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(state_file, "SEEN_WITHIN_SECONDS", 1.0)
    assert load_value(tmp_path) == expected


def test_a_newer_format_with_other_fields_is_refused_and_left_alone(tmp_path: Path) -> None:
    save_value(claim_store(tmp_path), 10)
    save_value(claim_store(tmp_path), 20)
    newer = tmp_path / "step-00000020.run-00002" / "checkpoint.json"
    newer.write_text(json.dumps({"format": 3, "contents": "elsewhere"}))
    with pytest.raises(CheckpointError, match=r"has format 3, this version reads up to 2.*a newer TopKube wrote it"):
        open_store(tmp_path).load(0, 1)
    assert list_names(tmp_path) == ["step-00000010.run-00001", "step-00000020.run-00002"]


def test_retention_leaves_checkpoints_that_this_version_cannot_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = claim_store(tmp_path, keep=1)
    save_value(first, 10)
    (tmp_path / "step-00000010.run-00001" / "checkpoint.json").write_text(json.dumps({"format": 3}))
    second = claim_store(tmp_path, keep=1)
    for step in (20, 30):
        save_value(second, step)
    assert list_names(tmp_path) == ["step-00000010.run-00001", "step-00000030.run-00002"]
    assert capfd.readouterr().err.count("stays: this version cannot read its manifest") == 1


def test_temporary_folders_of_others_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-notes.tmp").mkdir()
    (tmp_path / ".step-00000001.run-00099.tmp").mkdir()  # of a later run
    checkpoints = claim_store(tmp_path)
    (tmp_path / ".step-00000001.run-00001.tmp").mkdir()
    save_value(checkpoints, 2)
    assert list_names(tmp_path, ".step-*") == [".step-00000001.run-00099.tmp", ".step-notes.tmp"]


# Thousands of ranks


def test_the_files_of_4096_ranks_are_listed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"rank-{rank:05d}.pt": FileDigest(3, 0) for rank in range(4096)}
    for name in files:
        (tmp_path / name).write_bytes(b"abc")
    (tmp_path / "rank-04000.pt").rename(tmp_path / "unseen")
    (tmp_path / "rank-00007.pt").write_bytes(b"a")  # another node's file that grows
    scans, scandir = 0, os.scandir

    def count_and_scan(path: Path) -> object:
        nonlocal scans
        scans += path == tmp_path  # threads of other tests may read other folders
        return scandir(path)

    def appear(seconds: float) -> None:
        (tmp_path / "rank-00007.pt").write_bytes(b"abc")
        if scans == 2:
            (tmp_path / "unseen").rename(tmp_path / "rank-04000.pt")

    monkeypatch.setattr(save_module.os, "scandir", count_and_scan)
    monkeypatch.setattr(save_module.time, "sleep", appear)
    await_files(tmp_path, files)
    assert scans == 3


def test_files_that_do_not_appear_are_named_and_a_removed_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "SEEN_WITHIN_SECONDS", 0.0)
    files = {f"rank-{rank:05d}.pt": FileDigest(3, 0) for rank in range(3)}
    (tmp_path / "rank-00000.pt").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"rank-00001.pt as it was written \(2 of 3 files\).*all nodes share"):
        await_files(tmp_path, files)
    with pytest.raises(StorageError, match=r"gone was removed while .* a clean-up job"):
        await_files(tmp_path / "gone", files)


@settings(max_examples=100, deadline=None)
@given(old=st.integers(1, 64), new=st.integers(1, 64))
def test_shares_of_residuals_keep_their_sum(old: int, new: int) -> None:
    taken = [compute_shares(old, copy, new) for copy in range(new)]
    for copy in range(old):
        assert sum(share.get(copy, 0.0) for share in taken) == pytest.approx(1.0)
    assert max(map(len, taken)) == -(-old // new), "no rank reads more than its part"


@pytest.mark.parametrize(("old", "new"), [(2, 2), (4, 2), (2, 3), (3, 1)])
def test_recut_residuals_keep_their_sum(old: int, new: int) -> None:
    saved = [
        {"copy": copy, "copies": old, "pieces": {"w": [(2 * copy, torch.full((2,), copy + 1.0))]}}
        for copy in range(old)
    ]
    total = torch.zeros(2 * old)
    for copy in range(new):
        cut = recut(saved, copy, new)
        assert (cut["copy"], cut["copies"]) == (copy, new)
        for first, values in cut["pieces"].get("w", []):
            total[first : first + len(values)] += values
    assert torch.allclose(total, torch.arange(1.0, old + 1).repeat_interleave(2))


@pytest.mark.parametrize(("old", "new"), [(2, 5), (3, 8), (5, 2)])
def test_all_nodes_of_another_world_continue_with_the_same_factors(old: int, new: int) -> None:
    factor = torch.rand(7)
    saved = [{"copy": copy, "copies": old, "pieces": {"w factor": [(0, factor)]}} for copy in range(old)]
    for copy in range(new):
        [(first, values)] = recut(saved, copy, new)["pieces"]["w factor"]
        assert first == 0
        assert torch.equal(values, factor)


def test_a_rank_that_takes_over_many_old_copies_needs_the_memory_of_one() -> None:
    saved = [
        {"copy": copy, "copies": 32, "pieces": {"w": [(0, torch.ones(4)), (4, torch.ones(3))]}} for copy in range(32)
    ]
    assert [(first, values.tolist()) for first, values in recut(saved, 0, 1)["pieces"]["w"]] == [
        (0, [32.0] * 4),
        (4, [32.0] * 3),
    ]
    assert saved[0]["pieces"]["w"][0][1].tolist() == [1.0] * 4


def test_a_file_in_the_path_of_the_directory_is_the_reported_cause(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot be used.*a part of the directory's path is a file"):
        claim_store(tmp_path / "notes" / "checkpoints")


def test_runs_that_are_preempted_often_do_not_fill_the_disk(tmp_path: Path) -> None:
    """Each run reads one checkpoint and writes one, so no run ever knows two checkpoints to be whole and a third one to
    be old."""
    for step in range(1, 12):
        current = claim_store(tmp_path, keep=3)
        current.load(0, 1)
        save_value(current, step)
    names = list_names(tmp_path, "step-*")
    assert [int(name[5:13]) for name in names] == [6, 7, 8, 9, 10, 11]
    for name in names[:4]:  # they do not count as whole
        (tmp_path / name / "shared.pt").write_bytes(b"")
    current = claim_store(tmp_path, keep=3)
    for step in (12, 13):
        save_value(current, step)
    assert [int(name[5:13]) for name in list_names(tmp_path, "step-*")] == [6, 7, 8, 9, 10, 11, 12, 13]
    save_value(current, 14)
    assert [int(name[5:13]) for name in list_names(tmp_path, "step-*")] == [12, 13, 14]
