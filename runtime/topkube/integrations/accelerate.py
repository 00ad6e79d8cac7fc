"""The sparse exchange for Hugging Face accelerate. docs/huggingface.md explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from accelerate.utils.dataclasses import DDPCommunicationHookType

from topkube.environment import read_process_launch
from topkube.errors import ArgumentError, TrainingError
from topkube.integrations.ddp import Hook, check_device, ddp_hook

if TYPE_CHECKING:
    from accelerate import Accelerator

_WITHOUT_DDP = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def hook_accelerator(
    accelerator: Accelerator,
    aggregation: str | None = None,
    *,
    density: float | None = None,
    wire: str | None = None,
    warmup_steps: int | None = None,
    ranks_per_node: int | None = None,
) -> None:
    """Make `accelerator.prepare(model)` register TopKube's exchange in the DistributedDataParallel that it creates.
    Call this on all ranks, before `prepare`. The other arguments are those of `ddp_hook`.

    Does nothing for a script that runs as a single process. Raises TrainingError if the processes of this run do not
    train together, if the model is prepared already, or if the accelerator uses another method than
    DistributedDataParallel; ArgumentError if the accelerator has a communication hook already.
    """
    _check_processes(accelerator)
    if accelerator.num_processes == 1:
        return
    if accelerator.distributed_type in _WITHOUT_DDP:
        raise TrainingError(
            f"the accelerator uses {accelerator.distributed_type.value}, which has no communication hook",
            next_step="use DistributedDataParallel, accelerate's default, or do not call hook_accelerator",
        )
    if accelerator._models:
        raise TrainingError(
            "the accelerator has prepared a model already, which exchanges its gradients without TopKube",
            next_step="call hook_accelerator before accelerator.prepare, and hook_trainer before trainer.train",
        )
    check_device(accelerator.device)
    existing_handler = accelerator.ddp_handler
    if existing_handler is not None and existing_handler.comm_hook != DDPCommunicationHookType.NO:
        raise ArgumentError(
            f"the accelerator has the communication hook {existing_handler.comm_hook.value} already",
            next_step="remove comm_hook from DistributedDataParallelKwargs",
        )

    def make_hook(process_group: Any) -> Hook:
        return ddp_hook(
            aggregation,
            density=density,
            wire=wire,
            warmup_steps=warmup_steps,
            ranks_per_node=ranks_per_node,
            process_group=process_group,
        )

    accelerator.ddp_handler = _HookHandler(existing_handler, make_hook)


class _HookHandler(DistributedDataParallelKwargs):  # type: ignore[misc]  # mypy does not read accelerate
    """The arguments of DistributedDataParallel as in `existing_handler`, with a hook of TopKube."""

    def __init__(
        self, existing_handler: DistributedDataParallelKwargs | None, make_hook: Callable[[Any], Hook]
    ) -> None:
        super().__init__()
        self._existing_handler, self._make_hook = existing_handler, make_hook

    def to_kwargs(self) -> dict[str, Any]:
        return dict(self._existing_handler.to_kwargs()) if self._existing_handler is not None else {}

    def register_comm_hook(self, model: Any) -> None:
        model.register_comm_hook(None, self._make_hook(model.process_group))


def _check_processes(accelerator: Accelerator) -> None:
    launched = read_process_launch()
    started = max(launched.ranks, launched.processes)
    if started != accelerator.num_processes and started > 1:
        raise TrainingError(
            f"{started} ranks were started, but accelerate trains with {accelerator.num_processes}: each rank would"
            " train on its own",
            cause="this machine has an accelerator, but torch cannot use it, so accelerate does not connect the ranks",
            next_step="set ACCELERATE_USE_CPU=true, or install a build of torch for the accelerator",
        )
