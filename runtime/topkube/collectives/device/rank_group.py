"""Ranks joined through torch.distributed: by NCCL on GPUs, by gloo on CPUs.

A group is made directly, not with `init_process_group`: TopKube neither uses nor replaces the default group of the
script.
torch is imported here on use.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from topkube.environment import does_nccl_order_launches, read_visible_gpus
from topkube.errors import ArgumentError, DeviceError
from topkube.mpi_exit import get_exit_status
from topkube.world import World

_NAME_BYTES = 256
"""Bytes of a name that ranks compare; longer names are cut."""


class RankGroup:
    """Collectives of some ranks of `world` on tensors of `device`. On CUDA they run in torch's current stream and
    return at once. `purpose` names the exchange in errors: "an exchange inside the node". All ranks of the group make
    it together and call the same methods in the same order. In a group of one rank, call `all_reduce` only, which then
    does nothing.

    The deadline of TopKube must come before NCCL's watchdog, because the watchdog ends the process without naming the
    missing ranks. The watchdog therefore waits twice the deadline.
    """

    def __init__(self, world: World, device: Any, size: int, purpose: str) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        self._world, self._distributed, self.size, self._purpose = world, distributed, size, purpose
        self._group: Any = None
        self._is_nccl = device.type == "cuda"
        self._user: object = None

    def _join(self, make_store: Callable[[], Any], rank: int) -> None:
        """Make the communicator: `make_store` returns the store of torch.distributed through which its ranks meet.
        Raises DeviceError if this build of torch has no NCCL."""
        distributed, deadline = self._distributed, datetime.timedelta(seconds=self._world.deadline_seconds)
        if not self._is_nccl:
            self._group = distributed.ProcessGroupGloo(make_store(), rank, self.size, deadline)
            return
        if not distributed.is_nccl_available():
            raise DeviceError(
                f"this build of torch has no NCCL, which {self._purpose} needs for CUDA tensors",
                next_step="install a build of torch for CUDA",
            )
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = 2 * deadline
        self._group = distributed.ProcessGroupNCCL(make_store(), rank, self.size, options)

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
        """End the group. All of its ranks call this."""
        group, self._group = self._group, None
        if group is not None and self._is_nccl and not get_exit_status():  # after a failure, other ranks are gone
            # Before version 2.6, torch has the second name only.
            (group.shutdown if hasattr(group, "shutdown") else group._shutdown)()

    def _refuse_second_nccl(self) -> None:
        distributed = self._distributed
        if not distributed.is_initialized() or distributed.get_world_size() == 1 or does_nccl_order_launches():
            return
        if "nccl" in str(distributed.get_backend()):
            raise DeviceError(
                f"torch.distributed's default group uses NCCL, and TopKube uses NCCL for {self._purpose}",
                cause="SyncBatchNorm, DDP, FSDP or the script communicates through the default group; NCCL can deadlock"
                " if ranks start the collectives of two groups in different orders",
                next_step='pass backend="gloo" to init_process_group, or set NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or'
                " newer)",
            )

    def all_reduce(self, x: Any) -> None:
        """Replace x by the group's sum."""
        if self._group is not None:
            self._wait(self._group.allreduce([x]))

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """Write this rank's part of the group's sum of x, which has equal parts, into out."""
        self._wait(self._group._reduce_scatter_base(out, x))

    def all_gather(self, out: Any, x: Any) -> None:
        """Write the x of all ranks, side by side, into out."""
        self._wait(self._group._allgather_base(out, x))

    def broadcast(self, x: Any, root: int) -> None:
        """Replace x by the x of the group's rank `root`."""
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
            self._world.give_up(self._purpose)


def count_distinct_names(world: World, comm: Any, name: str, purpose: str) -> int:
    """Return how many different names the ranks of the MPI communicator `comm` have. All of its ranks call this
    together. `purpose` names the wait in errors."""
    own = np.zeros(_NAME_BYTES, np.uint8)
    encoded_name = name.encode()[:_NAME_BYTES]
    own[: len(encoded_name)] = np.frombuffer(encoded_name, np.uint8)
    all_names = np.empty((comm.size, _NAME_BYTES), np.uint8)
    world.wait([comm.Iallgather(own, all_names)], purpose)
    return len({row.tobytes() for row in all_names})


def count_gpus(world: World, comm: Any, device: Any, purpose: str) -> int:
    """Return how many GPUs the ranks of the MPI communicator `comm` use, with `device` for this rank. All of its ranks
    call this together. `purpose` names the wait in errors."""
    import torch

    return count_distinct_names(world, comm, identify_gpu(torch.cuda.get_device_properties(device), device), purpose)


def identify_gpu(properties: Any, device: Any) -> str:
    """Return a name that all processes of a machine give the GPU `device`: its UUID. Before version 2.5, torch does not
    tell it. Then the name says which GPUs the process sees, and the number of this one: NCCL itself refuses two ranks
    on one GPU that these names do not show."""
    known = getattr(properties, "uuid", None)
    if known is not None:
        return str(known)
    return f"{socket.gethostname()} {read_visible_gpus()} {device.index}"


def refuse_mig(gpu: str) -> None:
    """Raise DeviceError if the GPU called `gpu` is a part of a GPU (MIG)."""
    if " MIG " in gpu:
        raise DeviceError(
            f"{gpu} is a part of a GPU (MIG), which TopKube does not support",
            cause="NCCL does not connect parts of a GPU, and the kernels were never run on one",
            next_step="request whole GPUs (nvidia.com/gpu), on nodes whose GPUs are not partitioned",
        )
