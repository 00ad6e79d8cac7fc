"""Which device a rank works on, and where its gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from topkube.errors import ArgumentError, DeviceError
from topkube.settings import Settings
from topkube.training.buckets import Parameter
from topkube.world import World, current


def device() -> torch.device:
    """This rank's device: the GPU of its local rank, which becomes torch's current one, or the CPU where there is none.

    Where a rank sees one GPU only (CUDA_VISIBLE_DEVICES set rank by rank) that is its own. Raises DeviceError where a
    node has several GPUs but fewer than ranks: NCCL cannot serve two ranks on one.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    own = torch.device("cuda", gpu_of(current(), torch.cuda.device_count()))
    torch.cuda.set_device(own)
    return own


def gpu_of(world: World, gpus: int) -> int:
    """The number of this rank's GPU among the `gpus` that it sees."""
    if gpus == 1:
        return 0
    if world.local_size > gpus:
        raise DeviceError(
            f"node {world.node} has {world.local_size} ranks and {gpus} GPUs",
            cause="slotsPerWorker is larger than the GPUs that a pod asks for",
            next_step=f"start {gpus} ranks on each node (slotsPerWorker: {gpus}), one per GPU",
        )
    return world.local_rank


def exchange_device(parameters: Sequence[Parameter], settings: Settings | None = None) -> torch.device | None:
    """Where these parameters' gradients are reduced; None where host memory is the place. Raises ArgumentError where
    they lie on several devices."""
    found = {parameter.tensor.device for parameter in parameters}
    if len(found) > 1:
        listed = ", ".join(sorted(str(device) for device in found))
        raise ArgumentError(
            f"parameters lie on {listed}; one optimizer's gradients are exchanged on one device",
            cause="a model of which only a part was moved",
            next_step="model.to(topkube.device()) before the optimizer is made, or one optimizer per device",
        )
    place = next(iter(found), torch.device("cpu"))
    if place.type == "cuda" or (settings or Settings.from_environment()).node_exchange == "torch":
        return place
    return None
