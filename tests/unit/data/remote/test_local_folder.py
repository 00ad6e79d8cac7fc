"""The listing of a local folder: no file is left out in silence, also behind links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from openers import Opener

from topkube.data.remote import local_folder
from topkube.data.remote.object_store import ObjectStore
from topkube.errors import DatasetError, StoreError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "data"


def list_paths(folder: Path) -> list[str]:
    return [entry.path for entry in ObjectStore(str(f"file://{folder}")).read_listing()]


def test_links_to_files_are_samples(folder: Path, open_dataset: Opener) -> None:
    """The snapshots of Hugging Face, and subsets of larger datasets, are folders of links."""
    blob = folder.parent / "elsewhere" / "4f2a"
    blob.write_bytes(b"second")
    (folder / "a.bin").write_bytes(b"first")
    (folder / "b.bin").symlink_to(blob)
    (folder / "sub" / "c.bin").symlink_to("../a.bin")
    dataset = open_dataset(folder)
    assert list(dataset) == [b"first", b"second", b"first"]
    dataset.close()
    blob.write_bytes(b"third!")
    os.utime(blob, (1, 1))
    assert open_dataset(folder)[1] == b"third!", "the version is that of the target"


def test_links_to_folders_are_followed(folder: Path) -> None:
    (folder.parent / "elsewhere" / "x.bin").write_bytes(b"x")
    (folder / "sub" / "y.bin").write_bytes(b"y")
    (folder / "more").symlink_to(folder.parent / "elsewhere")
    (folder / "again").symlink_to("sub")
    assert list_paths(folder) == ["again/y.bin", "more/x.bin", "sub/y.bin"]


@pytest.mark.parametrize("target", [".", "..", "../../elsewhere"])
def test_a_link_to_a_folder_above_is_an_error(folder: Path, target: str) -> None:
    (folder.parent / "elsewhere" / "back").symlink_to(folder)
    (folder / "sub" / "link").symlink_to(target)
    with pytest.raises(DatasetError, match="is a link to a folder that contains it"):
        list_paths(folder)


def test_links_that_make_a_listing_endless_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_folder, "_LINKED_FOLDERS", 40)
    for level in range(10):
        (folder / str(level)).mkdir()
        for name in "ab":
            (folder / str(level) / name).symlink_to(folder / str(level + 1))
    (folder / "10").mkdir()
    with pytest.raises(DatasetError, match="more than 40 folders behind links"):
        list_paths(folder)


@pytest.mark.parametrize("target", ["nowhere", "link", "../a.bin/x"])
def test_a_link_that_leads_nowhere_is_an_error(folder: Path, target: str) -> None:
    (folder / "a.bin").write_bytes(b"a")
    (folder / "sub" / "link").symlink_to(target)
    with pytest.raises(DatasetError, match="sub/link is a link that leads nowhere"):
        list_paths(folder)


def test_pipes_are_no_samples(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "a.bin").write_bytes(b"a")
    assert list_paths(folder) == ["a.bin"]


def test_a_file_in_place_of_a_folder_is_named(folder: Path) -> None:
    (folder / "a.tar").write_bytes(b"a")
    with pytest.raises(DatasetError, match=r"a\.tar is a file"):
        list_paths(folder / "a.tar")
    with pytest.raises(StoreError, match="does not exist"):
        list_paths(folder / "b.tar")
