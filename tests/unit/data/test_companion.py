"""What runs beside the ranks: it fills the cache, and plain scripts find the files under their own names."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openers import until
from remotes import Remote, write_files, write_tars

from topkube.data.cache import Cache
from topkube.data.companion import Companion
from topkube.data.opening import open_cache
from topkube.data.place import Place
from topkube.data.store import Patience
from topkube.data.view import COMPLETE, View
from topkube.settings import Settings


class Pod:
    """A worker's folders."""

    def __init__(self, folder: Path, remote: Remote) -> None:
        self.folder, self.remote = folder, remote
        self.view, self.runs, self.report = folder / "view", folder / "runs", folder / "report.json"
        self.runs.mkdir(parents=True)

    def open(self, **settings: object) -> Cache:
        own = Settings(cache_directory=str(self.folder / "cache"), cache_memory_directory=str(self.folder / "shm"))
        return open_cache(self.remote.uri, own, Place(), patience=Patience(retries=0, pause_seconds=0.01), **settings)

    @contextmanager
    def companion(self, share: tuple[int, int] = (0, 1), **options: object) -> Iterator[Cache]:
        cache = self.open()
        sessions = next((self.folder / "shm").iterdir())
        one = Companion(
            cache, View(cache, self.view), share, runs=self.runs, sessions=sessions, report=self.report, **options
        )
        thread = threading.Thread(target=one.run)
        thread.start()
        try:
            yield cache
        finally:
            one.stop()
            thread.join(10)
            cache.close()
            assert not thread.is_alive()

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.view.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(self.view).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def pod(tmp_path: Path, remote: Remote) -> Pod:
    return Pod(tmp_path / "pod", remote)


def source(remote: Remote) -> dict[str, bytes]:
    return {
        path.relative_to(remote.folder).as_posix(): path.read_bytes()
        for path in remote.folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("write", [lambda folder: write_tars(folder, [3, 2, 4]), lambda folder: write_files(folder, 9)])
def test_plain_files_appear_under_their_own_names(pod: Pod, remote: Remote, write: Callable[[Path], object]) -> None:
    write(remote.folder)
    with pod.companion():
        until((pod.view / COMPLETE).exists)
        assert pod.files() == source(remote)
        size = sum(map(len, pod.files().values()))
        until(lambda: json.loads(pod.report.read_text())["cachedBytes"] == size)
        assert not any(path.stat().st_mode & 0o222 for path in pod.view.rglob("*.???") if path.is_file())
    sent, before = remote.sent_bytes, {path: path.stat().st_ino for path in pod.view.rglob("*")}
    pod.report.unlink()
    with pod.companion():  # the next job on this node
        until(pod.report.exists)
    assert remote.sent_bytes - sent < 4096, "only index pages"
    assert {path: path.stat().st_ino for path in pod.view.rglob("*")} == before, "nothing is copied again"


def test_a_whole_object_is_shown_as_a_link_that_costs_nothing(pod: Pod, remote: Remote) -> None:
    write_tars(remote.folder, [3])
    with pod.companion():
        until((pod.view / COMPLETE).exists)
        assert (pod.view / "000.tar").stat().st_nlink == 2


def test_a_worker_brings_its_share_and_the_rest_only_for_plain_scripts(pod: Pod, remote: Remote) -> None:
    write_tars(remote.folder, [2] * 6)
    with pod.companion((1, 3), plain_seconds=0.5):
        until(lambda: len(pod.files()) == 2)
        assert sorted(pod.files()) == ["001.tar", "004.tar"]
        (pod.runs / "attempt-1").mkdir()  # ranks run, and open nothing
        until((pod.view / COMPLETE).exists)
        assert pod.files() == source(remote)


def test_what_ranks_read_as_samples_is_left_to_them(pod: Pod, remote: Remote) -> None:
    write_tars(remote.folder, [2] * 6)
    ranks = pod.open()
    ranks.session.filling(+1)
    (pod.runs / "attempt-1").mkdir()
    with pod.companion((0, 2), plain_seconds=0.0):
        ranks.open(3, ranks.from_store)
        until(lambda: pod.files())
        assert list(pod.files()) == ["003.tar"], "what arrives is shown, and nothing else is brought"
    ranks.close()


def test_small_files_that_do_not_fit_twice_are_not_shown(
    pod: Pod, remote: Remote, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(remote.folder, 8)
    cache = pod.open(size_limit=40_000)
    one = Companion(cache, View(cache, pod.view), (0, 1))
    thread = threading.Thread(target=one.run)
    thread.start()
    said = ""
    while "do not fit twice" not in said:
        said += capfd.readouterr().err
    one.stop()
    thread.join(10)
    assert pod.files() == {}
    assert cache.has(0)
    cache.close()


def test_who_asks_gets_a_report_that_is_younger_than_the_question(pod: Pod, remote: Remote) -> None:
    write_tars(remote.folder, [4, 5, 3], 500)
    asked = pod.folder / "asked"
    with pod.companion(asked=asked, prefetch=False) as cache:
        until(lambda: pod.report.exists())
        cache.open(0)
        asked.write_text("first")
        until(lambda: json.loads(pod.report.read_text())["asked"] == "first")
        assert json.loads(pod.report.read_text())["cachedBytes"] == cache.shards.sizes[0]


def test_a_changed_dataset_replaces_the_old_files(pod: Pod, remote: Remote) -> None:
    write_tars(remote.folder, [3, 3])
    with pod.companion():
        until((pod.view / COMPLETE).exists)
    (remote.folder / "000.tar").unlink()
    write_tars(remote.folder / "new", [4])
    os.replace(remote.folder / "new/000.tar", remote.folder / "002.tar")
    (remote.folder / "new").rmdir()
    with pod.companion() as cache:
        assert not (pod.view / "000.tar").exists()
        until((pod.view / COMPLETE).exists)
        assert pod.files() == source(remote)
        assert cache.folder is not None
        held = cache.folder.log.total()
        assert held == sum(map(len, source(remote).values())), "shards of the old listing are gone"
        assert cache.folder.noted()["bytes"] == held


def test_a_remote_that_fails_is_asked_again(pod: Pod, remote: Remote) -> None:
    write_tars(remote.folder, [3])
    remote.faults["000.tar"] = ["503", "503"]
    with pod.companion():
        until((pod.view / COMPLETE).exists)
