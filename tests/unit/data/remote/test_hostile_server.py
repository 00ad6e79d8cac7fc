"""A server that lies causes no wrong byte. With 10,000 requests:
`PYTHONPATH=tests/unit/data python tests/unit/data/remote/test_hostile_server.py 10000`."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from typing import Any

import pytest
import xxhash
from hostile import HostileServer
from openers import Opener

from topkube.data.remote import transfer_reader
from topkube.data.remote.listing import Listing, RemoteObject
from topkube.data.remote.object_store import ByteRange, ObjectStore
from topkube.data.remote.retry import Patience
from topkube.errors import StoreError

PATIENCE = Patience(retries=3, pause_seconds=0.0005, stall_seconds=1.0)
KINDS = [
    (etags, lies_in_all, plain)
    for plain in (True, False)
    for etags, lies_in_all in (("strong", False), ("weak", False), ("none", False), ("strong", True), ("none", True))
]
"""A server that is not plain also sends chunked bodies and redirects, which TopKube reads with aiohttp."""


def list_objects(server: HostileServer) -> Listing:
    """Return the listing of the honest server, with checksums if the server is going to send wrong bytes."""
    objects = list(ObjectStore(server.uri, patience=PATIENCE).read_listing())
    assert len(objects) == server.objects
    if server.lies_in_all:
        sums = [xxhash.xxh3_128_hexdigest(server.build_bytes(number)) for number in range(server.objects)]
        objects = [entry._replace(checksum=checksum) for entry, checksum in zip(objects, sums, strict=True)]
    return Listing.from_objects(objects, server.uri)


def fetch_together(store: ObjectStore, objects: list[RemoteObject], offsets: list[int]) -> bytes:
    whole = bytearray(sum(entry.size for entry in objects))

    def write(offset: int, data: Any) -> None:
        assert not any(whole[offset : offset + len(data)]) or not any(data), "a byte came twice"
        whole[offset : offset + len(data)] = data

    store.fetch_many(objects, offsets, write, lambda count: None)
    return bytes(whole)


def fetch_parts(store: ObjectStore, entry: RemoteObject) -> list[bytes]:
    """Return three parts of an object that are requested at the same time."""
    cuts = [0, entry.size // 5, entry.size // 2, entry.size]
    parts = [bytearray(stop - start) for start, stop in itertools.pairwise(cuts)]
    offsets = [10_000 * number for number in range(3)]

    def write(offset: int, data: Any) -> None:
        part, at = parts[offset // 10_000], offset % 10_000
        part[at : at + len(data)] = data

    ranges = [ByteRange(entry, start, stop) for start, stop in itertools.pairwise(cuts)]
    store.fetch_ranges(ranges, offsets, write, lambda count: None)
    return [bytes(part) for part in parts]


def read_and_check(server: HostileServer, requests: int) -> Counter[str]:
    """Read until the server has got this number of requests. Fail at the first wrong byte."""
    listing = list_objects(server)
    objects, store = list(listing), ObjectStore(server.uri, patience=PATIENCE)
    server.hostile, server.requests, outcomes = True, 0, Counter[str]()
    turn = 0
    while server.requests < requests:
        number = turn % len(objects)
        turn += 1
        entry = objects[number]
        try:
            if turn % 5 == 0 and not server.lies_in_all:  # only a checksum of the whole object detects all lies
                assert b"".join(fetch_parts(store, entry)) == server.build_bytes(number), (
                    f"wrong bytes in a part of {entry.path}, {server.seed=} {server.etags=}"
                )
                outcomes["read"] += 1
            elif turn % 4:
                data = store.read(entry)
                assert data == server.build_bytes(number), (
                    f"wrong bytes in {entry.path}, {server.seed=} {server.etags=}"
                )
                outcomes["read"] += 1
            else:
                several = objects[number : number + 4]
                offsets = [sum(other.size for other in several[:at]) for at in range(len(several))]
                data = fetch_together(store, several, offsets)
                expected = b"".join(server.build_bytes(number + at) for at in range(len(several)))
                assert data == expected, f"wrong bytes from {entry.path} on, {server.seed=} {server.etags=}"
                outcomes["read"] += 1
        except StoreError:
            outcomes["refused"] += 1
    return outcomes


@pytest.mark.parametrize(("etags", "lies_in_all", "plain"), KINDS)
def test_a_server_that_lies_causes_no_wrong_byte(
    monkeypatch: pytest.MonkeyPatch, etags: str, lies_in_all: bool, plain: bool
) -> None:
    monkeypatch.setattr(transfer_reader, "RANGE_BYTES", 700)
    server = HostileServer(1, etags, lies_in_all, plain)
    try:
        outcomes = read_and_check(server, 400)
        assert outcomes["read"] > 20
        assert outcomes["refused"] > 20
        assert len(server.responses) > 12
    finally:
        server.close()


def test_the_cache_of_a_hostile_server_holds_only_right_bytes(
    open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of small files, in ranges, with many readers of one cache."""
    monkeypatch.setattr(transfer_reader, "RANGE_BYTES", 700)
    server = HostileServer(2)
    try:
        options: dict[str, Any] = {"prefetch": False, "group_bytes": 3000, "patience": PATIENCE}
        dataset, verified = open_dataset(server.uri, **options), set()
        server.hostile = True
        for at in range(200):
            number = at % len(dataset)
            try:
                assert dataset[number] == server.build_bytes(number)
                verified.add(number)
            except StoreError:
                pass
        assert len(verified) > 5
    finally:
        server.close()


if __name__ == "__main__":
    transfer_reader.RANGE_BYTES = 700
    total, begun = int(sys.argv[1]), time.monotonic()
    outcomes, responses, requests = Counter[str](), Counter[str](), 0
    for seed, (etags, lies_in_all, plain) in enumerate(KINDS):
        server = HostileServer(seed, etags, lies_in_all, plain)
        outcomes += read_and_check(server, total // len(KINDS))
        responses += Counter(server.responses)
        requests += server.requests
        server.close()
    print(
        f"{requests:,} requests in {time.monotonic() - begun:.0f} s, no wrong byte: {dict(outcomes)}, {dict(responses)}"
    )
