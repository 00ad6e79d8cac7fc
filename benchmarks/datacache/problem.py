"""The datasets that all contenders read: random samples as files, tar shards, peers' shards and a flat file."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NUMBER_BYTES = 8
"""Every sample begins with its number, so that the samples that were read can be checked."""
SHARD_BYTES = 64_000_000


@dataclass(frozen=True)
class CacheProblem:
    """A dataset of `samples` samples of `size` bytes, as single files or in tar shards of 64 MB. `name` is also the
    name of its folder."""

    name: str
    form: str  # files | shards
    size: int
    samples: int

    @property
    def record_bytes(self) -> int:
        """The bytes of a sample in a tar file: a header of 512 bytes, and whole blocks of 512 bytes."""
        return 512 + -(-self.size // 512) * 512

    @property
    def per_shard(self) -> int:
        """The number of samples in a tar shard."""
        return SHARD_BYTES // self.record_bytes

    def count_bytes(self, root: Path) -> int:
        """Return the least bytes that a job must read from the remote: all files, or all shards with their headers."""
        return sum(path.stat().st_size for path in (root / self.name).rglob("*") if path.suffix in (".bin", ".tar"))

    def read_array(self, root: Path) -> npt.NDArray[np.uint8]:
        """Return all samples, in the shape (samples, size)."""
        return np.fromfile(root / f"{self.name}.flat", np.uint8).reshape(self.samples, self.size)

    def find_places(self) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the positions of the samples: the names of objects, and for every sample its object and offset."""
        numbers = np.arange(self.samples)
        if self.form == "files":
            return [name_file(number) for number in range(self.samples)], numbers, np.zeros(self.samples, np.int64)
        shards = -(-self.samples // self.per_shard)
        return (
            [name_shard(number) for number in range(shards)],
            numbers // self.per_shard,
            numbers % self.per_shard * self.record_bytes + 512,
        )

    def to_data(self) -> dict[str, Any]:
        return asdict(self)


def name_file(number: int) -> str:
    return f"{number // 1000:03}/{number:07}.bin"


def name_shard(number: int) -> str:
    return f"{number:04}.tar"


def write_dataset(problem: CacheProblem, root: Path) -> None:
    """Write all forms of the dataset below `root`; those of a peer only if the peer is installed."""
    random = np.random.default_rng(problem.samples)
    data = random.integers(0, 256, (problem.samples, problem.size), np.uint8)
    data[:, :NUMBER_BYTES] = np.arange(problem.samples, dtype="<i8").view(np.uint8).reshape(-1, NUMBER_BYTES)
    data.tofile(root / f"{problem.name}.flat")
    folder = root / problem.name
    folder.mkdir()
    (_write_files if problem.form == "files" else _write_shards)(problem, data, folder)
    _write_chunks(problem, data, root / f"{problem.name}.litdata")
    _write_mosaic_shards(problem, data, root / f"{problem.name}.mosaic")


def _write_files(problem: CacheProblem, data: npt.NDArray[np.uint8], folder: Path) -> None:
    for number in range(problem.samples):
        path = folder / name_file(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data[number].tobytes())


def _write_shards(problem: CacheProblem, data: npt.NDArray[np.uint8], folder: Path) -> None:
    lines = []
    for shard, first in enumerate(range(0, problem.samples, problem.per_shard)):
        part = data[first : first + problem.per_shard]
        path = folder / name_shard(shard)
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, sample in enumerate(part, first):
                member = tarfile.TarInfo(f"{number:07}.bin")
                member.size = problem.size
                tar.addfile(member, io.BytesIO(sample.tobytes()))
        lines.append(json.dumps({"path": path.name, "size": path.stat().st_size, "samples": len(part)}))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")


def _write_chunks(problem: CacheProblem, data: npt.NDArray[np.uint8], folder: Path) -> None:
    try:
        from litdata.streaming.writer import BinaryWriter
    except ImportError:
        return
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
    for number, sample in enumerate(data):
        writer[number] = sample.tobytes()
    writer.done()
    writer.merge()


def _write_mosaic_shards(problem: CacheProblem, data: npt.NDArray[np.uint8], folder: Path) -> None:
    from datacache.contenders import import_mosaic

    try:
        mosaic = import_mosaic()
    except ImportError:
        return
    with mosaic.Writer(out=str(folder), columns={"bin": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for sample in data:
            writer.write({"bin": sample.tobytes()})
