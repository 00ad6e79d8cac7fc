"""The parameters of algorithms: name, range, default, and one sentence for people.

`spec.aggregation` of a TrainingJob has a field for each of them. An algorithm declares the parameters that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from topkube.errors import ArgumentError

_LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class AlgorithmParameter:
    """A parameter of one or more algorithms.

    `choices` lists all values of a text. A number is larger than `above`, at least `at_least` and at most `at_most`;
    None means no bound.
    """

    name: str
    description: str
    default: Any
    choices: tuple[str, ...] = ()
    above: float | None = None
    at_least: int | None = None
    at_most: float | None = None

    @property
    def field(self) -> str:
        """The name of the field in a TrainingJob: `warmup_steps` is `warmupSteps`."""
        first, *rest = self.name.split("_")
        return first + "".join(word.capitalize() for word in rest)

    @property
    def range(self) -> str:
        """The allowed values, for people: "above 0 and at most 1"."""
        if self.choices:
            return ", ".join(f"`{choice}`" for choice in self.choices)
        if isinstance(self.default, bool):
            return "`true`, `false`"
        bounds = [("above", self.above), ("at least", self.at_least), ("at most", self.at_most)]
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds if bound not in (None, _LARGEST_COUNT))

    def check(self, value: Any) -> None:
        """Raise ArgumentError if `value` is not allowed."""
        if self.choices:
            if value not in self.choices:
                raise ArgumentError(f"{self.name} is {value!r}", next_step=f"choose one of {', '.join(self.choices)}")
            return
        if not isinstance(self.default, bool):
            self._check_kind(value)
        is_allowed = (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )
        if not is_allowed:
            raise ArgumentError(
                f"{self.name} is {value}, but it must be {self.range}",
                next_step=f"pass a {self.name} that is {self.range}, for example {self.default}",
            )

    def _check_kind(self, value: Any) -> None:
        """Raise ArgumentError if `value` is no number, or no whole number although the default is one."""
        is_whole = isinstance(self.default, int)
        if isinstance(value, bool) or not isinstance(value, Integral if is_whole else Real):
            raise ArgumentError(
                f"{self.name} is {value!r}, which is not a {'whole ' if is_whole else ''}number",
                next_step=f"pass a {self.name} that is {self.range}, for example {self.default}",
            )


DENSITY = AlgorithmParameter("density", "share of each gradient that is sent between nodes", 0.01, above=0, at_most=1)
WARMUP_STEPS = AlgorithmParameter(
    "warmup_steps", "steps over which the density falls from 1 to its target", 0, at_least=0, at_most=_LARGEST_COUNT
)
WIRE = AlgorithmParameter("wire", "format of the values sent between nodes", "bf16", choices=("fp32", "bf16", "fp16"))
DENSE_WIRE = AlgorithmParameter(
    "dense_wire",
    "format of dense gradients between nodes: 16 bits halve the bytes; each node's mean and the result are"
    " rounded, sums are float32",
    "fp32",
    choices=("fp32", "bf16", "fp16"),
)
SELECTION = AlgorithmParameter(
    "selection",
    "how entries are chosen: topk exactly, mstopk by the approximate threshold of the MSTopK paper",
    "topk",
    choices=("topk", "mstopk"),
)
MOMENTUM_CORRECTION = AlgorithmParameter(
    "momentum_correction",
    "apply momentum (SGD, Adam, AdamW) before the selection: closer to dense training at low densities",
    False,
)

PERIOD = AlgorithmParameter(
    "period",
    "steps from one exchange of the weights to the next; between them, every node trains alone",
    1,
    at_least=1,
    at_most=_LARGEST_COUNT,
)
OUTER_LEARNING_RATE = AlgorithmParameter(
    "outer_learning_rate", "factor on the mean change of all nodes, before it is added to the weights", 0.7, above=0
)
OUTER_MOMENTUM = AlgorithmParameter(
    "outer_momentum", "Nesterov momentum of the mean change of all nodes", 0.9, at_least=0, at_most=0.999
)
DELAY = AlgorithmParameter(
    "delay",
    "steps after which the weights of a node get the result of an exchange: with 1, the exchange overlaps with the next"
    " forward and backward",
    0,
    at_least=0,
    at_most=1,
)
MATRIX_RANK = AlgorithmParameter(
    "matrix_rank",
    "rank of the approximation of each matrix: m rows of n columns are sent as (m + n) times this many values",
    4,
    at_least=1,
    at_most=1024,
)

OVERLAP = AlgorithmParameter(
    "overlap",
    "what the exchange of gradients between nodes overlaps with: backward, or dear: its first half with backward, and"
    " its second half and the update of the weights with the next forward",
    "backward",
    choices=("backward", "dear"),
)
NODE_WEIGHTS = AlgorithmParameter(
    "node_weights",
    "what auto may give the nodes: equal weights, or own weights between exchanges, as with onebit: the script then"
    " evaluates and saves inside `optimizer.consensus()`",
    "equal",
    choices=("equal", "own"),
)

PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        DENSITY,
        WARMUP_STEPS,
        WIRE,
        DENSE_WIRE,
        SELECTION,
        MOMENTUM_CORRECTION,
        PERIOD,
        OUTER_LEARNING_RATE,
        OUTER_MOMENTUM,
        DELAY,
        MATRIX_RANK,
        OVERLAP,
        NODE_WEIGHTS,
    )
}
