"""A choice in the state of an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from topkube.algorithms import DENSE_WIRE, Algorithm, Choice, find_algorithm, is_known


def save_choice(choice: Choice | None, after_residuals: Choice | None) -> dict[str, Any]:
    """Return the entries of a choice, and of the one that follows when all residuals were sent, for a checkpoint."""
    return {
        "algorithm": choice.algorithm.name if choice is not None else None,
        "dense_wire": choice.dense_wire if choice is not None else None,
        "seconds": _list_seconds(choice) if choice is not None else None,
        "after_residuals": [after_residuals.algorithm.name, *_list_seconds(after_residuals)]
        if after_residuals is not None
        else None,
    }


def _list_seconds(choice: Choice) -> list[float]:
    return [choice.between, choice.inside, choice.seconds]


def find_saved_choice(state: Mapping[str, Any], ranked: Sequence[Choice]) -> Choice | None:
    """Return the saved choice, if it is one of `ranked`: a later version of TopKube may have other algorithms."""
    saved = state["algorithm"], state["dense_wire"]
    choice = next((choice for choice in ranked if (choice.algorithm.name, choice.dense_wire) == saved), None)
    if choice is None:
        return None
    between, inside, seconds = state["seconds"]
    return dataclasses.replace(choice, between=between, inside=inside, seconds=seconds)


def find_after_residuals(state: Mapping[str, Any], allowed: Sequence[Algorithm]) -> Choice | None:
    """Return the saved choice that follows when all residuals were sent, if it is one of the `allowed` ones."""
    name, *seconds = state.get("after_residuals") or [None]  # older states do not have it
    algorithm = next((algorithm for algorithm in allowed if algorithm.name == name), None)
    return Choice(algorithm, DENSE_WIRE.default, *seconds) if algorithm is not None else None


def find_saved_algorithm(state: Mapping[str, Any] | None) -> Algorithm | None:
    """Return the algorithm that `auto` or `dense` stood for in what `Tuning.save` returned; None if there is none, or
    if this version of TopKube does not have it."""
    name = state and state["algorithm"]
    return find_algorithm(name) if name and is_known(name) else None
