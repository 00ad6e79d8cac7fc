"""Where samples lie inside a tar shard (WebDataset: files of equal name up to the first dot are one sample).

Only headers are read. Members are never unpacked to a path, and a member whose name would leave the folder it is
unpacked to, or that is a link or a device, is refused with the whole shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from topkube.data.sample_index import IndexBuilder, SampleIndex
from topkube.errors import DatasetError

_BLOCK = 512
_PASSED_OVER = frozenset((b"5", b"g", b"V", b"M", b"D"))
"""Folders, global headers, volume labels."""
_WINDOW = 1 << 20


class _Window:
    """Small reads of a file, few system calls."""

    def __init__(self, file: int) -> None:
        self._file, self._start, self._data = file, 0, b""

    def __call__(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if at < 0 or at + length > len(self._data):
            # a large member follows most headers of large members: read little then
            ahead = _WINDOW if 0 <= at <= 2 * _WINDOW else 16 * _BLOCK
            self._start, self._data, at = offset, os.pread(self._file, max(length, ahead), offset), 0
        return self._data[at : at + length]


def tar_index(file: int, size: int, name: str) -> SampleIndex:
    """The samples of the tar in `file`, `size` bytes. Raises DatasetError where it is damaged or unsafe."""
    builder = IndexBuilder()
    stem: str | None = None
    for path, offset, length in _members(file, size, name):
        folder, _, base = path.rpartition("/")
        first, dot, field = base.partition(".")
        if not first or base.startswith("."):
            continue  # .DS_Store and its kind
        key = f"{folder}/{first}" if folder else first
        if key != stem:
            builder.begin(key)
            stem = key
        if not builder.add(field if dot else "", offset, length):
            raise DatasetError(
                f"{name} holds {path!r} twice", cause="a shard written twice into one file", next_step="write it again"
            )
    return builder.finish()


def _members(file: int, size: int, name: str) -> Iterator[tuple[str, int, int]]:
    """Path, offset and length of every regular file."""
    read, at = _Window(file), 0
    long_name: str | None = None
    extended: dict[str, str] = {}
    while at + _BLOCK <= size:
        header = read(at, _BLOCK)
        if header.count(0) == _BLOCK:
            return
        if len(header) < _BLOCK or not _sound(header):
            raise DatasetError(
                f"{name} is not a tar: no header at byte {at}",
                cause="a damaged or truncated shard",
                next_step="compare it with its source, and upload it again",
            )
        kind, length, at = header[156:157], _number(header[124:136]), at + _BLOCK
        end = at + length
        if length < 0 or end > size:
            raise DatasetError(
                f"{name} is truncated: a member ends at byte {end} of {size}", next_step="upload the shard again"
            )
        if kind == b"L":
            long_name = read(at, length).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == b"x":
            extended = _pax(read(at, length))
        elif kind not in _PASSED_OVER:
            path = extended.get("path") or long_name or _path(header)
            _check(path, kind, name)
            if "size" in extended:
                length = int(extended["size"])
                end = at + length
                if not 0 <= length <= size - at:
                    raise DatasetError(f"{name} is truncated inside {path!r}", next_step="upload the shard again")
            yield path.removeprefix("./"), at, length
            long_name, extended = None, {}
        else:
            long_name, extended = None, {}
        at = -(-end // _BLOCK) * _BLOCK


def _check(path: str, kind: bytes, name: str) -> None:
    unsafe = path.startswith("/") or ".." in path.split("/") or "\\" in path or "\0" in path
    if unsafe or kind not in (b"0", b"\0", b"7"):
        what = "leaves the folder it is unpacked to" if unsafe else "is a link or a device"
        raise DatasetError(
            f"{name} holds {path!r}, which {what}",
            cause="a hostile or careless archive",
            next_step="do not use this shard before its owner has explained it",
        )


def _path(header: bytes) -> str:
    base = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + base if prefix else base).decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: binary, for files past 8 GiB
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _sound(header: bytes) -> bool:
    try:
        stored = int(header[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return stored == sum(header) - sum(header[148:156]) + 8 * 32


def _pax(data: bytes) -> dict[str, str]:
    """The records 'LENGTH KEY=VALUE' of an extended header."""
    found = {}
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return found
