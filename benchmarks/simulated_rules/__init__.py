"""Exchange rules of simulated nodes (benchmarks/simulated_nodes.py): what nodes send, and where the rest stays."""

from simulated_rules.gradients import (
    AcpSGD,
    Dense,
    Int3,
    Int4,
    Int8,
    PowerSGD,
    PowerSGDRank1,
    PowerSGDRank2,
    SignResidual,
    SimulatedGTopK,
    SimulatedHiTopK,
    SimulatedOkTopK,
)
from simulated_rules.rule import Nodes, Rule, RuleOptions
from simulated_rules.weights import (
    DelayedSignWeights,
    DiLoCo,
    LocalAveraging,
    SignWeights,
    SignWeightsTwoStage,
    SimulatedSparseLoCo,
    TopKWeights,
    TopSignWeights,
)

__all__ = ["RULES", "Nodes", "Rule", "RuleOptions"]

RULES: dict[str, type[Rule]] = {
    "dense": Dense,
    "hitopk": SimulatedHiTopK,
    "gtopk": SimulatedGTopK,
    "oktopk": SimulatedOkTopK,
    "int8": Int8,
    "int4": Int4,
    "int3": Int3,
    "powersgd": PowerSGD,
    "powersgd-rank2": PowerSGDRank2,
    "powersgd-rank1": PowerSGDRank1,
    "acpsgd": AcpSGD,
    "local-averaging": LocalAveraging,
    "sign-weights": SignWeights,
    "sign-weights-delayed": DelayedSignWeights,
    "sign-weights-two-stage": SignWeightsTwoStage,
    "topk-weights": TopKWeights,
    "topk1bit": TopSignWeights,
    "diloco": DiLoCo,
    "sparseloco": SimulatedSparseLoCo,
    "sign-residual": SignResidual,
}
"""The rules by name."""
