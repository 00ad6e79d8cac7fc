"""The comparisons of weights by all ranks: at the first step, and with the agreement at the end of a backward."""

from __future__ import annotations

from collections.abc import Callable

from topkube.training.exchange.step.weights_check import WeightsCheck
from topkube.training.ranks.queued_agreement import QueuedAgreement


class WeightsComparison:
    """The comparisons of one optimizer's weights by `check`. A digest that is due after a step waits for the end of the
    next backward, whose agreement carries it."""

    def __init__(self, agreement: QueuedAgreement, check: WeightsCheck) -> None:
        self.check = check
        self._agreement = agreement
        self._is_first = True
        self._digest: float | None = None

    @property
    def is_first_due(self) -> bool:
        """True if the next step is the first since the optimizer was created or loaded, and compares weights."""
        return self._is_first and self._agreement.world.size > 1 and self.check.is_due(0, True)

    def expect_first_step(self) -> None:
        """Note that the optimizer was created or loaded: all ranks compare their weights at the next step."""
        self._is_first = True

    def compare_first(self) -> None:
        """Raise TrainingError, or warn, if ranks have different weights at the first step after the optimizer was
        created or loaded. All ranks call this together."""
        if not self.is_first_due:
            return
        self._is_first = False
        digest = self.check.compute_digest()
        high, low = self._agreement.maximum([digest, -digest])
        self.report(digest, high == -low, True)

    def note_step(self, steps: int, finish_late: Callable[[], None]) -> None:
        """Compute the digest after `steps` updates if a comparison is due. `finish_late` finishes the last update."""
        if self._agreement.world.size > 1 and self.check.is_due(steps, False):
            finish_late()
            self._digest = self.check.compute_digest()

    def withdraw(self) -> None:
        """Compare nothing for a step that the device has skipped."""
        self._digest = None

    def take_digest(self) -> float | None:
        """Return the digest that the ranks compare now, None if no comparison is due."""
        digest, self._digest = self._digest, None
        return digest

    def report(self, digest: float, is_equal: bool, first: bool) -> None:
        """Raise TrainingError, or warn on rank 0, if the weights differ. All ranks call this together."""
        self.check.differing = 0
        if not is_equal:
            difference = self._agreement.run(lambda ranks: self.check.describe_difference(ranks, digest, first))
            self.check.report(difference, first, self._agreement.world.rank)
