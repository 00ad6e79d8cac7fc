"""Files of state: they are on disk before a checkpoint is published, and a checksum detects every change.

Files are read with `weights_only=True`, so reading a file runs no code: TorchScript, which some versions of torch would
run in spite of it, is refused first. Sparse tensors are checked, because torch would read and write outside of their
memory if their indices were too large.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from topkube.training.checkpoint.format.decoding import Undecodable, decode

SEEN_WITHIN_SECONDS = 10.0
"""How long shared storage may take to show a file that another node has written."""
_CHUNK = 8 << 20
"""The bytes that are read or written at once."""
_MOST_UNSYNCED = 1 << 30
"""The bytes after which a file that grows is synced. Otherwise the kernel may take 20 GB at once and write them to slow
storage in one sync, and nothing would show for many minutes that the storage works."""
_TORCHSCRIPT_RECORD = "constants.pkl"
"""A record that only archives of TorchScript have. Versions of torch before 2.6 run them, also with `weights_only`."""
_UNSEEN = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_DAMAGE = (*_UNSEEN, errno.EIO)
"""Read errors that mean damage if they do not pass."""
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
"""Read errors of network storage whose server is away for some seconds. A bad disk returns the first one too."""
_RETRY_SECONDS = 0.5


class Damaged(Exception):
    """A file is missing, truncated, changed since it was written, or not a file of a checkpoint."""


class Cancelled(Exception):
    """The file is no longer needed."""


@dataclass(frozen=True)
class FileDigest:
    """The size of a file in bytes, and the xxh3 (64 bits) of its contents."""

    bytes: int
    digest: int


@dataclass
class Tally:
    """The bytes that a save has written, or a load has read, so far; a file that is removed counts as one. A thread
    that writes or reads stops soon after `cancelled` is set."""

    bytes: int = 0
    cancelled: bool = False

    def count(self, count: int) -> None:
        """Count bytes. Raises Cancelled."""
        if self.cancelled:
            raise Cancelled
        self.bytes += count


class _CheckedFile:
    """A file that is written from start to end, and keeps the error of the disk.

    The file has no buffer: a process that the script forks in the middle of a save would write the inherited buffer
    when it ends.
    """

    def __init__(self, file: IO[bytes], tally: Tally) -> None:
        self.bytes, self.hash = 0, xxhash.xxh3_64()
        self.error: OSError | Cancelled | None = None
        self._file, self._tally = file, tally
        self._unsynced = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            self._write(view[start : start + _CHUNK])
        return len(view)

    def _write(self, chunk: memoryview) -> None:
        self.hash.update(chunk)
        done = 0
        try:
            while done < len(chunk):
                self._tally.count(0)
                count = self._file.write(chunk[done:])  # a full disk may take a part
                done += count
                self._tally.count(count)
            self._unsynced += len(chunk)
            if self._unsynced >= _MOST_UNSYNCED:
                sync(self._file)
                self._unsynced = 0
        except (OSError, Cancelled) as error:
            self.error = error
            raise
        self.bytes += len(chunk)

    def flush(self) -> None:
        self._file.flush()


class _CountedFile:
    """A file that `torch.load` reads, which counts the bytes."""

    def __init__(self, file: IO[bytes], tally: Tally) -> None:
        self._file, self._tally = file, tally
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._tally.count(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while count := cast(Any, self._file).readinto(view[done : done + _CHUNK]):
            done += count
            self._tally.count(count)
        return done


def write_state(path: Path, state: dict[str, Any], tally: Tally | None = None) -> FileDigest:
    """Write an encoded state (`encoding.encode`) to a new file, and sync the file to the disk. Raises OSError of the
    disk, Cancelled, and errors of pickling."""
    with path.open("xb", buffering=0) as file:
        checked = _CheckedFile(cast(IO[bytes], file), tally or Tally())
        try:
            torch.save(state, cast(IO[bytes], checked))
        except Exception:
            if checked.error is not None:  # torch raises its own error in place of the error of the disk
                raise checked.error from None
            raise
        sync(file)
    return FileDigest(checked.bytes, checked.hash.intdigest())


def read_state(path: Path, expected: FileDigest, tally: Tally | None = None) -> dict[str, Any]:
    """Return the state that `write_state` wrote, decoded. Waits for a file that is not complete yet, and for storage
    that fails, for SEEN_WITHIN_SECONDS. Raises Damaged if the file has changed since it was written, Cancelled, else
    OSError."""
    tally = tally or Tally()
    wait_until_seen(lambda: _read_size(path) == expected.bytes, path.parent)
    end = time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        try:
            return _read_once(path, expected, tally)
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() >= end:
                raise _classify_error(error, path) from error
        time.sleep(_RETRY_SECONDS)


def _read_once(path: Path, expected: FileDigest, tally: Tally) -> dict[str, Any]:
    """Return the state in a file, decoded. Raises as `read_state` does, but OSError for every error of the storage."""
    digest, count = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
            count += len(data)
            tally.count(len(data))
    if count != expected.bytes:
        raise Damaged(f"{path} has {count} bytes instead of {expected.bytes}")
    if digest.intdigest() != expected.digest:
        raise Damaged(f"{path} has changed since it was written")
    try:
        state = decode(_load(path, tally))
    except (Cancelled, Damaged, MemoryError, OSError):
        raise
    except Undecodable as error:
        raise Damaged(f"{path} holds {error}") from error
    except Exception as error:  # not a file of TopKube: torch raises errors of many kinds
        raise Damaged(f"{path} cannot be loaded: {error}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{path} holds a {type(state).__name__} instead of a dict")
    return state


def _load(path: Path, tally: Tally) -> Any:
    """Return the contents of a file without running code of it, and without tensors that are not consistent."""
    if _TORCHSCRIPT_RECORD in torch._C.PyTorchFileReader(str(path)).get_all_records():
        raise Damaged(f"{path} holds a program")
    with path.open("rb") as file, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        return torch.load(cast(IO[bytes], _CountedFile(file, tally)), map_location="cpu", weights_only=True)


def read_text(path: Path) -> str:
    """Return a small file's text. Raises Damaged or OSError as `read_state` does, at once."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} has changed since it was written") from error
    except OSError as error:
        raise _classify_error(error, path) from error


def write_new_text(path: Path, text: str) -> None:
    """Write a new small file, and sync it to the disk. Raises OSError, also if the file exists."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def wait_until_seen(is_seen: Callable[[], bool], directory: Path) -> bool:
    """Return True as soon as `is_seen` returns True, and False after SEEN_WITHIN_SECONDS. Lists `directory` meanwhile,
    because on NFS that makes new names visible. `is_seen` is called at least once."""
    end, pause = time.monotonic() + SEEN_WITHIN_SECONDS, 0.01
    while not is_seen():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
        try:
            os.listdir(directory)
        except OSError:
            continue
    return True


def sync(file: IO[Any]) -> None:
    """Write the contents of `file` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def is_missing(error: BaseException | None) -> bool:
    """Return True if `error` reports that a file or folder does not exist."""
    return isinstance(error, OSError) and error.errno in _UNSEEN


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _classify_error(error: OSError, path: Path) -> Exception:
    return Damaged(f"{path}: {error.strerror}") if error.errno in _DAMAGE else error
