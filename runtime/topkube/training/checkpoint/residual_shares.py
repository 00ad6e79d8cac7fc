"""Residuals for a world with other nodes or ranks than the world that saved them.

The sum over all copies of an element is the part of its gradient that was not sent yet, and that sum stays the same.
Every new copy takes whole old copies, or an equal part of one old copy, so that a rank reads the files of a few ranks
only: with P ranks before and after, all ranks together read P files instead of P squared. What it reads is added up at
once: with a tenth of the ranks, it needs the memory of one old copy, not of ten.

Factors are no part of that sum: all nodes must go on with the same bits, so every new copy takes them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from topkube.training.exchange.reduction.residuals import Pieces, is_factor


def compute_shares(old_copies: int, copy: int, copies: int) -> dict[int, float]:
    """Return the old copies that copy number `copy` of `copies` takes, with its share of each. Over all new copies, the
    shares of an old copy add up to 1."""
    if copies <= old_copies:
        return {old: 1.0 for old in range(copy, old_copies, copies)}
    old = copy % old_copies
    return {old: 1.0 / len(range(old, copies, old_copies))}


def recut(saved: Iterable[Mapping[str, Any]], copy: int, copies: int) -> dict[str, Any]:
    """Return the "residuals" of a state dict for copy number `copy` of `copies`; `saved` holds the "residuals" that
    ranks of the other world saved. `saved` may also contain residuals from which this copy takes nothing.

    Every rank of the new copy gets the same pieces: their names are "whole". Ranks that save such pieces before they
    were used save the same values, so pieces that are "whole" count once per old copy.

    With error feedback in the weights, each old copy has a "weight". Pieces are then multiplied by it, and "mass" is
    the sum of the weights that the new copy takes. "owners", what old copies owe of the mean of all nodes, is not
    weighted."""
    weights: dict[int, float] = {}
    pieces: Pieces = {}
    owners: Pieces = {}
    counted: set[tuple[int, str]] = set()
    for state in saved:
        share = compute_shares(state["copies"], copy, copies).get(state["copy"])
        if share is None:
            continue
        for name, entries in state.get("owners", {}).items():
            _add(owners, name, entries, share)
        is_of_weights = "weight" in state
        if is_of_weights:  # error feedback in the weights: a copy counts by its node's share of the ranks
            share *= state["weight"]
            weights[state["copy"]] = share
        whole = {(state["copy"], name) for name in state.get("whole", ())}
        repeated = {name for _, name in whole & counted}
        counted |= whole
        for name, entries in state["pieces"].items():
            if is_factor(name) and not is_of_weights:
                pieces.setdefault(name, entries)
            elif name not in repeated:
                _add(pieces, name, entries, share)
    own = {"copy": copy, "copies": copies, "pieces": pieces, "whole": sorted(pieces)}
    return own | ({"mass": sum(weights.values()), "owners": owners} if weights else {})


def _add(sums: Pieces, name: str, entries: Sequence[tuple[int, torch.Tensor]], share: float) -> None:
    """Add `share` of the `entries` of a name to `sums`. Entries of the same elements become one entry. The values of
    `entries` do not change."""
    summed = sums.setdefault(name, [])
    places = {(first, values.numel()): place for place, (first, values) in enumerate(summed)}
    for first, values in entries:
        part = values if share == 1.0 else values * share
        place = places.setdefault((first, values.numel()), len(summed))
        if place < len(summed):
            summed[place] = first, summed[place][1] + part
        else:
            summed.append((first, part))
