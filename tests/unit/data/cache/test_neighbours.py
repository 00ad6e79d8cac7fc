"""Other users of the machine cannot plant samples, redirect writes, or read the cache."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from openers import Opener, check_samples
from remotes import write_files

from topkube.data import ArrayOf
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.remote.addresses import check_address, redact
from topkube.errors import CacheError, DatasetError

RECORD = ArrayOf("uint8", (3072,))


@pytest.fixture
def folder(open_dataset: Opener) -> Path:
    """Return the folder of the memory tier."""
    open_dataset.memory.mkdir(parents=True)
    return open_dataset.memory / f"topkube-{os.geteuid()}"


def change_visible_owner(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make `path` appear to belong to another user."""
    real: dict[str, Any] = {"lstat": os.lstat, "stat": os.stat}

    def change_owner(name: str) -> Any:
        def stat_with_another_owner(target: Any, *arguments: Any, **options: Any) -> os.stat_result:
            state = real[name](target, *arguments, **options)
            if str(target) != str(path):
                return state
            return os.stat_result([*state[:4], 12345, *state[5:]])

        return stat_with_another_owner

    for name in real:
        monkeypatch.setattr(os, name, change_owner(name))


@pytest.mark.parametrize("planted", ["link", "open", "file", "owner"])
def test_a_memory_folder_that_another_user_prepared_is_not_used(
    tmp_path: Path, open_dataset: Opener, folder: Path, planted: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = write_files(tmp_path / "source", 20)
    foreign_folder = tmp_path / "theirs"
    foreign_folder.mkdir()
    if planted == "link":
        folder.symlink_to(foreign_folder)
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777 if planted == "open" else 0o700)
    if planted == "owner":
        change_visible_owner(monkeypatch, folder)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20)
    for _ in range(2):
        check_samples(dataset, data)
    assert dataset._samples.memory is None
    assert not list(foreign_folder.iterdir())
    assert not folder.is_dir() or not list(folder.iterdir())
    output = capfd.readouterr().err
    assert "share no state" in output
    assert "memory cache takes no more samples" in output
    assert str(folder) in output


def test_a_link_in_place_of_a_session_is_not_followed(tmp_path: Path, open_dataset: Opener, folder: Path) -> None:
    data = write_files(tmp_path / "source", 20)
    private = tmp_path / "private"
    private.write_text("precious")
    first = open_dataset(tmp_path / "source", decode=RECORD)
    name = first.node_state._path.name
    open_dataset.close()
    (folder / name).symlink_to(private)
    lock_file = os.open(folder / f"{name}.users", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock_file, fcntl.LOCK_SH)  # a process uses it, so it is not a leftover
    try:
        check_samples(open_dataset(tmp_path / "source", decode=RECORD), data)
    finally:
        os.close(lock_file)
    assert private.read_text() == "precious"


def list_everything(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


def read_mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def common_umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


def supports_access_lists(folder: Path) -> bool:
    folder.mkdir()
    DiskTier(folder)
    return "system.posix_acl_default" in os.listxattr(folder)


@pytest.mark.usefixtures("common_umask")
def test_only_its_user_can_read_a_cache(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 20)
    check_samples(open_dataset(tmp_path / "source", decode=RECORD, memory_limit=1 << 20), data)
    assert read_mode(open_dataset.cache) == 0o700
    folder = open_dataset.memory / f"topkube-{os.geteuid()}"
    assert read_mode(folder) == 0o700
    open_dataset.close()  # the threads that fill the cache have ended
    if supports_access_lists(tmp_path / "rehearsal"):
        assert not [path for path in list_everything(open_dataset.cache) if read_mode(path) & 0o077]


@pytest.mark.usefixtures("common_umask")
def test_a_cache_of_an_older_version_is_closed_to_others(tmp_path: Path, open_dataset: Opener) -> None:
    data = write_files(tmp_path / "source", 20)
    check_samples(open_dataset(tmp_path / "source", decode=RECORD), data)
    open_dataset.close()
    for path in list_everything(open_dataset.cache):
        if path.is_dir():
            for name in os.listxattr(path):
                os.removexattr(path, name)
        path.chmod(0o755 if path.is_dir() else 0o644)
    dataset = open_dataset(tmp_path / "source", decode=RECORD)
    check_samples(dataset, data)
    assert dataset.statistics()["remote_bytes"] == 0
    assert read_mode(open_dataset.cache) == 0o700


@pytest.mark.usefixtures("common_umask")
def test_a_folder_that_is_set_up_for_others_stays_so(tmp_path: Path) -> None:
    """A volume of a pod is such a folder: all users of the pod may write to it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    DiskTier(tmp_path / "cache")
    assert read_mode(tmp_path / "cache") == 0o777
    assert read_mode(tmp_path / "cache" / "datasets") == 0o755


@pytest.mark.usefixtures("common_umask")
def test_a_cache_of_a_group_can_be_written_by_all_of_it(tmp_path: Path) -> None:
    if not supports_access_lists(tmp_path / "rehearsal"):
        pytest.skip("this volume has no access lists")
    folder = DiskTier(tmp_path / "cache", sharing="group").open_folder("file:///x")
    os.close(folder.publish("0" * 32, 10, lambda file: os.posix_fallocate(file, 0, 10)))
    for path in list_everything(tmp_path / "cache"):
        assert read_mode(path) & 0o007 == 0, path
        assert read_mode(path) & 0o060 == (0o040 if path.name == "0" * 32 and path.parent.name == "00" else 0o060), path


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    change_visible_owner(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CacheError, match=r"belongs to user 12345.*TOPKUBE_CACHE_SHARING=group"):
        DiskTier(tmp_path / "cache")
    DiskTier(tmp_path / "cache", sharing="group")


SECRETS = [
    ("https://user:pass@host/x", "https://***@host/x"),
    ("https://token@host/x", "https://***@host/x"),
    ("s3://KEY:SECRET@bucket/x", "s3://***@bucket/x"),
    ("sftp://user:pass@host/x", "sftp://***@host/x"),
    ("https://host/x?X-Amz-Signature=pass", "https://host/x?***"),
    ("az://container/x?sv=1&sig=pass", "az://container/x?***"),
    ("simplecache::https://user:pass@host/x", "simplecache::https://***@host/x"),
]


@pytest.mark.parametrize(("uri", "shown"), SECRETS)
def test_credentials_in_an_address_are_refused_and_not_shown(open_dataset: Opener, uri: str, shown: str) -> None:
    with pytest.raises(DatasetError, match="contains credentials") as caught:
        open_dataset(uri)
    assert shown in str(caught.value)
    assert redact(uri) == shown
    for secret in ("pass", "SECRET", "token@"):
        assert secret not in str(caught.value).replace("user and password", "")
    assert not [path for path in open_dataset.cache.rglob("*") if path.is_file() and path.name == "dataset.json"]


@pytest.mark.parametrize(
    "uri", ["https://host/x", "sftp://user@host/x", "file:///a@b/c?token=1", "s3://bucket/a@b", "memory://x?y"]
)
def test_addresses_without_secrets_are_accepted(uri: str) -> None:
    check_address(uri)
