"""The ranks of one node joined through torch.distributed: NCCL where they have GPUs, gloo where they have none.

The group is made directly, not with `init_process_group`: the script's own default group, if it has one, stays its own.
torch is imported here on use.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from topkube.errors import DeviceError
from topkube.world import World

_PATH_BYTES = 256
_NAME_BYTES = 64


class NodeGroup:
    """Collectives of this node's ranks on tensors of `device`; on CUDA they follow torch's current stream and return at
    once. All ranks of the node make the group together and call the same methods in the same order."""

    def __init__(self, world: World, device: Any) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        self._world, self._distributed, self.size = world, distributed, world.local_size
        self._group: Any = None
        if self.size == 1:
            return
        store = distributed.FileStore(_meeting_place(world), self.size)
        deadline = datetime.timedelta(seconds=world.deadline_seconds)
        if device.type == "cuda":
            if not distributed.is_nccl_available():
                raise DeviceError(
                    "this build of torch has no NCCL, which ranks of one node need for CUDA tensors",
                    next_step="install a build of torch for CUDA, or run one rank per node",
                )
            _check_own_gpu(world, torch.cuda.get_device_properties(device))
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = deadline
            self._group = distributed.ProcessGroupNCCL(store, world.local_rank, self.size, options)
        else:
            self._group = distributed.ProcessGroupGloo(store, world.local_rank, self.size, deadline)

    def all_reduce(self, x: Any) -> None:
        """x becomes the node's sum."""
        if self._group is not None:
            self._wait(self._group.allreduce([x]))

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """out becomes this rank's part of the node's sum of x, which is cut into equal parts."""
        self._wait(self._group._reduce_scatter_base(out, x))

    def all_gather(self, out: Any, x: Any) -> None:
        """out becomes all ranks' x, side by side."""
        self._wait(self._group._allgather_base(out, x))

    def broadcast(self, x: Any, root: int) -> None:
        """x becomes what local rank `root` has."""
        options = self._distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(self._group.broadcast([x], options))

    def _wait(self, work: Any) -> None:
        """On CUDA the stream waits, not the host."""
        try:
            work.wait()
        except RuntimeError as error:
            if "imed out" not in str(error) and "onnection" not in str(error):
                raise
            self._world.give_up("an exchange inside the node")


def _check_own_gpu(world: World, properties: Any) -> None:
    """Two ranks on one GPU would wait for each other for ever."""
    own = np.zeros(_NAME_BYTES, np.uint8)
    name = str(properties.uuid).encode()[:_NAME_BYTES]
    own[: len(name)] = np.frombuffer(name, np.uint8)
    everyone = np.empty((world.local_size, _NAME_BYTES), np.uint8)
    world.wait([world.node_comm.Iallgather(own, everyone)], "the count of the node's GPUs")
    gpus = len({row.tobytes() for row in everyone})
    if gpus < world.local_size:
        raise DeviceError(
            f"the {world.local_size} ranks of node {world.node} have {gpus} GPU(s) between them",
            cause="the script did not move to topkube.device(), or slotsPerWorker is larger than the pod's GPUs",
            next_step="start one rank per GPU, and use topkube.device() for model and data",
        )


def _meeting_place(world: World) -> str:
    """A file that the node's ranks meet at; its name comes from the first of them."""
    name = np.zeros(_PATH_BYTES, np.uint8)
    if world.local_rank == 0:
        place = Path(tempfile.mkdtemp(prefix="topkube-node-")) / f"store-{os.getpid()}"
        name[: len(str(place))] = np.frombuffer(str(place).encode(), np.uint8)
    world.wait([world.node_comm.Ibcast(name)], "the meeting of the node's ranks")
    return name.tobytes().rstrip(b"\0").decode()
