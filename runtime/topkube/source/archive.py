"""Unpack an archive of code into a new folder, within limits, and compute digests of files and folders."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from topkube.data.formats.compression import decompress, find_compression
from topkube.data.formats.tar import read_members
from topkube.errors import DatasetError, SourceError

MOST_BYTES = 1 << 30
"""The largest archive, and the most bytes of its files together."""
MOST_FILES = 100_000
_DEEPEST, _LONGEST_PATH = 64, 1024
_COPY_BYTES = 1 << 20


def unpack_archive(archive: Path, folder: Path, name: str) -> None:
    """Unpack the tar file `archive` into the new folder `folder`. The ending of `name` determines the compression.

    Files keep only their executable bit. Raises SourceError for links, devices, paths that leave the folder, damaged
    archives, and archives that exceed the limits. Raises OSError if the disk refuses the files.
    """
    kind, plain = find_compression(name), archive
    try:
        if kind:
            plain = archive.with_name(archive.name + ".tar")
            with archive.open("rb") as compressed, plain.open("wb") as target:
                size = os.fstat(compressed.fileno()).st_size

                def write(offset: int, data: bytes) -> None:
                    _check_bytes(offset + len(data), name)
                    target.write(data)

                decompress(compressed.fileno(), size, kind, name, write)
        folder.mkdir()
        with plain.open("rb") as tar:
            _unpack_members(tar.fileno(), folder, name)
    except DatasetError as error:
        raise SourceError(
            f"the archive of the source cannot be unpacked: {error.what}",
            cause="the archive is damaged, hostile, or contains something other than files and folders",
            next_step="pack the code again without links: topkube submit --sync, git archive, or tar -h",
        ) from None
    finally:
        if plain != archive:
            plain.unlink(missing_ok=True)


def _unpack_members(tar: int, folder: Path, name: str) -> None:
    total = count = 0
    for path, offset, length, mode in read_members(tar, os.fstat(tar).st_size, name):
        total, count = total + length, count + 1
        _check_bytes(total, name)
        if count > MOST_FILES:
            raise _build_size_error(name, f"more than {MOST_FILES:,} files")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not parts or len(parts) > _DEEPEST or len(os.fsencode(path)) > _LONGEST_PATH:
            raise DatasetError(f"{name} contains a path that is empty or too long: {path[:100]!r}")
        target = folder.joinpath(*parts)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Nothing in the new folder is a link, because links are refused: no path leaves it.
            file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise DatasetError(f"{name} contains {path!r} twice, or as a file and as a folder") from None
        try:
            _copy_member(tar, offset, length, file)
            if mode & stat.S_IXUSR:
                os.fchmod(file, 0o755)
        finally:
            os.close(file)


def _copy_member(source: int, offset: int, length: int, target: int) -> None:
    end = offset + length
    while offset < end:
        data = os.pread(source, min(_COPY_BYTES, end - offset), offset)
        if not data:
            raise DatasetError("the archive became shorter while it was read")
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        offset += len(data)


def _check_bytes(total: int, name: str) -> None:
    if total > MOST_BYTES:
        raise _build_size_error(name, f"more than {MOST_BYTES >> 20:,} MiB")


def _build_size_error(name: str, excess: str) -> SourceError:
    return SourceError(
        f"the archive of the source, {name}, has {excess}",
        cause="it contains data, results or an environment besides the code",
        next_step="pack the code only; put data into spec.dataset, and packages into the image",
    )


def compute_folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the paths, executable bits and contents of all files in `folder`. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        executable = "x" if path.stat().st_mode & stat.S_IXUSR else "-"
        name = os.fsencode(path.relative_to(folder).as_posix())
        digest.update(b"%d %s %s %s\n" % (len(name), name, executable.encode(), compute_file_digest(path).encode()))
    return digest.hexdigest()


def compute_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(digest: str, expected: str, what: str, field: str) -> None:
    """Raise SourceError if `digest` is not the `expected` checksum of the archive `what`."""
    if digest != expected:
        raise SourceError(
            f"{what} has the checksum {digest}, and {field} is {expected}",
            cause="the archive was replaced after the job was written, or it was damaged on its way",
            next_step=f"upload the right archive, or set {field} to its checksum (sha256sum FILE)",
        )
