"""The index of the cache: a log that survives torn writes, keys that differ between versions, a million entries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.cache.disk.record_log import PUBLISHED, RECORD, RecordLog, read_hash, read_key
from topkube.data.formats.shards import Shards
from topkube.data.opening import list_dataset
from topkube.data.remote.listing import IndexPart, Listing, RemoteObject, format_manifest, read_manifest
from topkube.data.remote.object_store import ObjectStore
from topkube.errors import DatasetError

KEYS = [f"{number:032x}" for number in (1, 2, 3, 2**127)]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-1, 10**6)), max_size=25),
    st.integers(0, 63),
)
def test_the_log_is_right_after_any_history_and_a_torn_write(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]], torn: int
) -> None:
    log = RecordLog(tmp_path_factory.mktemp("log") / "records")
    expected: dict[str, int] = {}
    for key, size in history:
        if size < 0:
            assert log.remove(key) == expected.pop(key, 0)
        else:
            log.append(key, f"{size:032x}", size)
            expected[key] = size
    if log.path.exists():
        with log.path.open("ab") as file:
            file.write(b"\xff" * torn)
    log = RecordLog(log.path)
    assert {read_key(record): int(record["size"]) for record in log.read_live()} == expected
    assert (log.count_shards(), log.sum_shard_bytes()) == (len(expected), sum(expected.values()))
    for key in KEYS:
        record = log.find(key)
        assert (
            (int(record["size"]), read_hash(record)) == (expected[key], f"{expected[key]:032x}")
            if key in expected
            else record is None
        )
    log.append(KEYS[0], "f" * 32, 7)
    assert log.sum_shard_bytes() == sum({**expected, KEYS[0]: 7}.values())


def build_objects(count: int, version: str = "v") -> list[RemoteObject]:
    return [RemoteObject(f"folder/{number:07}.bin", 100 + number % 7, f"{version}{number}") for number in range(count)]


def test_a_key_changes_with_address_version_size_path_and_transform() -> None:
    base = build_objects(3)

    def compute_key(objects: list[RemoteObject], uri: str = "file:///a", fingerprint: str = "") -> str:
        return Shards(uri, Listing.from_objects(objects, uri), "files").compute_key(0, fingerprint)

    keys = {
        compute_key(base),
        compute_key(base, "file:///b"),
        compute_key(base, fingerprint="t"),
        compute_key([base[0]._replace(version="w"), *base[1:]]),
        compute_key([base[0]._replace(size=99), *base[1:]]),
        compute_key([base[0]._replace(path="folder/else"), *base[1:]]),
        compute_key(base[:2]),
    }
    assert len(keys) == 7
    assert compute_key(base) == compute_key(base[::-1])


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 6000))
def test_small_files_are_grouped_in_order_each_exactly_once(sizes: list[int], group: int) -> None:
    listing = Listing.from_objects([RemoteObject(f"{at:04}", size, "v") for at, size in enumerate(sizes)], "u")
    shards = Shards("u", listing, "files", group)
    covered = [at for number in range(len(shards)) for at in range(shards[number].start, shards[number].stop)]
    assert covered == list(range(len(sizes)))
    assert [shards[number].size for number in range(len(shards))] == shards.sizes.tolist()
    assert int(shards.sizes.sum()) == sum(sizes)
    assert max(shards.sizes) <= group + max(sizes)


def test_a_listing_comes_back_from_disk_and_from_a_manifest(tmp_path: Path) -> None:
    part = IndexPart(5, 100, "0f" * 16)
    listing = Listing.from_objects(
        [RemoteObject("a/ä.bin", 3, '"e"', 5, "f0" * 16, part), RemoteObject("b", 0, "")], "u"
    )
    assert listing.index_bytes == 105
    listing.save(tmp_path / "listing")
    assert list(Listing.load(tmp_path / "listing")) == list(listing)
    assert list(read_manifest(format_manifest(listing), "m", "v")) == [
        listing[0],
        listing[1]._replace(version="manifest v"),
    ]


@pytest.mark.parametrize(
    "index",
    [
        None,
        [0, 1],
        [0, 1, "0f" * 16, 0],
        [-1, 1, "0f" * 16],
        [0, 0, "0f" * 16],
        [0, 2**40, "0f" * 16],
        [2**62, 1, "0f" * 16],
        [0, 1, "0f"],
        [True, 1, "0f" * 16],
    ],
)
def test_an_invalid_index_in_a_manifest_is_an_error_with_its_line(index: object) -> None:
    lines = [json.dumps({"path": "a.tar", "size": 3, "index": index})]
    with pytest.raises(DatasetError, match=r"line 1 of the manifest .* is invalid"):
        read_manifest(lines, "m", "v")


def test_an_unsorted_listing_keeps_its_indexes() -> None:
    part = IndexPart(0, 9, "0f" * 16)
    listing = Listing.from_objects([RemoteObject("b", 1, "", 5, "", part), RemoteObject("a", 1, "")], "u")
    assert [entry.sample_index for entry in listing] == [None, part]


MILLION = """
import sys, time
from pathlib import Path
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.opening import list_dataset
from topkube.data.formats.shards import Shards
from topkube.data.remote.object_store import ObjectStore

start = time.process_time()  # of this process: other processes may use the processor
tier = DiskTier(Path(sys.argv[2]))
store = ObjectStore(sys.argv[1])
shards = Shards(store.uri, list_dataset(store, tier))
assert len(shards.listing) == 1_000_000 and len(shards.list_keys()) == len(shards)
folder = tier.open_folder("file:///million")
live = folder.list_records()
assert live.size == 1_000_000 and tier.count_used_bytes() == int(live["size"].sum())
assert folder.log.find(f"{999_999:032x}")["size"] == 999_999
seconds = time.process_time() - start
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) * 1024)  # getrusage would count the process that started this one
"""


def test_a_million_entries_are_opened_and_listed_within_seconds_and_300_megabytes(tmp_path: Path) -> None:
    with (tmp_path / "manifest.jsonl").open("w") as file:
        file.writelines(f'{{"path": "train/{at:07}.jpg", "size": 3072, "etag": "{at:x}"}}\n' for at in range(10**6))
    tier = DiskTier(tmp_path / "cache")
    store = ObjectStore((tmp_path / "manifest.jsonl").as_uri())
    assert len(list_dataset(store, tier)) == 10**6
    records = np.zeros(10**6, RECORD)
    records["key"][:, 1] = records["size"] = np.arange(10**6)
    records["kind"] = PUBLISHED
    last = records[-1:]
    summed_bytes = RECORD.fields["sum"][1]  # all fields before the sum
    last["sum"] = xxhash.xxh3_64_intdigest(last[0].tobytes()[:summed_bytes])
    tier.open_folder("file:///million").log.path.write_bytes(records.tobytes())
    command = [sys.executable, "-c", MILLION, store.uri, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split())
    assert seconds < 25, "about 1 s on a fast machine"
    assert peak < 300e6
