"""What a rank tells about itself: a small file of fixed size in the run's directory, rewritten in place every step.

One write of about half a kilobyte is a few microseconds, needs no lock, no socket and no thread, and survives the rank.
The process that serves /metrics reads the files of all its ranks when it is asked.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topkube.telemetry.metrics import STEP_BUCKETS
from topkube.telemetry.phases import PHASES, Snapshot

ABSENT = float("-inf")
"""A value that nothing has set: its series is left out."""
_HEADER = struct.Struct("<8sIIiiQ")
_MAGIC = b"tkmetric"
_VERSION = 1
_COUNTERS = ("steps", "step_seconds", "samples", "intra_bytes", "inter_bytes", "dense_bytes", "bound_seconds")
_GAUGES = ("loss", "gradient_norm", "residual_norm", "density", "last_step", "step", "total_steps", "link_rate")
CACHE = (
    *("memory_requests", "memory_misses", "disk_requests", "disk_misses"),
    *("memory_bytes", "disk_bytes", "remote_bytes", "peer_bytes"),
    *("fetches", "fetch_seconds", "waits_seconds", "evictions", "corruptions", "takeovers"),
    *("disk_state", "memory_state", "memory_used_bytes"),
)
"""What the data cache of this rank has counted, under the names of `topkube.data`."""
FIELDS = (
    *_COUNTERS,
    "skipped_steps",
    *_GAUGES,
    *(f"phase {phase}" for phase in PHASES),
    *(f"cache {name}" for name in CACHE),
    *(f"bucket {index}" for index in range(len(STEP_BUCKETS) + 1)),
)
"""The values, in the file's order. Buckets count steps of their own range, not cumulated."""
_AT = {name: index for index, name in enumerate(FIELDS)}
_BUCKET, _PHASE = _AT["bucket 0"], {phase: _AT[f"phase {phase}"] for phase in PHASES}
_SIZE = _HEADER.size + 8 * len(FIELDS) + 8
_ATTEMPTS_TO_READ = 5


def metrics_path(directory: Path, rank: int) -> Path:
    return directory / f"metrics-{rank}.bin"


class RankMetrics:
    """A rank's values; `step` after each step puts them on disk. Where the directory cannot be written, it says so once
    and training goes on without metrics."""

    def __init__(self, directory: Path, rank: int, attempt: int = 1) -> None:
        self.values = array("d", [0.0] * len(FIELDS))
        self._rank, self._attempt, self._sequence = rank, attempt, 0
        self._file: int | None = None
        self._lock = threading.Lock()
        for name in (*_GAUGES, *(f"cache {name}" for name in CACHE)):
            self[name] = ABSENT
        path = metrics_path(directory, rank)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self.flush()
            os.replace(part, path)  # a reader sees the file of an earlier attempt, or this one whole
        except OSError as error:
            self._give_up(error)

    def __setitem__(self, name: str, value: float) -> None:
        self.values[_AT[name]] = value

    def step(self, seconds: float, own: Snapshot, samples: int, gauges: Mapping[str, float]) -> None:
        """Counts a finished step of `seconds`, of which this rank's phases and bytes are `own`. `gauges` are further
        values by name in FIELDS."""
        values = self.values
        values[_BUCKET + bisect_left(STEP_BUCKETS, seconds)] += 1
        for phase, spent in own.seconds.items():
            values[_PHASE[phase]] += spent
        bound = own.inter_bytes / values[_AT["link_rate"]] if values[_AT["link_rate"]] > 0 else 0.0
        numbers = (1, seconds, samples, own.intra_bytes, own.inter_bytes, own.dense_bytes, bound)
        for index, number in enumerate(numbers):
            values[index] += number
        for name, value in gauges.items():
            values[_AT[name]] = value
        self.flush()

    def cache(self, counted: Mapping[str, float]) -> None:
        """Takes what the data cache has counted; the next `step` puts it on disk."""
        for name in CACHE:
            if name in counted:
                self[f"cache {name}"] = counted[name]

    def flush(self) -> None:
        """Writes all values. The sequence number stands at both ends: a reader knows whether it met a write."""
        with self._lock:  # the communication thread brings the loss
            if self._file is None:
                return
            self._sequence += 1
            header = _HEADER.pack(_MAGIC, _VERSION, len(FIELDS), self._rank, self._attempt, self._sequence)
            try:
                os.pwrite(self._file, b"".join((header, self.values.tobytes(), struct.pack("<Q", self._sequence))), 0)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _give_up(self, error: OSError) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        print(f"topkube: no metrics from rank {self._rank}: {error.strerror or error}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RankValues:
    """What one rank's file said."""

    rank: int
    attempt: int
    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def buckets(self) -> list[float]:
        """Steps per range of STEP_BUCKETS, the last above all of them."""
        return [self.values[f"bucket {index}"] for index in range(len(STEP_BUCKETS) + 1)]


def read_ranks(directory: Path) -> list[RankValues]:
    """The values of all ranks of the newest attempt, by rank. Files of an earlier attempt, of another version, or
    damaged ones are passed over."""
    found = [values for path in directory.glob("metrics-*.bin") if (values := _read(path)) is not None]
    newest = max((one.attempt for one in found), default=0)
    return sorted((one for one in found if one.attempt == newest), key=lambda one: one.rank)


def _read(path: Path) -> RankValues | None:
    for _ in range(_ATTEMPTS_TO_READ):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _SIZE:
            return None
        magic, version, fields, rank, attempt, sequence = _HEADER.unpack_from(data)
        if (magic, version, fields) != (_MAGIC, _VERSION, len(FIELDS)):
            return None
        if struct.unpack_from("<Q", data, _SIZE - 8)[0] == sequence:
            values = array("d", data[_HEADER.size : _SIZE - 8])
            return RankValues(rank, attempt, dict(zip(FIELDS, values, strict=True)))
    return None
