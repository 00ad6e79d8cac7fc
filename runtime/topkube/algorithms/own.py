"""The declarations of TopKube's own algorithms, in the order of lists and tables: in each family the best first."""

from __future__ import annotations

import math

from topkube.algorithms import parameters
from topkube.algorithms.cost import (
    VALUE_BYTES,
    Traffic,
    Workload,
    all_gather_memory,
    all_gather_messages,
    all_reduce_messages,
    all_reduce_sent,
    reduce_scatter_memory,
    two_stage_messages,
    two_stage_sent,
)
from topkube.algorithms.declaration import (
    OUTER_STATE,
    RANK_RESIDUAL,
    SHARD_RESIDUAL,
    WEIGHT_RESIDUAL,
    Algorithm,
    Family,
    Route,
    Transport,
)

_SPARSE = (
    parameters.DENSITY,
    parameters.WARMUP_STEPS,
    parameters.WIRE,
    parameters.SELECTION,
    parameters.MOMENTUM_CORRECTION,
)


_ELEMENT_BYTES = 4
_SIGN_BLOCK = 256
"""Elements that share a scale (csrc/cpu/sign/sign.hpp)."""
_TWO_STAGE_FROM = 8
"""With fewer nodes, an all-gather of signs sends at most 3.5 times the bytes of two stages, and compresses once."""
_AVERAGE_IN_TWO_STAGES_FROM = 3
"""With two nodes, an all-gather sends as many bytes as two stages."""
_MATRIX_SIDE = 1024
"""The cost of a low rank depends on the shapes of matrices. Costs are those of square matrices of this size, or of one
square matrix for fewer elements."""
_SPLIT_HEADER_BYTES = 36
"""Header of a message of `oktopk`, with its padding."""
_MERGED_ENTRY_BYTES = 160
"""Memory traffic per entry of a message that is added to another one: both are decoded, sorted, added and selected."""


def _hierarchical(load: Workload) -> Traffic:
    memory = reduce_scatter_memory(load) + all_gather_memory(load)
    sent = all_reduce_sent(load.dense_value_bytes * load.elements, load.nodes)
    if load.dense_value_bytes < _ELEMENT_BYTES and load.nodes > 1:
        memory += 2 * (_ELEMENT_BYTES + load.dense_value_bytes) * load.elements  # rounds the shards, and widens them
    return Traffic(sent, memory, all_reduce_messages(load.nodes))


def _torus2d(load: Workload) -> Traffic:
    memory = reduce_scatter_memory(load) + all_gather_memory(load)
    return Traffic(all_reduce_sent(load.array_bytes, load.nodes), memory, 2 * (load.nodes - 1))


def _flat(load: Workload) -> Traffic:
    ranks = load.nodes * load.slots
    memory = reduce_scatter_memory(load) + all_gather_memory(load)
    return Traffic(all_reduce_sent(load.array_bytes, ranks), memory, 2 * (ranks - 1))


def _hierarchical_nccl(load: Workload) -> Traffic:
    memory = reduce_scatter_memory(load) + all_gather_memory(load)
    return Traffic(all_reduce_sent(load.array_bytes, load.nodes), memory, _tree_messages(load.nodes))


def _nccl(load: Workload) -> Traffic:
    ranks = load.nodes * load.slots
    memory = reduce_scatter_memory(load) + all_gather_memory(load)
    return Traffic(all_reduce_sent(load.array_bytes, ranks), memory, _tree_messages(load.nodes))


def _tree_messages(partners: int) -> int:
    """Return how many messages wait for one another in a sum up a tree, and down again."""
    return 2 * math.ceil(math.log2(max(partners, 2)))


def _hitopk(load: Workload) -> Traffic:
    sent = (load.nodes - 1) * load.slots * load.kept(load.slots) * load.entry_bytes
    select = 3 * load.array_bytes  # reads the sum and the residual, writes the residual
    write_arrays = load.slots * load.array_bytes
    return Traffic(sent, reduce_scatter_memory(load) + select + write_arrays, all_gather_messages(load.nodes))


def _naive(load: Workload) -> Traffic:
    ranks = load.nodes * load.slots
    sent = load.slots * (ranks - load.slots) * load.kept() * load.entry_bytes
    read_arrays = write_arrays = load.slots * load.array_bytes
    return Traffic(sent, read_arrays + write_arrays, all_gather_messages(ranks))


def _gtopk(load: Workload) -> Traffic:
    rounds, surplus = _count_tree_rounds(load.nodes)
    entries = load.slots * load.kept(load.slots)
    merges = (rounds + surplus) * entries * _MERGED_ENTRY_BYTES
    read_and_write_shards = 5 * load.array_bytes  # the sum and the residual, the selection, the result
    memory = reduce_scatter_memory(load) + all_gather_memory(load) + read_and_write_shards + merges
    return Traffic((rounds + surplus) * entries * load.entry_bytes, memory, rounds + 2 * surplus)


def _oktopk(load: Workload) -> Traffic:
    nodes, entries = load.nodes, load.kept(load.slots)
    both_stages = 2 * (nodes - 1) * (entries / nodes * load.entry_bytes + _SPLIT_HEADER_BYTES)
    rounds = max(nodes - 1, 0).bit_length()
    measured = rounds * (8 * min(nodes, 64) + 2 * 4 * 128) + 8 * (nodes - 1)  # quantiles, histograms, counts
    memory = reduce_scatter_memory(load) + all_gather_memory(load) + 5 * load.array_bytes
    memory += load.slots * entries * _MERGED_ENTRY_BYTES if nodes > 1 else 0
    return Traffic(load.slots * (both_stages + measured), memory, two_stage_messages(nodes) + 4 * rounds)


def _count_tree_rounds(nodes: int) -> tuple[int, int]:
    """Return how many rounds a tree of pairs has, and 1 if nodes are left over that join before and after them."""
    rounds = max(nodes, 1).bit_length() - 1
    return rounds, int(nodes > 1 << rounds)


def _onebit(load: Workload) -> Traffic:
    bits, scales = load.elements / 8, 2 * -(-load.elements // _SIGN_BLOCK)
    return _count_change_traffic(load, bits + scales, _TWO_STAGE_FROM)


def _topk1bit(load: Workload) -> Traffic:
    count = -(-load.elements // 10)
    signs, scales = count / 8, 2 * -(-count // _SIGN_BLOCK)
    indices = (3 * count + count + load.elements / 8) / 8  # three low bits of each, and the others in unary
    return _count_change_traffic(load, signs + scales + indices, _TWO_STAGE_FROM)


def _signsgd(load: Workload) -> Traffic:
    sent = (load.nodes - 1) * (load.elements / 8 + 2 * -(-load.elements // _SIGN_BLOCK))
    read_and_write_shards = 8 * load.array_bytes  # a copy, its signs, the votes, the result
    memory = reduce_scatter_memory(load) + all_gather_memory(load) + read_and_write_shards
    return Traffic(sent, memory, all_gather_messages(load.nodes))


def _localsgd(load: Workload) -> Traffic:
    return _count_change_traffic(load, VALUE_BYTES[load.wire] * load.elements, _AVERAGE_IN_TWO_STAGES_FROM)


def _sparseloco(load: Workload) -> Traffic:
    count = -(-load.elements // 32)
    levels, bits = 4 * -(-count // _SIGN_BLOCK), 2 * count / 8
    indices = (5 * count + count + load.elements / 32) / 8  # five low bits of each, and the others in unary
    return _count_change_traffic(load, levels + bits + indices, _TWO_STAGE_FROM)


def _count_change_traffic(load: Workload, message_bytes: float, two_stage_from: int) -> Traffic:
    """Return the traffic of an exchange of weight changes. `message_bytes`: the encoded change of all weights."""
    if load.nodes < two_stage_from:
        sent, messages = (load.nodes - 1) * message_bytes, all_gather_messages(load.nodes)
    else:
        sent, messages = two_stage_sent(message_bytes, load.nodes), two_stage_messages(load.nodes)
    read_and_write_shards = 5 * load.array_bytes  # the change of the weights, what is sent of it, the sum of all nodes
    of_gradients = reduce_scatter_memory(load) + all_gather_memory(load)
    return Traffic(sent / load.period, of_gradients + read_and_write_shards / load.period, messages / load.period)


def _powersgd(load: Workload) -> Traffic:
    side = min(_MATRIX_SIDE, math.sqrt(load.elements))
    values = load.matrix_rank * 2 * side * max(1, load.elements / _MATRIX_SIDE**2)
    read_and_write_shards = 6 * load.array_bytes  # the gradient and the residual, both products, the result
    memory = reduce_scatter_memory(load) + all_gather_memory(load) + read_and_write_shards
    return Traffic(all_reduce_sent(4 * values, load.nodes), memory, 2 * all_reduce_messages(load.nodes))


def _acpsgd(load: Workload) -> Traffic:
    both = _powersgd(load)
    read_and_write_shard = load.array_bytes  # for the second product of powersgd
    return Traffic(both.sent / 2, both.memory - read_and_write_shard, both.messages / 2)


HIERARCHICAL = Algorithm(
    name="hierarchical",
    summary="reduces inside each node, then each shard between nodes, in pieces that overlap",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=_hierarchical,
    parameters=(parameters.DENSE_WIRE, parameters.OVERLAP),
    overlaps=True,
    on_device=True,
    implementation="topkube.collectives.dense:Hierarchical",
)
TORUS2D = Algorithm(
    name="torus2d",
    summary="reduces inside each node, then each shard around a ring of nodes, one stage after the other",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=_torus2d,
    on_device=True,
    implementation="topkube.collectives.dense:Torus2d",
)
FLAT = Algorithm(
    name="flat",
    summary="reduces around one ring of all ranks",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=_flat,
    overlaps=True,
    on_device=True,
    implementation="topkube.collectives.dense:Flat",
)
HIERARCHICAL_NCCL = Algorithm(
    name="hierarchical-nccl",
    summary="reduces inside each node, then each shard between nodes, with NCCL for both (GPUs only)",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=_hierarchical_nccl,
    on_device=True,
    transport=Transport.NCCL,
    implementation="topkube.collectives.dense:HierarchicalNccl",
)
NCCL = Algorithm(
    name="nccl",
    summary="reduces with one communicator of NCCL over all ranks (GPUs only)",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=_nccl,
    overlaps=True,
    on_device=True,
    transport=Transport.NCCL,
    implementation="topkube.collectives.dense:Nccl",
)
HITOPK = Algorithm(
    name="hitopk",
    summary="reduces inside each node, then sends only the largest entries of each shard to all other nodes",
    family=Family.SPARSE,
    sends="the largest entries of the node's mean gradient",
    route=Route.ALL_GATHER,
    traffic=_hitopk,
    state=(SHARD_RESIDUAL,),
    parameters=_SPARSE,
    on_device=True,
    implementation="topkube.collectives.sparse:HiTopK",
)
GTOPK = Algorithm(
    name="gtopk",
    summary="as hitopk, but pairs of nodes add up their largest entries and keep the largest of the sum, then pairs of"
    " pairs: the bytes grow with the logarithm of the number of nodes",
    family=Family.SPARSE,
    sends="the largest entries of the sum of more and more nodes",
    route=Route.TREE,
    traffic=_gtopk,
    state=(SHARD_RESIDUAL,),
    parameters=_SPARSE,
    implementation="topkube.collectives.global_top:GTopK",
)
OKTOPK = Algorithm(
    name="oktopk",
    summary="as gtopk, but every node adds up a region of the array and sends its largest sums to all: the bytes do not"
    " grow with the number of nodes",
    family=Family.SPARSE,
    sends="the largest entries of each node, and the largest of their sums",
    route=Route.SPLIT,
    traffic=_oktopk,
    state=(SHARD_RESIDUAL,),
    parameters=_SPARSE,
    implementation="topkube.collectives.split_top:OkTopK",
)
NAIVE = Algorithm(
    name="naive",
    summary="every rank sends the largest entries of its own gradient to all other ranks (for comparisons)",
    family=Family.SPARSE,
    sends="the largest entries of every rank's gradient",
    route=Route.ALL_GATHER,
    traffic=_naive,
    state=(RANK_RESIDUAL,),
    parameters=_SPARSE,
    implementation="topkube.collectives.sparse:Naive",
)
ONEBIT = Algorithm(
    name="onebit",
    summary="every node steps with its own mean gradient and sends the signs of the change of its weights",
    family=Family.SIGN,
    sends="one bit per element, and the mean magnitude of each block of 256",
    route=Route.ALL_GATHER,
    traffic=_onebit,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD,),
    in_weights=True,
    two_stage_from=_TWO_STAGE_FROM,
    corrects_second_moment=True,
    implementation="topkube.collectives.codec_all_reduce:OneBit",
)
TOPK1BIT = Algorithm(
    name="topk1bit",
    summary="every node steps with its own mean gradient and sends the signs of the largest tenth of the changes of its"
    " weights",
    family=Family.SIGN,
    sends="the indices of the largest tenth, one bit for each, and the mean magnitude of each 256 of them",
    route=Route.ALL_GATHER,
    traffic=_topk1bit,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD,),
    in_weights=True,
    two_stage_from=_TWO_STAGE_FROM,
    corrects_second_moment=True,
    implementation="topkube.collectives.codec_all_reduce:TopKOneBit",
)
SIGNSGD = Algorithm(
    name="signsgd",
    summary="every element takes the sign of most ranks, where each node votes for all its ranks (for comparisons)",
    family=Family.SIGN,
    sends="one bit per element, and the mean magnitude of each block of 256",
    route=Route.ALL_GATHER,
    traffic=_signsgd,
    implementation="topkube.collectives.codec_all_reduce:SignSgd",
)
POWERSGD = Algorithm(
    name="powersgd",
    summary="reduces inside each node, then sends two thin factors of each matrix, of rank `matrixRank`",
    family=Family.LOW_RANK,
    sends="the factors P and Q of each matrix",
    route=Route.ALL_REDUCE,
    traffic=_powersgd,
    state=(SHARD_RESIDUAL,),
    parameters=(parameters.MATRIX_RANK,),
    implementation="topkube.collectives.low_rank:PowerSgd",
)
ACPSGD = Algorithm(
    name="acpsgd",
    summary="as powersgd, but sends P and Q in turn: half the bytes and half the messages",
    family=Family.LOW_RANK,
    sends="one factor of each matrix: P in one step, Q in the next",
    route=Route.ALL_REDUCE,
    traffic=_acpsgd,
    state=(SHARD_RESIDUAL,),
    parameters=(parameters.MATRIX_RANK,),
    implementation="topkube.collectives.low_rank:AcpSgd",
)
LOCALSGD = Algorithm(
    name="localsgd",
    summary="every node steps with its own mean gradient, and nodes average their weights every `period` steps",
    family=Family.LOCAL_UPDATE,
    sends="the change of the weights, rounded",
    route=Route.ALL_GATHER,
    traffic=_localsgd,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD, parameters.WIRE),
    in_weights=True,
    two_stage_from=_AVERAGE_IN_TWO_STAGES_FROM,
    implementation="topkube.collectives.codec_all_reduce:LocalSgd",
)
DILOCO = Algorithm(
    name="diloco",
    summary="as localsgd with a long period, and the mean change of all nodes has Nesterov momentum",
    family=Family.LOCAL_UPDATE,
    sends="the change of the weights, rounded",
    route=Route.ALL_GATHER,
    traffic=_localsgd,
    state=(WEIGHT_RESIDUAL, OUTER_STATE),
    parameters=(parameters.PERIOD, parameters.WIRE, parameters.OUTER_LEARNING_RATE, parameters.OUTER_MOMENTUM),
    in_weights=True,
    two_stage_from=_AVERAGE_IN_TWO_STAGES_FROM,
    has_outer_step=True,
    least_period=2,
    implementation="topkube.collectives.codec_all_reduce:LocalSgd",
)
SPARSELOCO = Algorithm(
    name="sparseloco",
    summary="every node trains alone for `period` steps, then sends the largest 1/32 of the changes of its weights with"
    " two bits each",
    family=Family.LOCAL_UPDATE,
    sends="the indices of the largest 1/32, two bits for each, and two magnitudes for each 256 of them",
    route=Route.ALL_GATHER,
    traffic=_sparseloco,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD,),
    in_weights=True,
    two_stage_from=_TWO_STAGE_FROM,
    least_period=2,
    implementation="topkube.collectives.codec_all_reduce:SparseLoCo",
)

OWN = (
    HIERARCHICAL,
    TORUS2D,
    FLAT,
    HIERARCHICAL_NCCL,
    NCCL,
    HITOPK,
    GTOPK,
    OKTOPK,
    NAIVE,
    ONEBIT,
    TOPK1BIT,
    SIGNSGD,
    POWERSGD,
    ACPSGD,
    LOCALSGD,
    DILOCO,
    SPARSELOCO,
)
