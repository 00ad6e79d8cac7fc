"""Servers with endless responses: every wait has a deadline, and every walk has a bound."""

from __future__ import annotations

import json
import time

import pytest
from openers import Opener
from remotes import RemoteServer, write_tars

from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.retry import Patience
from topkube.errors import DatasetError, StoreError

SHORT = Patience(retries=1, pause_seconds=0.01, stall_seconds=0.15)
CALM = Patience(retries=3, pause_seconds=0.01, stall_seconds=2.0)


@pytest.mark.parametrize("what", ["object", "manifest", "page"])
def test_a_drip_ends_by_its_deadline(remote: RemoteServer, what: str) -> None:
    """Single bytes reset the stall timeout, and 10 KB would take ten minutes."""
    write_tars(remote.folder, [1])
    store = ObjectStore(remote.uri, patience=SHORT)
    (entry,) = ObjectStore(remote.uri, patience=CALM).read_listing()
    if what == "manifest":
        (remote.folder / "manifest.jsonl").write_text('{"path": "000.tar", "size": 10240}\n' * 300)
    name = {"object": "000.tar", "manifest": "manifest.jsonl", "page": ""}[what]
    remote.faults[name] = ["drip"] * 10
    begun = time.monotonic()
    with pytest.raises(StoreError, match="could not be read in 2 tries"):
        store.read(entry) if what == "object" else store.read_listing()
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("json_index", [False, True])
def test_endlessly_nested_folders_are_refused(remote: RemoteServer, json_index: bool) -> None:
    page = b'[{"name": "again", "type": "directory"}]' if json_index else b'<a href="again/">again</a>'
    remote.page = lambda path: page if "manifest" not in path else None
    with pytest.raises(DatasetError, match="endless tree of folders"):
        ObjectStore(remote.uri, patience=CALM).read_listing()
    assert sum(remote.requests.values()) < 50


def test_endlessly_many_folders_are_refused(remote: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topkube.data.remote.http.index_pages._FOLDERS", 40)
    page = b"".join(b'<a href="%d/">x</a>' % at for at in range(5))
    remote.page = lambda path: page if "manifest" not in path else None
    with pytest.raises(DatasetError, match="endless tree of folders"):
        ObjectStore(remote.uri, patience=CALM).read_listing()


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", ".", "%2e%2e", "a\\b"])
@pytest.mark.parametrize("json_index", [False, True])
def test_a_page_that_leads_out_of_the_dataset_is_not_followed(
    remote: RemoteServer, name: str, json_index: bool
) -> None:
    listed = {"name": name, "type": "directory", "mtime": "x", "size": 1}
    page = f'<a href="{name}/">x</a>'.encode()
    if json_index:  # names in JSON are not percent-encoded
        page = json.dumps([listed]).encode().replace(b"%2e", b".")
    remote.page = lambda path: page if path == "" else None
    with pytest.raises((DatasetError, StoreError), match=r"outside the dataset|is empty|does not exist"):
        ObjectStore(remote.uri, patience=CALM).read_listing()
    assert set(remote.requests) == {""}


def test_a_folder_that_is_linked_twice_is_read_once(remote: RemoteServer) -> None:
    (remote.folder / "a").mkdir()
    (remote.folder / "a" / "x.bin").write_bytes(b"x")
    page = (
        b'[{"name": "a", "type": "directory"}, {"name": "a", "type": "directory"}, {"name": "a/", "type": "directory"}]'
    )
    remote.page = lambda path: page if path == "" else None
    assert [entry.path for entry in ObjectStore(remote.uri, patience=CALM).read_listing()] == ["a/x.bin"]


PAGES = [
    b"[1]",
    b"[null]",
    b'[{"name": 3, "type": "file", "size": 1, "mtime": "x"}]',
    b'[{"name": "a", "type": "file", "size": "1", "mtime": "x"}]',
    b'["a"]',
    b"{}",
    b"[\xff]",
    b"[" * 100_000,
]


@pytest.mark.parametrize("page", PAGES)
def test_an_invalid_index_page_is_a_typed_error(remote: RemoteServer, page: bytes) -> None:
    remote.page = lambda path: page if path == "" else None
    with pytest.raises(DatasetError, match="is empty"):
        ObjectStore(remote.uri, patience=CALM).read_listing()


def test_a_page_without_end_is_refused(remote: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topkube.data.remote.http.reading.PAGE_BYTES", 1000)
    remote.page = lambda path: b"x" * 5000 if path == "" else None
    with pytest.raises(DatasetError, match="has more than 1,000 bytes"):
        ObjectStore(remote.uri, patience=CALM).read_listing()


def test_a_manifest_that_cannot_be_read_is_not_ignored(remote: RemoteServer, open_dataset: Opener) -> None:
    """The manifest may have checksums; a listing by index pages has none."""
    write_tars(remote.folder, [1])
    (remote.folder / "manifest.jsonl").write_text('{"path": "000.tar", "size": 10240}\n')
    remote.faults["manifest.jsonl"] = ["503"] * 100
    with pytest.raises(StoreError, match=r"manifest\.jsonl could not be read"):
        open_dataset(remote.uri)
