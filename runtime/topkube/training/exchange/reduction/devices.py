"""The device of a rank, and the device on which its gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from topkube.collectives.device.rank_group import refuse_mig
from topkube.errors import ArgumentError, DeviceError
from topkube.processors import bind_near_pci
from topkube.settings import Settings
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded
from topkube.world import World, current


def device() -> torch.device:
    """Return this rank's device: the GPU of its local rank, which becomes torch's current device, or the CPU if there
    is no GPU.

    If a rank sees only one GPU (CUDA_VISIBLE_DEVICES is set for each rank), that GPU is its device. Raises DeviceError
    if a node has several GPUs but fewer than ranks: NCCL does not support two ranks on the same GPU; or if the GPU is a
    part of a GPU (MIG). The thread is bound to the processors of the GPU's NUMA node.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    own = torch.device("cuda", find_gpu(current(), torch.cuda.device_count()))
    torch.cuda.set_device(own)
    properties = torch.cuda.get_device_properties(own)
    refuse_mig(properties.name)
    if (address := _format_pci_address(properties)) is not None:
        bind_near_pci(address)
    return own


def _format_pci_address(properties: Any) -> str | None:
    """Return the address of a GPU as the kernel writes it: "0000:3b:00.0"; None if this version of torch does not tell
    it."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def find_gpu(world: World, gpus: int) -> int:
    """Return the number of this rank's GPU among the `gpus` that it sees. Raises DeviceError."""
    if gpus == 1:
        return 0
    if world.host_size > gpus:
        raise DeviceError(
            f"node {world.node} has {world.host_size} ranks and {gpus} GPUs",
            cause="slotsPerWorker is larger than the number of GPUs that a pod requests",
            next_step=f"start {gpus} ranks on each node (slotsPerWorker: {gpus}), one per GPU",
        )
    return world.host_rank  # a machine that acts as several nodes has GPUs for all of them


def find_exchange_device(parameters: Sequence[Parameter], settings: Settings | None = None) -> torch.device | None:
    """Return the device on which these parameters' gradients are reduced; None for host memory. Raises ArgumentError if
    the parameters are on several devices."""
    devices = {parameter.tensor.device for parameter in parameters}
    if len(devices) > 1:
        listed = ", ".join(sorted(str(device) for device in devices))
        raise ArgumentError(
            f"parameters are on {listed}; the gradients of an optimizer must be on a single device",
            cause="only a part of the model was moved to another device",
            next_step="call model.to(topkube.device()) before you create the optimizer, or use an optimizer per device",
        )
    single_device = next(iter(devices), torch.device("cpu"))
    if single_device.type == "cuda" or (settings or Settings.from_environment()).node_exchange == "torch":
        if sharded := [parameter.name for parameter in parameters if is_sharded(parameter.tensor)]:
            raise ArgumentError(
                f"parameter {sharded[0]} is a DTensor on {single_device}",
                cause="FSDP2 or tensor parallelism sharded the model; TopKube exchanges shards on the CPU only",
                next_step="keep sharded models on the CPU, or train the whole model on each GPU",
            )
        return single_device
    return None
