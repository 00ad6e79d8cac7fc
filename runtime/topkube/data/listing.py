"""What a dataset consists of: the names, sizes and versions of its objects, in columns.

A million objects are a few arrays here, not a million Python objects; they lie in files that are mapped into memory.
A manifest is the same as text: one JSON object per line, {"path": ..., "size": ..., "etag" or "mtime": ..., and for
shards "samples": ...}.
"""

from __future__ import annotations

import itertools
import json
import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator
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
"""A sample count that nobody has told."""
_PARSED_AT_ONCE = 1000
_LEAVES = re.compile(r"^/|(^|/)\.{1,2}(/|$)|[\\\0]")


class Object(NamedTuple):
    """One object of the store. `version` is its etag, else its mtime, else empty."""

    path: str
    size: int
    version: str
    samples: int = UNKNOWN


@dataclass(frozen=True)
class Texts:
    """Many short texts: UTF-8 one after the other, and where each ends."""

    blob: Bytes
    ends: Longs

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        blob, ends = bytearray(), array("q")
        for text in texts:
            blob += text.encode()
            ends.append(len(blob))
        return _texts(blob, ends)

    def __len__(self) -> int:
        return self.ends.size

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].tobytes().decode()

    def between(self, start: int, stop: int) -> memoryview:
        """The bytes of texts start to stop - 1."""
        first = int(self.ends[start - 1]) if start else 0
        return self.blob[first : int(self.ends[stop - 1]) if stop else 0].data


def _texts(blob: bytearray, ends: array[int]) -> Texts:
    return Texts(np.frombuffer(bytes(blob), np.uint8), np.array(ends, np.int64))


@dataclass(frozen=True)
class Listing:
    """The objects of a dataset, by path. `samples[i]` is UNKNOWN where the store does not say."""

    paths: Texts
    versions: Texts
    sizes: Longs
    samples: Longs

    @classmethod
    def of(cls, objects: Iterable[Object], uri: str) -> Listing:
        """Raises DatasetError for an empty dataset, a path that leaves it, and sizes that nobody knows."""
        paths, versions = (bytearray(), array("q")), (bytearray(), array("q"))
        sizes, samples = array("q"), array("q")
        before, ordered = "", True
        for one in objects:
            check_path(one.path, uri)
            if one.path == before:
                raise _twice(one.path, uri)
            ordered, before = ordered and one.path > before, one.path
            if one.size < 0:
                raise DatasetError(
                    f"the size of {one.path!r} is unknown",
                    cause=f"{uri} does not send Content-Length",
                    next_step="give the dataset a manifest (`topkube cache manifest`)",
                )
            for (blob, ends), text in ((paths, one.path), (versions, one.version)):
                blob += text.encode()
                ends.append(len(blob))
            sizes.append(one.size)
            samples.append(one.samples)
        if not sizes:
            raise DatasetError(
                f"{uri} is empty",
                cause="a wrong address, or a store that does not list its folders",
                next_step="check the address; give the dataset a manifest where the store lists nothing",
            )
        listing = cls(_texts(*paths), _texts(*versions), np.array(sizes, np.int64), np.array(samples, np.int64))
        return listing if ordered else listing._sorted(uri)

    def _sorted(self, uri: str) -> Listing:
        names = [self.paths[index] for index in range(len(self))]
        order = sorted(range(len(self)), key=names.__getitem__)
        for first, second in itertools.pairwise(order):
            if names[first] == names[second]:
                raise _twice(names[first], uri)
        return Listing(
            Texts.of(names[index] for index in order),
            Texts.of(self.versions[index] for index in order),
            self.sizes[order],
            self.samples[order],
        )

    def __len__(self) -> int:
        return self.sizes.size

    def __getitem__(self, index: int) -> Object:
        return Object(self.paths[index], int(self.sizes[index]), self.versions[index], int(self.samples[index]))

    def __iter__(self) -> Iterator[Object]:
        return (self[index] for index in range(len(self)))

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def digest(self) -> str:
        """Changes with every name, size and version (32 hexadecimal digits)."""
        state = xxhash.xxh3_128()
        for part in self._columns().values():
            state.update(part.tobytes())
        return state.hexdigest()

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "paths": self.paths.blob,
            "path_ends": self.paths.ends,
            "versions": self.versions.blob,
            "version_ends": self.versions.ends,
            "sizes": self.sizes,
            "samples": self.samples,
        }

    def save(self, folder: Path) -> None:
        """One .npy file per column."""
        folder.mkdir(parents=True)
        for name, column in self._columns().items():
            np.save(folder / f"{name}.npy", column, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> Listing:
        """What `save` wrote, mapped into memory. Raises OSError or ValueError where it is not whole."""

        def column(name: str) -> npt.NDArray[Any]:
            path = folder / f"{name}.npy"
            try:
                return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
            except ValueError:  # an empty array cannot be mapped
                return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]

        return cls(
            Texts(column("paths"), column("path_ends")),
            Texts(column("versions"), column("version_ends")),
            column("sizes"),
            column("samples"),
        )


def _twice(path: str, uri: str) -> DatasetError:
    return DatasetError(f"{uri} lists {path!r} twice", next_step="remove one of the two entries")


def check_path(path: str, uri: str) -> None:
    """Raises DatasetError for a path that would leave the dataset's own folder."""
    if not path or _LEAVES.search(path):
        raise DatasetError(
            f"{uri} names an object {path!r}, which leaves the dataset",
            cause="a damaged or hostile listing",
            next_step="do not use this dataset before its owner has explained it",
        )


def read_manifest(lines: Iterable[bytes | str], uri: str, version: str) -> Listing:
    """The listing in a manifest. An entry without etag and mtime takes `version`, the manifest's own: when the
    manifest changes, such objects count as changed. Raises DatasetError naming the line."""

    def entries() -> Iterator[Object]:
        number, remaining = 1, iter(lines)
        while chunk := list(itertools.islice(remaining, _PARSED_AT_ONCE)):
            for entry in _parsed(chunk, number, uri):
                try:
                    path, size = entry["path"], entry["size"]
                    own = entry.get("etag") or entry.get("mtime") or f"manifest {version}"
                    samples = entry.get("samples", UNKNOWN)
                    if type(path) is not str or type(size) is not int or type(samples) is not int or samples < UNKNOWN:
                        raise TypeError
                except (TypeError, KeyError, AttributeError):
                    raise _unusable(number, uri) from None
                yield Object(path, size, str(own), samples)
                number += 1

    return Listing.of(entries(), uri)


def _parsed(lines: list[bytes | str], first: int, uri: str) -> list[Any]:
    """The JSON of some lines at once, which is much faster; one by one where that does not fit."""
    texts = [line.decode() if isinstance(line, bytes) else line for line in lines]
    try:
        found: list[Any] = json.loads(f"[{','.join(texts)}]")
        if len(found) == len(texts):
            return found
    except ValueError:
        pass
    found = []
    for number, text in enumerate(texts, first):
        try:
            found.append(json.loads(text))
        except ValueError:
            raise _unusable(number, uri) from None
    return found


def _unusable(number: int, uri: str) -> DatasetError:
    return DatasetError(
        f"line {number} of the manifest {uri} is unusable",
        cause="it is not an object with a path (text) and a size (a whole number)",
        next_step="write it with `topkube cache manifest`",
    )


def manifest_lines(listing: Iterable[Object]) -> Iterator[str]:
    """The lines of a manifest."""
    for one in listing:
        entry: dict[str, Any] = {"path": one.path, "size": one.size}
        if one.version:
            entry["etag"] = one.version
        if one.samples != UNKNOWN:
            entry["samples"] = one.samples
        yield json.dumps(entry) + "\n"


def extension(path: str) -> str:
    """All after the first dot of the last part, as WebDataset has it: 'a/b.seg.png' -> 'seg.png'."""
    return posixpath.basename(path).partition(".")[2]
