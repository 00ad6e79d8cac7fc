"""State in files that can be trusted: on disk before they count, with a checksum that tells when they changed.

Files are read with `weights_only=True`: reading one runs no code.
"""

from __future__ import annotations

import errno
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

_CHUNK = 8 << 20
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EIO)
"""Errors of reading that another try would not cure."""


class Damaged(Exception):
    """A file is missing, cut short or changed since it was written."""


@dataclass(frozen=True)
class Written:
    """What a file must be when it is read: its bytes, and their xxh3 (64 bits)."""

    bytes: int
    digest: int


class _Checked:
    """A file that is written from start to end, and remembers what the disk refused."""

    def __init__(self, file: IO[bytes]) -> None:
        self.bytes, self.hash = 0, xxhash.xxh3_64()
        self.refused: OSError | None = None
        self._file = file

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.refused = error
            raise
        self.hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write_state(path: Path, state: dict[str, Any]) -> Written:
    """Writes a new file, on disk when this returns. Raises OSError where the disk refuses, and what pickling raises."""
    with path.open("xb", buffering=1 << 20) as file:
        checked = _Checked(file)
        try:
            torch.save(state, cast(IO[bytes], checked))
        except Exception:
            if checked.refused is not None:  # torch reports it in words of its own
                raise checked.refused from None
            raise
        sync(file)
    return Written(checked.bytes, checked.hash.intdigest())


def read_state(path: Path, wanted: Written) -> dict[str, Any]:
    """What `write_state` wrote. Raises Damaged where the file is not the one that was written, else OSError."""
    digest, count = xxhash.xxh3_64(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                digest.update(data)
                count += len(data)
    except OSError as error:
        raise _damage_or(error, path) from error
    if count != wanted.bytes:
        raise Damaged(f"{path} has {count} bytes instead of {wanted.bytes}")
    if digest.intdigest() != wanted.digest:
        raise Damaged(f"{path} has changed since it was written")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Damaged(f"{path} holds types that a safe load refuses: {error}") from error
    except OSError as error:
        raise _damage_or(error, path) from error
    return state


def read_text(path: Path) -> str:
    """A small file's text. Raises Damaged or OSError as `read_state` does."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} has changed since it was written") from error
    except OSError as error:
        raise _damage_or(error, path) from error


def write_text(path: Path, text: str) -> None:
    """Writes a new small file, on disk when this returns."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Names that were made in `directory` are on disk when this returns."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage_or(error: OSError, path: Path) -> Exception:
    return Damaged(f"{path}: {error.strerror}") if error.errno in _DAMAGE else error
