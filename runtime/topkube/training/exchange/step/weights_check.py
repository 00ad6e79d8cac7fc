"""A checksum of the weights, which all ranks compare at intervals: data-parallel ranks must have the same weights.

Nothing else shows a difference: after a missing broadcast, a random number that only one rank draws, or a step that
only some ranks make, the weights differ while the losses look plausible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from topkube.errors import TrainingError
from topkube.training.exchange.buckets.parameter import Parameter, view_real
from topkube.training.exchange.step.checksums import hash_bytes, sum_bits
from topkube.training.ranks.agreement import Agreement, find_differing_ranks, name_ranks
from topkube.training.reporting.warning import warn


class WeightsCheck:
    """The comparison of an optimizer's weights every `every` steps, and at the first step after it was created or
    loaded.

    `mode` is "error", "warn" or "off". `differing` is the number of ranks whose weights differed from those of most
    ranks in the last comparison.
    """

    def __init__(self, parameters: list[Parameter], mode: str, every: int) -> None:
        self.differing = 0
        self._parameters, self._mode, self._every = parameters, mode, every

    def is_due(self, steps: int, first: bool) -> bool:
        """Return True if the exchange after `steps` steps compares weights. The same on all ranks."""
        return self._mode != "off" and (first or steps % self._every == 0)

    def compute_digest(self) -> float:
        """Return a digest of all weights, of 53 bits, which float64 represents exactly."""
        checksums = _compute_checksums([view_real(parameter.tensor) for parameter in self._parameters])
        return _hash(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))

    def describe_difference(self, agreement: Agreement, digest: float, first: bool) -> str:
        """Return a sentence that names the ranks whose weights differ, and a parameter that differs. All ranks call
        this together if their digests differ."""
        rows = agreement.gather([digest])[:, 0]
        ranks = find_differing_ranks(rows)
        self.differing = len(ranks)
        checksums = _compute_checksums([view_real(parameter.tensor) for parameter in self._parameters])
        values = [_hash(checksum.to_bytes(8, "little")) for checksum in checksums]
        low, high = agreement.maximum([-value for value in values]), agreement.maximum(values)
        different = [p.name for p, least, most in zip(self._parameters, -low, high, strict=True) if least != most]
        named = (
            f"{different[0]} and {len(different) - 1} more differ" if len(different) > 1 else f"{different[0]} differs"
        )
        if first:
            return f"ranks start from different weights: {name_ranks(ranks)} differ from the other ranks ({named})"
        return f"the weights of {name_ranks(ranks)} differ from those of the other ranks ({named})"

    def explain(self, first: bool) -> tuple[str, str]:
        """Return the likely cause of the difference that `describe_difference` described last, and the next step."""
        if first:
            return (
                "topkube.broadcast_parameters(model) was not called, or weights changed on some ranks after it",
                "call it before the first step; after a resume, load the same checkpoint on every rank",
            )
        return (
            "only some ranks made a step, drew a random number or changed weights; or"
            " torch.nn.utils.clip_grad_norm_(model.parameters()) read gradients of parameters that no"
            " DistributedOptimizer has; or processors round differently",
            "make every rank do the same; clip with optimizer.clip_grad_norm_; on mixed hardware set"
            " TOPKUBE_CHECK_WEIGHTS=warn",
        )

    def report(self, difference: str, first: bool, rank: int) -> None:
        """Raise TrainingError with `difference`, or warn on rank 0."""
        cause, next_step = self.explain(first)
        if self._mode == "error":
            raise TrainingError(difference, cause=cause, next_step=next_step)
        if rank == 0:
            warn(f"{difference}. Likely cause: {cause}.")


@torch.no_grad()
def _compute_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor. They are computed on the device, with one wait for the results."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return [int(checksum) % 2**64 for checksum in sum_bits(tensors).tolist()]
    return [hash_bytes(tensor) for tensor in tensors]


def _hash(data: bytes) -> float:
    """Return a hash of 53 bits, which float64 represents exactly. All bits of `data` change it, also its lowest."""
    return float(xxhash.xxh3_64_intdigest(data) >> 11)
