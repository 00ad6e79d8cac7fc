"""The measured machines: a measurement for gradients in host memory, and one for those on GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from topkube.collectives.device.rates import DeviceRates
from topkube.collectives.link import MeasuredMachine
from topkube.training.exchange.tuning import machines


def test_an_optimizer_in_host_memory_is_not_offered_the_transport_of_gpus(monkeypatch: Any) -> None:
    """A script may have one optimizer on GPUs and one in host memory."""
    monkeypatch.setattr(machines, "measure_machines", lambda world: MeasuredMachine(1e9, 1e-4, 1e10))
    world: Any = SimpleNamespace(cache={}, local_size=2, largest_node=2, shards=2, nodes=2, crowding=1.0)
    agreement: Any = SimpleNamespace(run=lambda work: work(None), maximum=lambda values: values)
    rates = DeviceRates(memory=1e12, nccl_link=3e9)
    on_gpus = machines.agree_on_machines(world, agreement, True, lambda: rates)
    in_host_memory = machines.agree_on_machines(world, agreement, False, lambda: None)
    assert (on_gpus.nccl_link, on_gpus.memory) == (3e9, 2e12)
    assert (in_host_memory.nccl_link, in_host_memory.memory) == (None, 1e10)
    assert machines.agree_on_machines(world, agreement, True, lambda: None) is on_gpus
