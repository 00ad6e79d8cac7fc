"""`checkpoint.json`, which is written last: the writer and the world of a checkpoint, and the digests of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.errors import CheckpointError
from topkube.training.checkpoint.format.state_file import Damaged, FileDigest, read_text, wait_until_seen

FORMAT = 2
"""The format of the files in a checkpoint. Format 1 had no typed encoding. Later formats are refused."""
NAME = "checkpoint.json"


def name_rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


SHARED_FILE = "shared.pt"


@dataclass(frozen=True)
class Manifest:
    """The contents of `checkpoint.json`. `copies` holds, per rank, the number of the copy of the residuals that the
    rank has a part of. `number_of_copies` is their number in the world. Both are None in format 1."""

    node_ranks: tuple[tuple[int, ...], ...]
    files: dict[str, FileDigest]
    copies: tuple[int, ...] | None
    number_of_copies: int | None

    def list_ranks(self, copy: int) -> list[int]:
        """Return the ranks that hold a part of copy number `copy`; all ranks if the format does not contain it."""
        if self.copies is None:
            return list(range(sum(map(len, self.node_ranks))))
        return [rank for rank, own in enumerate(self.copies) if own == copy]

    def format_text(self, step: int, job: str, attempt: int, time: float) -> str:
        fields = {
            "format": FORMAT,
            "step": step,
            "job": job,
            "attempt": attempt,
            "time": time,
            "node_ranks": self.node_ranks,
            "residual_copies": {"number": self.number_of_copies, "of_ranks": self.copies},
            "files": {name: {"bytes": file.bytes, "xxh3": f"{file.digest:016x}"} for name, file in self.files.items()},
        }
        return json.dumps(fields)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. Waits for a manifest that is not complete yet
    (state_file.SEEN_WITHIN_SECONDS). Raises Damaged, CheckpointError if a newer TopKube wrote the checkpoint, and
    OSError."""
    parsed_manifests: list[dict[str, Any]] = []

    def is_seen() -> bool:
        try:
            parsed_manifests.append(_parse(folder))
        except Damaged:
            return False
        return True

    fields = parsed_manifests[0] if wait_until_seen(is_seen, folder) else _parse(folder)
    return _build_manifest(fields, folder)


def is_manifest_readable(folder: Path) -> bool:
    """Return True if the manifest in `folder` exists now and this version can read it."""
    try:
        _build_manifest(_parse(folder), folder)
    except (Damaged, CheckpointError, OSError):
        return False
    return True


def has_all_files(folder: Path) -> bool:
    """Return True if this version can read the manifest in `folder`, and all files that it lists have their lengths.
    Their contents are not read."""
    try:
        manifest = _build_manifest(_parse(folder), folder)
        with os.scandir(folder) as entries:
            lengths = {entry.name: entry.stat().st_size for entry in entries}
    except (Damaged, CheckpointError, OSError):
        return False
    return all(lengths.get(name) == file.bytes for name, file in manifest.files.items())


def _parse(folder: Path) -> dict[str, Any]:
    """Return the fields of `checkpoint.json`. The format is checked first, because a newer format may have other
    fields."""
    try:
        fields = json.loads(read_text(folder / NAME))
        number = fields["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _make_changed_error(folder) from error
    if not isinstance(number, int):
        raise _make_changed_error(folder)
    if number > FORMAT:
        raise CheckpointError(
            f"{folder} has format {number}, this version reads up to {FORMAT}",
            cause="a newer TopKube wrote it",
            next_step="continue with that version, or use another directory",
        )
    parsed: dict[str, Any] = fields
    return parsed


def _build_manifest(fields: dict[str, Any], folder: Path) -> Manifest:
    try:
        ranks = tuple(tuple(int(rank) for rank in ranks) for ranks in fields["node_ranks"])
        files = {
            str(name): FileDigest(int(entry["bytes"]), int(entry["xxh3"], 16))
            for name, entry in fields["files"].items()
        }
        copies = fields["residual_copies"] if fields["format"] > 1 else None
        if copies is None:
            return Manifest(ranks, files, None, None)
        of_ranks = _read_numbers(copies["of_ranks"])
        if len(of_ranks) != sum(map(len, ranks)):
            raise _make_changed_error(folder)
        return Manifest(ranks, files, of_ranks, int(copies["number"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _make_changed_error(folder) from error


def _read_numbers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _make_changed_error(folder: Path) -> Damaged:
    return Damaged(f"{folder / NAME} has changed since it was written")
