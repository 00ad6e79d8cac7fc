"""Cases of small arrays, whose values travel in the greetings between nodes."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np

import topkube
from ranks.allreduce import TYPES, draw_inputs
from ranks.counted_messages import count_messages
from topkube.algorithms import find_algorithm
from topkube.collectives import Request, dense, load
from topkube.world import World


def case_small_arrays_need_few_messages(world: World) -> None:
    """The greeting of a small array carries its values: the result has the same bits, and the messages between nodes
    are those of one round, or of two."""
    for dtype in TYPES:
        for length in (0, 1, 5, 501, 30_011, 400_003):
            x = draw_inputs(world, length, dtype, seed=11)[world.rank].copy()
            alone = x.copy()
            with count_messages(world) as counted:
                topkube.allreduce_(x, algorithm="hierarchical")
            with patch.object(dense, "fits_in_greeting", return_value=False), count_messages(world) as counted_alone:
                topkube.allreduce_(alone, algorithm="hierarchical")
            assert x.tobytes() == alone.tobytes(), f"{length} {dtype}"
            if world.nodes > 1 and world.cross_comm is not None:
                assert counted_alone.messages == 3 * (world.nodes - 1)
                rounds = 1 if length <= 501 else 2 if length <= 30_011 else 3
                assert counted.messages <= rounds * (world.nodes - 1), f"{length} {dtype}"


def case_a_small_array_that_is_not_finite_shows(world: World) -> None:
    """An infinite value on one rank is reported, also if the values travel with the greeting."""
    x = np.ones(1_000, np.float32)
    x[-1] = np.inf if world.rank == world.size - 1 else 1.0
    assert not world.agree(load(find_algorithm("hierarchical")).run(world, Request(x, "sum")))
