"""The address of a dataset: of the job's dataset, of a folder of it, and of a local path."""

from __future__ import annotations

from pathlib import Path

import pytest
from openers import Opener, check_samples
from remotes import RemoteServer, write_files

from topkube.data import ArrayOf
from topkube.data.opening import resolve_address
from topkube.errors import DatasetError
from topkube.settings import Settings

JOB = Settings(dataset_uri="s3://bucket/imagenet", dataset_mount="/data")
ROWS = [
    ("/data", "s3://bucket/imagenet"),
    ("/data/", "s3://bucket/imagenet"),
    ("/data/train", "s3://bucket/imagenet/train"),
    ("/data//train/2024/", "s3://bucket/imagenet/train/2024"),
    ("/data/../data/train", "s3://bucket/imagenet/train"),
    ("/data2/train", "file:///data2/train"),
    ("/data/../etc", "file:///data/../etc"),
    ("https://host/data", "https://host/data"),
]


@pytest.mark.parametrize(("path", "address"), ROWS)
def test_the_files_of_a_job_are_read_from_its_remote(path: str, address: str) -> None:
    assert resolve_address(path, JOB) == address


def test_without_a_dataset_a_path_is_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_address("/data/train", Settings()) == "file:///data/train"
    assert resolve_address("train", JOB) == f"file://{tmp_path}/train"


def test_a_folder_of_a_manifest_is_refused() -> None:
    job = Settings(dataset_uri="s3://bucket/imagenet/manifest.jsonl", dataset_mount="/data")
    assert resolve_address("/data", job) == "s3://bucket/imagenet/manifest.jsonl"
    with pytest.raises(DatasetError, match="is a folder of the job's dataset, which is the manifest"):
        resolve_address("/data/train", job)


def test_a_folder_of_the_view_is_whole_although_files_are_still_arriving(
    remote: RemoteServer, open_dataset: Opener, tmp_path: Path
) -> None:
    data = write_files(remote.folder / "train", 8)
    write_files(remote.folder / "val", 8, seed=1)
    view = tmp_path / "view"
    write_files(view / "train", 2)  # what has arrived
    settings = Settings(dataset_uri=remote.uri, dataset_mount=str(view))
    check_samples(open_dataset(view / "train", decode=ArrayOf("uint8", (3072,)), settings=settings), data)
