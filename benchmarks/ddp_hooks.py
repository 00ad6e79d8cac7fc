"""DistributedDataParallel with the communication hooks that benchmarks compare with, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

_ONE_BUCKET_MB = 1024
"""The size of the only bucket of a model with PowerSGD's hook. With several buckets over gloo, its exchanges begin in
the order in which earlier exchanges end. The order differs between ranks, and the run hangs or fails."""


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
