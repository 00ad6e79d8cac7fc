"""One GPU per rank, one device per optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import topkube
from topkube.errors import ArgumentError, DeviceError
from topkube.settings import Settings
from topkube.training.buckets import Parameter
from topkube.training.devices import exchange_device, gpu_of


def parameter(device: str) -> Parameter:
    return Parameter(0, "w", torch.nn.Parameter(torch.zeros(3, device=device)))


def test_a_ranks_gpu_is_that_of_its_local_rank() -> None:
    world = replace(topkube.world.init(), local_rank=3, local_size=4)
    assert gpu_of(world, 8) == 3
    assert gpu_of(world, 4) == 3
    assert gpu_of(world, 1) == 0  # CUDA_VISIBLE_DEVICES was set rank by rank; NodeGroup compares the GPUs themselves
    with pytest.raises(DeviceError, match=r"has 4 ranks and 2 GPUs.*slotsPerWorker: 2"):
        gpu_of(world, 2)


def test_without_a_gpu_the_device_is_the_cpu() -> None:
    topkube.init()
    if torch.cuda.is_available():
        assert topkube.device().type == "cuda"
    else:
        assert topkube.device() == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("selection", ["topk", "mstopk"])
def test_one_process_with_one_gpu_trains_as_through_gloo_on_the_cpu(
    selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Settings.__dataclass_fields__["node_exchange"].metadata["variable"], "torch")
    topkube.init()
    trained = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.zeros(70_001, device=device))
        optimizer = topkube.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.5), [("weight", weight)],
            aggregation="hitopk", density=0.01, wire="bf16", selection=selection, warmup_steps=0,
        )  # fmt: skip
        for step in range(4):
            target = torch.randn(70_001, generator=torch.Generator().manual_seed(step)).to(device)
            (weight * target).sum().backward()  # the gradient is `target`: the same bits on both
            optimizer.step()
            optimizer.zero_grad()
        trained.append(weight.detach().cpu())
    assert bool(trained[0].any())
    assert torch.equal(*trained)


def test_gradients_are_reduced_where_they_lie() -> None:
    assert exchange_device([parameter("cpu")], Settings()) is None
    assert exchange_device([], Settings()) is None
    assert exchange_device([parameter("cpu")], Settings(node_exchange="torch")) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"cpu, meta.*one device"):
        exchange_device([parameter("cpu"), parameter("meta")], Settings())
