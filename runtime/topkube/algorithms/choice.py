"""The choice behind `dense` and `auto`: the algorithm of least predicted time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from topkube.algorithms.catalogue import find_algorithm, is_known
from topkube.algorithms.cost import Machines, Workload, count_wider_bytes, estimate_cost
from topkube.algorithms.declaration import Algorithm, Family
from topkube.algorithms.own import HIERARCHICAL, INT3, INT4, INT8, ONEBIT, OWN
from topkube.algorithms.parameters import DELAY, DENSE_WIRE, DENSITY, NODE_WEIGHTS, OVERLAP
from topkube.errors import AlgorithmError

AUTO, DENSE = "auto", "dense"
CHOICES = {
    AUTO: "takes the fastest algorithm that keeps the loss, by measurements at the start and in the first steps. It "
    "takes a dense algorithm, with 16 bits between nodes if `denseWire` allows them and they are faster. It takes "
    "`int8`, `int4` or `int3` instead if that makes steps at least 3% faster, or `onebit` with `nodeWeights: own`",
    DENSE: "takes the fastest dense algorithm, by the same measurements",
}
"""Names that stand for an algorithm, with a description for people, without a full stop."""
CHOICE_PARAMETERS = {AUTO: (DENSE_WIRE, OVERLAP, NODE_WEIGHTS), DENSE: (DENSE_WIRE, OVERLAP)}
"""The parameters that `auto` and `dense` read."""
EQUAL_COMPRESSED_CHOICES = (INT8, INT4, INT3)
"""The algorithms that compress and that `auto` may take in every job, those first that change values least.
docs/accuracy.md shows that their loss is within 1% of dense training. All ranks and nodes have the same gradients and
weights with them, so a script need not know which algorithm is in force."""
_OWN_WEIGHTS_CHOICES = (ONEBIT,)
"""The algorithms that `auto` may take if the job lets nodes have weights of their own (NODE_WEIGHTS)."""
LEAST_GAIN = 0.03
"""A choice that is tried stays if it makes the steps faster by this share. A smaller gain could be chance."""
_DENSE_OWN = tuple(algorithm for algorithm in OWN if algorithm.family is Family.DENSE)
_DENSE_MPI = tuple(algorithm for algorithm in _DENSE_OWN if not algorithm.needs_gpu)


@dataclass(frozen=True)
class BucketSize:
    """The size of a bucket: `elements` values of `itemsize` bytes. Values of a `small` bucket (biases, norms) are
    never rounded to a 16-bit format."""

    elements: int
    itemsize: int = 4
    small: bool = False


@dataclass(frozen=True)
class Choice:
    """An algorithm, the format of its dense values between nodes, and the predicted seconds of one step's exchange:
    `between` on the link, `inside` in the node's memory, and `seconds` with the overlap of both."""

    algorithm: Algorithm
    dense_wire: str
    between: float
    inside: float
    seconds: float

    @property
    def name(self) -> str:
        """The name of the algorithm, followed by the format of dense values if it is not the default."""
        wire = "" if self.dense_wire == DENSE_WIRE.default else f" {self.dense_wire}"
        return f"{self.algorithm.name}{wire}"

    def __str__(self) -> str:
        return f"{self.name} {self.seconds * 1e3:.3g} ms"


def sort_choices_by_time(
    name: str,
    machines: Machines,
    buckets: Sequence[BucketSize],
    dense_wire: str,
    compressed: Sequence[Algorithm] = (),
) -> list[Choice]:
    """Return the choices that `name`, one of CHOICES, can stand for, the fastest first.

    `dense_wire` is the format that the job names. `dense` uses this format; `auto` uses this format or float32. NCCL
    is a choice if its link was measured. `compressed` holds the algorithms that compress and that `auto` may take. The
    result depends on the arguments only: ranks that pass the same measurements get the same order.
    """
    wires = dict.fromkeys([DENSE_WIRE.default, dense_wire] if name == AUTO else [dense_wire])
    choices = [
        _predict(algorithm, wire, machines, buckets)
        for wire in wires
        for algorithm in (_DENSE_MPI if machines.nccl_link is None else _DENSE_OWN)
        if wire == DENSE_WIRE.default or DENSE_WIRE in algorithm.parameters
    ]
    if name == AUTO:
        choices += [
            _predict(algorithm, DENSE_WIRE.default, machines, buckets)
            for algorithm in compressed
            if keeps_loss(algorithm, machines.nodes)
        ]
    return sorted(choices, key=lambda choice: choice.seconds)


def list_compressed_choices(node_weights: str) -> tuple[Algorithm, ...]:
    """Return the algorithms that compress and that `auto` may take, those first that change values least.
    `node_weights` is the job's setting: "equal" or "own"."""
    return EQUAL_COMPRESSED_CHOICES + (() if node_weights == NODE_WEIGHTS.default else _OWN_WEIGHTS_CHOICES)


def keep_device_choices(choices: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
    """Return those of `choices` that `auto` may take on GPUs."""
    return tuple(choice for choice in choices if choice.trains_on_gpu)


def find_least_change(
    algorithms: Sequence[Algorithm], seconds: Sequence[float], dense_seconds: float, step_seconds: float
) -> Algorithm | None:
    """Return the algorithm to use in place of a dense one; None if no algorithm saves at least LEAST_GAIN of a step.

    `algorithms` begin with those that change values least. `seconds` has the time of the exchange or of the step with
    each, `dense_seconds` that with the dense one, and `step_seconds` that of a step with the dense one. Among the
    algorithms that save enough, the first wins whose step is less than LEAST_GAIN longer than the shortest: a slow
    link makes dense steps so long that the difference of two algorithms is a small share of them."""
    pairs = zip(algorithms, seconds, strict=True)
    least_gain = LEAST_GAIN * step_seconds
    worthwhile = [(algorithm, time) for algorithm, time in pairs if dense_seconds - time >= least_gain]
    fastest = min((time for _, time in worthwhile), default=0.0)
    least_difference = LEAST_GAIN * max(step_seconds - dense_seconds + fastest, fastest)
    near = (algorithm for algorithm, time in worthwhile if time - fastest < least_difference or time == fastest)
    return next(near, None)


def keeps_loss(algorithm: Algorithm, nodes: int) -> bool:
    """Return True if `auto` may take an algorithm that compresses between `nodes` nodes. With the two stages of signs,
    the loss of a GPT was 1.4% and 1.8% higher than that of dense training (docs/accuracy.md)."""
    return not (algorithm.in_weights and algorithm.two_stage_from is not None and nodes >= algorithm.two_stage_from)


@functools.lru_cache(maxsize=256)
def find_small_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm that exchanges small tensors (biases, norms) if `algorithm` exchanges the others. Gradients
    of small tensors are never compressed: `hierarchical` reduces them. Their weights travel with the other weights."""
    if not algorithm.compresses:
        return algorithm
    if not algorithm.in_weights:
        return HIERARCHICAL
    return dataclasses.replace(algorithm, traffic=algorithm.small_traffic or algorithm.traffic)


def _predict(algorithm: Algorithm, dense_wire: str, machines: Machines, buckets: Sequence[BucketSize]) -> Choice:
    """Return the predicted choice. With algorithms that exchange weights, the prediction is that of a period of 1."""
    between = inside = seconds = 0.0
    for bucket in buckets:
        used_algorithm = find_small_algorithm(algorithm) if bucket.small else algorithm
        can_be_narrowed = bucket.itemsize == 4 and not bucket.small
        wire = dense_wire if can_be_narrowed else DENSE_WIRE.default
        scale = bucket.itemsize / 4  # the catalogue counts float32
        exchange = estimate_cost(used_algorithm, machines, bucket.elements, dense_wire=wire)
        on_link = exchange.sent / machines.link_of(used_algorithm)
        # Latencies do not depend on the size of a value, and compressed values have the same size for every dtype.
        link = exchange.between - on_link + on_link * (1.0 if used_algorithm.compresses else scale)
        if not used_algorithm.compresses:
            wider = count_wider_bytes(bucket.itemsize, bucket.elements, machines.nodes) if scale < 1 else 0.0
            link += wider / machines.link_of(used_algorithm)
        memory = exchange.inside * scale
        between, inside = between + link, inside + memory
        seconds += max(link, memory) if used_algorithm.overlaps else link + memory
    return Choice(algorithm, dense_wire, between, inside, seconds)


def resolve(name: str, nodes: int, length: int, density: float) -> Algorithm:
    """Return the algorithm called `name`. If `name` is one of CHOICES, return the dense algorithm that sends the fewest
    bytes, in the fewest messages, for arrays of `length` elements over `nodes`. No measurement is used.

    The result is the same on all ranks. It considers TopKube's own algorithms only, so that installing a package
    changes no job. Raises ArgumentError if there is no algorithm of this name.
    """
    return _find_least_traffic(nodes, length, density) if name in CHOICES else find_algorithm(name)


def describe(name: str, density: float) -> str:
    """Return an algorithm and its density in a few words: "hitopk at density 0.01", "dense"."""
    return f"{name} at density {density:g}" if reads_density(name) else name


def compresses(name: str) -> bool:
    """Return True if the algorithm called `name` may send less than the whole gradient, or cannot be loaded here. The
    result is False for CHOICES, which begin with a dense algorithm; `auto` may change to another in training only."""
    if name in CHOICES:
        return False
    algorithm = _load_if_known(name)
    return algorithm is None or algorithm.compresses


def reads_density(name: str) -> bool:
    """Return True if the algorithm behind a name has a density. The result is also True for an algorithm that cannot be
    loaded here."""
    if name in CHOICES:
        return False
    algorithm = _load_if_known(name)
    return algorithm is None or DENSITY in algorithm.parameters


def reads_dense_wire(name: str) -> bool:
    """Return True if the algorithm behind a name can send dense values in 16 bits. The result is also True for an
    algorithm that cannot be loaded here."""
    if name in CHOICES:
        return True
    algorithm = _load_if_known(name)
    return algorithm is None or DENSE_WIRE in algorithm.parameters


# The texts of the functions below have the form "reason; advice".


def explain_dense_wire(name: str) -> str:
    """Return why a `dense_wire` other than the default has no effect with the algorithm, and what to do."""
    return (
        f"{name} does not read it: only dense gradients have this format; choose the algorithm {DENSE} or {AUTO}, or "
        f"leave it at {DENSE_WIRE.default}"
    )


def explain_overlap(names: Sequence[str], momentum_correction: bool) -> str:
    """Return why the overlap `dear` (DeAR) does not work with the algorithms called `names`, and what to do; "" if it
    works. `momentum_correction` is the job's setting."""
    for name in names:
        algorithm = None if name in CHOICES else _load_if_known(name)
        if algorithm is not None and OVERLAP not in algorithm.parameters:
            divisible = [one.name for one in OWN if OVERLAP in one.parameters]
            return (
                f"{name} cannot divide its exchange between nodes into two halves; choose {', '.join(CHOICES)} or one"
                f" of {', '.join(divisible)}, or leave overlap at {OVERLAP.default}"
            )
        if algorithm is not None and algorithm.compresses and momentum_correction:
            return (
                f"with {name}, momentum correction changes the gradients of all parameters in the optimizer's step;"
                f" turn off momentum correction, or leave overlap at {OVERLAP.default}"
            )
    return ""


def explain_delay(names: Sequence[str]) -> str:
    """Return why exchanges of the algorithms called `names` cannot be delayed, and what to do; "" if they can."""
    for name in names:
        algorithm = None if name in CHOICES else _load_if_known(name)
        if name in CHOICES or (algorithm is not None and DELAY not in algorithm.parameters):
            return (
                f"{name} does not read it: only algorithms with error feedback in the weights can apply an exchange"
                f" later; choose such an algorithm, or leave delay at {DELAY.default}"
            )
    return ""


def explain_node_weights(name: str, overlap: str, momentum_correction: bool, has_schedule: bool) -> str:
    """Return why the setting `node_weights` has no effect in a job with the algorithm called `name` and these settings,
    and what to do; "" if it has an effect."""
    advice = f"or leave it at {NODE_WEIGHTS.default}"
    if name != AUTO:
        return f"{name} does not read it: only {AUTO} does; choose {AUTO}, {advice}"
    settings = {f"overlap {overlap}": overlap != OVERLAP.default, "momentum correction": momentum_correction}
    blocking = [text for text, is_set in (settings | {"a schedule": has_schedule}).items() if is_set]
    if not blocking:
        return ""
    return f"{AUTO} keeps the weights of all nodes equal with {' and '.join(blocking)}; leave that out, {advice}"


def _load_if_known(name: str) -> Algorithm | None:
    try:
        return find_algorithm(name) if is_known(name) else None
    except AlgorithmError:
        return None


@functools.lru_cache(maxsize=1024)
def _find_least_traffic(nodes: int, length: int, density: float) -> Algorithm:
    def count_bytes_and_messages(algorithm: Algorithm) -> tuple[float, float]:
        two_or_more = max(nodes, 2)  # one node sends nothing, so all algorithms would be equal
        traffic = algorithm.traffic(Workload(two_or_more, 1, length, density, "fp32"))
        return traffic.sent, traffic.messages

    return min(_DENSE_MPI, key=count_bytes_and_messages)
