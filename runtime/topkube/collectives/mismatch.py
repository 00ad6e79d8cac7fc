"""The comparison of calls that differ between ranks, for the message of a MismatchError."""

from __future__ import annotations

from typing import Any

import numpy as np

from topkube.control import name_ranks
from topkube.world import WaitSeries, World

_DESCRIPTION_BYTES = 160
_LISTED = 8
"""Most descriptions that a message lists."""


def describe_ranks(
    world: World, comm: Any, description: str, series: WaitSeries = WaitSeries.COLLECTIVE
) -> tuple[int, str]:
    """Return the number of different descriptions, and which ranks have each: "ranks 0, 1: …; rank 2: …". All ranks of
    `comm`, which are those of `world`, call this after they learn that their calls differ."""
    own = np.zeros(_DESCRIPTION_BYTES, np.uint8)
    text = description.encode()[:_DESCRIPTION_BYTES]
    own[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = np.empty((world.size, _DESCRIPTION_BYTES), np.uint8)
    world.wait([comm.Iallgather(own, everyone)], "the comparison of mismatched collectives", series=series)
    groups: dict[str, list[int]] = {}
    for rank, row in enumerate(everyone):
        groups.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(world.members[rank])
    listed = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in list(groups.items())[:_LISTED])
    return len(groups), listed + (f"; and {len(groups) - _LISTED} more" if len(groups) > _LISTED else "")
