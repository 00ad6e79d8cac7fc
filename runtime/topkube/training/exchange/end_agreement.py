"""The agreement of all ranks at the end of a backward: one message with the report of each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from topkube.errors import TrainingError
from topkube.training.exchange.buckets.rank_comparison import RankComparison
from topkube.training.ranks.agreement import find_differing_ranks, name_ranks
from topkube.training.ranks.queued_agreement import QueuedAgreement


@dataclass(frozen=True)
class EndReport:
    """The report of a rank at the end of a backward."""

    is_nonfinite: bool
    """True if the rank saw a value that was not finite."""
    has_idle: bool
    """True if the rank did not use one of its parameters."""
    has_unplanned: bool
    """True if the rank has a gradient of a parameter without a bucket."""
    is_saved: bool
    """True if the rank has saved its state since the last exchange."""
    can_gather_late: bool
    """True if the next forward may gather the gradients (DeAR)."""
    steps: int
    """The number of the rank's updates."""
    trainable_digest: float
    """The digest of the rank's trainable parameters."""
    weights_digest: float
    """The digest of the rank's weights, 0 if they are not compared."""
    loss_scale: float
    """The factor of a gradient scaler on the loss, 1 if it is not compared."""


@dataclass(frozen=True)
class EndAgreement:
    """The agreement of the ranks. A field is True if it is True in the report of any rank; `can_gather_late` and
    `has_equal_weights` are True if that holds for all ranks."""

    is_nonfinite: bool
    has_idle: bool
    has_unplanned: bool
    is_saved: bool
    can_gather_late: bool
    has_equal_weights: bool


def agree_at_end(agreement: QueuedAgreement, comparison: RankComparison, own: EndReport) -> EndAgreement:
    """Return the agreement of all ranks on their reports. All ranks call this together. Raises TrainingError on all
    ranks if their steps, their trainable parameters or the factors of their gradient scalers differ."""
    if agreement.world.size == 1:
        has_equal_weights = True
        return EndAgreement(
            own.is_nonfinite, own.has_idle, own.has_unplanned, own.is_saved, own.can_gather_late, has_equal_weights
        )
    trainable, weights, scale = own.trainable_digest, own.weights_digest, own.loss_scale
    # A factor of 1 is not compared: a rank that has no data sends zeros, and may have no scaler.
    has_scale = scale != 1
    numbers: dict[str, float] = {
        "is_nonfinite": own.is_nonfinite,
        "has_idle": own.has_idle,
        "trainable": trainable,
        "-trainable": -trainable,
        "weights": weights,
        "-weights": -weights,
        "has_unplanned": own.has_unplanned,
        "steps": own.steps,
        "-steps": -own.steps,
        "is_saved": own.is_saved,
        "cannot_gather_late": not own.can_gather_late,
        "scale": scale if has_scale else -math.inf,
        "-scale": -scale if has_scale else -math.inf,
    }
    maxima = dict(zip(numbers, agreement.maximum(list(numbers.values())), strict=True))

    def are_equal(name: str) -> bool:
        """Return True if all ranks sent the same number: its largest value is also its smallest."""
        return bool(maxima[name] == -maxima[f"-{name}"])

    if not are_equal("steps"):
        _raise_different_steps(agreement, own.steps)
    if not are_equal("trainable"):
        comparison.raise_different_trainable()
    if not are_equal("scale") and maxima["scale"] > -math.inf:  # -inf: no rank has a factor
        _raise_different_scales(agreement, scale)
    return EndAgreement(
        is_nonfinite=bool(maxima["is_nonfinite"] > 0),
        has_idle=bool(maxima["has_idle"] > 0),
        has_unplanned=bool(maxima["has_unplanned"]),
        is_saved=bool(maxima["is_saved"] > 0),
        can_gather_late=not maxima["cannot_gather_late"],
        has_equal_weights=are_equal("weights"),
    )


def _raise_different_steps(agreement: QueuedAgreement, steps: int) -> None:
    rows = agreement.gather([steps])[:, 0]
    ranks = find_differing_ranks(rows)
    raise TrainingError(
        f"{name_ranks(ranks)} made a different number of optimizer steps than the other ranks ({int(rows.min())} to"
        f" {int(rows.max())})",
        cause="step() is called on some ranks only, or ranks loaded different states",
        next_step="call step() on every rank after the same backward()",
    )


def _raise_different_scales(agreement: QueuedAgreement, scale: float) -> None:
    rows = agreement.gather([scale])[:, 0]
    raise TrainingError(
        f"the gradient scalers of {name_ranks(find_differing_ranks(rows))} have another factor than those of the other"
        f" ranks ({rows.min():g} to {rows.max():g}): the mean of their gradients has no meaning",
        cause="a rank has loaded the state of its GradScaler, or created it with another factor",
        next_step="load the same state of the scaler on every rank",
    )
