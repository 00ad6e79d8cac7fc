"""The catalogue of all-reduce algorithms: what each of them is called, sends, keeps, costs and supports.

This package loads neither torch, MPI nor NumPy, because the operator imports it. An algorithm is declared once, as an
`Algorithm`. The TrainingJob, the operator, the command line, the cost model, the benchmarks and the reference pages
read the declaration. `collectives/` loads the implementation when an algorithm runs.
"""

from topkube.algorithms.catalogue import GROUP, Package, find, known, load_all, names, package_of, register
from topkube.algorithms.choice import AUTO, CHOICES, DENSE, compresses, describe, resolve
from topkube.algorithms.cost import (
    Cost,
    Machines,
    Traffic,
    Workload,
    all_gather_memory,
    all_gather_messages,
    all_reduce_messages,
    all_reduce_sent,
    cost,
    reduce_scatter_memory,
)
from topkube.algorithms.declaration import (
    RANK_RESIDUAL,
    SHARD_RESIDUAL,
    WEIGHT_RESIDUAL,
    Algorithm,
    Family,
    Route,
    Scope,
    State,
)
from topkube.algorithms.own import OWN
from topkube.algorithms.parameters import (
    DENSE_WIRE,
    DENSITY,
    MATRIX_RANK,
    MOMENTUM_CORRECTION,
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    PARAMETERS,
    PERIOD,
    SELECTION,
    WARMUP_STEPS,
    WIRE,
    AlgorithmParameter,
)
from topkube.algorithms.schedule import MOST_STAGES, Stage, check_schedule

__all__ = [
    "AUTO",
    "CHOICES",
    "DENSE",
    "DENSE_WIRE",
    "DENSITY",
    "GROUP",
    "MATRIX_RANK",
    "MOMENTUM_CORRECTION",
    "MOST_STAGES",
    "OUTER_LEARNING_RATE",
    "OUTER_MOMENTUM",
    "OWN",
    "PARAMETERS",
    "PERIOD",
    "RANK_RESIDUAL",
    "SELECTION",
    "SHARD_RESIDUAL",
    "WARMUP_STEPS",
    "WEIGHT_RESIDUAL",
    "WIRE",
    "Algorithm",
    "AlgorithmParameter",
    "Cost",
    "Family",
    "Machines",
    "Package",
    "Route",
    "Scope",
    "Stage",
    "State",
    "Traffic",
    "Workload",
    "all_gather_memory",
    "all_gather_messages",
    "all_reduce_messages",
    "all_reduce_sent",
    "check_schedule",
    "compresses",
    "cost",
    "describe",
    "find",
    "known",
    "load_all",
    "names",
    "package_of",
    "reduce_scatter_memory",
    "register",
    "resolve",
]
