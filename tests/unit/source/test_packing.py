"""A folder of code as one archive: its files, its bytes, which depend only on the files, and the files that are
refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from topkube.errors import SourceError
from topkube.source import packing
from topkube.source.archive import unpack_archive
from topkube.source.packing import ARCHIVE_KEY, pack_source


def _write_files(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _unpack(packed: packing.PackedSource, folder: Path) -> dict[str, str]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    archive = folder.with_name(ARCHIVE_KEY)
    archive.write_bytes(packed.data)
    unpack_archive(archive, folder, ARCHIVE_KEY)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_pods_unpack_the_packed_files(tmp_path: Path) -> None:
    code = _write_files(
        tmp_path / "code", train_py="a", pkg__model_py="b", **{"run.sh": "#!/bin/sh", "name with ä": "c"}
    )
    (code / "run.sh").chmod(0o700)
    packed = pack_source(code, {"added/train.py": b"d", "train.py": b"replaced"})
    files = _unpack(packed, tmp_path / "pod" / "code")
    expected = {"train.py": "replaced", "pkg/model.py": "b", "run.sh": "#!/bin/sh", "name with ä": "c"}
    assert files == {**expected, "added/train.py": "d"}
    assert packed.files == 5
    assert os.access(tmp_path / "pod" / "code" / "run.sh", os.X_OK)


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    first = pack_source(_write_files(tmp_path / "a", train_py="1", model_py="2"))
    second = pack_source(_write_files(tmp_path / "b", model_py="2", train_py="1"))
    os.utime(tmp_path / "b" / "train.py", (1, 1))
    (tmp_path / "b" / "train.py").chmod(0o600)
    assert first == second == pack_source(tmp_path / "b")
    assert pack_source(_write_files(tmp_path / "b", train_py="3")).sha256 != first.sha256


def test_files_that_git_ignores_are_not_packed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    code = repository / "code"
    _write_files(
        code, train_py="", **{"notes.txt": "", "data/x": "", "pkg/data/y": "", "keep.log": "", "pkg/out.log": ""}
    )
    (repository / ".git").mkdir()
    (repository / ".gitignore").write_text("*.txt\n/code/data/\n")
    (code / ".gitignore").write_text("*.log\n!keep.log\n")
    (code / "pkg" / ".gitignore").write_text("/data/\n")
    assert set(_unpack(pack_source(code), tmp_path / "out" / "code")) == {"train.py", "keep.log"}
    (code / ".topkubeignore").write_text("!notes.txt\ntrain.py\n")
    assert set(_unpack(pack_source(code), tmp_path / "out" / "code")) == {"notes.txt", "keep.log"}


def test_credentials_and_environments_are_not_sent(tmp_path: Path) -> None:
    names = [
        ".env",
        "id.pem",
        ".ssh/id",
        "venv/bin/python",
        "pkg/__pycache__/a.pyc",
        "runs/a/rank-0.log",
        ".git/config",
    ]
    code = _write_files(tmp_path / "code", train_py="", **dict.fromkeys(names, ""))
    assert set(_unpack(pack_source(code), tmp_path / "out" / "code")) == {"train.py"}
    (code / ".gitignore").write_text("!*/\n!.env\n")
    assert set(_unpack(pack_source(code), tmp_path / "out" / "code")) == {"train.py"}
    (code / ".topkubeignore").write_text("!.env\n!.git/\n")
    assert set(_unpack(pack_source(code), tmp_path / "out" / "code")) == {"train.py", ".env"}


def test_lines_that_are_no_patterns_and_a_byte_order_mark_have_no_effect(tmp_path: Path) -> None:
    code = _write_files(tmp_path / "code", train_py="", **{"notes.txt": "", "out.log": ""})
    (code / ".gitignore").write_bytes(b"\xef\xbb\xbfnotes.txt\r\n!\r\n*.log\r\n")
    assert set(_unpack(pack_source(code), tmp_path / "out" / "code")) == {"train.py"}


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    code = _write_files(tmp_path / "code", train_py="a")
    (code / "same.py").symlink_to("train.py")
    assert _unpack(pack_source(code), tmp_path / "out" / "code") == {"train.py": "a", "same.py": "a"}
    (tmp_path / "secret").write_text("s")
    (code / "leak.py").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match=r"leak\.py is a link that leaves the folder .*add the line /leak\.py to"):
        pack_source(code)
    (code / ".topkubeignore").write_text("/leak.py\n")
    pack_source(code)
    (code / "above").symlink_to("..")
    with pytest.raises(SourceError, match="above is a link"):
        pack_source(code)
    (code / "above").unlink()
    os.mkfifo(code / "pipe")
    with pytest.raises(SourceError, match="pipe is no regular file"):
        pack_source(code)


def test_a_folder_that_is_too_large_names_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _write_files(tmp_path / "code", train_py="")
    (code / "weights.bin").write_bytes(os.urandom(packing.MOST_PACKED_BYTES))
    words = r"when compressed, more than 1,000,000; the largest files are weights\.bin \(1,000,000 bytes\)"
    with pytest.raises(SourceError, match=words):
        pack_source(code)
    monkeypatch.setattr(packing, "_MOST_BYTES", 1000)
    with pytest.raises(SourceError, match=r"the largest files are weights\.bin"):
        pack_source(code)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    with pytest.raises(SourceError, match="contains no files to send"):
        pack_source(tmp_path / "code")
    with pytest.raises(SourceError, match="is not a folder"):
        pack_source(tmp_path / "absent")
