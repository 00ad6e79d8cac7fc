"""The listing of a dataset: the paths, sizes and versions of its objects, in columns.

A million objects are a few arrays instead of a million Python objects. The arrays are files that are mapped into
memory. A manifest is a listing as text: one JSON object per line, {"path": ..., "size": ..., "etag" or "mtime": ...,
"samples": ... (for shards), "xxh3": ... (the checksum of the bytes, if it is known: xxh3-128, 32 hexadecimal digits)}.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.errors import DatasetError

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
UNKNOWN = -1
"""An unknown number of samples."""
_COLUMNS = ("paths", "path_ends", "versions", "version_ends", "sizes", "samples", "checksums")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_PARSED_AT_ONCE = 1000
_LEAVES = re.compile(r"^/|(^|/)\.{1,2}(/|$)|[\\\0]")


class RemoteObject(NamedTuple):
    """An object of the store. `version` is its etag, else its mtime, else empty (object_version.py). `checksum` is the
    xxh3-128 of its bytes, 32 hexadecimal digits; empty if it is unknown."""

    path: str
    size: int
    version: str
    samples: int = UNKNOWN
    checksum: str = ""


@dataclass(frozen=True)
class Texts:
    """Many short texts: their concatenated UTF-8 bytes, and the end of each text."""

    blob: Bytes
    ends: Longs

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        blob, ends = bytearray(), array("q")
        for text in texts:
            blob += encode_text(text)
            ends.append(len(blob))
        return _list_texts(blob, ends)

    def __len__(self) -> int:
        return self.ends.size

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].tobytes().decode()

    def between(self, start: int, stop: int) -> memoryview:
        """Return the bytes of texts start to stop - 1."""
        first = int(self.ends[start - 1]) if start else 0
        return self.blob[first : int(self.ends[stop - 1]) if stop else 0].data


def encode_text(text: str) -> bytes:
    """Return the text as UTF-8. Raises DatasetError for half a surrogate pair or bytes of another encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DatasetError(
            f"the name {text!r} is not UTF-8",
            cause="the archive or the listing has another encoding, or is damaged",
            next_step="write it again with names in UTF-8",
        ) from None


def _list_texts(blob: bytearray, ends: array[int]) -> Texts:
    return Texts(np.frombuffer(bytes(blob), np.uint8), np.array(ends, np.int64))


@dataclass(frozen=True)
class Listing:
    """The objects of a dataset, sorted by path. `samples[i]` may be UNKNOWN. `checksums`: (objects, 2), uint64, the
    high and the low half of each checksum; zeros for an object without a checksum."""

    paths: Texts
    versions: Texts
    sizes: Longs
    samples: Longs
    checksums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, objects: Iterable[RemoteObject], uri: str) -> Listing:
        """Return the listing of these objects. Raises DatasetError for an empty dataset, a path that leaves the
        dataset, and an unknown size."""
        paths, versions = (bytearray(), array("q")), (bytearray(), array("q"))
        sizes, samples, checksums = array("q"), array("q"), array("Q")
        before, ordered = "", True
        for remote_object in objects:
            check_path(remote_object.path, uri)
            if remote_object.path == before:
                raise _duplicate_error(remote_object.path, uri)
            ordered, before = ordered and remote_object.path > before, remote_object.path
            if remote_object.size < 0:
                raise DatasetError(
                    f"the size of {remote_object.path!r} is unknown",
                    cause=f"{uri} does not send Content-Length",
                    next_step="write a manifest for the dataset (`topkube cache manifest`)",
                )
            for (blob, ends), text in ((paths, remote_object.path), (versions, remote_object.version)):
                blob += encode_text(text)
                ends.append(len(blob))
            try:
                sizes.append(remote_object.size)
                samples.append(remote_object.samples)
            except OverflowError:
                raise DatasetError(
                    f"{uri} lists {remote_object.path!r} with {remote_object.size} bytes and {remote_object.samples} "
                    "samples",
                    cause="a damaged or hostile listing",
                    next_step="write the manifest again (`topkube cache manifest`)",
                ) from None
            checksums.extend((int(remote_object.checksum[:16] or "0", 16), int(remote_object.checksum[16:] or "0", 16)))
        if not sizes:
            raise DatasetError(
                f"{uri} is empty",
                cause="the address is wrong, or the store does not list its folders",
                next_step="check the address; write a manifest if the store does not list folders",
            )
        listing = cls(
            _list_texts(*paths),
            _list_texts(*versions),
            np.array(sizes, np.int64),
            np.array(samples, np.int64),
            np.array(checksums, np.uint64).reshape(-1, 2),
        )
        return listing if ordered else listing._sorted(uri)

    def _sorted(self, uri: str) -> Listing:
        names = [self.paths[index] for index in range(len(self))]
        order = sorted(range(len(self)), key=names.__getitem__)
        for first, second in itertools.pairwise(order):
            if names[first] == names[second]:
                raise _duplicate_error(names[first], uri)
        return Listing(
            Texts.of(names[index] for index in order),
            Texts.of(self.versions[index] for index in order),
            self.sizes[order],
            self.samples[order],
            self.checksums[order],
        )

    def __len__(self) -> int:
        return self.sizes.size

    def __getitem__(self, index: int) -> RemoteObject:
        high, low = self.checksums[index].tolist()
        return RemoteObject(
            self.paths[index],
            int(self.sizes[index]),
            self.versions[index],
            int(self.samples[index]),
            f"{high:016x}{low:016x}" if high or low else "",
        )

    def __iter__(self) -> Iterator[RemoteObject]:
        return (self[index] for index in range(len(self)))

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def digest(self) -> str:
        """Return 32 hexadecimal digits that change with every path, size, version and checksum."""
        state = xxhash.xxh3_128()
        for name, part in self.columns().items():
            if name != "checksums" or part.any():
                state.update(part.tobytes())
        return state.hexdigest()

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "paths": self.paths.blob,
            "path_ends": self.paths.ends,
            "versions": self.versions.blob,
            "version_ends": self.versions.ends,
            "sizes": self.sizes,
            "samples": self.samples,
            "checksums": self.checksums,
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, npt.NDArray[Any]]) -> Listing:
        """Return the listing whose `columns` these are."""
        return cls(
            Texts(columns["paths"], columns["path_ends"]),
            Texts(columns["versions"], columns["version_ends"]),
            columns["sizes"],
            columns["samples"],
            columns["checksums"],
        )

    def save(self, folder: Path) -> None:
        """Write one .npy file per column."""
        folder.mkdir(parents=True)
        for name, column in self.columns().items():
            np.save(folder / f"{name}.npy", column, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> Listing:
        """Map a saved listing into memory. Raises OSError or ValueError if it is not whole."""

        def column(name: str) -> npt.NDArray[Any]:
            path = folder / f"{name}.npy"
            try:
                return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
            except ValueError:  # an empty array cannot be mapped
                return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]

        return cls.from_columns({name: column(name) for name in _COLUMNS})


def _duplicate_error(path: str, uri: str) -> DatasetError:
    return DatasetError(f"{uri} lists {path!r} twice", next_step="remove one of the two entries")


def check_path(path: str, uri: str) -> None:
    """Raise DatasetError for a path that leaves the folder of the dataset."""
    if not path or _LEAVES.search(path):
        raise DatasetError(
            f"{uri} lists an object {path!r}, which is outside the dataset",
            cause="a damaged or hostile listing",
            next_step="ask the owner of the dataset before you use it",
        )


def read_manifest(lines: Iterable[bytes | str], uri: str, version: str) -> Listing:
    """Return the listing in a manifest. Raises DatasetError with the number of an invalid line.

    An entry without etag and mtime gets `version`, the version of the manifest: such an object counts as changed when
    the manifest changes.
    """

    def entries() -> Iterator[RemoteObject]:
        number, remaining = 1, iter(lines)
        while chunk := list(itertools.islice(remaining, _PARSED_AT_ONCE)):
            for entry in _parse_lines(chunk, number, uri):
                try:
                    path, size = entry["path"], entry["size"]
                    own = entry.get("etag") or entry.get("mtime") or f"manifest {version}"
                    samples = entry.get("samples", UNKNOWN)
                    checksum = entry.get("xxh3", "")
                    if type(path) is not str or type(size) is not int or type(samples) is not int or samples < UNKNOWN:
                        raise TypeError
                    if checksum and not _CHECKSUM.fullmatch(checksum):
                        raise TypeError
                except (TypeError, KeyError, AttributeError):
                    raise _unusable_line_error(number, uri) from None
                yield RemoteObject(path, size, str(own), samples, checksum)
                number += 1

    return Listing.of(entries(), uri)


def _parse_lines(lines: list[bytes | str], first: int, uri: str) -> list[Any]:
    """Parse several lines of JSON at once, which is much faster; line by line if a line is not a JSON value."""
    try:
        texts = [line.decode() if isinstance(line, bytes) else line for line in lines]
        entries: list[Any] = json.loads(f"[{','.join(texts)}]")
        if len(entries) == len(texts):
            return entries
    except (ValueError, RecursionError):
        pass
    entries = []
    for number, line in enumerate(lines, first):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            raise _unusable_line_error(number, uri) from None
    return entries


def _unusable_line_error(number: int, uri: str) -> DatasetError:
    return DatasetError(
        f"line {number} of the manifest {uri} is invalid",
        cause="a line is an object with a path (text) and a size (an integer); "
        "samples is an integer, xxh3 has 32 hexadecimal digits",
        next_step="write it with `topkube cache manifest`",
    )


def format_manifest(listing: Iterable[RemoteObject]) -> Iterator[str]:
    """Yield the lines of a manifest of these objects."""
    for remote_object in listing:
        entry: dict[str, Any] = {"path": remote_object.path, "size": remote_object.size}
        if remote_object.version:
            entry["etag"] = remote_object.version
        if remote_object.samples != UNKNOWN:
            entry["samples"] = remote_object.samples
        if remote_object.checksum:
            entry["xxh3"] = remote_object.checksum
        yield json.dumps(entry) + "\n"
