"""The selection of a bucket on a device begins at the threshold of the bucket's previous step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import topkube
from topkube.kernels.device import DeviceKernels
from topkube.settings import Settings
from unit.training.fake_graphs import FakeGraphs
from unit.training.fake_streams import simulate_device

STEPS = 6


@pytest.fixture
def reuses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each selection on the emulated device, in their order: True if it began at a previous threshold."""
    reuses: list[bool] = []
    launch = DeviceKernels._launch_selection

    def observe(kernels: DeviceKernels, *arguments: Any, **options: Any) -> None:
        launch(kernels, *arguments, **options)
        reuses.append(kernels.library.read_effort(bytes(kernels._last.state.numpy())).is_reused)

    monkeypatch.setattr(DeviceKernels, "_launch_selection", observe)
    with simulate_device(monkeypatch):
        FakeGraphs(monkeypatch)
        yield reuses


@pytest.mark.parametrize("options", [{}, {"selection": "mstopk"}, {"momentum_correction": True}], ids=str)
def test_each_bucket_has_a_previous_threshold_of_its_own(reuses: list[bool], options: dict[str, Any]) -> None:
    weights = [torch.nn.Parameter(torch.zeros(140, 120)) for _ in range(2)]
    optimizer = topkube.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        [(f"weight{i}", weight) for i, weight in enumerate(weights)],
        settings=Settings(node_exchange="torch"),
        bucket_bytes=140 * 120 * 4,
        **{"aggregation": "hitopk", "density": 0.05, "warmup_steps": 0, "wire": "bf16", **options},
    )
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        sizes = 1.0, 1000.0  # one threshold for both buckets would be wrong for each
        sum(
            (weight * torch.randn(140, 120, generator=random) * size).sum()
            for weight, size in zip(weights, sizes, strict=True)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(reuses) == 2 * STEPS
    assert reuses[:2] == [False, False]
    assert sum(reuses) >= STEPS  # a jump of the threshold, as momentum causes at first, costs a sample
