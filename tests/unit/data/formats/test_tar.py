"""Archives that would silently return wrong bytes are refused with a typed error."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from openers import Opener
from remotes import add_member

from topkube import _kernels
from topkube.data.cache.disk.stored_index import pack_index, read_index
from topkube.data.formats import tar
from topkube.data.formats.sample_index import SampleIndex
from topkube.data.formats.tar import index_tar
from topkube.errors import DatasetError
from topkube.files import write_bytes

BLOCK = 512


def index_bytes(data: bytes) -> SampleIndex:
    file = os.memfd_create("tar")
    try:
        os.write(file, data)
        return index_tar(file, len(data), "0.tar")
    finally:
        os.close(file)


def build_archive(count: int = 10, format: int = tarfile.USTAR_FORMAT, **headers: str) -> bytearray:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=format, pax_headers=headers or None) as tar:
        for number in range(count):
            add_member(tar, f"{number}.bin", bytes([number + 1]) * BLOCK)
    return bytearray(written.getvalue())


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar")
@pytest.mark.parametrize("format", ["posix", "gnu"])
@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0"])
def test_sparse_members_are_refused_by_name(tmp_path: Path, format: str, version: str, open_dataset: Opener) -> None:
    """The archive contains a map of such a file, and the parts that are not holes."""
    (tmp_path / "source").mkdir()
    with (tmp_path / "hole.bin").open("wb") as file:
        file.truncate(2 << 20)
        file.seek(1 << 20)
        file.write(b"x" * 8192)
    options = [f"--sparse-version={version}"] if format == "posix" else []
    target = tmp_path / "source" / "0.tar"
    subprocess.run(
        ["tar", "-S", f"--format={format}", *options, "-C", str(tmp_path), "-cf", str(target), "hole.bin"], check=True
    )
    with pytest.raises(DatasetError, match=r"hole\.bin' as a sparse file \((GNU\.sparse\.\w+|type S)\).*--sparse"):
        open_dataset(tmp_path / "source")


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_zeros_in_the_middle_do_not_end_a_shard_in_silence(blocks: int) -> None:
    data = build_archive()
    data[8 * BLOCK : (8 + blocks) * BLOCK] = bytes(blocks * BLOCK)  # the header of the fifth member, and more
    with pytest.raises(DatasetError, match=r"0\.tar has more data after the zeros at byte 4096"):
        index_bytes(bytes(data))


def test_an_archive_without_its_end_is_refused() -> None:
    data = bytes(build_archive(10))[: 20 * BLOCK]
    with pytest.raises(DatasetError, match="without the two blocks of zeros"):
        index_bytes(data)
    with pytest.raises(DatasetError, match="ends with 512 bytes of zeros"):
        index_bytes(data + bytes(BLOCK))
    assert len(index_bytes(data + bytes(2 * BLOCK))) == 10


def test_two_archives_in_one_file_are_refused() -> None:
    with pytest.raises(DatasetError, match="has more data after the zeros"):
        index_bytes(bytes(build_archive() + build_archive()))


@pytest.mark.parametrize("key", ["path", "size", "GNU.sparse.size"])
def test_a_global_header_that_changes_members_is_refused(key: str) -> None:
    with pytest.raises(DatasetError, match=f"global header with '{key}'"):
        index_bytes(bytes(build_archive(2, tarfile.PAX_FORMAT, **{key: "3"})))
    assert len(index_bytes(bytes(build_archive(2, tarfile.PAX_FORMAT, comment="of git")))) == 2


def build_member(change: Callable[[tarfile.TarInfo], None]) -> bytes:
    written = io.BytesIO()
    info = tarfile.TarInfo("0.bin")
    change(info)
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        tar.addfile(info, io.BytesIO(b"x"))
    return written.getvalue()


@pytest.mark.parametrize("size", ["x", "", "-1", "9" * 30, "1_0", "٣"])
def test_an_invalid_size_is_a_typed_error(size: str) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.pax_headers = {"size": size}

    with pytest.raises(DatasetError):
        index_bytes(build_member(change))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_name_in_another_encoding_is_a_typed_error(format: int) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=format, encoding="latin-1") as tar:
        add_member(tar, "größe.bin", b"x")
    with pytest.raises(DatasetError, match="is not UTF-8"):
        index_bytes(written.getvalue())


def test_an_extended_header_without_end_is_not_read_into_memory() -> None:
    header = tarfile.TarInfo("0.bin")
    header.type, header.size = tarfile.XHDTYPE, 3 << 20
    with pytest.raises(DatasetError, match="extended header of 3,145,728 bytes"):
        index_bytes(header.tobuf(tarfile.USTAR_FORMAT) + bytes(3 << 20))


def test_names_with_a_dot_in_their_number_are_refused_with_two_of_them() -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for number in range(5000):
            add_member(tar, f"image.{number:04}.jpg", b"x")
    with pytest.raises(DatasetError, match=r"'image\.0000\.jpg' and 'image\.0001\.jpg' are different fields"):
        index_bytes(written.getvalue())


def test_an_index_of_older_rules_is_created_again(tmp_path: Path) -> None:
    """An older version may have created the index from a shard that is refused now."""
    path = tmp_path / "0.index"
    write_bytes(path, pack_index(index_bytes(bytes(build_archive(3)))))
    assert read_index(path) is not None
    data = path.read_bytes()[16:]
    path.write_bytes(xxhash.xxh3_128_digest(data) + data)
    assert read_index(path) is None


@settings(max_examples=150)
@given(st.data())
def test_damage_is_an_error_or_changes_no_other_sample(data: st.DataObject) -> None:
    """After any bytes are overwritten, the remaining samples are those of the archive, or the shard is refused."""
    intact = bytes(build_archive(6, data.draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT]))))
    at = data.draw(st.integers(0, 12 * BLOCK - 1))
    put = data.draw(st.binary(min_size=1, max_size=2 * BLOCK) | st.integers(1, 3 * BLOCK).map(bytes))
    damaged = (intact[:at] + put + intact[at + len(put) :])[: len(intact)]
    try:
        index = index_bytes(damaged)
    except DatasetError:
        return
    # zeros from inside a member to the end of the file make a complete archive of fewer members
    assert len(index) == 6 or not any(damaged[2 * BLOCK * len(index) :])
    assert (index.sizes == BLOCK).all()


def build_members(
    count: int, change: Callable[[int, tarfile.TarInfo], None], format: int = tarfile.USTAR_FORMAT
) -> bytes:
    """Return an archive of small members of equal size; `change` gets the number and the header of each member."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=format) as tar:
        for number in range(count):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 600
            change(number, member)
            tar.addfile(member, io.BytesIO(bytes([number % 256]) * member.size))
    return written.getvalue()


def rename(at: int, name: str) -> Callable[[int, tarfile.TarInfo], None]:
    return lambda number, member: setattr(member, "name", name) if number == at else None


def resize(at: int, size: int) -> Callable[[int, tarfile.TarInfo], None]:
    return lambda number, member: setattr(member, "size", size) if number == at else None


_EQUAL_MEMBER_BYTES = 3 * BLOCK
"""The bytes of one of the equal members: a header, and 600 bytes in two blocks."""
ALIKE = {
    "equal": build_members(100, lambda *_: None),
    "one larger": build_members(100, resize(50, 1300)),
    "every second larger": build_members(100, lambda number, member: setattr(member, "size", 700 + number % 2 * 600)),
    "a long name": build_members(100, rename(50, "d/" * 60 + "x.bin")),
    "a very long name": build_members(100, rename(50, "x" * 180 + ".bin"), tarfile.GNU_FORMAT),
    "a folder": build_members(100, lambda number, member: setattr(member, "type", b"5") if number == 50 else None),
    "a name in UTF-8": build_members(100, rename(50, "\u00e4\u00f6.bin"), tarfile.GNU_FORMAT),
    "a dot": build_members(100, rename(50, "./x.bin")),
    "many sizes": build_members(100, lambda number, member: setattr(member, "size", number * 97 % 2000)),
    "large members": build_members(100, lambda number, member: setattr(member, "size", 9000 + number)),
    "folders in prefixes": build_members(
        100, lambda number, member: setattr(member, "name", f"{'d' * 90}/{number}/x.bin")
    ),
    "a hidden file": build_members(100, rename(50, ".x.bin")),
    "other owners": build_members(100, lambda number, member: setattr(member, "uid", number)),
}
"""Archives in which most headers differ only in fields that the kernel reads, by what differs."""


@pytest.mark.parametrize("name", ALIKE)
def test_members_that_are_alike_are_read_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = pack_index(index_bytes(ALIKE[name]))
    monkeypatch.setattr(tar, "_FIRST_SCAN", 3)
    monkeypatch.setattr(tar, "_SCANNED_AT_ONCE", 7)
    assert pack_index(index_bytes(ALIKE[name])) == together
    monkeypatch.setattr(tar, "_SCANS", False)
    assert pack_index(index_bytes(ALIKE[name])) == together


@pytest.mark.parametrize("place", [0, 100, 110, 130, 150, 156, 300, 400])
def test_a_damaged_header_among_members_that_are_alike_is_found(place: int) -> None:
    data = bytearray(ALIKE["equal"])
    data[50 * _EQUAL_MEMBER_BYTES + place] ^= 1
    with pytest.raises(DatasetError, match=f"no header at byte {50 * _EQUAL_MEMBER_BYTES}"):
        index_bytes(bytes(data))


@pytest.mark.parametrize("stop", [50 * _EQUAL_MEMBER_BYTES + 100, 50 * _EQUAL_MEMBER_BYTES + BLOCK + 100])
def test_an_archive_that_ends_among_members_that_are_alike_is_refused(stop: int) -> None:
    with pytest.raises(DatasetError, match=r"no header at byte|ends at byte|is truncated"):
        index_bytes(ALIKE["equal"][:stop])


@settings(max_examples=100)
@given(st.integers(0, BLOCK - 1), st.integers(0, 255))
def test_any_changed_byte_of_a_header_is_found(place: int, value: int) -> None:
    """The scan of many headers accepts no header that the parser of single headers refuses."""
    data = bytearray(ALIKE["equal"])
    at = 50 * _EQUAL_MEMBER_BYTES + place
    if data[at] != value:
        data[at] = value
        if 148 <= place < 156:  # the checksum itself has several valid forms
            with contextlib.suppress(DatasetError):
                assert pack_index(index_bytes(bytes(data))) == pack_index(index_bytes(ALIKE["equal"]))
        else:
            with pytest.raises(DatasetError, match=f"no header at byte {50 * _EQUAL_MEMBER_BYTES}"):
                index_bytes(bytes(data))


def test_arrays_that_are_too_small_are_refused() -> None:
    arrays = [np.empty(BLOCK, np.uint8), np.empty(2, np.int64), np.empty(202, np.uint8)]
    assert _kernels.scan_tar(-1, 0, 0, *arrays) == (0, 0)
    for at, shorter in ((0, arrays[0][1:]), (2, arrays[2][1:])):
        with pytest.raises(ValueError, match="must have"):
            _kernels.scan_tar(-1, 0, 0, *[shorter if number == at else array for number, array in enumerate(arrays)])


@pytest.mark.parametrize("name", ["/etc/x.bin", "a/../../x.bin", "a\\x.bin"])
def test_an_unsafe_name_among_members_that_are_alike_is_refused(name: str) -> None:
    with pytest.raises(DatasetError, match="would leave the folder"):
        index_bytes(build_members(100, rename(50, name)))
