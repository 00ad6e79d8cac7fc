"""The sparse exchange and progress reports for the Trainer of Hugging Face transformers. docs/huggingface.md explains
them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from topkube.integrations.accelerate import hook_accelerator
from topkube.integrations.step_reports import StepReports
from topkube.settings import Settings

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


def hook_trainer(
    trainer: Trainer,
    aggregation: str | None = None,
    *,
    density: float | None = None,
    wire: str | None = None,
    warmup_steps: int | None = None,
    ranks_per_node: int | None = None,
) -> None:
    """Make `trainer` exchange its gradients with TopKube, and report its steps to TopKube's progress bar, plot,
    status and metrics. Call this on all ranks, before `trainer.train()`. The other arguments are those of `ddp_hook`.

    Raises the errors of `hook_accelerator`.
    """
    hook_accelerator(
        trainer.accelerator,
        aggregation,
        density=density,
        wire=wire,
        warmup_steps=warmup_steps,
        ranks_per_node=ranks_per_node,
    )
    reporter = _TrainerStepReporter()
    trainer.add_callback(reporter)
    training_step = trainer.training_step

    @functools.wraps(training_step)
    def counting_step(model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        reporter.count(inputs)  # callbacks do not see batches
        return training_step(model, inputs, *arguments, **options)

    trainer.training_step = counting_step


class _TrainerStepReporter(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Reports every step of a Trainer. The loss is the number that the Trainer logs: its mean over all ranks and the
    last `logging_steps` steps."""

    def __init__(self) -> None:
        self._reports: StepReports | None = None
        self._checkpoint_step: int | None = None
        self._samples = 0

    def count(self, inputs: Any) -> None:
        """Count the samples of a batch for the record of the next step; 1 if the batch has no tensors."""
        self._samples += find_batch_size(inputs) or 1

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reports = StepReports(Settings.from_environment())
        self._samples = 0
        self._checkpoint_step = state.global_step or None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._reports is not None:
            epoch = int(state.epoch or 0)
            self._reports.add(state.global_step, state.max_steps, epoch, self._samples, None, self._checkpoint_step)
        self._samples = 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._reports is not None and logs is not None and "loss" in logs:
            self._reports.set_loss(state.global_step, float(logs["loss"]))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._reports is not None:
            self._reports.note_activity()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._checkpoint_step = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._reports is not None:
            self._reports.close()
            self._reports = None
