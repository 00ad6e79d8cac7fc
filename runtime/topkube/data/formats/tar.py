"""Finds the samples in a tar shard (WebDataset: files whose names are equal up to the first dot are one sample).

Only headers are read, and members are never extracted to a path. A shard is refused if it contains a link, a device, a
sparse file or a name that would leave the folder of extraction, or if it is not a valid archive from its first to its
last byte: an archive ends with two blocks of zeros, and only zeros may follow.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator

import numpy as np

from topkube import _kernels
from topkube.data.formats.sample_index import IndexBuilder, SampleIndex
from topkube.errors import DatasetError

_BLOCK = 512
_SKIPPED = frozenset((b"5", b"V", b"D"))
"""The types of folders and volume labels."""
_LONG_NAME, _EXTENDED, _GLOBAL = b"L", b"x", b"g"
"""The types of members that describe the next member (its long name, its extended header) or all later members."""
_WINDOW_BYTES = 1 << 20
_MOST_HEADER_BYTES = 1 << 20
"""The most bytes of an extended header or of a long name."""
_DIGITS = re.compile(r"[0-9]{1,18}")
_CLOSE_BYTES = 32 << 10
"""Headers that are closer than this are read together, with the bytes between them."""
_SCANS = True
"""False if every header is parsed on its own, as tests do for comparison."""
_FIRST_SCAN, _SCANNED_AT_ONCE = 16, 1 << 14
"""The most members that the first call of the kernel scans, and the most that each later call scans."""
_MOST_FIELDS = 256
"""The most fields that the samples of a shard may have."""
_NAME_BYTES = 100
"""The length of the name in a header. A longer path has a prefix, or an extended header."""
_REGULAR_TYPES = (b"0", b"\0", b"7")
"""The types of regular files: a file, a file of an old archive, a contiguous file."""


class _Window:
    """A buffer that serves many small reads of a file with few system calls."""

    def __init__(self, file: int) -> None:
        self._file, self._start, self._data = file, 0, b""
        self._last_offset = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes of the file from `offset` on; fewer at the end of the file."""
        at = offset - self._start
        if at < 0 or at + length > len(self._data):
            # members before a jump are large; the next member is probably large too, so read only its header
            ahead = _WINDOW_BYTES if 0 <= offset - self._last_offset <= _CLOSE_BYTES else 16 * _BLOCK
            self._start, self._data, at = offset, os.pread(self._file, max(length, ahead), offset), 0
        self._last_offset = offset
        return self._data[at : at + length]


def _scan_members(file: int, size: int, at: int, header: bytes, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield path, offset and length of the members from byte `at` on, until a header is invalid or differs from
    `header` in more than name, owner, length, time and checksum. Raises DatasetError for an unsafe path."""
    prefix, kind = _read_prefix(header), header[156:157]
    expected, count = np.frombuffer(header, np.uint8), _FIRST_SCAN
    while _SCANS:
        lengths, names = np.empty(count, np.int64), np.empty(count * (_NAME_BYTES + 1), np.uint8)
        scanned, name_bytes = _kernels.scan_tar(file, size, at, expected, lengths, names)
        if not scanned:
            return
        lengths = lengths[:scanned]
        ends = at + np.cumsum(_BLOCK + -(-lengths // _BLOCK) * _BLOCK)
        starts = np.concatenate(([at], ends[:-1])) + _BLOCK
        joined = b"\0" + names[: name_bytes - 1].tobytes()
        paths = joined[1:].decode("utf-8", "surrogateescape").split("\0")
        # No name is unsafe if none of these parts is in any of them: one search is faster than a check of each name.
        if prefix or any(part in joined for part in (b"..", b"\\", b"\0/", b"\0./")):
            paths = [prefix + path for path in paths]
            for path in paths:
                _check_member(path, kind, {}, name)
            paths = [path.removeprefix("./") for path in paths]
        yield from zip(paths, starts.tolist(), lengths.tolist(), strict=True)
        if scanned < count:
            return
        at, count = int(ends[-1]), _SCANNED_AT_ONCE


def index_tar(file: int, size: int, name: str) -> SampleIndex:
    """Return the index of the samples of the tar in `file`, which has `size` bytes. Raises DatasetError for a damaged
    or unsafe archive."""
    builder = IndexBuilder()
    add, last_name = builder.add, None
    fields: dict[str, str] = {}  # the fields of all samples, and the path of the first member that has each of them
    for path, offset, length, _ in read_members(file, size, name):
        folder, _, base = path.rpartition("/")
        stem, dot, field = base.partition(".")
        if not stem:
            continue  # files like .DS_Store
        sample_name = f"{folder}/{stem}" if folder else stem
        if sample_name != last_name:
            builder.begin(sample_name)
            last_name = sample_name
        if not dot:
            field = ""
        if field not in fields:
            fields[field] = path
            if len(fields) > _MOST_FIELDS:
                first_path, second_path, *_ = fields.values()
                raise DatasetError(
                    f"the samples of {name} have more than {_MOST_FIELDS} fields: {first_path!r} and {second_path!r} "
                    "are different fields",
                    cause="the name of a sample ends at the first dot, and the rest is the name of the field "
                    "(WebDataset); every number after the first dot is a field of its own",
                    next_step="write the shard again without dots in the names of samples",
                )
        if not add(field, offset, length):
            raise DatasetError(
                f"{name} has two members {path!r}",
                cause="a shard was written twice into one file",
                next_step="write the shard again",
            )
    return builder.finish()


def read_members(file: int, size: int, name: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, offset, length and mode of every regular file in the tar in `file`, which has `size` bytes. The path
    is relative, and no part of it is `..`. Raises DatasetError for a damaged or unsafe archive."""
    window, at = _Window(file), 0
    long_name: str | None = None
    extended: dict[str, str] = {}
    while True:
        header = window.read(at, _BLOCK) if at + _BLOCK <= size else b""
        if len(header) == _BLOCK and header.count(0) == _BLOCK:
            return _check_end(window, at, size, name)
        if not header:
            raise DatasetError(
                f"{name} ends at byte {size} without the two blocks of zeros that end an archive",
                cause="the shard was truncated, or its writer was never closed",
                next_step="compare it with its source, and write it again",
            )
        if len(header) < _BLOCK or not _has_valid_checksum(header):
            raise DatasetError(
                f"{name} is not a tar: no header at byte {at}",
                cause="a damaged or truncated shard",
                next_step="compare it with its source, and upload it again",
            )
        kind, length, at = header[156:157], _parse_number(header[124:136]), at + _BLOCK
        end = at + length
        if length < 0 or end > size:
            raise DatasetError(
                f"{name} is truncated: a member ends at byte {end} of {size}", next_step="upload the shard again"
            )
        if kind in (_LONG_NAME, _EXTENDED, _GLOBAL):
            if length > _MOST_HEADER_BYTES:
                raise DatasetError(
                    f"{name} has an extended header of {length:,} bytes at byte {at}, more than {_MOST_HEADER_BYTES:,}",
                    cause="a damaged or hostile archive",
                    next_step="compare it with its source",
                )
            data = window.read(at, length)
            if kind == _LONG_NAME:
                long_name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == _EXTENDED:
                extended = _parse_pax(data, name)
            else:
                _check_global_header(_parse_pax(data, name), name)
        elif kind not in _SKIPPED:
            path = extended.get("path") or long_name or _read_path(header)
            is_plain = not extended and long_name is None
            _check_member(path, kind, extended, name)
            if "size" in extended:
                length = int(extended["size"]) if _DIGITS.fullmatch(extended["size"]) else -1
                end = at + length
                if not 0 <= length <= size - at:
                    raise DatasetError(f"{name} is truncated inside {path!r}", next_step="upload the shard again")
            mode = max(0, _parse_number(header[100:108]))
            yield path.removeprefix("./"), at, length, mode
            long_name, extended = None, {}
            if is_plain:
                # The loop takes `at` and `length` of the last scanned member. They stay if no member is scanned.
                next_member = at + -(-length // _BLOCK) * _BLOCK
                for path, at, length in _scan_members(file, size, next_member, header, name):
                    yield path, at, length, mode
                end = at + length
        else:
            long_name, extended = None, {}
        at = -(-end // _BLOCK) * _BLOCK


def _check_end(window: _Window, at: int, size: int, name: str) -> None:
    """Raise DatasetError unless two blocks of zeros begin at `at`, and only zeros follow them."""
    start, end = at, min(at + 2 * _BLOCK, size)
    while at < end:
        part = window.read(at, min(end - at, _WINDOW_BYTES))
        if part.count(0) != len(part) or not part:
            raise DatasetError(
                f"{name} has more data after the zeros at byte {start}",
                cause="a header was overwritten with zeros, or two archives were written into one file",
                next_step="compare it with its source, and write it again as one archive",
            )
        at, end = at + len(part), size
    if size - start < 2 * _BLOCK:
        raise DatasetError(
            f"{name} ends with {size - start} bytes of zeros; an archive ends with two blocks, {2 * _BLOCK} bytes",
            cause="the shard was truncated, or its writer was never closed",
            next_step="compare it with its source, and write it again",
        )


def _check_global_header(records: dict[str, str], name: str) -> None:
    """Raise DatasetError for a global header that changes the members after it."""
    for key in records:
        if key in ("path", "size", "linkpath") or key.startswith("GNU.sparse."):
            raise DatasetError(
                f"{name} has a global header with {key!r}, which changes all members after it",
                cause="the archive was written with an unusual tool",
                next_step="write the shard again with another tool",
            )


def _check_member(path: str, kind: bytes, extended: dict[str, str], name: str) -> None:
    """Raise DatasetError for a member that is not a regular file, is stored in parts, or has an unsafe path."""
    sparse = [key for key in extended if key.startswith("GNU.sparse.")]
    if sparse or kind == b"S":
        raise DatasetError(
            f"{name} stores {path!r} as a sparse file ({sparse[0] if sparse else 'type S'})",
            cause="the archive was written with `tar --sparse`: it contains a map of the file, and parts of the file",
            next_step="write it again without --sparse",
        )
    if kind == b"M":
        raise DatasetError(
            f"{name} contains the rest of {path!r}, which began in another archive",
            cause="the archive was written with `tar --multi-volume`",
            next_step="write it again as one archive",
        )
    unsafe = _is_unsafe(path)
    if unsafe or kind not in _REGULAR_TYPES:
        what = "would leave the folder of extraction" if unsafe else "is a link or a device"
        raise DatasetError(
            f"{name} contains {path!r}, which {what}",
            cause="a hostile or carelessly written archive",
            next_step="ask the owner of the shard before you use it",
        )


def _is_unsafe(path: str) -> bool:
    """Return True if the path could leave the folder of extraction."""
    return path.startswith("/") or (".." in path and ".." in path.split("/")) or "\\" in path or "\0" in path


def _read_path(header: bytes) -> str:
    """Return the path in a header without extensions."""
    return _read_prefix(header) + header[:_NAME_BYTES].partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _read_prefix(header: bytes) -> str:
    """Return the first part of a long path, with the slash that ends it."""
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix.decode("utf-8", "surrogateescape") + "/" if prefix else ""


def _parse_number(field: bytes) -> int:
    """Return the number in a field of a header; -1 if the field is invalid."""
    if field[0] & 0x80:  # GNU: binary, for files of more than 8 GiB
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _has_valid_checksum(header: bytes) -> bool:
    """Return True if the checksum is the sum of the header's bytes, with eight spaces in place of the checksum."""
    try:
        stored = int(header[148:156].strip(b" \0"), 8)
    except ValueError:
        return False
    spaces = 8 * ord(" ")
    return stored == _sum_bytes(header[:148]) + spaces + _sum_bytes(header[156:400]) + _sum_bytes(header[400:])


def _sum_bytes(part: bytes) -> int:
    """Return the sum of at most 256 bytes: the low half of their Adler-32, minus 1. The sum is smaller than 65,521, the
    modulus of Adler-32."""
    return (zlib.adler32(part) & 0xFFFF) - 1


def _parse_pax(data: bytes, name: str) -> dict[str, str]:
    """Return the records 'LENGTH KEY=VALUE' of an extended header. Raises DatasetError if the header is damaged."""
    records = {}
    while data:
        length, space, _ = data.partition(b" ")
        end = int(length) if length.isdigit() and len(length) < 10 else 0
        if not space or not len(length) < end <= len(data) or data[end - 1 : end] != b"\n":
            raise DatasetError(
                f"{name} has a damaged extended header",
                cause="a damaged shard",
                next_step="compare it with its source, and upload it again",
            )
        key, _, value = data[len(length) + 1 : end - 1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[end:]
    return records
