"""The metrics file of a rank: a small file of fixed size in the run's directory that is overwritten after every step.

A write of about half a kilobyte takes a few microseconds, needs no lock, socket or thread, and the values survive the
rank. The process that serves /metrics reads the files of all its ranks at every scrape.
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

from topkube.files import replace_file
from topkube.telemetry.metrics import STEP_BUCKETS, TIERS
from topkube.telemetry.phases import PHASES, Snapshot

ABSENT = float("-inf")
"""The value of a field that was never set. The endpoint leaves out its series."""
_HEADER = struct.Struct("<8sIIiiQ")
"""Magic, version, number of fields, rank, attempt, sequence number."""
_MAGIC = b"tkmetric"
_VERSION = 2
_COUNTERS = ("steps", "step_seconds", "samples", "intra_bytes", "inter_bytes", "dense_bytes", "bound_seconds")
_GAUGES = (
    *("loss", "gradient_norm", "residual_norm", "density", "last_step", "step", "total_steps", "link_rate"),
    *("differing_ranks", "unsent_ratio", "weight_spread", "period"),
    *("predicted_exchange", "measured_exchange"),
)
CACHE = (
    *("memory_requests", "memory_misses", "disk_requests", "disk_misses"),
    *("memory_bytes", "disk_bytes", "remote_bytes", "peer_bytes"),
    *("fetches", "fetch_seconds", "waits_seconds", "evictions", "corruptions", "takeovers"),
    *("disk_state", "memory_state", "memory_used_bytes"),
)
"""The counters of this rank's data cache, with the names of `topkube.data`."""
FIELDS = (
    *_COUNTERS,
    "skipped_steps",
    *_GAUGES,
    *(f"phase {phase}" for phase in PHASES),
    *(f"cache {name}" for name in CACHE),
    *(f"bucket {index}" for index in range(len(STEP_BUCKETS) + 1)),
)
"""The fields in the order of the file. A bucket counts the steps of its range; buckets are not cumulative."""
_INDEX = {name: index for index, name in enumerate(FIELDS)}
_BUCKET, _PHASE = _INDEX["bucket 0"], {phase: _INDEX[f"phase {phase}"] for phase in PHASES}
_SIZE = _HEADER.size + 8 * len(FIELDS) + 8
_ATTEMPTS_TO_READ = 5


def build_metrics_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's metrics file in `directory`."""
    return directory / f"metrics-{rank}.bin"


class RankMetrics:
    """The metrics of a rank. `count_step` writes them to disk after each step. If the directory cannot be written, a
    message is printed once and training continues without metrics."""

    def __init__(self, directory: Path, rank: int, attempt: int = 1) -> None:
        self.values = array("d", [0.0] * len(FIELDS))
        self._rank, self._attempt, self._sequence = rank, attempt, 0
        self._file: int | None = None
        self._lock = threading.Lock()
        self._cache_hits = dict.fromkeys(TIERS, 0.0)
        for name in (*_GAUGES, *(f"cache {name}" for name in CACHE)):
            self[name] = ABSENT
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with replace_file(build_metrics_path(directory, rank)) as part:
                self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                self.flush()
            # a reader sees the file of an earlier attempt, or this whole file
        except OSError as error:
            self._give_up(error)

    def __setitem__(self, name: str, value: float) -> None:
        self.values[_INDEX[name]] = value

    def count_step(self, seconds: float, own: Snapshot, samples: int, gauges: Mapping[str, float]) -> None:
        """Count a finished step. `own` has this rank's phases and bytes in the step, `gauges` has further values by
        their names in FIELDS."""
        values = self.values
        values[_BUCKET + bisect_left(STEP_BUCKETS, seconds)] += 1
        for phase, spent in own.seconds.items():
            values[_PHASE[phase]] += spent
        bound = own.inter_bytes / values[_INDEX["link_rate"]] if values[_INDEX["link_rate"]] > 0 else 0.0
        numbers = (1, seconds, samples, own.intra_bytes, own.inter_bytes, own.dense_bytes, bound)
        for index, number in enumerate(numbers):
            values[index] += number
        for name, value in gauges.items():
            values[_INDEX[name]] = value
        self.flush()

    def store_cache_counters(self, counters: Mapping[str, float]) -> None:
        """Store the counters of the data cache; the next `count_step` writes them to disk. A request counts before it
        is known to be a miss, so misses are limited such that hits, the difference, never fall."""
        for name in CACHE:
            if name in counters:
                self[f"cache {name}"] = counters[name]
        for tier in TIERS:
            requests, misses = counters.get(f"{tier}_requests", 0.0), counters.get(f"{tier}_misses", 0.0)
            self._cache_hits[tier] = max(self._cache_hits[tier], requests - misses)
            if misses:
                self[f"cache {tier}_misses"] = requests - self._cache_hits[tier]

    def flush(self) -> None:
        """Write all values. The sequence number is at both ends, so that a reader detects a write in progress."""
        with self._lock:  # the communication thread sets the loss
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
    """The values in the file of a rank."""

    rank: int
    attempt: int
    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def buckets(self) -> list[float]:
        """The steps in each range of STEP_BUCKETS; the last element counts the steps above all ranges."""
        return [self.values[f"bucket {index}"] for index in range(len(STEP_BUCKETS) + 1)]


def read_ranks(directory: Path) -> list[RankValues]:
    """Return the values of all ranks of the newest attempt, sorted by rank. Files of an earlier attempt or another
    version and damaged files are ignored."""
    all_values = [values for path in directory.glob("metrics-*.bin") if (values := _read(path)) is not None]
    newest = max((values.attempt for values in all_values), default=0)
    return sorted((values for values in all_values if values.attempt == newest), key=lambda values: values.rank)


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
