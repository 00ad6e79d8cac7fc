"""Untrusted archives are unpacked within limits, or refused. Nothing is written outside the new folder."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path

import pytest

from topkube.errors import SourceError
from topkube.source import archive as archives
from topkube.source.archive import compute_folder_digest, unpack_archive


def _write_archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _build_member(
    name: str, data: bytes = b"x", mode: int = 0o644, kind: bytes = tarfile.REGTYPE
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode, info.type = mode, kind
    return info, data


@pytest.mark.parametrize("name", ["code.tar", "code.tar.gz"])
def test_files_and_folders_arrive_with_their_executable_bit_only(tmp_path: Path, name: str) -> None:
    members = [
        _build_member("./train.py", b"print(1)"),
        _build_member("bin/run.sh", b"#!", 0o4777),
        _build_member("a/b/c.txt", b"deep", 0o600),
    ]
    path = _write_archive(tmp_path / name, members)
    unpack_archive(path, tmp_path / "code", name)
    assert (tmp_path / "code/train.py").read_bytes() == b"print(1)"
    modes = {file.name: file.stat().st_mode & 0o7777 for file in (tmp_path / "code").rglob("*") if file.is_file()}
    assert modes == {"train.py": 0o644, "run.sh": 0o755, "c.txt": 0o644}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([name, "code"]), "the plain copy is removed"


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (_build_member("../out.py"), "would leave the folder"),
        (_build_member("/etc/out.py"), "would leave the folder"),
        (_build_member("a\\..\\out.py"), "would leave the folder"),
        (_build_member("link", b"", kind=tarfile.SYMTYPE), "is a link or a device"),
        (_build_member("hard", b"", kind=tarfile.LNKTYPE), "is a link or a device"),
        (_build_member("null", b"", kind=tarfile.CHRTYPE), "is a link or a device"),
        (_build_member("/".join(["d"] * 70)), "empty or too long"),
        (_build_member("train.py"), "twice"),
        (_build_member("train.py/below.py"), "twice, or as a file and as a folder"),
    ],
)
def test_hostile_members_are_refused(tmp_path: Path, member: tuple[tarfile.TarInfo, bytes], words: str) -> None:
    path = _write_archive(tmp_path / "code.tar", [_build_member("train.py"), member])
    with pytest.raises(SourceError, match=words) as raised:
        unpack_archive(path, tmp_path / "code", "code.tar")
    assert raised.value.reason == "SourceInvalid"
    assert not (tmp_path / "out.py").exists()


def test_an_archive_that_becomes_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_BYTES", 1 << 20)
    packed = _write_archive(tmp_path / "code.tar.gz", [_build_member("noise", random.Random(1).randbytes(2 << 20))])
    with pytest.raises(SourceError, match="more than 1 MiB"):
        unpack_archive(packed, tmp_path / "code", "code.tar.gz")
    assert not (tmp_path / "code").exists()
    plain = _write_archive(
        tmp_path / "code.tar", [_build_member("a", bytes(600 << 10)), _build_member("b", bytes(600 << 10))]
    )
    with pytest.raises(SourceError, match="more than 1 MiB"):
        unpack_archive(plain, tmp_path / "code", "code.tar")


def test_a_bomb_and_a_truncated_archive_are_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.tar.gz"
    bomb.write_bytes(gzip.compress(bytes(300 << 20), 9, mtime=0))
    with pytest.raises(SourceError, match="when it is decompressed"):
        unpack_archive(bomb, tmp_path / "code", bomb.name)
    whole = _write_archive(tmp_path / "code.tar.gz", [_build_member("train.py", bytes(range(256)) * 40)]).read_bytes()
    (tmp_path / "code.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match="truncated"):
        unpack_archive(tmp_path / "code.tar.gz", tmp_path / "code", "code.tar.gz")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_FILES", 3)
    path = _write_archive(tmp_path / "code.tar", [_build_member(f"{number}.py") for number in range(4)])
    with pytest.raises(SourceError, match="more than 3 files"):
        unpack_archive(path, tmp_path / "code", "code.tar")


def test_the_digest_changes_with_contents_names_and_modes(tmp_path: Path) -> None:
    digests = set()
    for number, (name, data, mode) in enumerate(
        [("a.py", b"1", 0o644), ("a.py", b"2", 0o644), ("b.py", b"1", 0o644), ("a.py", b"1", 0o755)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(data)
        (folder / name).chmod(mode)
        digests.add(compute_folder_digest(folder))
    assert len(digests) == 4
