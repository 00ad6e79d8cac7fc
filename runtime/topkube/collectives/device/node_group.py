"""The ranks of one node joined through torch.distributed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from topkube.collectives.device.rank_group import RankGroup, count_gpus, refuse_mig
from topkube.errors import DeviceError
from topkube.world import World

_PATH_BYTES = 256


def find_node_group(world: World, device: Any) -> NodeGroup:
    """Return the group of this node's ranks for `device`. Training and `allreduce_` share it, because NCCL takes memory
    and threads for each communicator, and because collectives of two communicators may wait for each other."""
    key = f"node group on {device}"
    if key not in world.cache:
        world.cache[key] = group = NodeGroup(world, device)
        world.at_end.append(group.close)
    shared: NodeGroup = world.cache[key]
    return shared


class NodeGroup(RankGroup):
    """The ranks of this node. They meet through a file."""

    def __init__(self, world: World, device: Any) -> None:
        super().__init__(world, device, world.local_size, "an exchange inside the node")
        if self.size == 1:
            return
        if device.type == "cuda":
            import torch

            refuse_mig(torch.cuda.get_device_properties(device).name)
            _check_own_gpu(world, device)
        self.meeting_file = Path(_choose_meeting_file(world))
        self._join(lambda: self._distributed.FileStore(str(self.meeting_file), self.size), world.local_rank)
        if not self._is_nccl:  # gloo has made its connections; NCCL makes them in the first exchange
            world.wait([world.node_comm.Ibarrier()], "the meeting of the node's ranks")
            if world.local_rank == 0:
                shutil.rmtree(self.meeting_file.parent, ignore_errors=True)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # the last rank of the node that closes its store removes the file
            if self.size > 1:
                self.meeting_file.parent.rmdir()


def _check_own_gpu(world: World, device: Any) -> None:
    """Raise DeviceError if two ranks use one GPU: they would wait for each other forever."""
    gpus = count_gpus(world, world.node_comm, device, "the count of the node's GPUs")
    if gpus < world.local_size:
        raise DeviceError(
            f"the {world.local_size} ranks of node {world.node} share {gpus} GPU(s)",
            cause="the script does not use topkube.device(), or slotsPerWorker is larger than the pod's number of GPUs",
            next_step="start one rank per GPU, and use topkube.device() for model and data",
        )


def _choose_meeting_file(world: World) -> str:
    """Return the path of the file through which the node's ranks find each other. The node's first rank chooses it."""
    name = np.zeros(_PATH_BYTES, np.uint8)
    if world.local_rank == 0:
        place = Path(tempfile.mkdtemp(prefix="topkube-node-")) / f"store-{os.getpid()}"
        name[: len(str(place))] = np.frombuffer(str(place).encode(), np.uint8)
    world.wait([world.node_comm.Ibcast(name)], "the meeting of the node's ranks")
    return name.tobytes().rstrip(b"\0").decode()
