"""DeAR: gradients are gathered, and parameters updated, during the next forward. Every script gets the bits that it
gets without DeAR, however it reads parameters and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import topkube
from ranks.training.dear_scene import (
    STEPS,
    DearNetwork,
    build_adamw,
    check_equal,
    check_resumed,
    is_late,
    run_backward,
    take_step,
    train,
    wait_for,
)
from ranks.training.scene import (
    build_network,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
)
from topkube.algorithms import cost
from topkube.collectives import decoupled, overlapped
from topkube.errors import ArgumentError, TrainingError
from topkube.training.optimizers.lamb import LAMB
from topkube.world import World


def case_updates_come_with_the_next_forward(world: World) -> None:
    late, memories = [], []

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        take_step(model, optimizer, step)
        late.append(is_late(optimizer))
        parts = [part for bucket in optimizer._backward.plan.buckets for part in bucket.parts if part.memory]
        memories.append({part.memory._values.data_ptr() for part in parts if part.memory._values is not None})
        assert all(parameter.grad is None for parameter in model.parameters())

    for options in ({"bucket_bytes": None}, {"dense_wire": "bf16"}, {"aggregation": "auto"}):
        late.clear()
        memories.clear()
        check_equal(script, **options)
        assert all(memory == memories[1] for memory in memories[1:STEPS])  # nothing keeps the gradients of a step
        assert late == [False, *[world.nodes > 1] * (STEPS - 1), *[False] * STEPS], (options, late)  # the first plans


def case_late_updates_work_in_rounds(world: World) -> None:
    """As with many nodes."""
    limit = cost.PAIRWISE_LIMIT
    try:
        cost.PAIRWISE_LIMIT = 1
        check_equal(take_step)
        case_gathers_begin_in_backward_while_the_link_is_idle(world)
    finally:
        cost.PAIRWISE_LIMIT = limit


def case_gathers_begin_in_backward_while_the_link_is_idle(world: World) -> None:
    """Backward waits in the first layer until a bucket of later layers is gathered. In every other step only one rank
    begins gathers early: the others gather all pieces in the order of the next forward."""
    begun: list[int] = []

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        exchange = optimizer._backward.exchange
        pieces = getattr(exchange._overlapped, "_decoupled", None)
        is_early = isinstance(pieces, decoupled.DecoupledAllReduce) and step > 0
        only_rank_0_is_early = step % 2 == 1
        gathers_early = not only_rank_0_is_early or world.rank == 0

        def halve(*arguments: Any) -> decoupled.HalvedArray:
            halved = decoupled.DecoupledAllReduce.halve(pieces, *arguments)
            pieces._is_halving = gathers_early
            return halved

        def wait_for_gather(gradient: torch.Tensor) -> None:
            if is_early and gathers_early:
                wait_for(lambda: any(part.halved.begun for part in exchange.reduced_parts.parts))
                begun.append(step)
            if is_early and not only_rank_0_is_early:
                wait_for(lambda: any(part.halved.is_gathered for part in exchange.reduced_parts.parts))

        def enter(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(wait_for_gather)

        if is_early:
            pieces.halve = halve
        hook = model.first.register_forward_hook(enter)
        take_step(model, optimizer, step)
        hook.remove()

    for wire in ("fp32", "bf16"):
        options = {"dense_wire": wire, "bucket_bytes": 20_000}  # two buckets: all ranks gather both early
        begun.clear()
        check_equal(script, **options)
        assert begun == ([step for step in range(1, STEPS) if step % 2 == 0 or world.rank == 0]) * (world.nodes > 1)


def case_ranks_that_wait_for_slower_ones_gather_what_these_have_begun(world: World) -> None:
    """Backward waits in the first layer of the first node until a bucket is gathered. The other nodes are at the end of
    backward by then. They begin no gather of their own."""
    if not world.agree(world.links is not None):  # through MPI, ranks do not see what others have begun
        return
    waited = []

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        exchange = optimizer._backward.exchange
        pieces = getattr(exchange._overlapped, "_decoupled", None)
        is_late = isinstance(pieces, decoupled.DecoupledAllReduce) and step > 0
        is_slow = is_late and world.node == 0

        def wait_for_gather(gradient: torch.Tensor) -> None:
            wait_for(lambda: any(part.halved.is_gathered for part in exchange.reduced_parts.parts))
            waited.append(step)

        def enter(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(wait_for_gather)

        hook = model.first.register_forward_hook(enter) if is_slow else None
        with pytest.MonkeyPatch.context() as patch:
            if is_late and not is_slow:
                patch.setattr(decoupled, "EARLY", 0)
                patch.setattr(decoupled, "EARLY_ALONE", 0)
            take_step(model, optimizer, step)
        if hook is not None:
            hook.remove()

    for wire in ("fp32", "bf16"):
        waited.clear()
        check_equal(script, dense_wire=wire, bucket_bytes=20_000)
        assert waited == list(range(1, STEPS)) * (world.nodes > 1 and world.node == 0)


def case_gathers_begin_while_an_array_of_many_pieces_is_reduced(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlapped, "LEAST_PIECE_BYTES", 1 << 10)
        for wire in ("fp32", "bf16"):
            check_equal(take_step, dense_wire=wire, bucket_bytes=20_000)


def case_all_reduces_of_the_script_mix_with_late_gathers(world: World) -> None:
    """In the world of all ranks outside of backward, and in a world of its own within it."""
    own_world = topkube.new_world(range(world.size))
    results = []

    def sum_over(chosen: World | None) -> None:
        results.append(topkube.allreduce_(torch.ones(3000), "sum", "hierarchical", world=chosen))

    weights = []
    for mixes in (False, True):
        model = build_network()
        optimizer = build_optimizer(model, aggregation="dense", overlap="dear")
        if mixes:
            model[3].weight.register_hook(lambda gradient: sum_over(own_world))
        for step in range(STEPS):
            loss = compute_loss(model, *map(take_own_part, draw_samples(8 * world.size, step)))
            for act in (loss.backward, optimizer.step, optimizer.zero_grad):
                if mixes:
                    sum_over(world)
                act()
        weights.append(copy_weights(model))
        optimizer.unwrap()
    assert len(results) == 4 * STEPS
    assert all((result == world.size).all() for result in results)
    assert all(torch.equal(plain, mixed) for plain, mixed in zip(*weights, strict=True))


def case_late_updates_use_the_learning_rate_of_their_step(world: World) -> None:
    schedules: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        if step == 0:
            schedules[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        take_step(model, optimizer, step)
        assert is_late(optimizer) is (step > 0 and optimizer.aggregation.overlap == "dear" and world.nodes > 1)
        schedules[id(optimizer)].step()

    check_equal(script)


def case_a_rank_may_read_a_gradient_alone(world: World) -> None:
    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        run_backward(model, step)
        if world.rank == 0:
            assert model.first.weight.grad.norm() > 0
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        if world.rank == world.size - 1:
            assert model.norm.weight.grad.isfinite().all()
        optimizer.zero_grad()

    check_equal(script)


def case_a_late_step_is_skipped_by_all(world: World) -> None:
    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        x, y = draw_samples(8 * topkube.size(), step)
        loss = compute_loss(model, take_own_part(x), take_own_part(y))
        (loss * torch.nan if step == 3 and world.rank == world.size - 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped_steps == (step >= 3)

    check_equal(script)


def case_a_gradient_scaler_sees_whole_gradients(world: World) -> None:
    scalers: dict[int, torch.amp.GradScaler] = {}

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
        x, y = draw_samples(8 * topkube.size(), step)
        loss = compute_loss(model, take_own_part(x), take_own_part(y))
        scaler.scale(loss * torch.inf if step == 4 and world.rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    check_equal(script)


def case_accumulated_gradients_are_exchanged_late(world: World) -> None:
    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        with optimizer.no_sync():
            run_backward(model, 100 + step)
        run_backward(model, step)
        if step % 2:
            run_backward(model, 200 + step)  # adds to gradients that are exchanged already
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 0)

    check_equal(script)


def case_steps_that_accumulate_under_no_sync_are_late(world: World) -> None:
    late = []

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        for number in (100, 200):
            with optimizer.no_sync():
                model.uses_odd = number == 100  # the layer has its gradient before the last backward
                run_backward(model, number + step)
        run_backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        late.append(is_late(optimizer))

    check_equal(script)
    assert late == [False, *[world.nodes > 1] * (STEPS - 1), *[False] * STEPS]  # the first plans


def case_every_reader_sees_finished_weights(world: World) -> None:
    """The mean of the weights after each step, by reads of every kind."""
    readers: list[Callable[[nn.Module], list[torch.Tensor]]] = [
        lambda model: list(model.state_dict().values()),
        lambda model: [parameter.data for parameter in model.parameters()],
        lambda model: [parameter.detach() for parameter in model.parameters()],
        lambda model: list(nn.utils.parameters_to_vector(model.parameters()).split(64)),
        lambda model: [torch.from_numpy(parameter.detach().numpy()) for parameter in model.parameters()],
        lambda model: list(copy.deepcopy(model).parameters()),
        lambda model: torch._foreach_mul(list(model.parameters()), 1.0),
        lambda model: [model(draw_samples(8, 1)[0])],
    ]
    means: dict[int, list[float]] = {}

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        take_step(model, optimizer, step)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            values = readers[step % len(readers)](model)
            means.setdefault(id(optimizer), []).append(float(sum(value.double().mean() for value in values)))

    check_equal(script, steps=len(readers))
    own, expected = means.values()
    assert own == expected


def case_a_second_step_uses_the_same_gradients_again(world: World) -> None:
    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        run_backward(model, step)
        optimizer.step()
        if step != 2:
            optimizer.step()
        if step == 3:
            optimizer.step()
        optimizer.zero_grad()

    check_equal(script)


def case_the_state_of_the_wrapped_optimizer_is_finished(world: World) -> None:
    """A script may have kept the torch optimizer, and save its state."""
    saved: dict[int, list[torch.Tensor]] = {}

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        take_step(model, optimizer, step)
        state = optimizer.inner.state_dict()["state"]
        saved.setdefault(id(optimizer), []).extend(state[key]["exp_avg"].clone() for key in sorted(state))

    check_equal(script)
    own, expected = saved.values()
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def case_layers_that_a_forward_leaves_out_are_updated_too(world: World) -> None:
    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        model.uses_odd = step % 3 != 1 if step < 3 else bool(world.rank)
        take_step(model, optimizer, step)

    check_equal(script)


def case_memory_that_something_else_reads_is_updated_at_once(world: World) -> None:
    seen: dict[int, list[torch.Tensor]] = {}

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        alias = model.first.weight.detach()
        take_step(model, optimizer, step)
        seen.setdefault(id(optimizer), []).append(alias.clone())

    check_equal(script)
    own, expected = seen.values()
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def case_a_use_that_is_not_noticed_sees_nan(world: World) -> None:
    model, optimizer = train("dear", take_step)
    if world.nodes > 1:
        with torch._C.DisableTorchFunction():
            assert all(parameter.isnan().all() for parameter in model.parameters() if parameter.requires_grad)
    optimizer.finish_step()
    with torch._C.DisableTorchFunction():
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def case_a_gradient_of_a_use_that_is_not_noticed_is_an_error(world: World) -> None:
    """`torch.vmap` takes parameters in compiled code. Otherwise the step would be skipped, and every second one after
    it."""
    if world.nodes == 1:
        return
    model = build_network()
    optimizer = build_optimizer(model, overlap="dear", bucket_bytes=1)
    x, _ = draw_samples(8, 1)

    def compute(weight: torch.Tensor) -> torch.Tensor:
        return (x @ torch.vmap(torch.tanh)(weight).T).square().mean()

    compute(model[0].weight).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TrainingError, match=r"forward used 0\.weight before its late update.*finish_step"):
        compute(model[0].weight).backward()
    optimizer.zero_grad()
    for _ in range(2):
        compute(model[0].weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.finish_step()
    assert optimizer.skipped_steps == 0
    optimizer.unwrap()


def case_a_graph_from_before_a_late_step_is_refused(world: World) -> None:
    model = DearNetwork()
    optimizer = build_optimizer(model, build_adamw, overlap="dear")
    take_step(model, optimizer, 0)
    x, y = draw_samples(8, 1)
    loss = compute_loss(model, x, y)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.finish_step()
    optimizer.unwrap()


def case_a_resumed_run_with_late_updates_has_the_same_bits(world: World) -> None:
    for overlap in ("dear", "backward"):
        check_resumed(overlap)


def case_hooks_of_the_script_run_once_per_step(world: World) -> None:
    counts: dict[int, int] = {}

    def script(model: nn.Module, optimizer: topkube.DistributedOptimizer, step: int) -> None:
        if step == 2:
            optimizer.inner.register_step_post_hook(
                lambda *_: counts.update({id(optimizer): counts.get(id(optimizer), 0) + 1})
            )
        take_step(model, optimizer, step)

    check_equal(script)
    assert list(counts.values()) == [STEPS - 2] * 2


def case_optimizers_that_need_all_gradients_are_refused(world: World) -> None:
    model = DearNetwork()
    with pytest.raises(ArgumentError, match="does not work with LAMB"):
        build_optimizer(model, lambda p: LAMB(p, lr=1e-3), overlap="dear")
    with pytest.raises(ArgumentError, match=r"overlap is dear, but gtopk cannot divide its exchange"):
        build_optimizer(model, aggregation="gtopk", density=0.1, overlap="dear")
