"""The choice behind `dense` and `auto`: the algorithm with the lowest declared cost."""

from __future__ import annotations

import functools

from topkube.algorithms.catalogue import find, known
from topkube.algorithms.cost import Traffic, Workload
from topkube.algorithms.declaration import Algorithm
from topkube.algorithms.own import AUTOMATIC, OWN
from topkube.algorithms.parameters import DENSITY
from topkube.errors import AlgorithmError

AUTO, DENSE = "auto", "dense"
CHOICES = {
    AUTO: "takes "
    + " or ".join(algorithm.name for algorithm in AUTOMATIC)
    + " if that sends much less between nodes, else dense",
    DENSE: "takes the dense algorithm of least cost",
}
"""Names that stand for an algorithm, with one sentence for people."""
SMALL = 1 << 16
"""For arrays with fewer elements latency counts, not bytes: `auto` sends them dense."""
MOST_OF_DENSE = 3 / 8
"""`auto` compresses if that sends less than this share of the dense bytes, counted with fp32 values. Selection and
latency cost the rest of the gain."""


def resolve(name: str, nodes: int, length: int, density: float) -> Algorithm:
    """Return the algorithm behind a name, for arrays of `length` elements over `nodes`.

    The choice is the same on all ranks. It considers TopKube's own algorithms only, so that installing a package
    changes no job. Raises ArgumentError if there is no algorithm of this name.
    """
    return _chosen(name, nodes, length, density) if name in CHOICES else find(name)


def describe(name: str, density: float) -> str:
    """Return an algorithm and its density in a few words: "hitopk at density 0.01", "dense"."""
    if name in CHOICES:
        uses_density = name == AUTO
    else:
        algorithm = _loaded(name)
        uses_density = algorithm is None or DENSITY in algorithm.parameters
    return f"{name} at density {density:g}" if uses_density else name


def compresses(name: str) -> bool:
    """Return True if the algorithm behind a name may send less than the whole gradient. An algorithm that cannot be
    loaded here counts as one that does."""
    if name in CHOICES:
        return name == AUTO
    algorithm = _loaded(name)
    return algorithm is None or algorithm.compresses


def _loaded(name: str) -> Algorithm | None:
    try:
        return find(name) if known(name) else None
    except AlgorithmError:
        return None


@functools.lru_cache(maxsize=1024)
def _chosen(name: str, nodes: int, length: int, density: float) -> Algorithm:
    def traffic(algorithm: Algorithm) -> Traffic:
        return algorithm.traffic(Workload(max(nodes, 2), 1, length, density, "fp32"))

    def price(algorithm: Algorithm) -> tuple[float, int]:
        return traffic(algorithm).sent, traffic(algorithm).messages

    dense = min((algorithm for algorithm in OWN if not algorithm.compresses), key=price)
    best = min(AUTOMATIC, key=price)
    is_worth_it = traffic(best).sent < MOST_OF_DENSE * traffic(dense).sent
    return best if name == AUTO and nodes > 1 and length >= SMALL and is_worth_it else dense
