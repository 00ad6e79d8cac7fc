"""`auto` with `node_weights="own"` on real ranks: it tries int4, and then onebit, after a dense step that sends all
residuals. If it returns to int4, the weights of the nodes are averaged."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
import torch
from torch import nn

import topkube
from ranks.training.checkpoints import make_shared_directory
from ranks.training.onebit_scene import (
    build_adamw,
    build_sgd,
    draw_batch,
    read_agreed_weights,
    read_bits,
    train,
    train_with_checkpoints,
)
from ranks.training.scene import are_equal_on_all_ranks, build_network, compute_loss, copy_weights, write_weights
from ranks.training.tuning_scene import STEPS, have_same_choice, read_algorithm, simulate_slow_links
from topkube.world import World

KEPT, REJECTED, REPEATED = (0.4, 0.35, 0.3), (0.4, 0.35, 0.345, 0.35), (0.4, 0.35, 0.33, 0.35)
"""The seconds of a step that is dense, with int4, and with onebit, and if onebit gains little, with int4 once more."""
DENSE, INT, ONEBIT = ["hierarchical"], ["int"], ["onebit"]
CHANGED = 2 * STEPS + 1
"""The number of steps after which the nodes have weights of their own."""


def read_kind(optimizer: topkube.DistributedOptimizer) -> str:
    """Return the name of the algorithm in force, without the number of bits: int4, or int3 on a device."""
    return read_algorithm(optimizer).rstrip("345678")


def build_auto(model: nn.Module, make: Any = build_sgd) -> topkube.DistributedOptimizer:
    return topkube.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), aggregation="auto", node_weights="own"
    )


def compute_mean_weights(world: World, model: nn.Module) -> list[np.ndarray]:
    """Return the mean over all ranks of each parameter."""
    return [world.comm.allreduce(p.detach().double().numpy()) / world.size for p in model.parameters()]


def read_state_tensors(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> list[torch.Tensor]:
    pairs = [sorted(optimizer.inner.state[p].items()) for p in model.parameters()]
    return [value.clone() for entries in pairs for _, value in entries if isinstance(value, torch.Tensor)]


def case_auto_takes_onebit_and_keeps_it_if_steps_become_faster(world: World) -> None:
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *KEPT):
        model = build_network()
        optimizer = build_auto(model)
        names, steps = [], CHANGED + STEPS + 3
        for step in range(steps):
            train(world, model, optimizer, range(step, step + 1))
            assert have_same_choice(world, optimizer)
            names.append(read_kind(optimizer))
    assert names == DENSE * (STEPS - 1) + INT * STEPS + DENSE + ONEBIT * (STEPS + 4), names
    assert optimizer.tuning.is_settled
    assert "kept: 300 ms per step, 350 ms before" in optimizer.tuning.summary
    assert (optimizer.steps, optimizer.skipped_steps) == (steps, 0)
    assert optimizer.guard is not None
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    assert not are_equal_on_all_ranks(copy_weights(model)), "nodes train weights of their own"
    optimizer.unwrap()
    assert are_equal_on_all_ranks(copy_weights(model))


def case_onebit_returns_after_a_second_measurement_without_it(world: World) -> None:
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *REPEATED):
        model = build_network()
        optimizer = build_auto(model)
        names, steps = [], 5 * STEPS
        for step in range(steps):
            train(world, model, optimizer, range(step, step + 1))
            names.append(read_kind(optimizer))
            assert names[-1] == "onebit" or are_equal_on_all_ranks(copy_weights(model))
    expected = DENSE * (STEPS - 1) + INT * STEPS + DENSE + ONEBIT * STEPS + INT * STEPS + DENSE + ONEBIT * 10
    assert names == expected, names
    assert optimizer.tuning.is_settled
    assert (optimizer.steps, optimizer.skipped_steps) == (steps, 0)
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()
    assert are_equal_on_all_ranks(copy_weights(model))


def case_weights_are_averaged_if_onebit_is_not_faster(world: World) -> None:
    if world.nodes == 1:
        return
    for make in (build_sgd, build_adamw):
        with simulate_slow_links(world, *REJECTED):
            check_average(world, make)


def check_average(world: World, make: Any) -> None:
    """Check that the average of the nodes keeps the mean of their weights and of the optimizers' states, and that nodes
    have equal weights after later steps."""
    model = build_network()
    optimizer = build_auto(model, make)
    last = CHANGED + STEPS
    train(world, model, optimizer, range(last - 1))
    assert read_algorithm(optimizer) == "onebit"
    node_weights = optimizer._node_weights
    assert node_weights is not None
    average, before = node_weights.average, []

    def record_and_average() -> None:
        before.append((compute_mean_weights(world, model), read_state_tensors(optimizer, model)))
        average()

    node_weights.average = record_and_average  # type: ignore[method-assign]
    train(world, model, optimizer, range(last - 1, last))
    assert read_kind(optimizer) == "int"
    assert optimizer.guard is None
    [(mean, states)] = before
    assert are_equal_on_all_ranks(copy_weights(model))
    for parameter, expected in zip(model.parameters(), mean, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    for state, own in zip(read_state_tensors(optimizer, model), states, strict=True):
        expected = world.comm.allreduce(own.double().numpy()) / world.size
        np.testing.assert_allclose(state.numpy(), expected, rtol=1e-5, atol=1e-7)
    train(world, model, optimizer, range(last, last + 3))
    assert are_equal_on_all_ranks(copy_weights(model))
    assert optimizer.steps == last + 3
    optimizer.unwrap()


def case_the_switch_to_onebit_survives_a_skipped_step_and_no_sync(world: World) -> None:
    """The gradients of the step that would send all residuals are not finite. That step is skipped, the next one sends
    them, and `auto` then switches to onebit. A backward under `no_sync()` follows."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *KEPT):
        model = build_network()
        optimizer = build_auto(model)
        train(world, model, optimizer, range(CHANGED - 1))
        loss = compute_loss(model, *draw_batch(world.rank, CHANGED - 1))
        (loss * torch.nan if world.rank == world.size - 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        counted = optimizer.skipped_steps, optimizer.steps
        assert (read_algorithm(optimizer), *counted) == ("hierarchical", 1, CHANGED - 1)
        train(world, model, optimizer, range(CHANGED, CHANGED + 1))
        assert read_algorithm(optimizer) == "onebit"
        with optimizer.no_sync():
            compute_loss(model, *draw_batch(world.rank, CHANGED + 1)).backward()
        train(world, model, optimizer, range(CHANGED + 2, CHANGED + 5))
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def case_no_part_of_a_gradient_is_lost_when_onebit_follows_int4(world: World) -> None:
    """The gradients do not depend on the weights, and SGD has no momentum. So int4 and the dense step that sends its
    residuals leave the weights that dense steps alone would leave."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *KEPT):
        model, dense = build_network(), build_network()
        optimizer = topkube.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            aggregation="auto",
            node_weights="own",
        )
        plain = topkube.DistributedOptimizer(
            torch.optim.SGD(dense.parameters(), lr=0.1), dense.named_parameters(), aggregation="hierarchical"
        )
        differences = []
        for step in range(CHANGED):
            for network, owner in ((model, optimizer), (dense, plain)):
                generator = torch.Generator().manual_seed(1000 * step + world.rank)
                terms = [(p * torch.randn(p.shape, generator=generator)).sum() for p in network.parameters()]
                torch.stack(terms).sum().backward()
                owner.step()
                owner.zero_grad()
            pairs = zip(model.parameters(), dense.parameters(), strict=True)
            differences.append(max(float((a - b).abs().max()) for a, b in pairs))
    assert read_algorithm(optimizer) == "onebit"
    assert differences[-2] > 1e-3, "int4 has residuals before the last step"
    assert differences[-1] < 1e-5, differences
    for owner in (optimizer, plain):
        owner.unwrap()


def case_parts_of_gradients_of_frozen_parameters_are_dropped_with_a_warning(world: World) -> None:
    """A frozen parameter sends nothing, so its residual is left when `auto` changes to weights of nodes."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *KEPT), contextlib.redirect_stderr(io.StringIO()) as output:
        model = build_network()
        optimizer = build_auto(model)
        train(world, model, optimizer, range(CHANGED - 2))
        max(model.parameters(), key=torch.numel).requires_grad_(False)
        train(world, model, optimizer, range(CHANGED - 2, CHANGED + 2))
    assert read_algorithm(optimizer) == "onebit"
    warned = world.comm.allreduce(int("parameters which are frozen now had not sent" in output.getvalue()))
    assert warned > 0, output.getvalue()
    optimizer.unwrap()


def case_a_loop_over_join_continues_when_auto_switches(world: World) -> None:
    """The loop over `join` began before the switch, and ranks have different numbers of batches."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *KEPT):
        model = build_network()
        optimizer = build_auto(model)
        turns, batches = optimizer.turns, [draw_batch(world.rank, step) for step in range(CHANGED + 3 + world.rank)]
        for batch in optimizer.join(batches, samples=8):
            compute_loss(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert read_algorithm(optimizer) == "onebit"
    assert optimizer.steps == CHANGED + 3 + world.size - 1
    assert optimizer.turns is turns, "the same object still counts the batches of the loop"
    assert are_equal_on_all_ranks(read_agreed_weights(optimizer, model))
    optimizer.unwrap()


def run_until(world: World, directory: str, steps: int) -> tuple[nn.Module, topkube.DistributedOptimizer]:
    """Train up to `steps` with checkpoints."""
    model = build_network()
    optimizer = build_auto(model, build_adamw)
    train_with_checkpoints(world, model, optimizer, directory, steps, every=100)
    return model, optimizer


def case_a_checkpoint_of_onebit_is_resumed_by_auto_bit_for_bit(world: World) -> None:
    """The first run saves a checkpoint during the trial of onebit, and then trains on as the reference. The second run
    resumes the checkpoint and continues with onebit."""
    check_resumption(world, CHANGED + 2, "onebit")


def case_a_checkpoint_before_residuals_are_sent_is_resumed_bit_for_bit(world: World) -> None:
    """The step after the checkpoint is dense and sends the residuals of int4, and onebit follows, in both runs."""
    check_resumption(world, CHANGED - 1, "hierarchical")


def check_resumption(world: World, saved: int, algorithm: str) -> None:
    """Check that a run resumes from a checkpoint after `saved` steps, where `algorithm` is in force, bit for bit."""
    if world.nodes == 1:
        return
    with make_shared_directory(world) as directory, simulate_slow_links(world, 0.4, 0.35):
        model, optimizer = run_until(world, directory, saved)
        assert read_algorithm(optimizer) == algorithm
        train(world, model, optimizer, range(saved, saved + 5))
        assert read_algorithm(optimizer) == "onebit"
        whole = read_bits(optimizer, model)
        optimizer.unwrap()
        model, optimizer = run_until(world, directory, saved + 5)
        assert read_algorithm(optimizer) == "onebit"
        assert optimizer.tuning.is_settled
        assert read_bits(optimizer, model) == whole
        optimizer.unwrap()


def case_a_dense_state_replaces_weights_of_nodes(world: World) -> None:
    """A state that was saved before the change is loaded after it: the run is dense again, with equal weights."""
    if world.nodes == 1:
        return
    with simulate_slow_links(world, *KEPT):
        model = build_network()
        optimizer = build_auto(model)
        train(world, model, optimizer, range(3))
        state, start = copy.deepcopy(optimizer.state_dict()), copy_weights(model)
        optimizer.tuning.is_saved = False  # a saved state would settle `auto`; it must still try onebit
        train(world, model, optimizer, range(3, CHANGED + 3))
        assert read_algorithm(optimizer) == "onebit"
        write_weights(model, start)
        optimizer.load_state_dict(state)
        train(world, model, optimizer, range(3, 6))
        assert read_algorithm(optimizer) == "hierarchical"
        assert optimizer.steps == 6
        assert are_equal_on_all_ranks(copy_weights(model))
        optimizer.unwrap()


def case_auto_never_takes_onebit_without_node_weights_own(world: World) -> None:
    if world.nodes == 1:
        return
    model = build_network()
    with simulate_slow_links(world, *KEPT):
        optimizer = topkube.DistributedOptimizer(
            build_sgd(model.parameters()), model.named_parameters(), aggregation="auto"
        )
        train(world, model, optimizer, range(CHANGED + 2))
    assert read_algorithm(optimizer) == "int4"
    assert are_equal_on_all_ranks(copy_weights(model))
    optimizer.unwrap()


def case_a_model_that_onebit_does_not_support_trains_without_it(world: World) -> None:
    """The parameters have 16 bits, without master weights. Rank 0 prints why `auto` will not take onebit."""
    model = build_network().to(torch.bfloat16)
    with contextlib.redirect_stderr(io.StringIO()) as output:
        optimizer = build_auto(model)
    is_reported = "auto will not take onebit" in output.getvalue() and "bfloat16" in output.getvalue()
    assert is_reported == (world.rank == 0)
    assert all(not algorithm.in_weights for algorithm in optimizer.tuning.compressed_choices)
    optimizer.unwrap()
