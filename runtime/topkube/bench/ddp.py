"""DistributedDataParallel, the peer of training: its communication hooks by name, and its gloo group on the ranks of
MPI."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from topkube.addresses import find_device, list_addresses
from topkube.collectives.coordination import broadcast_object
from topkube.environment import choose_gloo_device
from topkube.errors import WorldError
from topkube.world import World

_ONE_BUCKET_MB = 1024
"""The size of the only bucket of a model with PowerSGD's hook. With several buckets over gloo, its exchanges begin in
the order in which earlier exchanges end. The order differs between ranks, and the run hangs or fails."""
_CONNECT_SECONDS = 30.0
"""How long the ranks try to connect through gloo."""


class DdpHook(NamedTuple):
    """The arguments of `register_comm_hook`."""

    state: Any
    hook: Callable[[Any, Any], Any]


def wrap_in_ddp(model: torch.nn.Module, hook: str) -> DistributedDataParallel:
    """Return `model` in DistributedDataParallel, with the buckets that suit the hook called `hook`. The hook is not
    registered."""
    if hook.startswith("powersgd"):
        return DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
    return DistributedDataParallel(model)


def build_hook(name: str, powersgd_start: int) -> DdpHook:
    """Return the hook called `name`: ddp (the plain all-reduce), fp16, bf16, or powersgd with its rank, such as
    powersgd4. `powersgd_start` is the first step that PowerSGD compresses."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name.startswith("powersgd"):
        rank = int(name.removeprefix("powersgd"))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=powersgd_start)
        return DdpHook(state, powerSGD_hook.powerSGD_hook)
    hooks = {
        "ddp": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return DdpHook(None, hooks[name])


def join_gloo(world: World) -> None:
    """Make torch's default process group of all ranks, over gloo. All ranks call this together. Raises WorldError, or
    an error of torch, on the ranks that cannot connect in time. Other ranks may then have the group."""
    own = next(iter(list_addresses(world.link_choice.pod_ip)), "")
    listener = None
    if world.rank == 0 and own:
        listener = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
    host, port = broadcast_object((own, listener.getsockname()[1] if listener is not None else 0), world=world)
    if not (own and host):
        raise WorldError(f"rank {world.rank if host else 0} has no IP address")
    choose_gloo_device(find_device(own))
    limit = datetime.timedelta(seconds=min(_CONNECT_SECONDS, world.deadline_seconds / 4))  # others wait meanwhile
    options: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener is not None else {}
    distributed: Any = dist  # its stores have no annotations
    store = distributed.TCPStore(host, port, world.size, world.rank == 0, limit, wait_for_workers=False, **options)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    dist.barrier()
    distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=world.deadline_seconds))


def leave_gloo() -> None:
    """End torch's default process group, if this rank has it."""
    if dist.is_initialized():
        dist.destroy_process_group()
