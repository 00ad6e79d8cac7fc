"""The format of a dataset, and files beside its shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from openers import Opener
from remotes import write_files, write_tars

from topkube.data import ArrayOf
from topkube.data.base.rank_place import RankPlace
from topkube.data.fill.warm import warm
from topkube.data.formats.shards import Shards
from topkube.data.manifest import generate_manifest
from topkube.data.opening import open_cache
from topkube.data.remote.listing import Listing, RemoteObject
from topkube.settings import Settings

FIELD = ArrayOf("uint8", (3072,), field="bin")
ROWS = [
    (["0.tar", "1.tar.gz"], "tar"),
    (["0.tar", "README.md", ".gitattributes", "LICENSE", ".cache/huggingface/x.json", "sub/.DS_Store"], "tar"),
    (["part-0.parquet", "_SUCCESS", ".part-0.parquet.crc", "_metadata"], "parquet"),
    (["0.arrow", "readme.txt"], "arrow"),
    (["0.tar", "labels.json"], "files"),
    (["0.tar", "0.parquet"], "files"),
    (["0.tar", "license_plates/1.jpg"], "files"),
    (["0.tar", "readme/1.jpg"], "files"),
    (["README.md", ".gitattributes"], "files"),
]


@pytest.mark.parametrize(("paths", "format"), ROWS)
def test_descriptions_do_not_change_the_format(paths: list[str], format: str) -> None:
    listing = Listing.from_objects([RemoteObject(path, 10, "") for path in paths], "file:///x")
    assert Shards("file:///x", listing).format == format


def write_beside(folder: Path) -> None:
    for name in ("README.md", ".gitattributes", "_SUCCESS"):
        (folder / name).write_text("no archive")


def test_shards_are_read_beside_a_description(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_tars(tmp_path / "source", [3, 4])
    write_beside(tmp_path / "source")
    dataset = open_dataset(tmp_path / "source", decode=FIELD)
    np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(len(dataset))))), data)
    dataset.warm()


@pytest.mark.parametrize("name", ["meta.json", "000.parquet", "stats.json.gz", "other/1.bin"])
def test_other_files_have_no_samples_if_the_format_is_named(tmp_path: Path, open_dataset: Opener, name: str) -> None:
    data = write_tars(tmp_path / "source", [3, 4])
    (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "source" / name).write_text("no archive")
    dataset = open_dataset(tmp_path / "source", decode=FIELD, format="tar")
    np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(len(dataset))))), data)
    dataset.warm()
    assert all(dataset.cache.has(number) for number in range(3))


def test_shards_may_have_any_names_if_the_format_is_named(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_tars(tmp_path / "source", [3, 4])
    for path in (tmp_path / "source").iterdir():
        path.rename(path.with_suffix(""))
    dataset = open_dataset(tmp_path / "source", decode=FIELD, format="tar")
    np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(len(dataset))))), data)


def test_a_manifest_names_descriptions_and_counts_the_samples_of_shards(tmp_path: Path, open_dataset: Opener) -> None:
    write_tars(tmp_path / "source", [3, 4])
    write_beside(tmp_path / "source")
    lines = list(generate_manifest(str(tmp_path / "source"), True, True, tmp_path / "index"))
    assert ['"samples": 3' in line or '"samples": 4' in line for line in lines] == [False, True, True, False, False]
    assert all("xxh3" in line for line in lines)
    (tmp_path / "source" / "manifest.jsonl").write_text("".join(lines))
    assert len(open_dataset(tmp_path / "source", decode=FIELD)) == 7


def test_plain_scripts_find_descriptions_too(tmp_path: Path) -> None:
    write_tars(tmp_path / "source", [3])
    write_beside(tmp_path / "source")
    settings = Settings(cache_directory=str(tmp_path / "cache"), cache_memory_directory=str(tmp_path / "shm"))
    cache = open_cache(f"file://{tmp_path}/source", settings, RankPlace())
    assert warm(cache, view=tmp_path / "view").is_complete
    cache.close()
    assert (tmp_path / "view" / "README.md").read_text() == "no archive"


def test_small_files_with_a_description_are_all_samples(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 4)
    write_beside(tmp_path / "source")
    assert len(open_dataset(tmp_path / "source")) == 7
