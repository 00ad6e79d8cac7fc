"""`topkube cache` with real caches."""

from __future__ import annotations

import gzip
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import xxhash
from remotes import write_files, write_tars

from topkube.cli.entry import run_app
from topkube.data.formats.checked_index import unpack_checked_index
from topkube.data.manifest import generate_manifest
from topkube.errors import DatasetError


class Command:
    """Runs `topkube cache` with a cache in `directory`, and returns its output."""

    def __init__(self, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._directory, self._capfd = directory, capfd

    def __call__(self, *words: object, code: int = 0) -> str:
        self._capfd.readouterr()
        directory_option = [] if words[0] == "manifest" else ["--directory", str(self._directory)]
        ended = run_app(["cache", *map(str, words), *directory_option])
        captured = self._capfd.readouterr()
        assert ended == code, captured
        return captured.out if ended != 2 else captured.err

    def run_json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "-o", "json", code=code))


@pytest.fixture
def command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("TOPKUBE_CACHE_MEMORY_DIRECTORY", str(tmp_path / "memory"))
    return Command(tmp_path / "cache", capfd)


@pytest.mark.parametrize("words", [("warm", ""), ("manifest", ""), ("check", ""), ("pin", " ")])
def test_an_empty_address_is_refused(words: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    assert "the address of the dataset is empty" in command(*words, code=2)


def test_a_dataset_is_warmed_listed_checked_pinned_and_evicted(command: Command, tmp_path: Path) -> None:
    write_tars(tmp_path / "source", [5, 6])
    size = sum(path.stat().st_size for path in (tmp_path / "source").iterdir())
    assert command.run_json("warm", tmp_path / "source", "--share", "0/2")["cached"] == 1
    assert command.run_json("warm", tmp_path / "source")["cached"] == 2
    assert command.run_json("warm", tmp_path / "source") == {"shards": 2, "cached": 2, "remoteBytes": 0}
    (row,) = command.run_json("ls")
    assert (row["uri"], row["shards"], row["bytes"]) == ((tmp_path / "source").as_uri(), 2, size)
    assert not row["inUse"]
    assert command.run_json("check")["damaged"] == {}
    shard_file = next(path for path in (tmp_path / "cache").glob("datasets/*/shards/*/*") if path.suffix != ".index")
    shard_file.chmod(0o644)
    shard_file.write_bytes(shard_file.read_bytes()[:-1] + b"!")
    assert command.run_json("check", code=1)["damaged"] == {row["uri"]: [shard_file.name]}
    command("pin", row["id"])
    assert command.run_json("evict", "--all")["kept"][0]["reason"] == "pinned"
    command("pin", row["id"], "--off")
    assert command.run_json("evict", tmp_path / "source")["evicted"][0]["uri"] == row["uri"]
    assert command.run_json("ls") == []


def test_a_list_has_one_line_for_each_dataset_however_long_its_address_is(command: Command, tmp_path: Path) -> None:
    """Other programs read the list, and people copy the ID from it."""
    source = tmp_path / ("long-name-" * 9) / "source"
    write_tars(source, [5])
    command("warm", source)
    (row,) = command.run_json("ls")
    head, line = command("ls").splitlines()
    assert head.split()[:3] == ["ID", "DATASET", "SHARDS"]
    assert line.split()[:3] == [row["id"], source.as_uri(), "1"]


def test_a_view_shows_the_datasets_own_files_read_only(command: Command, tmp_path: Path) -> None:
    write_files(tmp_path / "files", 6)
    write_tars(tmp_path / "tars", [3])
    for name in ("files", "tars"):
        command("warm", tmp_path / name, "--view", tmp_path / "view" / name)
        shown = {path.relative_to(tmp_path / "view" / name): path for path in (tmp_path / "view" / name).rglob("*.*")}
        assert len(shown) == {"files": 6, "tars": 1}[name]
        for path, file in shown.items():
            assert file.read_bytes() == (tmp_path / name / path).read_bytes()
            assert file.stat().st_mode & 0o222 == 0
    assert (tmp_path / "view" / "tars" / "000.tar").stat().st_nlink == 2  # a link, not a second copy


@pytest.mark.parametrize("name", ["thesis.txt", "sub/.hidden", "a/00000.bin"])
def test_a_view_in_a_folder_with_other_files_is_refused(name: str, command: Command, tmp_path: Path) -> None:
    """A view removes what is not in the listing, so it must not be in a folder that somebody uses."""
    write_files(tmp_path / "files", 6)
    other = tmp_path / "home" / name
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    error = command("warm", tmp_path / "files", "--view", tmp_path / "home", code=2)
    assert "name a new folder" in error
    assert name in error
    assert other.read_text() == "mine"


def test_a_view_follows_a_changed_object(command: Command, tmp_path: Path) -> None:
    write_tars(tmp_path / "source", [3, 3])
    command("warm", tmp_path / "source", "--share", "0/2", "--view", tmp_path / "view")
    write_tars(tmp_path / "source", [3, 5])
    command("warm", tmp_path / "source", "--view", tmp_path / "view")
    for name in ("000.tar", "001.tar"):
        assert (tmp_path / "view" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_a_view_in_the_place_of_a_file_is_refused(command: Command, tmp_path: Path) -> None:
    write_files(tmp_path / "files", 6)
    (tmp_path / "view").write_text("mine")
    command("warm", tmp_path / "files", "--view", tmp_path / "view", code=1)
    assert (tmp_path / "view").read_text() == "mine"


def test_a_manifest_counts_samples(command: Command, tmp_path: Path) -> None:
    write_tars(tmp_path / "source", [5, 6])
    lines = [json.loads(line) for line in command("manifest", tmp_path / "source", "--samples").splitlines()]
    assert [(line["path"], line["samples"]) for line in lines] == [("000.tar", 5), ("001.tar", 6)]


def test_a_manifest_names_the_index_of_every_plain_tar(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tars(source, [5, 6, 2])
    (source / "002.tar.gz").write_bytes(gzip.compress((source / "002.tar").read_bytes()))
    (source / "002.tar").unlink()
    lines = command("manifest", source, "--index", source / "manifest.index")
    entries = [json.loads(line) for line in lines.splitlines()]
    assert [(entry["path"], entry["samples"]) for entry in entries] == [
        ("000.tar", 5),
        ("001.tar", 6),
        ("002.tar.gz", 2),
    ]
    assert "index" not in entries[2]
    packed = (source / "manifest.index").read_bytes()
    for entry in entries[:2]:
        start, size, checksum = entry["index"]
        part = packed[start : start + size]
        assert xxhash.xxh3_128_hexdigest(part) == checksum
        assert len(unpack_checked_index(part, entry["size"]).index) == entry["samples"]
    assert entries[0]["index"][1] + entries[1]["index"][1] == len(packed)
    assert command("manifest", source, "--index", source / "manifest.index") == lines, "the index is not a shard"


def test_an_index_of_a_dataset_without_tar_shards_is_refused(command: Command, tmp_path: Path) -> None:
    write_files(tmp_path / "files", 2)
    assert "has no tar shards" in command("manifest", tmp_path / "files", "--index", tmp_path / "i", code=2)
    assert not (tmp_path / "i").exists()
    write_tars(tmp_path / "tars", [2])
    absent = tmp_path / "absent" / "i"
    assert "cannot be written" in command("manifest", tmp_path / "tars", "--index", absent, code=2)


def test_mistakes_are_explained(command: Command, tmp_path: Path) -> None:
    assert "there is no cache" in command("ls", code=2)
    write_files(tmp_path / "source", 2)
    command("warm", tmp_path / "source")
    assert "is not in the cache" in command("evict", "file:///other", code=2)
    assert "nothing to evict" in command("evict", code=2)
    for days in ("-1", "nan"):  # -1 would remove what was used a minute ago
        assert "--idle" in command("evict", "--idle", days, code=2)
    assert len(command.run_json("ls")) == 1
    assert "is not I/N" in command("warm", tmp_path / "source", "--share", "2/2", code=2)


def test_shards_are_counted_on_the_disk_and_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may be larger than the memory."""
    write_tars(tmp_path / "source", [3, 300])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the kernel refuses larger files, as a full disk
    try:
        with pytest.raises(DatasetError, match=rf"001\.tar \([\d,]+ bytes\) cannot be stored in {tmp_path}.*TMPDIR"):
            list(generate_manifest(str(tmp_path / "source"), samples=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list(generate_manifest(str(tmp_path / "source"), samples=True))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
