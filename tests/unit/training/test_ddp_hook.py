"""The hook for DistributedDataParallel: real ranks under torchrun, compared with HiTopKComm in NumPy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds

import topkube
from topkube.errors import TrainingError

SCRIPT = Path(__file__).with_name("ddp_hook_script.py")
DENSITY, NODES, RANKS_PER_NODE = 0.1, 2, 2
SCALES = [64.0 * 2**step for step in range(6)]
"""The factors of the GradScaler: powers of two, so that nothing is rounded."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """(weights, steps) of each rank, for each run of the script."""
    ranks = worlds.run_torchrun(SCRIPT, tmp_path_factory.mktemp("ddp"))
    return {name: [results[name] for results in ranks] for name in ranks[0]}


class Reference:
    """HiTopKComm of one bucket over two nodes, with error feedback."""

    def __init__(self) -> None:
        self.residuals: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def compute_mean(self, gradients: list[np.ndarray[Any, Any]], dense: bool) -> np.ndarray[Any, Any]:
        count = len(gradients[0])
        length = math.ceil(count / RANKS_PER_NODE)
        padded = [np.pad(gradient, (0, RANKS_PER_NODE * length - count)) for gradient in gradients]
        result = np.zeros(RANKS_PER_NODE * length, np.float32)
        for place in range(RANKS_PER_NODE):
            part = slice(place * length, (place + 1) * length)
            for node in range(NODES):
                shard = np.zeros(length, np.float32)
                for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
                    shard += padded[rank][part]
                shard *= np.float32(1 / (NODES * RANKS_PER_NODE))
                if dense:
                    result[part] += shard
                    continue
                total = shard + self.residuals.get((node, place), np.zeros(length, np.float32))
                chosen = np.argsort(-np.abs(total), kind="stable")[: max(1, math.ceil(round(DENSITY * length, 6)))]
                result[part][chosen] += total[chosen]
                total[chosen] = 0
                self.residuals[node, place] = total
        return result[:count]


@pytest.mark.parametrize(
    ("run", "overflow", "scale"), [("fp32", -1, [1.0] * 6), ("overflow", 3, [1.0] * 6), ("scaled", -1, SCALES)]
)
def test_every_bucket_is_the_mean_of_hitopkcomm(
    runs: dict[str, list[Any]], run: str, overflow: int, scale: list[float]
) -> None:
    """If a GradScaler changes its factor, residuals follow: in true units everything stays as it was."""
    ranks = runs[run]
    references: dict[int, Reference] = {}
    for step in range(6):
        buckets = sorted(ranks[0][1][step])
        assert step == 0 or len(buckets) > 1, "the test needs several buckets"
        for index in buckets:
            gradients = [steps[step][index][0].numpy() / np.float32(scale[step]) for _, steps in ranks]
            means = [steps[step][index][1].numpy() / np.float32(scale[step]) for _, steps in ranks]
            for mean in means[1:]:
                np.testing.assert_array_equal(mean, means[0], "all ranks hold the same mean")
            if step == overflow:
                assert not np.isfinite(means[0]).all(), "GradScaler must see it on every rank"
                continue  # the residuals are those of the step before
            reference = references.setdefault(index, Reference())
            np.testing.assert_array_equal(means[0], reference.compute_mean(gradients, dense=step == 0))
    for weights, _ in ranks[1:]:
        assert torch.equal(weights, ranks[0][0])


def test_sixteen_bit_values_keep_all_ranks_equal(runs: dict[str, list[Any]]) -> None:
    ranks = runs["bf16"]
    assert all(torch.equal(weights, ranks[0][0]) for weights, _ in ranks[1:])
    _, steps = ranks[0]
    _, sparse = steps[3][0]  # the first bucket of step 3 before and after the hook
    assert 0 < torch.count_nonzero(sparse) <= 2 * (DENSITY * len(sparse) + 2)


def test_the_hook_needs_a_process_group() -> None:
    with pytest.raises(TrainingError, match="is not initialized"):
        topkube.ddp_hook()
