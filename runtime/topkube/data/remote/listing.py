"""The listing of a dataset: the paths, sizes and versions of its objects, in columns.

A million objects are a few arrays instead of a million Python objects. The arrays are files that are mapped into
memory. A manifest is a listing as text: one JSON object per line, {"path": ..., "size": ..., "etag" or "mtime": ...,
"samples": ... (for shards), "xxh3": ... (the checksum of the bytes, if it is known: xxh3-128, 32 hexadecimal digits),
"index": [...] (for tar shards whose sample index is in the index file beside the manifest: see IndexPart)}.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
_COLUMNS = ("paths", "path_ends", "versions", "version_ends", "sizes", "samples", "checksums", "indexes")
_CHECKSUM_FILE = "xxh3"
"""The file with the checksum of a saved listing."""
_READ_AT_ONCE = 1 << 20
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_PARSED_AT_ONCE = 1000
_MOST_INDEX_BYTES, _MOST_INDEX_PART_BYTES = 1 << 50, 1 << 30
"""The most bytes before the index of a shard in the index file, and of that index."""
_OUTSIDE = re.compile(r"^/|(^|/)\.{1,2}(/|$)|[\\\0]")


class IndexPart(NamedTuple):
    """The part of the index file that is the sample index of a shard: its first byte, its number of bytes, and its
    xxh3-128 (32 hexadecimal digits)."""

    start: int
    size: int
    checksum: str


class RemoteObject(NamedTuple):
    """An object of the store. `version` is its etag, else its mtime, else empty (object_version.py). `checksum` is the
    xxh3-128 of its bytes, 32 hexadecimal digits; empty if it is unknown. `sample_index` is the place of the index of
    its samples; None if it has no index."""

    path: str
    size: int
    version: str
    samples: int = UNKNOWN
    checksum: str = ""
    sample_index: IndexPart | None = None


@dataclass(frozen=True)
class Texts:
    """Many short texts: their concatenated UTF-8 bytes, and the end of each text."""

    blob: Bytes
    ends: Longs

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> Texts:
        """Return these strings as one object. Raises DatasetError as `encode_text` does."""
        blob, ends = bytearray(), array("q")
        for text in strings:
            blob += encode_text(text)
            ends.append(len(blob))
        return _build_texts(blob, ends)

    def __len__(self) -> int:
        return self.ends.size

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].tobytes().decode()

    def view_bytes(self, start: int, stop: int) -> memoryview:
        """Return the bytes of texts `start` to `stop` - 1, one after the other."""
        first = int(self.ends[start - 1]) if start else 0
        return self.blob[first : int(self.ends[stop - 1]) if stop else 0].data


def encode_text(text: str) -> bytes:
    """Return the text as UTF-8. Raises DatasetError for text that UTF-8 cannot represent: a single surrogate, which may
    stand for a byte of another encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DatasetError(
            f"the name {text!r} is not UTF-8",
            cause="the archive or the listing has another encoding, or is damaged",
            next_step="write it again with names in UTF-8",
        ) from None


def _build_texts(blob: bytearray, ends: array[int]) -> Texts:
    return Texts(np.frombuffer(bytes(blob), np.uint8), np.array(ends, np.int64))


@dataclass(frozen=True)
class Listing:
    """The objects of a dataset, sorted by path, as columns.

    `samples[i]` may be UNKNOWN. `checksums`: (objects, 2) uint64, the high and the low half of each checksum; zeros for
    an object without a checksum. `indexes`: (objects, 4) uint64, the first byte of each index part, its number of
    bytes, and the halves of its checksum; zeros for an object without an index. `indexes` has no rows if no object has
    an index.
    """

    paths: Texts
    versions: Texts
    sizes: Longs
    samples: Longs
    checksums: npt.NDArray[np.uint64]
    indexes: npt.NDArray[np.uint64]

    @classmethod
    def from_objects(cls, objects: Iterable[RemoteObject], uri: str) -> Listing:
        """Return the listing of these objects. Raises DatasetError for an empty dataset, a path that leaves the
        dataset, and an unknown size."""
        paths, versions = (bytearray(), array("q")), (bytearray(), array("q"))
        sizes, samples, checksums = array("q"), array("q"), array("Q")
        indexes: dict[int, IndexPart] = {}
        previous_path, is_sorted = "", True
        for remote_object in objects:
            check_path(remote_object.path, uri)
            if remote_object.path == previous_path:
                raise _build_duplicate_error(remote_object.path, uri)
            is_sorted, previous_path = is_sorted and remote_object.path > previous_path, remote_object.path
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
            checksums.extend(_split_checksum(remote_object.checksum))
            if remote_object.sample_index is not None:
                indexes[len(sizes) - 1] = remote_object.sample_index
        if not sizes:
            raise DatasetError(
                f"{uri} is empty",
                cause="the address is wrong, or the store does not list its folders",
                next_step="check the address; write a manifest if the store does not list folders",
            )
        listing = cls(
            _build_texts(*paths),
            _build_texts(*versions),
            np.array(sizes, np.int64),
            np.array(samples, np.int64),
            np.array(checksums, np.uint64).reshape(-1, 2),
            _build_index_rows(indexes, len(sizes)),
        )
        return listing if is_sorted else listing._sort(uri)

    def _sort(self, uri: str) -> Listing:
        """Return the listing, sorted by path. Raises DatasetError if two objects have the same path."""
        names = [self.paths[index] for index in range(len(self))]
        order = sorted(range(len(self)), key=names.__getitem__)
        for first, second in itertools.pairwise(order):
            if names[first] == names[second]:
                raise _build_duplicate_error(names[first], uri)
        return Listing(
            Texts.from_strings(names[index] for index in order),
            Texts.from_strings(self.versions[index] for index in order),
            self.sizes[order],
            self.samples[order],
            self.checksums[order],
            self.indexes[order] if self.indexes.size else self.indexes,
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
            self.find_index(index),
        )

    def find_index(self, index: int) -> IndexPart | None:
        """Return the place of the sample index of object `index`; None if the object has no sample index."""
        if not self.indexes.size:
            return None
        start, size, high, low = self.indexes[index].tolist()
        return IndexPart(start, size, f"{high:016x}{low:016x}") if size else None

    @property
    def index_bytes(self) -> int:
        """The bytes of the index file; 0 if no object has an index."""
        return int(self.indexes[:, :2].sum(axis=1).max()) if self.indexes.size else 0

    def __iter__(self) -> Iterator[RemoteObject]:
        return (self[index] for index in range(len(self)))

    @property
    def has_versions(self) -> bool:
        """True if every object has a version."""
        return bool(np.diff(self.versions.ends, prepend=0).all())

    def fill_versions(self, version: str) -> Listing:
        """Return the listing with this version for every object without a version."""
        filled = (self.versions[index] or version for index in range(len(self)))
        return replace(self, versions=Texts.from_strings(filled))

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def compute_digest(self) -> str:
        """Return 32 hexadecimal digits that change with every path, size, version, checksum and index."""
        state = xxhash.xxh3_128()
        for name, part in self.to_columns().items():
            if name not in ("checksums", "indexes") or part.any():
                state.update(part.tobytes())
        return state.hexdigest()

    def to_columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays from which `from_columns` builds the listing, by name."""
        return {
            "paths": self.paths.blob,
            "path_ends": self.paths.ends,
            "versions": self.versions.blob,
            "version_ends": self.versions.ends,
            "sizes": self.sizes,
            "samples": self.samples,
            "checksums": self.checksums,
            "indexes": self.indexes,
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, npt.NDArray[Any]]) -> Listing:
        """Return the listing from the arrays that `to_columns` returned."""
        return cls(
            Texts(columns["paths"], columns["path_ends"]),
            Texts(columns["versions"], columns["version_ends"]),
            columns["sizes"],
            columns["samples"],
            columns["checksums"],
            columns["indexes"],
        )

    def save(self, folder: Path) -> None:
        """Create the folder. Write one .npy file per column, and a checksum of these files. Existing files are not
        replaced. Raises OSError."""
        folder.mkdir(parents=True)
        for name, column in self.to_columns().items():
            with _get_column_path(folder, name).open("xb") as file:
                np.save(file, column, allow_pickle=False)
        with (folder / _CHECKSUM_FILE).open("x") as checksum_file:
            checksum_file.write(_compute_files_checksum(folder))

    @classmethod
    def load(cls, folder: Path) -> Listing:
        """Map a saved listing into memory. Raises OSError or ValueError if the listing is incomplete or damaged, for
        example because the machine lost its power while the files were written."""
        if (folder / _CHECKSUM_FILE).read_text() != _compute_files_checksum(folder):
            raise ValueError(f"the listing in {folder} is damaged")

        def load_column(name: str) -> npt.NDArray[Any]:
            path = _get_column_path(folder, name)
            try:
                return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
            except ValueError:  # an empty array cannot be mapped
                return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]

        return cls.from_columns({name: load_column(name) for name in _COLUMNS})


def _get_column_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _compute_files_checksum(folder: Path) -> str:
    """Return the xxh3-128 of the files of all columns, 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    for name in _COLUMNS:
        with _get_column_path(folder, name).open("rb") as file:
            while data := file.read(_READ_AT_ONCE):
                state.update(data)
    return state.hexdigest()


def _split_checksum(checksum: str) -> tuple[int, int]:
    """Return the halves of a checksum of 32 hexadecimal digits; zeros for an empty text."""
    return int(checksum[:16] or "0", 16), int(checksum[16:] or "0", 16)


def _build_index_rows(indexes: Mapping[int, IndexPart], count: int) -> npt.NDArray[np.uint64]:
    rows = np.zeros((count if indexes else 0, 4), np.uint64)
    for position, part in indexes.items():
        rows[position] = part.start, part.size, *_split_checksum(part.checksum)
    return rows


def _build_duplicate_error(path: str, uri: str) -> DatasetError:
    return DatasetError(f"{uri} lists {path!r} twice", next_step="remove one of the two entries")


def check_path(path: str, uri: str) -> None:
    """Raise DatasetError for a path that leaves the folder of the dataset."""
    if not path or _OUTSIDE.search(path):
        raise DatasetError(
            f"{uri} lists an object {path!r}, which is outside the dataset",
            cause="a damaged or hostile listing",
            next_step="ask the owner of the dataset before you use it",
        )


def read_manifest(lines: Iterable[bytes | str], uri: str, version: str) -> Listing:
    """Return the listing in a manifest. Raises DatasetError with the number of an invalid line.

    An entry without etag and mtime gets `version`, the version of the manifest or a hash of its bytes. If the manifest
    changes, such an object counts as changed.
    """

    def parse_entries() -> Iterator[RemoteObject]:
        number, remaining = 1, iter(lines)
        while chunk := list(itertools.islice(remaining, _PARSED_AT_ONCE)):
            for entry in _parse_lines(chunk, number, uri):
                try:
                    path, size = entry["path"], entry["size"]
                    object_version = entry.get("etag") or entry.get("mtime") or f"manifest {version}"
                    samples = entry.get("samples", UNKNOWN)
                    checksum = entry.get("xxh3", "")
                    if type(path) is not str or type(size) is not int or type(samples) is not int or samples < UNKNOWN:
                        raise TypeError
                    if checksum and not _CHECKSUM.fullmatch(checksum):
                        raise TypeError
                    index = _parse_index_part(entry["index"]) if "index" in entry else None
                except (TypeError, KeyError, AttributeError):
                    raise _build_line_error(number, uri) from None
                yield RemoteObject(path, size, str(object_version), samples, checksum, index)
                number += 1

    return Listing.from_objects(parse_entries(), uri)


def _parse_index_part(entry: Any) -> IndexPart:
    """Return the index part of a line. Raises TypeError if it is invalid."""
    if type(entry) is not list or [type(value) for value in entry] != [int, int, str]:
        raise TypeError
    part = IndexPart(*entry)
    if not (0 <= part.start <= _MOST_INDEX_BYTES and 0 < part.size <= _MOST_INDEX_PART_BYTES):
        raise TypeError
    if not _CHECKSUM.fullmatch(part.checksum):
        raise TypeError
    return part


def _parse_lines(lines: list[bytes | str], first: int, uri: str) -> list[Any]:
    """Parse several lines of JSON at once, because this is much faster. If a line is not a JSON value, parse line by
    line, and raise DatasetError with the number of the line. `first`: the number of the first line."""
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
            raise _build_line_error(number, uri) from None
    return entries


def _build_line_error(number: int, uri: str) -> DatasetError:
    return DatasetError(
        f"line {number} of the manifest {uri} is invalid",
        cause="a line is an object with a path (text) and a size (an integer); "
        "samples is an integer, xxh3 has 32 hexadecimal digits, and index is [first byte, bytes, xxh3]",
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
        if remote_object.sample_index is not None:
            entry["index"] = list(remote_object.sample_index)
        yield json.dumps(entry) + "\n"
