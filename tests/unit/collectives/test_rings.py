"""All-reduces around a ring, with all ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from message_network import SimulatedNetwork
from topkube.algorithms import cost
from topkube.arrays import BFLOAT16
from topkube.collectives.rings import ring_all_reduce
from topkube.collectives.rounds import all_reduce, count_buffer_elements


def reduce(exchange: Any, arrays: list[Any], scale: float) -> tuple[list[Any], int]:
    """Return the result of each rank, and the bytes that rank 0 sent."""
    network, results = SimulatedNetwork(len(arrays)), [array.copy() for array in arrays]
    room = count_buffer_elements(len(arrays[0]), len(arrays))
    network.run(
        [
            exchange(comm, result, np.empty(room, result.dtype), 0, lambda _: None, scale)
            for comm, result in zip(network.comms, results, strict=True)
        ]
    )
    return results, network.sent_bytes[0]


@pytest.mark.parametrize(("dtype", "large"), [(BFLOAT16, 256.0), (np.float16, 2048.0), (np.float32, 2.0**24)])
@pytest.mark.parametrize("ranks", [17, 20])
def test_partial_sums_keep_small_values(dtype: Any, large: float, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type cannot add 1 to `large`. With many ranks, partial sums have a wider type, so that no 1 is lost."""
    arrays = [np.full(3 * ranks + 5, large if rank == 0 else 1.0, np.float32).astype(dtype) for rank in range(ranks)]
    around, sent = reduce(ring_all_reduce, arrays, 0.5)
    monkeypatch.setattr(cost, "PAIRWISE_LIMIT", ranks)  # one round, in the order of the ranks
    expected, _ = reduce(all_reduce, arrays, 0.5)
    if np.dtype(dtype).itemsize == 2:
        for result in around:
            assert result.tobytes() == expected[0].tobytes()
        assert float(around[0][0]) > large / 2 + 6
        assert sent < 7 * len(arrays[0])  # 4 bytes in the first round, 2 in the second
    for result in around:
        assert result.tobytes() == around[0].tobytes()


def test_few_ranks_send_partial_sums_in_the_type_of_the_array() -> None:
    arrays = [np.full(40, rank, np.float32).astype(BFLOAT16) for rank in range(4)]
    around, sent = reduce(ring_all_reduce, arrays, 1.0)
    assert all((result.astype(np.float32) == 6).all() for result in around)
    assert sent == 2 * 2 * 30
