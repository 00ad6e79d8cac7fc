"""The declaration of an algorithm."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from topkube.algorithms.cost import Traffic, Workload
from topkube.algorithms.parameters import PARAMETERS, AlgorithmParameter
from topkube.errors import ArgumentError

NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
"""The name of one of TopKube's own algorithms. An algorithm of another package is called PACKAGE.NAME, with both parts
of this form."""
_LONGEST_NAME = 100


class Family(enum.StrEnum):
    """The kinds of data that algorithms send in place of a gradient. All but DENSE send less than the gradient."""

    DENSE = "dense"
    SPARSE = "sparse"
    """Some entries, with or without their indices."""
    SIGN = "sign"
    QUANTISED = "quantised"
    LOW_RANK = "low-rank"
    LOCAL_UPDATE = "local-update"
    """Nothing in most steps: nodes train on their own, and exchange their weights every `period` steps."""


class Route(enum.StrEnum):
    """The routes of data between nodes."""

    ALL_REDUCE = "all-reduce"
    """Arrays of equal length are added up on the way; every node receives the sum."""
    ALL_GATHER = "all-gather"
    """Every node receives what every other node sends, and adds it up."""
    TREE = "tree"
    """Pairs of nodes exchange and add up their messages, then pairs of pairs, and so on."""
    SPLIT = "reduce-scatter and all-gather"
    """Every node adds up a part of what all nodes send, and sends the sum to all."""


class Transport(enum.StrEnum):
    """The libraries that carry data between nodes."""

    MPI = "MPI"
    """Messages of MPI. A tensor on a GPU crosses through pinned host memory, unless MPI takes device pointers."""
    NCCL = "NCCL"
    """A communicator of NCCL, through torch.distributed: tensors on a GPU only."""


class Scope(enum.StrEnum):
    """The ranks that hold a state."""

    SHARD = "shard"
    """One copy per node: each of its ranks holds the part that belongs to its shard of the gradient."""
    RANK = "rank"
    """One copy per rank, as long as the gradient."""


@dataclass(frozen=True)
class State:
    """State that an algorithm keeps between steps, for each parameter of the model: one float32 value per element."""

    name: str
    scope: Scope
    summary: str


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm.

    `name` is the name in a TrainingJob. `summary` is one sentence for people, without a full stop. `sends` names what
    is sent: the compressor. `route` is the collective that sends these bytes between nodes. `state` lists what each
    rank keeps for the next step. `parameters` are those that the algorithm reads. `traffic` returns what one exchange
    costs. `overlaps` is True if the algorithm sends one piece while it adds up another. `on_device` is True if the
    algorithm also reduces torch tensors on a GPU. `transport` carries the data between nodes: an algorithm of NCCL
    reduces only tensors on a GPU, all others reduce CPU arrays too.

    `in_weights` is True if training keeps what was not sent in the node's weights: gradients are then reduced within
    the node only, and nodes exchange the changes of their weights in the optimizer's step (training/node_weights/). A
    model on a GPU then works too: the changes are compressed there or in host memory.
    `is_for_comparisons` is True if other algorithms are better in all respects: no recommendation names it.
    From `two_stage_from` nodes on, these exchanges have two stages (collectives/two_stage.py). `corrects_second_moment`
    is True if the second moment of Adam, and the norms of LARS and LAMB, are corrected for the noise of one node's
    gradient. `has_outer_step` is True if the mean change of all nodes has a momentum of its own. `least_period` is the
    smallest allowed period. `small_traffic` returns what the exchange of small tensors costs, if their values are
    rounded in place of compressed.

    `implementation` is the import path "module:Class" of a subclass of `topkube.collectives.AllReduce`, which is loaded
    when the algorithm first runs. With `in_weights`, it is a subclass of
    `topkube.collectives.codec_all_reduce.CodecAllReduce`.

    Raises ArgumentError if the name or the import path is malformed, or a parameter is unknown.
    """

    name: str
    summary: str
    family: Family
    sends: str
    route: Route
    traffic: Callable[[Workload], Traffic]
    implementation: str
    state: tuple[State, ...] = ()
    parameters: tuple[AlgorithmParameter, ...] = ()
    overlaps: bool = False
    on_device: bool = False
    transport: Transport = Transport.MPI
    in_weights: bool = False
    two_stage_from: int | None = None
    corrects_second_moment: bool = False
    has_outer_step: bool = False
    least_period: int = 1
    small_traffic: Callable[[Workload], Traffic] | None = None
    is_for_comparisons: bool = False

    def __post_init__(self) -> None:
        if len(self.name) > _LONGEST_NAME or not re.fullmatch(rf"{NAME}(\.{NAME})?", self.name):
            raise ArgumentError(
                f"{self.name!r} is not the name of an algorithm",
                next_step="write PACKAGE.NAME in lower-case letters, digits and '-', such as acme.stride-k, "
                f"in at most {_LONGEST_NAME} characters",
            )
        if not re.fullmatch(r"[\w.]+:\w+", self.implementation):
            raise ArgumentError(
                f"the implementation of {self.name} is {self.implementation!r}",
                next_step='write the import path of its class, such as "acme.stride_k:StrideK"',
            )
        if self.transport is Transport.NCCL and not self.on_device:
            raise ArgumentError(
                f"{self.name} declares the transport NCCL, and on_device=False",
                cause="NCCL carries tensors on a GPU only",
                next_step="declare on_device=True, or the transport MPI",
            )
        for parameter in self.parameters:
            if PARAMETERS.get(parameter.name) is not parameter:
                raise ArgumentError(
                    f"{self.name} declares the parameter {parameter.name!r}, which no TrainingJob has",
                    next_step=f"use those of topkube.algorithms.PARAMETERS ({', '.join(PARAMETERS)}), or declare one "
                    "algorithm for each value",
                )

    def __hash__(self) -> int:
        return hash(self.name)  # implementations are looked up in every exchange

    def check_period(self, period: int) -> None:
        """Raise ArgumentError if nodes must exchange less often than every `period` steps."""
        if period < self.least_period:
            raise ArgumentError(
                f"the period of {self.name} is {period}, but it must be at least {self.least_period}",
                cause=f"{self.name} is made for nodes that train alone for many steps",
                next_step="set a period, such as 32",
            )

    @property
    def compresses(self) -> bool:
        """True if the algorithm sends less than the whole gradient."""
        return self.family is not Family.DENSE

    def has_two_stages(self, nodes: int) -> bool:
        """Return True if the exchange between `nodes` nodes has two stages."""
        return self.two_stage_from is not None and nodes >= max(self.two_stage_from, 2)

    def overlaps_buckets(self, nodes: int) -> bool:
        """Return True if training on CPUs has several buckets under way between `nodes` nodes at the same time: dense
        ones, and gradients that travel in two stages (training/exchange/reduction/overlapped_buckets.py)."""
        return self.overlaps or (self.has_two_stages(nodes) and not self.in_weights)

    @property
    def has_small_buckets(self) -> bool:
        """True if its work per element does not depend on the size of a bucket: small buckets overlap better with
        backward. The other families select or factor each bucket."""
        return self.family in (Family.DENSE, Family.QUANTISED)

    @property
    def needs_gpu(self) -> bool:
        """True if the algorithm reduces only tensors on a GPU."""
        return self.transport is Transport.NCCL

    @property
    def trains_on_gpu(self) -> bool:
        """True if a model on a GPU can train with the algorithm: it reduces gradients there, or exchanges weights."""
        return self.on_device or self.in_weights

    @property
    def residual(self) -> State | None:
        """The state that holds what was not sent; None if everything is sent or the rest is forgotten."""
        return next((state for state in self.state if state.name == RESIDUAL), None)

    def state_bytes(self, workload: Workload) -> int:
        """Return the bytes of state that each rank keeps."""
        shards = {Scope.SHARD: workload.slots, Scope.RANK: 1}
        return sum(4 * -(-workload.elements // shards[state.scope]) for state in self.state)


RESIDUAL = "residual"
"""The name of the state that `topkube.collectives.Residual` holds, and that checkpoints save."""
SHARD_RESIDUAL = State(RESIDUAL, Scope.SHARD, "what was not sent of the node's mean gradient")
WEIGHT_RESIDUAL = State(
    RESIDUAL,
    Scope.SHARD,
    "what was not sent; in training it is part of the node's weights, and a copy of the agreed weights is kept",
)
OUTER_STATE = State("outer momentum", Scope.SHARD, "the momentum of the mean change of all nodes")
RANK_RESIDUAL = State(RESIDUAL, Scope.RANK, "what was not sent of the rank's own gradient")
