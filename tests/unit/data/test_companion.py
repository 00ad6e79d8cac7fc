"""The companion fills the cache, and plain scripts find the files with their own names."""

from __future__ import annotations

import json
import lzma
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openers import Opener, wait_until
from remotes import RemoteServer, add_member, write_files, write_tars

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.companion import Companion, _open_view
from topkube.data.fill.file_view import COMPLETE, FileView
from topkube.data.opening import open_cache
from topkube.data.remote.object_store import Patience
from topkube.errors import DatasetError
from topkube.settings import Settings


class CompanionPod:
    """The folders of a worker."""

    def __init__(self, folder: Path, remote: RemoteServer) -> None:
        self.folder, self.remote = folder, remote
        self.view, self.runs, self.report = folder / "view", folder / "runs", folder / "report.json"
        self.runs.mkdir(parents=True)

    def open(self, **settings: object) -> ShardCache:
        cache_settings = Settings(
            cache_directory=str(self.folder / "cache"), cache_memory_directory=str(self.folder / "shm")
        )
        return open_cache(
            self.remote.uri,
            cache_settings,
            RankPlace(),
            patience=Patience(retries=0, pause_seconds=0.01),
            for_samples=False,
            **settings,
        )

    @contextmanager
    def run_companion(self, share: tuple[int, int] = (0, 1), **options: object) -> Iterator[ShardCache]:
        cache = self.open()
        sessions = next((self.folder / "shm").iterdir())
        started = Companion(
            cache, FileView(cache, self.view), share, runs=self.runs, sessions=sessions, report=self.report, **options
        )
        thread = threading.Thread(target=started.run)
        thread.start()
        try:
            yield cache
        finally:
            started.stop()
            thread.join(120)
            cache.close()
            assert not thread.is_alive()

    def read_files(self) -> dict[str, bytes]:
        paths = (path for path in self.view.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(self.view).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def pod(tmp_path: Path, remote: RemoteServer) -> CompanionPod:
    return CompanionPod(tmp_path / "pod", remote)


def read_source(remote: RemoteServer) -> dict[str, bytes]:
    return {
        path.relative_to(remote.folder).as_posix(): path.read_bytes()
        for path in remote.folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("write", [lambda folder: write_tars(folder, [3, 2, 4]), lambda folder: write_files(folder, 9)])
def test_plain_files_appear_under_their_own_names(
    pod: CompanionPod, remote: RemoteServer, write: Callable[[Path], object]
) -> None:
    write(remote.folder)
    with pod.run_companion():
        wait_until((pod.view / COMPLETE).exists)
        assert pod.read_files() == read_source(remote)
        size = sum(map(len, pod.read_files().values()))
        wait_until(lambda: json.loads(pod.report.read_text())["cachedBytes"] == size)
        assert not any(path.stat().st_mode & 0o222 for path in pod.view.rglob("*.???") if path.is_file())
    sent, before = remote.sent_bytes, {path: path.stat().st_ino for path in pod.view.rglob("*")}
    pod.report.unlink()
    with pod.run_companion():  # the next job on this node
        wait_until(pod.report.exists)
    assert remote.sent_bytes - sent < 4096, "only index pages"
    assert {path: path.stat().st_ino for path in pod.view.rglob("*")} == before, "nothing is copied again"


def write_tar_with_link(folder: Path) -> None:
    with tarfile.open(folder / "000.tar", "w") as tar:
        add_member(tar, "target", b"x")
        add_member(tar, "link", b"", tarfile.SYMTYPE)


@pytest.mark.parametrize(
    "write", [write_tar_with_link, lambda folder: (folder / "000.tar.xz").write_bytes(lzma.compress(b"x"))]
)
def test_plain_scripts_get_archives_whose_samples_cannot_be_read(
    pod: CompanionPod, remote: RemoteServer, open_dataset: Opener, write: Callable[[Path], object]
) -> None:
    write(remote.folder)
    with pod.run_companion():
        wait_until((pod.view / COMPLETE).exists)
        assert pod.read_files() == read_source(remote)
    with pytest.raises(DatasetError, match=r"is a link or a device|compression that is not supported"):
        open_dataset(remote.uri, cache_directory=pod.folder / "cache")


def test_an_object_that_is_a_shard_is_shown_as_a_link(pod: CompanionPod, remote: RemoteServer) -> None:
    write_tars(remote.folder, [3])
    with pod.run_companion():
        wait_until((pod.view / COMPLETE).exists)
        assert (pod.view / "000.tar").stat().st_nlink == 2


def test_a_worker_fetches_its_share_and_the_rest_only_for_plain_scripts(
    pod: CompanionPod, remote: RemoteServer
) -> None:
    write_tars(remote.folder, [2] * 6)
    with pod.run_companion((1, 3), plain_seconds=0.5):
        wait_until(lambda: len(pod.read_files()) == 2)
        assert sorted(pod.read_files()) == ["001.tar", "004.tar"]
        (pod.runs / "attempt-1").mkdir()  # ranks run, but do not open the dataset
        wait_until((pod.view / COMPLETE).exists)
        assert pod.read_files() == read_source(remote)


def test_the_companion_stops_fetching_for_ranks_that_read_samples(pod: CompanionPod, remote: RemoteServer) -> None:
    write_tars(remote.folder, [2] * 6)
    ranks = pod.open()
    ranks.node_state.change_filler_count(+1)
    (pod.runs / "attempt-1").mkdir()
    with pod.run_companion((0, 2), plain_seconds=0.0):
        ranks.open(3, ranks.fetch_from_store)
        wait_until(lambda: pod.read_files())
        assert list(pod.read_files()) == ["003.tar"], "a shard that arrives is shown, and no other shard is fetched"
    ranks.close()


def test_small_files_that_do_not_fit_twice_are_not_shown(
    pod: CompanionPod, remote: RemoteServer, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(remote.folder, 8)
    cache = pod.open(size_limit=40_000)
    companion = Companion(cache, FileView(cache, pod.view), (0, 1))
    thread = threading.Thread(target=companion.run)
    thread.start()
    output: list[str] = []

    def is_reported() -> bool:
        output.append(capfd.readouterr().err)
        return "do not fit twice" in "".join(output)

    wait_until(is_reported)
    companion.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert pod.read_files() == {}
    assert cache.has(0)
    cache.close()


def test_a_report_is_newer_than_the_request_for_it(pod: CompanionPod, remote: RemoteServer) -> None:
    write_tars(remote.folder, [4, 5, 3], 500)
    request_file = pod.folder / "asked"
    with pod.run_companion(request=request_file, prefetch=False) as cache:
        wait_until(lambda: pod.report.exists())
        cache.open(0)
        request_file.write_text("first")
        wait_until(lambda: json.loads(pod.report.read_text())["asked"] == "first")
        assert json.loads(pod.report.read_text())["cachedBytes"] == cache.shards.sizes[0]


def test_a_changed_dataset_replaces_the_old_files(pod: CompanionPod, remote: RemoteServer) -> None:
    write_tars(remote.folder, [3, 3])
    with pod.run_companion():
        wait_until((pod.view / COMPLETE).exists)
    (remote.folder / "000.tar").unlink()
    write_tars(remote.folder / "new", [4])
    os.replace(remote.folder / "new/000.tar", remote.folder / "002.tar")
    (remote.folder / "new").rmdir()
    with pod.run_companion() as cache:
        assert not (pod.view / "000.tar").exists()
        wait_until((pod.view / COMPLETE).exists)
        assert pod.read_files() == read_source(remote)
        assert cache.folder is not None
        cached_bytes = cache.folder.log.sum_shard_bytes()
        assert cached_bytes == sum(map(len, read_source(remote).values())), "shards of the old listing are gone"
        assert cache.folder.read_summary()["bytes"] == cached_bytes


def test_a_remote_that_fails_is_retried(pod: CompanionPod, remote: RemoteServer) -> None:
    write_tars(remote.folder, [3])
    remote.faults["000.tar"] = ["503", "503"]
    with pod.run_companion():
        wait_until((pod.view / COMPLETE).exists)


@pytest.mark.parametrize("link", ["datasets/x", "datasets/x/view", "datasets/x/view/train"])
def test_a_link_in_a_view_that_neighbours_may_write_to_is_not_followed(
    pod: CompanionPod, remote: RemoteServer, link: str
) -> None:
    write_files(remote.folder / "train", 2)
    outside = pod.folder / "outside"
    for name in ("best.pt", "view/best.pt", "train/a/00000.bin", "a/00000.bin", COMPLETE):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text("precious")
    cache = pod.open()
    path = pod.folder / "cache" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(outside)
    before = read_tree(outside)
    settings = Settings(
        cache_directory=str(pod.folder / "cache"), dataset_view=str(pod.folder / "cache/datasets/x/view")
    )
    if (view := _open_view(cache, settings)) is not None:
        with pytest.raises(NotADirectoryError):
            view.show(0)
    cache.close()
    assert read_tree(outside) == before


def read_tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
