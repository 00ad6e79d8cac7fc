"""Runs that stop and continue: batches of different sizes, loops over epochs, accumulated gradients, several
optimizers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import topkube
from ranks.training.checkpoints import list_checkpoint_names, make_shared_directory
from ranks.training.scene import build_network, build_optimizer, compute_loss, copy_weights, draw_samples
from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.world import World


class Stopped(Exception):
    """The script ends here, as if its process was killed."""


def store_in(directory: str, every: int = 1000) -> Settings:
    return Settings(checkpoint_directory=directory, checkpoint_every=every)


def case_batches_of_different_sizes_are_trained_once_each_across_a_resume(world: World) -> None:
    dataset = torch.arange(36 * world.size).reshape(-1, 1)
    seen: list[int] = []

    def train(directory: str, stop_after: int | None, again_after: int | None = None) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = build_optimizer(model)
        sampler = topkube.data.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=2 + world.rank, sampler=sampler)
        with topkube.checkpointing(model, optimizer, sampler, settings=store_in(directory)) as run:
            while run.epoch < 1:
                for batch in run.progress(loader):
                    compute_loss(model, batch.float() / 100, batch.float()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if not optimizer.turns.is_replay:
                        seen.extend(batch.flatten().tolist())
                    if run.step + 1 == stop_after:
                        run.save()
                        raise Stopped
                    if run.step + 1 == again_after:
                        break

    with make_shared_directory(world) as directory:
        for stop_after, again_after in ((2, None), (5, 4), (7, None), (None, None)):
            with pytest.raises(Stopped) if stop_after else make_shared_directory(world):
                train(directory, stop_after, again_after)
        counts = Counter(index for rank in world.comm.allgather(seen) for index in rank)
        assert counts == Counter(range(len(dataset))), sorted((counts - Counter(range(len(dataset)))).elements())


def case_a_run_that_was_saved_between_epochs_resumes_bit_for_bit(world: World) -> None:
    """Dropout draws a mask for each batch, and creating a loader's iterator draws a number too."""
    dataset = TensorDataset(*draw_samples(8 * world.size))

    def train(directory: str, epochs: int) -> list[torch.Tensor]:
        torch.manual_seed(world.rank)
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), build_network())
        optimizer = build_optimizer(model)
        sampler = topkube.data.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        with topkube.checkpointing(model, optimizer, sampler, settings=store_in(directory)) as run:
            for _ in run.epochs(epochs):
                for x, y in run.progress(loader):
                    compute_loss(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                run.save()
        return copy_weights(model)

    with make_shared_directory(world) as whole, make_shared_directory(world) as parts:
        expected = train(whole, 3)
        train(parts, 1)
        assert all(torch.equal(a, b) for a, b in zip(train(parts, 3), expected, strict=True))


class RandomNumbers(Dataset[torch.Tensor]):
    """Each sample is a random number."""

    def __len__(self) -> int:
        return 8 * topkube.size()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def case_workers_do_not_repeat_their_random_numbers_after_a_resume(world: World) -> None:
    dataset, seen = RandomNumbers(), list[float]()

    def train(directory: str, stop_after: int | None) -> None:
        torch.manual_seed(world.rank)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = build_optimizer(model)
        sampler = topkube.data.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=1)
        with topkube.checkpointing(model, optimizer, sampler, settings=store_in(directory)) as run:
            for x in run.progress(loader):
                seen.extend(x.flatten().tolist())
                compute_loss(model, x, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step + 1 == stop_after:
                    run.save()
                    raise Stopped

    with make_shared_directory(world) as directory:
        for stop_after in (1, 2, 3, None):
            with pytest.raises(Stopped) if stop_after else make_shared_directory(world):
                train(directory, stop_after)
        assert len(set(seen)) == len(seen) == 8, seen


def case_a_loop_over_epochs_continues_with_the_schedule_of_its_epoch(world: World) -> None:
    dataset = draw_samples(8 * world.size)[0]

    def train(directory: str, choose: Callable[[topkube.training.Run], Any], stop_after: int | None) -> list[float]:
        model, rates = build_network(), list[float]()
        optimizer = build_optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        sampler = topkube.data.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        settings = store_in(directory, every=1)
        with topkube.checkpointing(model, optimizer, sampler, settings=settings, scheduler=scheduler) as run:
            for epoch in choose(run):
                for x in run.progress(loader):
                    assert epoch == run.epoch
                    rates.append(optimizer.param_groups[0]["lr"])
                    compute_loss(model, x, x[:, :1]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if run.step + 1 == stop_after:
                        run.save()
                        raise Stopped
                scheduler.step()
        return rates

    expected = [0.05 * 0.5**epoch for epoch in range(4) for _ in range(2)]
    for stop_after in (5, 6):  # in the middle of an epoch, and at its last batch
        with make_shared_directory(world) as directory:
            with pytest.raises(Stopped):
                train(directory, lambda run: run.epochs(4), stop_after)
            assert train(directory, lambda run: run.epochs(4), None) == expected[stop_after:]
        with make_shared_directory(world) as directory:
            with pytest.raises(Stopped):
                train(directory, lambda run: range(4), stop_after)
            with pytest.raises(TrainingError, match="changed the optimizer's options and the state of scheduler"):
                train(directory, lambda run: range(4), None)


def case_a_loop_over_epochs_that_is_left_early_begins_the_next_epoch(world: World) -> None:
    dataset = torch.arange(8.0 * world.size).reshape(-1, 1)
    model = torch.nn.Linear(1, 1)
    optimizer = build_optimizer(model)
    sampler = topkube.data.DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    seen = []
    with topkube.checkpointing(model, optimizer, sampler, settings=Settings()) as run:
        for epoch in run.epochs(3):
            for x in run.progress(loader):
                seen.append((epoch, sampler.epoch, sampler.position))
                compute_loss(model, x, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                break
        with pytest.raises(TrainingError, match="asked for no batches"):
            for _ in run.epochs(4):
                pass
    assert seen == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]


def case_a_save_waits_for_the_step_that_uses_accumulated_gradients(world: World) -> None:
    x = draw_samples(4)[0]

    def train(directory: str, steps: int) -> list[torch.Tensor]:
        model = build_network()
        optimizer = build_optimizer(model)
        with topkube.checkpointing(model, optimizer, settings=store_in(directory, every=6)) as run:
            for batch in run.progress([x] * 16, total=steps):
                (compute_loss(model, batch + run.step, batch[:, :1]) / 4).backward()  # each backward exchanges
                if (run.step + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return copy_weights(model)

    with make_shared_directory(world) as whole, make_shared_directory(world) as parts:
        expected = train(whole, 16)
        train(parts, 10)
        world.comm.Barrier()
        assert list_checkpoint_names(parts) == ["step-00000008.run-00001", "step-00000010.run-00001"]
        world.comm.Barrier()
        if world.rank == 0:
            shutil.rmtree(Path(parts, "step-00000010.run-00001"))
        world.comm.Barrier()
        assert all(torch.equal(a, b) for a, b in zip(train(parts, 16), expected, strict=True))


def case_a_resumed_run_saves_only_after_the_step_that_uses_its_gradients(world: World) -> None:
    x = draw_samples(4)[0]

    def train(directory: str, steps: int) -> None:
        model = build_network()
        optimizer = build_optimizer(model)
        settings = Settings(checkpoint_directory=directory, checkpoint_every=1, checkpoint_keep=20)
        with topkube.checkpointing(model, optimizer, settings=settings) as run:
            for batch in run.progress([x] * 16, total=steps):
                (compute_loss(model, batch, batch[:, :1]) / 4).backward()
                if (run.step + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    with make_shared_directory(world) as directory:
        train(directory, 4)
        train(directory, 12)
        world.comm.Barrier()
        steps = [name.split(".")[0] for name in list_checkpoint_names(directory)]
        assert steps == ["step-00000004", "step-00000008", "step-00000012"], steps


def case_gradients_that_no_step_will_use_delay_no_save(world: World) -> None:
    """A generator's loss leaves gradients in the discriminator, which its script sets to zero before it uses it."""
    generator, critic = build_network(), torch.nn.Linear(1, 1)
    inner = build_optimizer(generator)
    other = topkube.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.1), critic.named_parameters("c"))
    x = draw_samples(4)[0]
    with make_shared_directory(world) as directory:
        settings = store_in(directory, every=2)
        with topkube.checkpointing(generator, inner, settings=settings, critic=critic, other=other) as run:
            for batch in run.progress([x] * 5, total=5):
                other.zero_grad()
                critic(generator(batch).detach()).square().mean().backward()
                other.step()
                inner.zero_grad()
                critic(generator(batch)).mean().backward()
                inner.step()
        assert list_checkpoint_names(directory)[-1] == "step-00000005.run-00001"
        assert run.failed_checkpoints == 0
        assert "step-00000004.run-00001" in list_checkpoint_names(directory)


def case_each_node_gets_its_weights_of_several_optimizers_back(world: World) -> None:
    x = draw_samples(4 * world.size)[0][world.rank :: world.size]

    def train(directory: str, steps: int) -> list[torch.Tensor]:
        models = [build_network(), build_network()]
        optimizers = [
            topkube.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                [(f"{number}.{name}", p) for name, p in model.named_parameters()],
                aggregation="onebit",
                warmup_steps=0,
            )
            for number, model in enumerate(models)
        ]
        settings = store_in(directory, every=3)
        more: dict[str, Any] = {"second_model": models[1], "second_optimizer": optimizers[1]}
        with topkube.checkpointing(models[0], optimizers[0], settings=settings, **more) as run:
            for batch in run.progress([x] * 6, total=steps):
                for model, optimizer in zip(models, optimizers, strict=True):
                    compute_loss(model, batch, batch[:, :1]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        weights = [weight for model in models for weight in copy_weights(model)]
        for optimizer in optimizers:
            optimizer.unwrap()
        return weights

    with make_shared_directory(world) as whole, make_shared_directory(world) as parts:
        expected = train(whole, 6)
        train(parts, 3)
        assert Path(parts, "step-00000003.run-00001").is_dir()
        assert all(torch.equal(a, b) for a, b in zip(train(parts, 6), expected, strict=True))
