"""The declarations of TopKube's own algorithms, in the order in which lists and tables show them."""

from __future__ import annotations

from topkube.algorithms import own_traffic, parameters
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

HIERARCHICAL = Algorithm(
    name="hierarchical",
    summary="reduces inside each node, then each shard between nodes, in pieces that overlap",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=own_traffic.count_hierarchical_traffic,
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
    traffic=own_traffic.count_torus2d_traffic,
    on_device=True,
    implementation="topkube.collectives.dense:Torus2d",
)
FLAT = Algorithm(
    name="flat",
    summary="reduces around one ring of all ranks",
    family=Family.DENSE,
    sends="all entries",
    route=Route.ALL_REDUCE,
    traffic=own_traffic.count_flat_traffic,
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
    traffic=own_traffic.count_hierarchical_nccl_traffic,
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
    traffic=own_traffic.count_nccl_traffic,
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
    traffic=own_traffic.count_hitopk_traffic,
    state=(SHARD_RESIDUAL,),
    parameters=(*_SPARSE, parameters.OVERLAP),
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
    traffic=own_traffic.count_gtopk_traffic,
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
    traffic=own_traffic.count_oktopk_traffic,
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
    traffic=own_traffic.count_naive_traffic,
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
    traffic=own_traffic.count_onebit_traffic,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD, parameters.DELAY),
    in_weights=True,
    two_stage_from=own_traffic.SIGNS_IN_TWO_STAGES_FROM,
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
    traffic=own_traffic.count_topk1bit_traffic,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD, parameters.DELAY),
    in_weights=True,
    two_stage_from=own_traffic.SIGNS_IN_TWO_STAGES_FROM,
    corrects_second_moment=True,
    implementation="topkube.collectives.codec_all_reduce:TopKOneBit",
)
SIGNSGD = Algorithm(
    name="signsgd",
    summary="every element takes the sign of most ranks; each node votes for all its ranks (for comparisons)",
    family=Family.SIGN,
    sends="one bit per element, and the mean magnitude of each block of 256",
    route=Route.ALL_GATHER,
    traffic=own_traffic.count_signsgd_traffic,
    implementation="topkube.collectives.codec_all_reduce:SignSgd",
)
INT8 = Algorithm(
    name="int8",
    summary="reduces inside each node, then each shard between nodes, with 8 bits per value",
    family=Family.QUANTISED,
    sends="8 bits per element, and a scale for each block of 256",
    route=Route.SPLIT,
    traffic=own_traffic.count_int8_traffic,
    state=(SHARD_RESIDUAL,),
    parameters=(parameters.OVERLAP,),
    on_device=True,
    two_stage_from=2,
    implementation="topkube.collectives.codec_all_reduce:Int8",
)
INT4 = Algorithm(
    name="int4",
    summary="reduces inside each node, then each shard between nodes, with 4 bits per value",
    family=Family.QUANTISED,
    sends="4 bits per element (the root of a square, and its sign), and a scale for each block of 256",
    route=Route.SPLIT,
    traffic=own_traffic.count_int4_traffic,
    state=(SHARD_RESIDUAL,),
    parameters=(parameters.OVERLAP,),
    on_device=True,
    two_stage_from=2,
    implementation="topkube.collectives.codec_all_reduce:Int4",
)
INT3 = Algorithm(
    name="int3",
    summary="reduces inside each node, then each shard between nodes, with 3 bits per value",
    family=Family.QUANTISED,
    sends="3 bits per element (one of seven levels), 4 bits for each 32, and a scale for each block of 256",
    route=Route.SPLIT,
    traffic=own_traffic.count_int3_traffic,
    state=(SHARD_RESIDUAL,),
    parameters=(parameters.OVERLAP,),
    on_device=True,
    two_stage_from=2,
    implementation="topkube.collectives.codec_all_reduce:Int3",
)
POWERSGD = Algorithm(
    name="powersgd",
    summary="reduces inside each node, then sends two thin factors of each matrix, of rank `matrixRank`",
    family=Family.LOW_RANK,
    sends="the factors P and Q of each matrix",
    route=Route.ALL_REDUCE,
    traffic=own_traffic.count_powersgd_traffic,
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
    traffic=own_traffic.count_acpsgd_traffic,
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
    traffic=own_traffic.count_localsgd_traffic,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD, parameters.DELAY, parameters.WIRE),
    in_weights=True,
    two_stage_from=own_traffic.AVERAGES_IN_TWO_STAGES_FROM,
    implementation="topkube.collectives.codec_all_reduce:LocalSgd",
)
DILOCO = Algorithm(
    name="diloco",
    summary="as localsgd with a long period, and the mean change of all nodes has Nesterov momentum",
    family=Family.LOCAL_UPDATE,
    sends="the change of the weights, rounded",
    route=Route.ALL_GATHER,
    traffic=own_traffic.count_localsgd_traffic,
    state=(WEIGHT_RESIDUAL, OUTER_STATE),
    parameters=(
        parameters.PERIOD,
        parameters.DELAY,
        parameters.WIRE,
        parameters.OUTER_LEARNING_RATE,
        parameters.OUTER_MOMENTUM,
    ),
    in_weights=True,
    two_stage_from=own_traffic.AVERAGES_IN_TWO_STAGES_FROM,
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
    traffic=own_traffic.count_sparseloco_traffic,
    state=(WEIGHT_RESIDUAL,),
    parameters=(parameters.PERIOD, parameters.DELAY),
    in_weights=True,
    two_stage_from=own_traffic.SIGNS_IN_TWO_STAGES_FROM,
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
    INT8,
    INT4,
    INT3,
    ONEBIT,
    TOPK1BIT,
    SIGNSGD,
    POWERSGD,
    ACPSGD,
    LOCALSGD,
    DILOCO,
    SPARSELOCO,
)
