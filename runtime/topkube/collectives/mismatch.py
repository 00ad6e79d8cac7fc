"""The comparison of calls that differ between ranks, for the message of a MismatchError."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from topkube.control import name_ranks
from topkube.world import WaitSeries, World

_DESCRIPTION_BYTES = 160
"""What ranks send each other of a description. A longer one ends with a hash of the whole."""
_LISTED = 8
"""Most descriptions that a message lists."""


def describe_ranks(
    world: World, comm: Any, description: str, series: WaitSeries = WaitSeries.COLLECTIVE
) -> tuple[int, str]:
    """Return the number of different descriptions, and which ranks have each: "ranks 0, 1: …; rank 2: …". All ranks of
    `comm`, which are those of `world`, call this after they learn that their calls differ."""
    own = np.zeros(_DESCRIPTION_BYTES, np.uint8)
    text = _shorten(description.encode())
    own[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = np.empty((world.size, _DESCRIPTION_BYTES), np.uint8)
    world.wait([comm.Iallgather(own, everyone)], "the comparison of mismatched collectives", series=series)
    groups: dict[str, list[int]] = {}
    for rank, row in enumerate(everyone):
        groups.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(world.members[rank])
    listed = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in list(groups.items())[:_LISTED])
    return len(groups), listed + (f"; and {len(groups) - _LISTED} more" if len(groups) > _LISTED else "")


def _shorten(text: bytes) -> bytes:
    """Return `text`; if it is too long, its beginning and a hash of the whole."""
    if len(text) <= _DESCRIPTION_BYTES:
        return text
    end = f"... (hash of the whole: {xxhash.xxh3_64_hexdigest(text)})".encode()
    return text[: _DESCRIPTION_BYTES - len(end)] + end
