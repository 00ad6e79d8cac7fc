"""The comparison of ranks before they exchange gradients: all ranks must have the same parameters and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube.errors import TrainingError
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded
from topkube.training.ranks.agreement import digest, find_differing_ranks, name_ranks
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World


class RankComparison:
    """The comparison of the parameters and settings of one optimizer. `finite_check` (TOPKUBE_FINITE_CHECK) is compared
    too, because it decides which collectives a backward ends with."""

    def __init__(
        self,
        world: World,
        parameters: list[Parameter],
        aggregation: AggregationSettings,
        agreement: QueuedAgreement,
        finite_check: str,
    ) -> None:
        self._world, self._parameters, self._agreement = world, parameters, agreement
        self._aggregation, self._finite_check = aggregation, finite_check
        self._trainable: tuple[list[bool], float] | None = None
        """Which parameters required a gradient when they were compared last, and the digest of those that did."""

    def compare(self) -> None:
        """Raise TrainingError on all ranks if ranks have different parameters or settings."""
        if self._world.size == 1:
            return
        digests: Mapping[str, float] = {
            "parameters": digest([_describe_parameter(parameter) for parameter in self._parameters]),
            "frozen parameters": self.digest_trainable(),
            "aggregation settings": digest((self._aggregation, self._finite_check)),
        }
        values = list(digests.values())
        maxima = self._agreement.maximum([*values, *(-value for value in values)])
        for number, compared in enumerate(digests):
            if maxima[number] == -maxima[number + len(digests)]:
                continue
            if compared == "frozen parameters":
                self.raise_different_trainable()
            rows = self._agreement.gather(values)
            if not find_differing_ranks(rows[:, number]):
                raise TrainingError(
                    "ranks are in different places of a step",
                    cause="a rank left out a batch, a backward or a step, for example after an error that it caught",
                    next_step="let all ranks do the same work in each step, or let the error end the script",
                )
            raise TrainingError(
                f"{name_ranks(find_differing_ranks(rows[:, number]))} have different {compared} than the other ranks",
                cause="the model or the settings depend on the rank"
                if compared == "parameters"
                else "TOPKUBE_* variables or the arguments of DistributedOptimizer differ",
                next_step="build the same model with the same arguments on every rank",
            )

    def digest_trainable(self) -> float:
        """Return a digest of the parameters that require a gradient."""
        require = [parameter.tensor.requires_grad for parameter in self._parameters]
        if self._trainable is None or self._trainable[0] != require:
            named = [
                (p.name, p.length) for p, is_required in zip(self._parameters, require, strict=True) if is_required
            ]
            self._trainable = require, digest(named)
        return self._trainable[1]

    def raise_different_trainable(self) -> None:
        """Raise TrainingError, which names the ranks on which other parameters require a gradient. All ranks call this
        together."""
        frozen = sorted(p.name for p in self._parameters if not p.tensor.requires_grad)
        rows = self._agreement.gather([self.digest_trainable(), len(frozen)])
        ranks = find_differing_ranks(rows[:, 0])
        own_frozen = f"; on rank {self._world.rank} {len(frozen)} are frozen" + (
            f", {frozen[0]} among them" if frozen else ""
        )
        raise TrainingError(
            f"{name_ranks(ranks)} train different parameters than the other ranks{own_frozen}",
            cause="a parameter was frozen, unfrozen or added on some ranks only",
            next_step="set requires_grad to the same value on every rank, before the same step",
        )


def _describe_parameter(parameter: Parameter) -> tuple[object, ...]:
    """Return the properties of a parameter that must be the same on all ranks, with the part of a sharded parameter
    that this rank holds."""
    tensor: Any = parameter.tensor
    if not is_sharded(tensor):
        return parameter.name, tuple(tensor.shape), str(tensor.dtype), str(parameter.gradient_dtype)
    coordinate = tensor.device_mesh.get_coordinate()
    return parameter.name, tuple(tensor.shape), str(tensor.dtype), str(tensor.placements), str(coordinate)
