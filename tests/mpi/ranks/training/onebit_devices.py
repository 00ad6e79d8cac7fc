"""Error feedback in the weights of models on a device: weights are copied to the host, and gradients stay there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from ranks.device import exchange_through_torch
from ranks.training import own_weights, tuning_scene
from ranks.training.checkpoints import make_shared_directory
from ranks.training.onebit_checkpoints import read_state, run_until
from ranks.training.onebit_scene import (
    build_adamw,
    build_lamb,
    build_masters,
    build_onebit,
    build_sgd,
    draw_batch,
    read_bits,
    train,
)
from ranks.training.scene import build_network, compute_loss
from topkube.collectives.device.rows import RowsInOneStage, RowsInTwoStages
from topkube.telemetry.trace import DELAYED_THREAD
from topkube.training.node_weights import exchange
from topkube.world import World

ALGORITHMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("onebit", {}),
    ("onebit", {"delay": 1}),
    ("onebit", {"period": 2}),
    ("topk1bit", {}),
    ("localsgd", {"period": 2}),
    ("diloco", {"period": 2}),
)


@contextmanager
def exchange_over_slow_links() -> Iterator[None]:
    """Let all algorithms that compress save so much that `auto` takes the one that sends least: on a device, it does
    not fit its predictions to the steps."""
    with exchange_through_torch(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_scene, "SLOW_RATE", 3e4)
        yield


def run_steps(
    world: World, build_optimizer: Any, is_on_device: bool, default_dtype: torch.dtype = torch.float32, **options: Any
) -> list[bytes]:
    """Return the bits of the weights after 8 steps, with or without the copies of a device. `default_dtype` is torch's
    in the steps and exchanges; the model and its data have float32."""
    model = build_network()
    with exchange_through_torch() if is_on_device else nullcontext():
        optimizer = build_onebit(model, build_optimizer, **options)
        assert (optimizer._backward.exchange.on_device is not None) == is_on_device
        for step in range(8):
            x, y = draw_batch(world.rank, step)
            torch.set_default_dtype(default_dtype)
            try:
                compute_loss(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.set_default_dtype(torch.float32)
        return read_bits(optimizer, model)


def have_same_sums(world: World) -> bool:
    """Return True if sums within nodes do not depend on their order: a node has at most two ranks."""
    return max(len(ranks) for ranks in world.node_ranks) <= 2


def case_a_model_on_a_device_trains_with_the_same_bits(world: World) -> None:
    if not have_same_sums(world):
        return
    for algorithm, options in ALGORITHMS:
        arguments = {"aggregation": algorithm, **options}
        on_device = run_steps(world, build_adamw, True, **arguments)
        assert on_device == run_steps(world, build_adamw, False, **arguments), arguments


def case_chunks_on_a_device_that_overlap_give_the_same_bits(world: World) -> None:
    """Several chunks are under way at the same time, and the next exchange takes their work buffers."""
    if not have_same_sums(world):
        return
    for options in ({}, {"delay": 1}, {"period": 2}):
        expected = run_steps(world, build_adamw, False, **options)
        for chunk_bytes in (4_000, 8_000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange, "DEVICE_CHUNK_BYTES", chunk_bytes)
                assert run_steps(world, build_adamw, True, **options) == expected, (options, chunk_bytes)


def case_the_default_dtype_of_the_script_does_not_change_the_exchange(world: World) -> None:
    if not have_same_sums(world):
        return
    for algorithm, options in ALGORITHMS:
        arguments = {"aggregation": algorithm, **options}
        expected = run_steps(world, build_sgd, False, **arguments)
        assert run_steps(world, build_sgd, True, torch.bfloat16, **arguments) == expected, arguments


def case_a_run_continues_on_a_device_with_other_chunks(world: World) -> None:
    """A checkpoint of a run on processors, or of an earlier version, holds the shards of chunks of another size."""
    if not have_same_sums(world):
        return
    with make_shared_directory(world) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BUCKET_BYTES", 8_000)
        whole = read_state(*run_until(world, f"{directory}/whole", 10))
        run_until(world, f"{directory}/parts", 7)
        with exchange_through_torch():
            assert whole == read_state(*run_until(world, f"{directory}/parts", 10))


def case_delayed_exchanges_and_others_keep_apart(world: World) -> None:
    """Two optimizers exchange at the same time, one of them with a delay. On rank 0, the rows of delayed exchanges are
    late, and the other exchange overtakes them."""
    if not have_same_sums(world):
        return
    results = []

    def make_late(travel: Any) -> Any:
        def travel_late(*arguments: Any) -> Any:
            if world.rank == 0 and threading.current_thread().name == DELAYED_THREAD:
                time.sleep(0.05)
            return travel(*arguments)

        return travel_late

    for is_on_device in (False, True):
        with exchange_through_torch() if is_on_device else nullcontext(), pytest.MonkeyPatch.context() as patch:
            for kind in (RowsInOneStage, RowsInTwoStages):
                patch.setattr(kind, "travel", make_late(kind.travel))
            models = [build_network(), build_network()]
            optimizers = [build_onebit(model, delay=delay) for delay, model in enumerate(models)]
            for step in range(4):
                for model, optimizer in zip(reversed(models), reversed(optimizers), strict=True):
                    train(world, model, optimizer, range(step, step + 1))
            results.append([read_bits(o, model) for o, model in zip(optimizers, models, strict=True)])
            for optimizer in optimizers:
                optimizer.unwrap()
    assert results[0] == results[1]


def case_auto_takes_onebit_on_a_device_and_keeps_it_if_steps_become_faster(world: World) -> None:
    if world.nodes < 8:  # auto never takes the two stages of signs
        with exchange_over_slow_links():
            own_weights.case_auto_takes_onebit_and_keeps_it_if_steps_become_faster(world)


def case_weights_on_a_device_are_averaged_if_onebit_is_not_faster(world: World) -> None:
    if world.nodes < 8:
        with exchange_over_slow_links():
            own_weights.case_weights_are_averaged_if_onebit_is_not_faster(world)


def case_each_optimizer_works_on_a_device(world: World) -> None:
    if not have_same_sums(world):
        return
    for build_optimizer in (build_sgd, build_lamb, build_masters(build_adamw)):
        assert run_steps(world, build_optimizer, True) == run_steps(world, build_optimizer, False)


def case_a_resumed_run_on_a_device_has_the_same_bits(world: World) -> None:
    for options in ({}, {"delay": 1}):
        with make_shared_directory(world) as directory, exchange_through_torch():
            whole = read_state(*run_until(world, f"{directory}/whole", 10, **options))
            run_until(world, f"{directory}/parts", 7, **options)
            assert whole == read_state(*run_until(world, f"{directory}/parts", 10, **options)), options
