"""Compressed shards: gzip (RFC 1952) and Zstandard (RFC 8878). A shard is decompressed as a whole, in pieces."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any, Literal

from topkube.errors import DatasetError
from topkube.installation import build_install_command

Compression = Literal["", "gzip", "zstd"]
ENDINGS: dict[str, Compression] = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".tzst": "zstd"}
MOST_TIMES = 200
"""A shard may become this many times larger. Samples and tables become 1 to 20 times larger; damaged or hostile shards
become thousands of times larger."""
_ALWAYS_ALLOWED_BYTES = 1 << 20
"""A decompressed shard may have this many bytes even if the compressed shard is very small."""
_GZIP_WINDOW = 31
"""For zlib: the largest window (2**15 bytes), plus 16 for the header and the trailer of gzip."""
_READ_BYTES = 256 << 10
_WRITE_BYTES = 1 << 20
_ZSTD_READ_BYTES = 2 << 10
"""The compressed bytes that are decompressed at once. A block of Zstandard has at least 4 bytes and becomes at most
128 KiB, so the result has at most 64 MiB."""
_ZSTD_WINDOW = 128 << 20
"""The largest window that is accepted, in bytes. The command `zstd` accepts the same by default."""
Write = Callable[[int, Any], None]


def find_compression(path: str) -> Compression:
    """Return the compression that the name of a file shows; empty if the file is not compressed."""
    return next((kind for ending, kind in ENDINGS.items() if path.endswith(ending)), "")


def decompress(file: int, size: int, kind: Compression, name: str, write: Write) -> int:
    """Decompress the shard in `file`, which has `size` bytes, and return the size of the result. `write(offset, bytes)`
    gets the result in order. Raises DatasetError if the shard is damaged, is truncated, is followed by other bytes, or
    becomes more than MOST_TIMES larger."""
    most, total = max(size * MOST_TIMES, _ALWAYS_ALLOWED_BYTES), 0

    def receive(data: bytes) -> None:
        nonlocal total
        if total + len(data) > most:
            raise DatasetError(
                f"{name} has {size:,} bytes and becomes more than {most:,} bytes when it is decompressed",
                cause=f"a damaged or hostile shard: a shard may become {MOST_TIMES} times larger",
                next_step="ask the owner of the shard before you use it; store very compressible data uncompressed",
            )
        write(total, data)
        total += len(data)

    (_decompress_gzip if kind == "gzip" else _decompress_zstd)(file, size, name, receive)
    return total


def _decompress_gzip(file: int, size: int, name: str, receive: Callable[[bytes], None]) -> None:
    member, at, data = zlib.decompressobj(_GZIP_WINDOW), 0, b""
    while True:
        if not data:
            data = os.pread(file, min(_READ_BYTES, size - at), at) if at < size else b""
            at += len(data)
            if not data:
                raise _build_truncated_error(name)
        try:
            result = member.decompress(data, _WRITE_BYTES)
        except zlib.error as error:
            raise _build_damaged_error(name, error) from None
        if result:
            receive(result)
        data = member.unconsumed_tail
        if not member.eof:
            continue
        data = member.unused_data.lstrip(b"\0")  # some writers fill the last block of a tape with zeros
        while not data and at < size:
            data = os.pread(file, min(_READ_BYTES, size - at), at)
            if not data:
                raise _build_truncated_error(name)
            at += len(data)
            data = data.lstrip(b"\0")
        if not data:
            return
        member = zlib.decompressobj(_GZIP_WINDOW)  # a file may have several members


def _decompress_zstd(file: int, size: int, name: str, receive: Callable[[bytes], None]) -> None:
    try:
        import zstandard
    except ImportError as error:
        raise DatasetError(
            f"the library zstandard is needed for {name}", cause=str(error), next_step=build_install_command("zstd")
        ) from None
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame, is_new, at, data, read_ahead = reader.decompressobj(), True, 0, b"", b""
    while True:
        if not data:
            if not read_ahead:
                read_ahead = os.pread(file, min(_READ_BYTES, size - at), at) if at < size else b""
                at += len(read_ahead)
            data, read_ahead = read_ahead[:_ZSTD_READ_BYTES], read_ahead[_ZSTD_READ_BYTES:]
            if not data:
                if is_new and at >= size > 0:
                    return
                raise _build_truncated_error(name)
        try:
            result = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise _build_damaged_error(name, error) from None
        is_new = False
        for start in range(0, len(result), _WRITE_BYTES):
            receive(result[start : start + _WRITE_BYTES])
        data = b""
        if frame.eof:  # a file may have several frames
            data = frame.unused_data
            frame, is_new = reader.decompressobj(), True


def _build_truncated_error(name: str) -> DatasetError:
    return DatasetError(
        f"{name} is truncated: its compressed data ends too early",
        cause="the upload was interrupted",
        next_step="compare it with its source, and upload it again",
    )


def _build_damaged_error(name: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"{name} cannot be decompressed: {error}",
        cause="the shard is damaged, has other bytes after its end, or has another format than its name says",
        next_step="compare it with its source, and upload it again",
    )
