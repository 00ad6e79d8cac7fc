"""The traffic of one exchange with each of TopKube's own algorithms, as their declarations state it.

Each function takes a `Workload` and returns its `Traffic`: bytes between nodes, bytes through memory, and messages that
wait for one another.
"""

from __future__ import annotations

import math

from topkube.algorithms.cost import (
    PAIRWISE_LIMIT,
    SPARSE_INSIDE,
    VALUE_BYTES,
    Traffic,
    Workload,
    all_gather_memory,
    all_gather_messages,
    all_reduce_messages,
    all_reduce_sent,
    count_wider_bytes,
    reduce_scatter_memory,
    two_stage_messages,
    two_stage_sent,
)

_ELEMENT_BYTES = 4
_SIGN_BLOCK = _QUANTISED_BLOCK = 256
"""Elements that share a scale (csrc/cpu/sign/sign.hpp, csrc/cpu/quantised/quantised.hpp)."""
SIGNS_IN_TWO_STAGES_FROM = 8
"""With fewer nodes, an all-gather of signs sends at most 3.5 times the bytes of two stages, and compresses once."""
AVERAGES_IN_TWO_STAGES_FROM = 3
"""With two nodes, an all-gather sends as many bytes as two stages."""
_MATRIX_SIDE = 1024
"""The cost of a low rank depends on the shapes of matrices. Costs are those of square matrices of this size, or of one
square matrix for fewer elements."""
_SPLIT_HEADER_BYTES = 36
"""Header of a message of `oktopk`, with its padding."""
_SPLIT_QUANTILES, _SPLIT_QUANTILE_BYTES = 64, 8
"""Most quantiles that the nodes of `oktopk` add up, and the bytes of a quantile (collectives/split_top.py)."""
_SPLIT_HISTOGRAM_BYTES = 4 * 128
"""Bytes of a histogram of `oktopk`: 128 bins of 4 bytes."""
_SPLIT_COUNT_BYTES = 2 * 4
"""Bytes that every node of `oktopk` sends to each other node: its numbers of sums above and at the threshold."""
_DECODED_ENTRY_BYTES = 2 * (4 + _ELEMENT_BYTES)
"""Memory traffic per entry that is decoded and added up: its index and its value are written and read."""
_MERGED_ENTRY_BYTES = 160
"""Memory traffic per entry of a message that is added to another one: both are decoded, sorted, added and selected."""


def count_hierarchical_traffic(workload: Workload) -> Traffic:
    """Return the traffic of an all-reduce of each shard between nodes, in the format `dense_wire`."""
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload)
    sent = all_reduce_sent(workload.dense_value_bytes * workload.elements, workload.nodes)
    sent += count_wider_bytes(workload.dense_value_bytes, workload.elements, workload.nodes)
    if workload.dense_value_bytes < _ELEMENT_BYTES and workload.nodes > 1:
        # Shards are rounded before the exchange, and widened after it.
        memory += 2 * (_ELEMENT_BYTES + workload.dense_value_bytes) * workload.elements
    return Traffic(sent, memory, all_reduce_messages(workload.nodes))


def count_torus2d_traffic(workload: Workload) -> Traffic:
    """Return the traffic of a ring of nodes for each shard."""
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload)
    return Traffic(all_reduce_sent(workload.array_bytes, workload.nodes), memory, 2 * (workload.nodes - 1))


def count_flat_traffic(workload: Workload) -> Traffic:
    """Return the traffic of a ring of all ranks."""
    ranks = workload.nodes * workload.slots
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload)
    return Traffic(all_reduce_sent(workload.array_bytes, ranks), memory, 2 * (ranks - 1))


def count_hierarchical_nccl_traffic(workload: Workload) -> Traffic:
    """Return the traffic of NCCL's trees between nodes, one for each shard."""
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload)
    return Traffic(all_reduce_sent(workload.array_bytes, workload.nodes), memory, _count_tree_messages(workload.nodes))


def count_nccl_traffic(workload: Workload) -> Traffic:
    """Return the traffic of NCCL's tree over all ranks."""
    ranks = workload.nodes * workload.slots
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload)
    return Traffic(all_reduce_sent(workload.array_bytes, ranks), memory, _count_tree_messages(workload.nodes))


def _count_tree_messages(partners: int) -> int:
    """Return how many messages wait for one another if a sum travels up a tree and down again."""
    return 2 * math.ceil(math.log2(max(partners, 2)))


def count_hitopk_traffic(workload: Workload) -> Traffic:
    """Return the traffic of an all-gather of the largest entries of each shard, and inside each node of the entries of
    all shards, or of the sums if the entries are too many."""
    node_entries = workload.slots * workload.kept(workload.slots)
    sent = (workload.nodes - 1) * node_entries * workload.entry_bytes
    entries = workload.nodes * node_entries
    entry_bytes = entries * workload.entry_bytes
    add_entries = entry_bytes + entries * _DECODED_ENTRY_BYTES + workload.array_bytes  # writes zeros and sums once
    select = 3 * workload.array_bytes  # reads the sum and the residual, writes the residual
    memory = reduce_scatter_memory(workload) + select
    if entry_bytes <= SPARSE_INSIDE * workload.array_bytes:
        memory += 2 * (workload.slots - 1) * entry_bytes + workload.slots * add_entries
    else:
        memory += add_entries + all_gather_memory(workload)
    return Traffic(sent, memory, all_gather_messages(workload.nodes))


def count_naive_traffic(workload: Workload) -> Traffic:
    """Return the traffic of an all-gather of the largest entries of every rank: pairwise up to PAIRWISE_LIMIT ranks,
    then along a ring in rank order, of which one link leaves each node."""
    slots, ranks = workload.slots, workload.nodes * workload.slots
    is_direct, row_bytes = ranks <= PAIRWISE_LIMIT, workload.kept() * workload.entry_bytes
    rows = slots * (ranks - slots) if is_direct else ranks - 1
    rows_inside = slots * (slots - 1) if is_direct else (slots - 1) * (ranks - 1)
    sent = rows * row_bytes if workload.nodes > 1 else 0
    select = 3 * workload.array_bytes  # reads the array and the residual, writes the residual
    add_entries = ranks * (row_bytes + workload.kept() * _DECODED_ENTRY_BYTES) + workload.array_bytes  # as for hitopk
    memory = slots * (select + add_entries) + 2 * rows_inside * row_bytes
    return Traffic(sent, memory, 1 if is_direct else ranks - 1)


def count_gtopk_traffic(workload: Workload) -> Traffic:
    """Return the traffic of a tree in which pairs of nodes add up their largest entries."""
    rounds, surplus = _count_tree_rounds(workload.nodes)
    entries = workload.slots * workload.kept(workload.slots)
    merge_bytes = (rounds + surplus) * entries * _MERGED_ENTRY_BYTES
    read_and_write_shards = 5 * workload.array_bytes  # the sum and the residual, the selection, the result
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload) + read_and_write_shards + merge_bytes
    return Traffic((rounds + surplus) * entries * workload.entry_bytes, memory, rounds + 2 * surplus)


def count_oktopk_traffic(workload: Workload) -> Traffic:
    """Return the traffic of two stages: entries to the owners of regions, and the largest sums to all nodes."""
    nodes, entries = workload.nodes, workload.kept(workload.slots)
    both_stages = 2 * (nodes - 1) * (entries / nodes * workload.entry_bytes + _SPLIT_HEADER_BYTES)
    rounds = max(nodes - 1, 0).bit_length()  # of an all-reduce of the quantiles, or of one of the two histograms
    quantile_bytes = _SPLIT_QUANTILE_BYTES * min(nodes, _SPLIT_QUANTILES)
    measurement_bytes = rounds * (quantile_bytes + 2 * _SPLIT_HISTOGRAM_BYTES) + _SPLIT_COUNT_BYTES * (nodes - 1)
    read_and_write_shards = 5 * workload.array_bytes  # as for gtopk
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload) + read_and_write_shards
    memory += workload.slots * entries * _MERGED_ENTRY_BYTES if nodes > 1 else 0
    messages = two_stage_messages(nodes) + 4 * rounds  # quantiles, two histograms, counts
    return Traffic(workload.slots * (both_stages + measurement_bytes), memory, messages)


def _count_tree_rounds(nodes: int) -> tuple[int, int]:
    """Return how many rounds a tree of pairs has, and 1 if the number of nodes is not a power of two: the surplus nodes
    send to a partner before the first round, and get the result after the last."""
    rounds = max(nodes, 1).bit_length() - 1
    return rounds, int(nodes > 1 << rounds)


def count_onebit_traffic(workload: Workload) -> Traffic:
    """Return the traffic of the signs and scales of all changes of the weights."""
    bits, scales = workload.elements / 8, 2 * -(-workload.elements // _SIGN_BLOCK)
    return _count_traffic_of_changes(workload, bits + scales, SIGNS_IN_TWO_STAGES_FROM)


def count_topk1bit_traffic(workload: Workload) -> Traffic:
    """Return the traffic of the indices, signs and scales of the largest tenth of the changes of the weights."""
    count = -(-workload.elements // 10)
    signs, scales = count / 8, 2 * -(-count // _SIGN_BLOCK)
    # Bits of the indices: three low bits each; the rest in unary, with a bit per index and one per 2**3 elements.
    indices = (3 * count + count + workload.elements / 8) / 8
    return _count_traffic_of_changes(workload, signs + scales + indices, SIGNS_IN_TWO_STAGES_FROM)


def count_signsgd_traffic(workload: Workload) -> Traffic:
    """Return the traffic of an all-gather of the signs and scales of the node's gradient."""
    message_bytes = workload.elements / 8 + 2 * -(-workload.elements // _SIGN_BLOCK)
    read_and_write_shards = 8 * workload.array_bytes  # a copy, its signs, the votes, the result
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload) + read_and_write_shards
    memory += workload.nodes * message_bytes  # reads the signs of all nodes
    return Traffic((workload.nodes - 1) * message_bytes, memory, all_gather_messages(workload.nodes))


def count_int8_traffic(workload: Workload) -> Traffic:
    """Return the traffic of two stages with 8 bits per element."""
    return _count_quantised_traffic(workload, 8)


def count_int4_traffic(workload: Workload) -> Traffic:
    """Return the traffic of two stages with 4 bits per element."""
    return _count_quantised_traffic(workload, 4)


def count_int3_traffic(workload: Workload) -> Traffic:
    """Return the traffic of two stages with 3 bits per element, and 4 bits for each 32."""
    return _count_quantised_traffic(workload, 3 + 4 / 32)


def _count_quantised_traffic(workload: Workload, bits: float) -> Traffic:
    message_bytes = bits / 8 * workload.elements + 2 * -(-workload.elements // _QUANTISED_BLOCK)
    # The sum with the residual, both packings, the result.
    read_and_write_shards = 7 * workload.array_bytes
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload) + read_and_write_shards
    return Traffic(two_stage_sent(message_bytes, workload.nodes), memory, two_stage_messages(workload.nodes))


def count_localsgd_traffic(workload: Workload) -> Traffic:
    """Return the traffic of the rounded changes of all weights."""
    return _count_traffic_of_changes(
        workload, VALUE_BYTES[workload.wire] * workload.elements, AVERAGES_IN_TWO_STAGES_FROM
    )


def count_small_changes_traffic(workload: Workload) -> Traffic:
    """Return the traffic of the changes of small tensors, rounded to bf16, in an exchange that sends signs or levels of
    the others (collectives/codec_all_reduce.py)."""
    return _count_traffic_of_changes(workload, VALUE_BYTES["bf16"] * workload.elements, SIGNS_IN_TWO_STAGES_FROM)


def count_sparseloco_traffic(workload: Workload) -> Traffic:
    """Return the traffic of the indices, two bits and levels of the largest 1/32 of the changes of the weights."""
    count = -(-workload.elements // 32)
    levels, bits = 4 * -(-count // _SIGN_BLOCK), 2 * count / 8
    # Bits of the indices: five low bits each; the rest in unary, with a bit per index and one per 2**5 elements.
    indices = (5 * count + count + workload.elements / 32) / 8
    return _count_traffic_of_changes(workload, levels + bits + indices, SIGNS_IN_TWO_STAGES_FROM)


def _count_traffic_of_changes(workload: Workload, message_bytes: float, two_stage_from: int) -> Traffic:
    """Return the traffic of an exchange of weight changes. `message_bytes` is the length of the encoded changes."""
    if workload.nodes < two_stage_from:
        sent, messages = (workload.nodes - 1) * message_bytes, all_gather_messages(workload.nodes)
    else:
        sent, messages = two_stage_sent(message_bytes, workload.nodes), two_stage_messages(workload.nodes)
    # The change of the weights, the part of it that is sent, the sum of all nodes.
    read_and_write_shards = 5 * workload.array_bytes
    gradient_memory = reduce_scatter_memory(workload) + all_gather_memory(workload)
    return Traffic(
        sent / workload.period, gradient_memory + read_and_write_shards / workload.period, messages / workload.period
    )


def count_powersgd_traffic(workload: Workload) -> Traffic:
    """Return the traffic of two all-reduces, of the factors P and Q of all matrices."""
    side = min(_MATRIX_SIDE, math.sqrt(workload.elements))
    values = workload.matrix_rank * 2 * side * max(1, workload.elements / _MATRIX_SIDE**2)
    read_and_write_shards = 6 * workload.array_bytes  # the gradient and the residual, both products, the result
    memory = reduce_scatter_memory(workload) + all_gather_memory(workload) + read_and_write_shards
    return Traffic(all_reduce_sent(4 * values, workload.nodes), memory, 2 * all_reduce_messages(workload.nodes))


def count_acpsgd_traffic(workload: Workload) -> Traffic:
    """Return the traffic of one all-reduce, of the factor P or Q of all matrices."""
    both_factors = count_powersgd_traffic(workload)
    read_and_write_shard = workload.array_bytes  # for the second product of powersgd
    return Traffic(both_factors.sent / 2, both_factors.memory - read_and_write_shard, both_factors.messages / 2)
