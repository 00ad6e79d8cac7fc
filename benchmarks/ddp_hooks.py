"""The communication hooks of DistributedDataParallel with which benchmarks compare, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class DdpHook(NamedTuple):
    """The arguments of `register_comm_hook`."""

    state: Any
    hook: Callable[[Any, Any], Any]


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
