"""Files and folders appear complete or not at all, also on a full disk."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from topkube.files import create_folder, replace_file, sync_directory, write_bytes, write_json, write_text


@pytest.fixture
def full_disk() -> Iterator[None]:
    """The kernel refuses to let a file grow beyond 100 bytes, as a full disk would. Python ignores SIGXFSZ, so the
    write raises OSError."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_new_version_replaces_the_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"step": 1})
    write_json(path, {"step": 2}, indent=1)
    assert json.loads(path.read_text()) == {"step": 2}
    write_text(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_bytes(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_reader_sees_the_earlier_version_until_the_new_version_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("earlier")
    with replace_file(path) as part:
        part.write_text("ne")
        assert path.read_text() == "earlier"
        assert part.parent == tmp_path  # os.replace works within a file system only
        part.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("earlier", [None, b"earlier"])
def test_a_full_disk_leaves_the_earlier_version_and_nothing_half_written(
    tmp_path: Path, full_disk: None, earlier: bytes | None
) -> None:
    path = tmp_path / "value"
    if earlier is not None:
        path.write_bytes(earlier)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    with pytest.raises(OSError, match="File too large"):
        write_bytes(path, bytes(1000))
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_a_value_that_is_not_json_leaves_the_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"earlier")
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"value": b"earlier"}


def test_a_folder_appears_with_everything_in_it(tmp_path: Path) -> None:
    with create_folder(tmp_path / "run") as part:
        part.mkdir()
        assert not (tmp_path / "run").exists()
        (part / "claim").write_text("mine")
    assert (tmp_path / "run" / "claim").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_cannot_be_filled_is_removed(tmp_path: Path, full_disk: None) -> None:
    # All of the block is in `raises`, because an error may come from any file: the folder is removed as a whole.
    with pytest.raises(OSError, match="File too large"), create_folder(tmp_path / "run") as part:  # noqa: PT012
        part.mkdir()
        (part / "small").write_bytes(b"1")
        (part / "large").write_bytes(bytes(1000))
    assert not list(tmp_path.iterdir())


def test_only_the_first_of_two_folders_of_one_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "claim").write_text("theirs")
    # The error comes at the end of the block, when the folder gets its name.
    with pytest.raises(FileExistsError), create_folder(tmp_path / "run") as part:  # noqa: PT012
        part.mkdir()
        (part / "claim").write_text("mine")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "claim").read_text() == "theirs"


def test_links_to_the_same_file_leave_no_hidden_name(tmp_path: Path) -> None:
    (tmp_path / "shard").write_text("bytes")
    os.link(tmp_path / "shard", tmp_path / "shown")
    with replace_file(tmp_path / "shown") as part:
        os.link(tmp_path / "shard", part)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shard", "shown"]


def test_sync_directory_reports_a_path_that_is_not_a_directory(tmp_path: Path) -> None:
    sync_directory(tmp_path)
    (tmp_path / "file").touch()
    for name, number in (("file", errno.ENOTDIR), ("missing", errno.ENOENT)):
        with pytest.raises(OSError) as raised:  # noqa: PT011
            sync_directory(tmp_path / name)
        assert raised.value.errno == number


def test_a_file_system_that_cannot_sync_directories_is_used_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sync_directory(Path("/proc"))  # the kernel answers EINVAL, as for some network file systems

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(Path("/proc"))


@pytest.mark.parametrize("name", ["x" * 255, "x" * 233, "日" * 85, "é" * 127], ids=["255", "233", "3 bytes", "2 bytes"])
def test_a_file_may_have_the_longest_name_of_a_folder(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, "content")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "content"}
