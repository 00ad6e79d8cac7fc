"""TopKube's exchange as a Strategy of Lightning: `Trainer(strategy="topkube")`. docs/lightning.md explains it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from topkube.environment import read_torch_place
from topkube.errors import ArgumentError, TrainingError
from topkube.integrations.ddp import check_device, ddp_hook
from topkube.integrations.step_reports import StepReports
from topkube.settings import Settings

NAME = "topkube"
"""The name of the strategy for `Trainer(strategy=...)`. It is known after an import of this module."""


class LightningStrategy(DDPStrategy):  # type: ignore[misc]  # mypy does not read Lightning
    """DistributedDataParallel with the exchange of `ddp_hook`, on the ranks that TopKube or torchrun started.

    `aggregation`, `density`, `wire` and `warmup_steps` are those of `ddp_hook`; those that are None come from the job's
    spec.aggregation. `more` holds arguments of DDPStrategy. The launcher determines the number of nodes and, on CPUs,
    the number of devices. Steps are reported to TopKube's progress bar, plot, status and metrics. The checkpoints
    are Lightning's; residuals are not part of them.

    Raises TrainingError if no launcher started this process, or if the devices are not CPUs; ArgumentError if the
    Trainer has another number of nodes than the launcher.
    """

    strategy_name = NAME

    def __init__(
        self,
        aggregation: str | None = None,
        density: float | None = None,
        wire: str | None = None,
        warmup_steps: int | None = None,
        **more: Any,
    ) -> None:
        place = read_torch_place()
        if place is None:
            raise TrainingError(
                "this process has no rank",
                cause="the script was not started by TopKube or torchrun",
                next_step="topkube run train.py --workers 2 --slots 2",
            )
        if "ddp_comm_hook" in more:
            raise ArgumentError(
                "LightningStrategy got ddp_comm_hook, but it registers a hook of its own",
                next_step="remove ddp_comm_hook, or use DDPStrategy",
            )
        self._place, self._aggregation = place, aggregation
        self._arguments: dict[str, Any] = {"density": density, "wire": wire, "warmup_steps": warmup_steps}
        super().__init__(cluster_environment=more.pop("cluster_environment", None) or _LauncherEnvironment(), **more)

    # ---- devices and nodes, which the launcher determines

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node's ranks: one CPU for each rank, or the Trainer's devices."""
        devices: list[torch.device] | None = self._parallel_devices
        if devices and all(device.type == "cpu" for device in devices):
            return devices[:1] * self._place.local_size
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    def num_nodes(self) -> int:
        """The number of nodes that the launcher has."""
        return self._place.nodes

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes not in (1, self._place.nodes):  # 1 is the Trainer's default
            raise ArgumentError(
                f"Trainer(num_nodes={nodes}), but the launcher started ranks on {self._place.nodes} nodes",
                next_step="leave out num_nodes, or start the script with as many workers",
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of Lightning's DistributedSampler, also for nodes with different numbers of ranks."""
        return {"num_replicas": self._place.size, "rank": self._place.rank}

    # ---- training

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare the model, and report steps from now on."""
        check_device(self.root_device)
        super().setup(trainer)
        callbacks: list[Any] = trainer.callbacks
        if not any(isinstance(callback, _LightningStepReporter) for callback in callbacks):
            callbacks.append(_LightningStepReporter())

    def _register_ddp_hooks(self) -> None:
        hook = ddp_hook(self._aggregation, process_group=self.model.process_group, **self._arguments)
        self.model.register_comm_hook(None, hook)


class _LauncherEnvironment(TorchElasticEnvironment):  # type: ignore[misc]
    """The ranks of the launcher, by the variables of torchrun. Nodes may have different numbers of ranks."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept all numbers: LightningStrategy takes them from the launcher."""


class _LightningStepReporter(pl.Callback):  # type: ignore[misc]
    """Reports every step of the optimizer, with the mean loss of its batches."""

    def __init__(self) -> None:
        self._reports: StepReports | None = None
        self._samples, self._loss, self._weight = 0, 0.0, 0
        self._step = 0
        self._checkpoint_step: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reports = StepReports(Settings.from_environment())
        self._step = trainer.global_step
        self._checkpoint_step = trainer.global_step or None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._reports is None or not self._reports.is_on:
            return
        samples = _count_samples(batch)
        self._samples += samples
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Lightning divides the loss by the number of batches whose gradients it accumulates.
            divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._loss += samples * divided_by * float(loss)
            self._weight += samples
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        total = trainer.estimated_stepping_batches
        self._reports.add(
            self._step,
            int(total) if 0 < total < float("inf") else None,
            trainer.current_epoch,
            self._samples,
            self._loss / self._weight if self._weight else None,
            self._checkpoint_step,
        )
        self._samples, self._loss, self._weight = 0, 0.0, 0

    def on_validation_batch_end(self, *_: Any) -> None:
        if self._reports is not None:
            self._reports.note_activity()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._checkpoint_step = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._reports is not None:
            self._reports.close()
            self._reports = None


def _count_samples(batch: Any) -> int:
    """Return the number of samples in a batch; 1 if Lightning cannot determine it."""
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:
        return 1


if NAME not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(
        NAME, LightningStrategy, description="DistributedDataParallel with TopKube's sparse exchange"
    )
