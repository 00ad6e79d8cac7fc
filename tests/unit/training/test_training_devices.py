"""One GPU per rank, a single device per optimizer."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import topkube
from topkube import mpi_exit
from topkube.collectives.device import node_group as node_group_module
from topkube.collectives.device import spanning_group
from topkube.collectives.device.node_group import find_node_group, refuse_mig
from topkube.collectives.device.rank_group import identify_gpu
from topkube.errors import ArgumentError, DeviceError
from topkube.processors import bind_near_pci, find_processors_near_pci
from topkube.settings import Settings
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.reduction.devices import _format_pci_address, find_exchange_device, find_gpu
from topkube.training.reporting.step_trace import StepTrace
from topkube.world import World


def build_parameter(device: str) -> Parameter:
    return Parameter(0, "w", torch.nn.Parameter(torch.zeros(3, device=device)))


def test_a_ranks_gpu_is_that_of_its_local_rank() -> None:
    world = replace(topkube.world.init(), host_rank=3, host_size=4)
    assert find_gpu(world, 8) == 3
    assert find_gpu(world, 4) == 3
    assert find_gpu(world, 1) == 0  # CUDA_VISIBLE_DEVICES was set rank by rank; NodeGroup compares the GPUs themselves
    # TOPKUBE_RANKS_PER_NODE=4,4 on a machine with eight GPUs: each rank has a GPU of its own.
    ranks_of_second_node = [replace(world, local_rank=i, local_size=4, host_rank=4 + i, host_size=8) for i in range(4)]
    assert [find_gpu(rank, 8) for rank in ranks_of_second_node] == [4, 5, 6, 7]
    with pytest.raises(DeviceError, match=r"has 4 ranks and 2 GPUs.*slotsPerWorker: 2"):
        find_gpu(world, 2)


def test_a_rank_is_bound_to_the_processors_near_its_gpu(tmp_path: Path) -> None:
    gpu = tmp_path / "0000:3b:00.0"
    gpu.mkdir()
    (gpu / "local_cpulist").write_text("0-1,64,70-72\n")
    assert find_processors_near_pci(gpu.name, tmp_path) == {0, 1, 64, 70, 71, 72}
    assert find_processors_near_pci("0000:ff:00.0", tmp_path) == frozenset()
    affinity = os.sched_getaffinity(0)
    first = min(affinity)
    try:
        (gpu / "local_cpulist").write_text("4000")
        bind_near_pci(gpu.name, tmp_path)
        assert os.sched_getaffinity(0) == affinity
        (gpu / "local_cpulist").write_text(f"{first},4000")
        bind_near_pci(gpu.name, tmp_path)
        assert os.sched_getaffinity(0) == {first}
    finally:
        os.sched_setaffinity(0, affinity)


def test_gpus_are_told_apart_without_what_older_versions_of_torch_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, new = SimpleNamespace(index=0), SimpleNamespace(index=1), SimpleNamespace(uuid="GPU-1")
    names = {identify_gpu(SimpleNamespace(), first), identify_gpu(SimpleNamespace(), second), identify_gpu(new, first)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    names.add(identify_gpu(SimpleNamespace(), first))
    assert len(names) == 4
    assert "GPU-1" in names
    assert _format_pci_address(SimpleNamespace()) is None
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert _format_pci_address(address) == "0000:3b:00.0"


def test_a_trace_waits_for_the_gpu_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def current_stream(device: Any = None) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    device = torch.device("cuda", 3)
    parameters: Any = [("bias", torch.ones(2)), ("weight", SimpleNamespace(is_cuda=True, device=device))]
    step_trace = StepTrace(SimpleNamespace(recording=True), parameters)  # type: ignore[arg-type]
    step_trace.begin_backward()
    assert waited == [device]
    for handle in step_trace._handles:
        handle.remove()


def test_parts_of_a_gpu_and_sharded_parameters_are_refused() -> None:
    refuse_mig("NVIDIA H100 80GB HBM3")
    with pytest.raises(DeviceError, match=r"MIG 1g.10gb is a part of a GPU.*whole GPUs"):
        refuse_mig("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    tensor = SimpleNamespace(device=torch.device("cuda", 0), placements=(), to_local=None)
    sharded: Any = SimpleNamespace(name="layer.weight", tensor=tensor)
    with pytest.raises(ArgumentError, match=r"layer.weight is a DTensor on cuda:0"):
        find_exchange_device([sharded], Settings())
    tensor.device = torch.device("cpu")
    assert find_exchange_device([sharded], Settings()) is None


class FakeNccl:
    """The parts of torch's ProcessGroupNCCL that NodeGroup uses."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self.ended = options, 0

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture
def nccl_world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the world of the first of two ranks with GPUs on a node."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="GPU-1")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(node_group_module, "_check_own_gpu", lambda *_: None)
    mpi_exit.forget_exit()  # tests of commands end with sys.exit in this process
    return replace(topkube.world.init(), local_size=2, deadline_seconds=60.0, cache={}, at_end=[])


def test_the_watchdog_of_nccl_waits_twice_as_long_as_topkube(nccl_world: World) -> None:
    group = find_node_group(nccl_world, torch.device("cuda", 0))
    assert group._group.options._timeout == timedelta(seconds=120)


def test_a_build_of_torch_without_nccl_is_refused(nccl_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(DeviceError, match=r"this build of torch has no NCCL.*install a build of torch for CUDA"):
        find_node_group(nccl_world, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("names", "route", "address"),
    [
        (["10.1.2.3"], "192.168.0.2", "10.1.2.3"),  # a pod: its name resolves to its address
        (["127.0.1.1", "::1"], "192.168.0.2", "192.168.0.2"),  # Debian's /etc/hosts
        (["fe80::1%eth0", "2001:db8::5"], "", "2001:db8::5"),
        ([], "", ""),
    ],
)
def test_ranks_of_other_nodes_meet_at_an_address_that_they_reach(
    monkeypatch: pytest.MonkeyPatch, names: list[str], route: str, address: str
) -> None:
    class Route:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, _: object) -> None:
            if not route:
                raise OSError("there is no route")

        def getsockname(self) -> tuple[str, int]:
            return route, 1

    def resolve(*_: object) -> Any:
        if not names:
            raise OSError("the name is unknown")
        return [(0, 0, 0, "", (name, 0)) for name in names]

    monkeypatch.setattr(spanning_group.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(spanning_group.socket, "socket", Route)
    assert spanning_group.find_own_address() == address


def test_a_process_has_one_communicator_per_device_and_ends_it(nccl_world: World) -> None:
    group = find_node_group(nccl_world, torch.device("cuda", 0))
    assert find_node_group(nccl_world, torch.device("cuda", 0)) is group
    communicator = group._group
    for close in nccl_world.at_end:
        close()
    assert communicator.ended == 1
    group.close()
    assert communicator.ended == 1


def test_a_communicator_of_an_older_torch_is_ended_too(nccl_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNccl, "_shutdown", FakeNccl.shutdown, raising=False)
    monkeypatch.delattr(FakeNccl, "shutdown")
    group = find_node_group(nccl_world, torch.device("cuda", 0))
    communicator = group._group
    group.close()
    assert communicator.ended == 1


def test_two_series_of_collectives_do_not_mix(nccl_world: World) -> None:
    group = find_node_group(nccl_world, torch.device("cuda", 0))
    training, script = object(), object()
    group.claim(training)
    group.claim(training)
    with pytest.raises(ArgumentError, match=r"while backward\(\) exchanges gradients"):
        group.claim(script)
    group.release()
    group.claim(script)


@pytest.mark.parametrize(("backend", "is_refused"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False)])
def test_a_default_group_of_nccl_beside_ours_is_refused(
    nccl_world: World, monkeypatch: pytest.MonkeyPatch, backend: str, is_refused: bool
) -> None:
    group = find_node_group(nccl_world, torch.device("cuda", 0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    with pytest.raises(DeviceError, match="default group uses NCCL") if is_refused else nullcontext():
        group.claim(object())
    group.release()
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    group.claim(object())


def test_without_a_gpu_the_device_is_the_cpu() -> None:
    topkube.init()
    if torch.cuda.is_available():
        assert topkube.device().type == "cuda"
    else:
        assert topkube.device() == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("has_graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("selection", ["topk", "mstopk"])
def test_one_process_with_one_gpu_trains_as_through_gloo_on_the_cpu(selection: str, has_graphs: bool) -> None:
    settings = Settings(node_exchange="torch", device_graphs=has_graphs)
    topkube.init()
    trained = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.zeros(693, 101, device=device))  # two dimensions: entries are selected
        optimizer = topkube.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.5), [("weight", weight)],
            aggregation="hitopk", density=0.01, wire="bf16", selection=selection, warmup_steps=0, settings=settings,
        )  # fmt: skip
        for step in range(8):
            target = torch.randn(693, 101, generator=torch.Generator().manual_seed(step)).to(device)
            (weight * target).sum().backward()  # the gradient is `target`: the same bits on both
            optimizer.step()
            optimizer.zero_grad()
        trained.append(weight.detach().cpu())
    assert bool(trained[0].any())
    assert torch.equal(*trained)


def test_gradients_are_reduced_on_their_own_device() -> None:
    assert find_exchange_device([build_parameter("cpu")], Settings()) is None
    assert find_exchange_device([], Settings()) is None
    assert find_exchange_device([build_parameter("cpu")], Settings(node_exchange="torch")) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"cpu, meta.*a single device"):
        find_exchange_device([build_parameter("cpu"), build_parameter("meta")], Settings())
