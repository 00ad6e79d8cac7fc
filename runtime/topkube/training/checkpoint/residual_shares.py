"""Residuals for a world with other nodes or ranks than the world that saved them.

The sum over all copies of an element is the part of its gradient that was not sent yet, and that sum stays the same.
Every new copy takes whole old copies, or an equal part of one old copy, so that a rank reads the files of a few ranks
only: with P ranks before and after, all ranks together read P files instead of P squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from topkube.training.exchange.reduction.residuals import Pieces


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
    owners: list[Pieces] = []
    pieces = _merge(_take_parts(saved, copy, copies, weights, owners))
    own = {"copy": copy, "copies": copies, "pieces": pieces, "whole": sorted(pieces)}
    return own | ({"mass": sum(weights.values()), "owners": _merge(owners)} if weights else {})


def _merge(parts: Iterable[Pieces]) -> Pieces:
    """Return the pieces of all parts, by name."""
    merged: Pieces = {}
    for pieces in parts:
        for name, entries in pieces.items():
            merged.setdefault(name, []).extend(entries)
    return merged


def _take_parts(
    saved: Iterable[Mapping[str, Any]],
    copy: int,
    copies: int,
    weights: dict[int, float],
    owners: list[Pieces],
) -> Iterator[Pieces]:
    """Yield the parts that the new copy takes. Fill `weights` with the weight of each old copy in them, and `owners`
    with the parts of what old copies owe of the mean of all nodes."""
    counted: set[tuple[int, str]] = set()
    for state in saved:
        share = compute_shares(state["copies"], copy, copies).get(state["copy"])
        if share is None:
            continue
        owners.append(_scale(state.get("owners", {}), share))
        if "weight" in state:  # error feedback in the weights: a copy counts by its node's share of the ranks
            share *= state["weight"]
            weights[state["copy"]] = share
        whole = {(state["copy"], name) for name in state.get("whole", ())}
        repeated = {name for _, name in whole & counted}
        counted |= whole
        pieces = {name: entries for name, entries in state["pieces"].items() if name not in repeated}
        yield _scale(pieces, share)


def _scale(pieces: Pieces, share: float) -> Pieces:
    return {
        name: [(first, values if share == 1.0 else values * share) for first, values in entries]
        for name, entries in pieces.items()
    }
