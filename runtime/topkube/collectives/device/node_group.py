"""The ranks of one node joined through torch.distributed: by NCCL on GPUs, by gloo on CPUs.

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

from topkube.errors import ArgumentError, DeviceError
from topkube.mpi_exit import exit_status
from topkube.settings import nccl_orders_launches
from topkube.world import World

_PATH_BYTES = 256
_NAME_BYTES = 64


def node_group(world: World, device: Any) -> NodeGroup:
    """Return the group of this node's ranks for `device`. Training and `allreduce_` share it, because NCCL takes memory
    and threads for each communicator, and because collectives of two communicators may wait for each other."""
    key = f"node group on {device}"
    if key not in world.cache:
        world.cache[key] = group = NodeGroup(world, device)
        world.at_end.append(group.close)
    shared: NodeGroup = world.cache[key]
    return shared


class NodeGroup:
    """Collectives of this node's ranks on tensors of `device`. On CUDA they run in torch's current stream and return at
    once. All ranks of the node make the group together and call the same methods in the same order.

    The watchdog of NCCL waits twice the deadline of a collective. It ends the process without naming a rank, so
    TopKube's own deadline, whose error names the missing ranks, must come first.
    """

    def __init__(self, world: World, device: Any) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        self._world, self._distributed, self.size = world, distributed, world.local_size
        self._group: Any = None
        self._is_nccl = device.type == "cuda"
        self._user: object = None
        if self.size == 1:
            return
        store = distributed.FileStore(_choose_meeting_file(world), self.size)
        deadline = datetime.timedelta(seconds=world.deadline_seconds)
        if device.type == "cuda":
            if not distributed.is_nccl_available():
                raise DeviceError(
                    "this build of torch has no NCCL, which ranks of one node need for CUDA tensors",
                    next_step="install a build of torch for CUDA, or run one rank per node",
                )
            properties = torch.cuda.get_device_properties(device)
            refuse_mig(properties.name)
            _check_own_gpu(world, properties)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = 2 * deadline
            self._group = distributed.ProcessGroupNCCL(store, world.local_rank, self.size, options)
        else:
            self._group = distributed.ProcessGroupGloo(store, world.local_rank, self.size, deadline)

    def claim(self, user: object) -> None:
        """Note that `user` starts a series of collectives, until `release`. Raises ArgumentError if another user's
        series is not over, and DeviceError if torch's default group uses NCCL too: ranks could start the collectives in
        different orders, and then wait for each other forever."""
        if self._user not in (None, user):
            raise ArgumentError(
                "allreduce_() of a CUDA tensor while backward() exchanges gradients",
                cause="a hook of the script or of a library called it",
                next_step="call it before or after backward()",
            )
        if self._user is None and self._group is not None and self._is_nccl:
            self._refuse_second_nccl()
        self._user = user

    def release(self) -> None:
        """Note that the series of collectives is over."""
        self._user = None

    def close(self) -> None:
        """End the group. All ranks of the node call this."""
        group, self._group = self._group, None
        if group is not None and self._is_nccl and not exit_status():  # after a failure, other ranks are gone
            group.shutdown()

    def _refuse_second_nccl(self) -> None:
        distributed = self._distributed
        if not distributed.is_initialized() or distributed.get_world_size() == 1 or nccl_orders_launches():
            return
        if "nccl" in str(distributed.get_backend()):
            raise DeviceError(
                "torch.distributed's default group uses NCCL, and TopKube uses NCCL within the node",
                cause="SyncBatchNorm, DDP, FSDP or the script communicates through the default group; NCCL can stop if"
                " ranks start the collectives of two groups in different orders",
                next_step='pass backend="gloo" to init_process_group, or set NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or'
                " newer)",
            )

    def all_reduce(self, x: Any) -> None:
        """Replace x by the node's sum."""
        if self._group is not None:
            self._wait(self._group.allreduce([x]))

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """Write this rank's part of the node's sum of x, which has equal parts, into out."""
        self._wait(self._group._reduce_scatter_base(out, x))

    def all_gather(self, out: Any, x: Any) -> None:
        """Write the x of all ranks, side by side, into out."""
        self._wait(self._group._allgather_base(out, x))

    def broadcast(self, x: Any, root: int) -> None:
        """Replace x by the x of local rank `root`."""
        options = self._distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(self._group.broadcast([x], options))

    def _wait(self, work: Any) -> None:
        """Wait for the collective. On CUDA the stream waits, not the host."""
        try:
            work.wait()
        except RuntimeError as error:
            if "imed out" not in str(error) and "onnection" not in str(error):
                raise
            self._world.give_up("an exchange inside the node")


def refuse_mig(gpu: str) -> None:
    """Raise DeviceError if the GPU called `gpu` is a part of a GPU (MIG)."""
    if " MIG " in gpu:
        raise DeviceError(
            f"{gpu} is a part of a GPU (MIG), which TopKube does not support",
            cause="NCCL does not connect parts of a GPU, and the kernels were never run on one",
            next_step="request whole GPUs (nvidia.com/gpu), on nodes whose GPUs are not partitioned",
        )


def _check_own_gpu(world: World, properties: Any) -> None:
    """Raise DeviceError if two ranks use one GPU: they would wait for each other forever."""
    own = np.zeros(_NAME_BYTES, np.uint8)
    name = str(properties.uuid).encode()[:_NAME_BYTES]
    own[: len(name)] = np.frombuffer(name, np.uint8)
    everyone = np.empty((world.local_size, _NAME_BYTES), np.uint8)
    world.wait([world.node_comm.Iallgather(own, everyone)], "the count of the node's GPUs")
    gpus = len({row.tobytes() for row in everyone})
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
