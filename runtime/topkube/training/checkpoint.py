"""Checkpoints on a directory that all ranks share: written aside, published by one rename, so that a complete one is
always there.

`DIRECTORY/step-00000500.run-00002/` holds `shared.pt` (model, optimizer, sampler: rank 0's), `rank-00000.pt` for every
rank (its residuals and random generators) and `checkpoint.json`, written last: who wrote it, and each file's length and
checksum. The run is numbered by its claim (`claims.py`), so no run writes over another's. A checkpoint that was damaged
since is passed over for the one before.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topkube.errors import CheckpointError, StorageError
from topkube.training.agreement import agreement
from topkube.training.claims import Claim
from topkube.training.residuals import redistribute
from topkube.training.storage import Damaged, Written, read_state, read_text, sync_directory, write_state, write_text
from topkube.world import World

FORMAT = 1
"""Of the files in a checkpoint. A later one is refused."""
_NAME = re.compile(r"step-(\d+)\.run-(\d+)(?:\.(\d+))?")
_SEEN_WITHIN_SECONDS = 10.0
"""How long another node's file may take to appear here."""


@dataclass(frozen=True, order=True)
class Place:
    """A published checkpoint. Later runs come after earlier ones, whatever the step: a run that was given up may have
    gone on for a while. `again` counts further ones of the same step and run, from 1."""

    run: int
    step: int
    again: int = 0

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.run-{self.run:05d}" + (f".{self.again}" if self.again else "")


@dataclass(frozen=True)
class Loaded:
    """`shared` is the same on all ranks; `own` holds this rank's "residuals" and, in the world that wrote them, random
    "generators"."""

    place: Place
    shared: dict[str, Any]
    own: dict[str, Any]


class CheckpointStore:
    """The checkpoints in one directory. All methods are called by all ranks together; what fails on one rank raises on
    all of them, so that none waits for another."""

    def __init__(self, directory: Path, keep: int, world: World, job: str = "", attempt: int = 1) -> None:
        self.directory, self.keep = directory, keep
        self._world, self._job, self._attempt = world, job, attempt
        self._lead = world.rank == 0
        self._claim: Claim | None = None
        self._run = 0
        self._damaged: set[Place] = set()

    def claim(self) -> None:
        """From here on this run writes to the directory, and no earlier one. Raises CheckpointError."""

        def take() -> None:
            if self._lead:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._claim = Claim.make(self.directory, self._job, self._attempt)

        self._together(take, f"the checkpoint directory {self.directory} cannot be used")
        self._run = int(agreement()([self._claim.run if self._claim else 0])[0])

    def load(self, copy: int, copies: int) -> Loaded | None:
        """The newest checkpoint that is whole, None where there never was one. In another world than it was written in,
        `own` holds residuals cut anew for copy number `copy` of `copies`, and no random generators.

        Warns of each damaged one. Raises CheckpointError where all are damaged, or one cannot be read for now.
        """
        places = sorted(self._published(), reverse=True) if self._lead else []
        for number in range(int(agreement()([len(places)])[0])):
            mine = [places[number].run, places[number].step, places[number].again] if self._lead else [0, 0, 0]
            place = Place(*(int(value) for value in agreement()(mine)))
            loaded: list[Loaded] = []

            def read(place: Place = place, loaded: list[Loaded] = loaded) -> None:
                loaded.append(self._read(place, copy, copies))

            try:
                self._together(read, f"the checkpoint {self.directory / place.name} cannot be read")
                return loaded[0]
            except _PassedOver as passed:
                self._damaged.add(place)
                if passed.reason:
                    _warn(f"{passed.reason}; going back to the checkpoint before")
        if self._damaged:
            raise CheckpointError(
                f"none of the {len(self._damaged)} checkpoints in {self.directory} can be read",
                cause="the files were changed or cut short after they were written",
                next_step="bring back one of them, or empty the directory to train from the start",
            )
        return None

    def save(self, step: int, shared: Callable[[], dict[str, Any]], own: dict[str, Any]) -> None:
        """Publishes a checkpoint of `step`; `shared` is called on rank 0. What was there before stays until the new one
        is published. Raises StorageError where the disk refuses (training may go on), CheckpointError where a later run
        has taken over."""
        what = f"the checkpoint of step {step} could not be written to {self.directory}"
        aside = self.directory / f".step-{step:08d}.run-{self._run:05d}.tmp"
        written: dict[str, Written] = {}

        def prepare() -> None:
            if self._lead:
                assert self._claim is not None, "claim() comes first"
                self._claim.check()
                self._sweep()
                aside.mkdir()

        def write() -> None:
            written["own"] = write_state(aside / _rank_file(self._world.rank), own)
            if self._lead:
                written["shared"] = write_state(aside / "shared.pt", shared())

        def publish() -> None:
            if self._lead:
                self._publish(step, aside, {"shared.pt": written["shared"], **files})

        try:
            self._together(prepare, what)
            self._together(write, what)
            files = self._gather(written["own"])
            self._together(publish, what)
        except CheckpointError:
            if self._lead:
                shutil.rmtree(aside, ignore_errors=True)  # what is half written would fill the disk
            raise

    # ---- writing

    def _gather(self, written: Written) -> dict[str, Written]:
        """What every rank has written, by file name."""
        numbers = np.zeros((self._world.size, 3))
        numbers[self._world.rank] = written.bytes, written.digest >> 32, written.digest & 0xFFFFFFFF
        rows = agreement()(numbers.reshape(-1).tolist()).reshape(-1, 3).astype(np.uint64).tolist()
        return {_rank_file(rank): Written(count, high << 32 | low) for rank, (count, high, low) in enumerate(rows)}

    def _publish(self, step: int, aside: Path, files: dict[str, Written]) -> None:
        assert self._claim is not None
        for name, wanted in files.items():
            _await_file(aside / name, wanted.bytes)
        about = {
            "format": FORMAT,
            "step": step,
            "job": self._job,
            "attempt": self._attempt,
            "time": time.time(),
            "node_ranks": self._world.node_ranks,
            "files": {name: {"bytes": one.bytes, "xxh3": f"{one.digest:016x}"} for name, one in files.items()},
        }
        write_text(aside / "checkpoint.json", json.dumps(about))
        sync_directory(aside)
        self._claim.check()
        published = self._published()
        again = 1 + max((one.again for one in published if (one.run, one.step) == (self._run, step)), default=-1)
        aside.rename(self.directory / Place(self._run, step, again).name)
        sync_directory(self.directory)
        whole = sorted(set(published) - self._damaged)
        for old in [*self._damaged.intersection(published), *whole[: max(0, len(whole) + 1 - self.keep)]]:
            self._remove(old)

    def _remove(self, place: Place) -> None:
        """Out of sight first: half a checkpoint would look like a damaged one."""
        path = self.directory / place.name
        gone = self.directory / f".{place.name}.tmp"
        try:
            path.rename(gone)
        except OSError as error:
            _warn(f"the old checkpoint {path} cannot be removed: {error.strerror}")
            return
        shutil.rmtree(gone, ignore_errors=True)
        self._damaged.discard(place)

    def _sweep(self) -> None:
        """Removes what broken-off saves, and removals, of this run and earlier ones have left."""
        for path in self.directory.glob(".step-*.tmp"):
            found = _NAME.fullmatch(path.name.removeprefix(".").removesuffix(".tmp"))
            if found is None or int(found[2]) <= self._run:
                shutil.rmtree(path, ignore_errors=True)

    # ---- reading

    def _published(self) -> list[Place]:
        found = (_NAME.fullmatch(path.name) for path in self.directory.glob("step-*"))
        return [Place(int(name[2]), int(name[1]), int(name[3] or 0)) for name in found if name]

    def _read(self, place: Place, copy: int, copies: int) -> Loaded:
        path = self.directory / place.name
        try:
            about = json.loads(read_text(path / "checkpoint.json"))
            known = int(about["format"]) <= FORMAT
            ranks = [list(ranks) for ranks in about["node_ranks"]]
            files = {name: Written(int(one["bytes"]), int(one["xxh3"], 16)) for name, one in about["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{path}/checkpoint.json has changed since it was written") from error
        if not known:
            raise CheckpointError(
                f"{path} has format {about['format']}, this version reads up to {FORMAT}",
                cause="a newer TopKube wrote it",
                next_step="go on with that version, or use another directory",
            )

        def file(name: str) -> dict[str, Any]:
            if name not in files:
                raise Damaged(f"{path}/checkpoint.json has changed since it was written")
            return read_state(path / name, files[name])

        if [list(ranks) for ranks in self._world.node_ranks] == ranks:
            own = file(_rank_file(self._world.rank))
        else:
            saved = (file(_rank_file(rank))["residuals"] for rank in range(sum(map(len, ranks))))
            own = {"residuals": recut(saved, copy, copies)}
        return Loaded(place, file("shared.pt"), own)

    # ---- together

    def _together(self, stage: Callable[[], None], what: str) -> None:
        """Runs a stage on every rank. Raises on all of them when it failed on one: CheckpointError, StorageError where
        all failures are the disk's, _PassedOver where files are damaged."""
        problem: Exception | None = None
        try:
            stage()
        except Exception as error:
            problem = error
        damaged, storage = isinstance(problem, Damaged), isinstance(problem, OSError)
        counts = agreement()([damaged, storage, problem is not None and not damaged and not storage]).tolist()
        if not any(counts):
            return
        if isinstance(problem, CheckpointError):
            raise problem
        if counts[0] and not any(counts[1:]):
            raise _PassedOver(str(problem) if damaged else "")
        kind = CheckpointError if counts[2] else StorageError
        if problem is not None:
            raise kind(f"{what}: {problem}", cause=_cause(problem), next_step="see to the directory") from problem
        raise kind(
            f"{what}: {int(sum(counts))} other rank(s) failed",
            cause="no space, no permission, or a directory that not all nodes share",
            next_step="read the other ranks' messages",
        )


class _PassedOver(Exception):
    """The files of a checkpoint are damaged; `reason` is empty where only other ranks' are."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def recut(saved: Iterable[dict[str, Any]], copy: int, copies: int) -> dict[str, Any]:
    """The "residuals" of a state dict for one rank of a new world."""
    return {"copy": copy, "copies": copies, "pieces": redistribute(saved, copy, copies)}


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _await_file(path: Path, size: int) -> None:
    """Another node's file may take a moment to appear. Raises CheckpointError where it does not."""
    end = time.monotonic() + _SEEN_WITHIN_SECONDS
    while not path.exists() or path.stat().st_size != size:
        if time.monotonic() > end:
            raise CheckpointError(
                f"rank 0 does not see {path} as it was written",
                cause="the directory is not the same on all nodes",
                next_step="put checkpoints on storage that all nodes share (a ReadWriteMany claim)",
            )
        time.sleep(0.02)


def _cause(problem: Exception) -> str:
    if isinstance(problem, PermissionError):
        return "this user may not write there, or the claim is mounted read-only"
    return "no space, a read-only or a failing disk" if isinstance(problem, OSError) else "state that cannot be saved"


def _warn(text: str) -> None:
    print(f"topkube: warning: {text}", file=sys.stderr, flush=True)
