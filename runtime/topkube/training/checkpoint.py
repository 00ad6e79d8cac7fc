"""Checkpoints on a directory that all ranks share: written aside, published by one rename, so that a complete one is
always there.

`DIRECTORY/step-00000500/` holds `shared.pt` (model, optimizer, sampler: rank 0's), `rank-00000.pt` for every rank
(its residuals and random generators) and `checkpoint.json` (who wrote it). Files are read with `weights_only=True`:
reading one runs no code.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from topkube.errors import CheckpointError
from topkube.training.agreement import agreement
from topkube.training.residuals import redistribute
from topkube.world import World


class CheckpointStore:
    """The checkpoints in one directory. All methods are called by all ranks together."""

    def __init__(self, directory: Path, keep: int, world: World, attempt: int = 1) -> None:
        self.directory, self.keep, self._world, self._attempt = directory, keep, world, attempt

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, None where there is none."""
        step = -1
        if self._world.rank == 0:
            step = max((number for number, _ in self._complete()), default=-1)
        agreed = int(agreement()([step if self._world.rank == 0 else 0])[0])
        return agreed if agreed >= 0 else None

    def save(self, step: int, shared: Callable[[], dict[str, Any]], own: dict[str, Any]) -> None:
        """Publishes a checkpoint of `step`; `shared` is called on rank 0. Raises CheckpointError on all ranks when
        one of them fails; what was there before stays."""
        final = self.directory / f"step-{step:08d}"
        aside = self.directory / f".step-{step:08d}.attempt-{self._attempt}.tmp"
        lead = self._world.rank == 0

        def prepare() -> None:
            if lead:
                self.directory.mkdir(parents=True, exist_ok=True)
                for stale in self.directory.glob(".step-*.tmp"):
                    shutil.rmtree(stale)
                aside.mkdir()

        def write() -> None:
            _write(aside / f"rank-{self._world.rank:05d}.pt", own)
            if lead:
                _write(aside / "shared.pt", shared())

        def publish() -> None:
            if not lead:
                return
            about = {"step": step, "node_ranks": self._world.node_ranks, "attempt": self._attempt, "time": time.time()}
            with (aside / "checkpoint.json").open("w", encoding="utf-8") as file:
                json.dump(about, file)
                _sync(file)
            _sync_directory(aside)
            if final.exists():
                final.rename(self.directory / f".replaced-{final.name}.tmp")
            aside.rename(final)
            _sync_directory(self.directory)
            for _, old in sorted(self._complete())[: -self.keep]:
                shutil.rmtree(old)
            for replaced in self.directory.glob(".replaced-*.tmp"):
                shutil.rmtree(replaced)

        for stage in (prepare, write, publish):
            self._together(stage, f"the checkpoint of step {step} could not be written to {self.directory}")

    def load(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(what all ranks share, what belongs to this rank) of the checkpoint of `step`. In another world than it was
        written in, the rank's part holds residuals cut anew, and no random generators."""
        place, loaded = self.directory / f"step-{step:08d}", []

        def read() -> None:
            about = json.loads((place / "checkpoint.json").read_text(encoding="utf-8"))
            if [list(ranks) for ranks in self._world.node_ranks] == about["node_ranks"]:
                own = _read(place / f"rank-{self._world.rank:05d}.pt")
            else:
                own = {"saved": sum(len(ranks) for ranks in about["node_ranks"])}
            loaded.extend([_read(place / "shared.pt"), own])

        self._together(read, f"the checkpoint {place} could not be read")
        return loaded[0], loaded[1]

    def residuals_of(self, step: int, ranks: int) -> Iterator[dict[str, Any]]:
        """What `ranks` ranks of another world saved of their residuals, one file at a time."""
        place = self.directory / f"step-{step:08d}"
        for rank in range(ranks):
            yield _read(place / f"rank-{rank:05d}.pt")["residuals"]

    def _complete(self) -> list[tuple[int, Path]]:
        found = self.directory.glob("step-*/checkpoint.json")
        return [(int(path.parent.name.removeprefix("step-")), path.parent) for path in found]

    def _together(self, stage: Callable[[], None], what: str) -> None:
        """Runs a stage on every rank; raises on all of them when it failed on one, so that none waits for another."""
        problem: Exception | None = None
        try:
            stage()
        except Exception as error:
            problem = error
        failed = int(agreement()([problem is not None])[0])
        if problem is not None:
            raise CheckpointError(
                f"{what}: {problem}",
                cause="no space, no permission, or a damaged file",
                next_step="see to the directory",
            ) from problem
        if failed:
            raise CheckpointError(
                f"{what}: {failed} other rank(s) failed",
                cause="the directory is not shared by all nodes, or is full",
                next_step="read the other ranks' messages",
            )


def recut(saved: Iterable[dict[str, Any]], copy: int, copies: int) -> dict[str, Any]:
    """The "residuals" of a state dict for one rank of a new world."""
    return {"copy": copy, "copies": copies, "pieces": redistribute(saved, copy, copies)}


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        _sync(file)


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
