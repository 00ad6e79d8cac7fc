"""Scripts as users write them: they register hooks, add parameters, copy states, or use several optimizers. One process
does the same for comparison."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import (
    SPARSE,
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_plain_sgd,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    shrink,
    take_own_part,
)
from topkube.errors import ArgumentError, TrainingError
from topkube.world import World


def case_ranks_may_use_different_optimizers_in_a_backward(world: World) -> None:
    """Two optimizers in one backward; some ranks use one of them, some the other, in another order."""
    torch.manual_seed(0)
    parts = [nn.Linear(24, 40), nn.Linear(24, 40)]
    references = copy.deepcopy(parts)
    optimizers = [build_optimizer(part, build_plain_sgd) for part in parts]
    plain = [build_plain_sgd(part.parameters()) for part in references]
    for step in range(3):
        x, _ = draw_samples(4 * topkube.size(), step)

        def compute_joint_loss(
            layers: list[nn.Module], rank: int, part: torch.Tensor, alone: bool = step == 1
        ) -> torch.Tensor:
            used = [layers[rank % 2]] if alone else layers if rank % 2 else layers[::-1]
            return sum((shrink(layer(part).square().mean()) for layer in used), torch.zeros(()))

        compute_joint_loss(parts, topkube.rank(), take_own_part(x)).backward()
        for rank in range(topkube.size()):
            (compute_joint_loss(references, rank, x[rank :: topkube.size()]) / topkube.size()).backward()
        for optimizer in (*optimizers, *plain):
            optimizer.step()
            optimizer.zero_grad()
    for part, reference in zip(parts, references, strict=True):
        assert_close(part, reference)


def case_hooks_of_the_script_see_aggregated_gradients(world: World) -> None:
    """Hooks work if they are registered before or after the model is wrapped."""
    for early in (True, False):
        model, reference = build_network(), build_network()
        seen: dict[str, torch.Tensor] = {}

        def add_hooks(model: nn.Module = model, seen: dict[str, torch.Tensor] = seen) -> None:
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name, seen=seen: seen.__setitem__(name, p.grad.clone())
                )

        if early:
            add_hooks()
        optimizer = build_optimizer(model)
        if not early:
            add_hooks()
        for step in range(3):
            x, y = draw_samples(4 * topkube.size(), step)
            seen.clear()
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            reference.load_state_dict(model.state_dict())
            reference.zero_grad()
            compute_loss(reference, x, y).backward()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-5, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad()


def case_hooks_may_update_parameters_in_a_dense_backward_only(world: World) -> None:
    """A hook updates each parameter. Sparse exchanges refuse this."""
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model, build_plain_sgd), torch.optim.SGD(reference.parameters(), lr=0.05)

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(4):
        x, y = draw_samples(4 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)
    optimizer.unwrap()
    distributed_again = build_optimizer(model, build_plain_sgd, **SPARSE)
    with pytest.raises(TrainingError, match="hook set the gradient"):
        compute_loss(model, *draw_samples(4)).backward()
    distributed_again.unwrap()


def case_a_group_of_parameters_is_added(world: World) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(5):
        x, y = draw_samples(4 * topkube.size(), step)
        if step == 2:
            for network, each_optimizer, takes_names in ((model, optimizer, True), (reference, plain, False)):
                torch.manual_seed(5)
                network.append(nn.Linear(1, 1))
                added = list(network[6].named_parameters("added"))
                parameters = added if takes_names else [parameter for _, parameter in added]
                each_optimizer.add_param_group({"params": parameters, "lr": 0.01})
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)
    with pytest.raises(ArgumentError, match="already has a parameter named added"):
        optimizer.add_param_group({"params": list(nn.Linear(1, 1).named_parameters("added"))})


class NoGradient(torch.autograd.Function):
    """A function whose second input gets no gradient."""

    @staticmethod
    def forward(context: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def case_a_parameter_without_a_gradient_from_its_function_stays(world: World) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(3):
        x, y = draw_samples(4 * topkube.size(), step)
        loss = compute_loss(model, take_own_part(x), take_own_part(y))
        if step == 1:
            loss = NoGradient.apply(loss, model[3].weight)
        loss.backward()
        compute_loss(reference, x, y).backward()
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)
    weight = nn.Parameter(torch.ones(2000, 2))
    alone = topkube.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], "dense")
    NoGradient.apply(torch.ones((), requires_grad=True), weight).backward()
    alone.step()
    assert weight.grad is None
    assert weight.eq(1).all()


def case_one_rank_loads_and_the_others_follow(world: World) -> None:
    """Horovod's way to resume, with and without broadcast_optimizer_state."""
    for broadcast in (True, False):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())

        def train(steps: range, model: nn.Module, own_optimizer: torch.optim.Optimizer, whole: bool) -> None:
            for step in steps:
                x, y = draw_samples(4 * topkube.size(), step)
                compute_loss(model, *((x, y) if whole else (take_own_part(x), take_own_part(y)))).backward()
                own_optimizer.step()
                own_optimizer.zero_grad()

        train(range(3), model, optimizer, False)
        train(range(6), reference, plain, True)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        again = build_network()
        optimizer_again = build_optimizer(again)
        if topkube.rank() == 0 or not broadcast:
            again.load_state_dict(saved[0])
        if topkube.rank() == 0:
            optimizer_again.load_state_dict(saved[1])
        if broadcast:
            topkube.broadcast_parameters(again)
            topkube.broadcast_optimizer_state(optimizer_again)
            assert optimizer_again.steps == 3
        else:
            inner = copy.deepcopy(saved[1])
            del inner["topkube"]
            if topkube.rank():
                optimizer_again.load_state_dict(inner)
        train(range(3, 6), again, optimizer_again, False)
        assert_close(again, reference)
        assert are_equal_on_all_ranks(copy_weights(again))


def case_the_state_of_another_rank_brings_no_residuals(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
    compute_loss(model, *draw_samples(4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = optimizer.state_dict()
    own = copy.deepcopy(state)
    others = topkube.world.current().comm.bcast(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(others)
    messages = [str(warning.message) for warning in caught if "residuals" in str(warning.message)]
    assert bool(messages) == (topkube.rank() > 0), messages
    pieces = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
    assert bool(pieces) == (topkube.rank() == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(own)


def case_copies_and_pickles_continue_training(world: World) -> None:
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        model, reference = build_network(), build_network()
        pair = (model, build_optimizer(model, **SPARSE))
        plain = (reference, build_optimizer(reference, **SPARSE))
        for step in range(6):
            x, y = draw_samples(4 * topkube.size(), step)
            if step == 3:
                pair = copied(pair)
            for network, each_optimizer in (pair, plain):
                compute_loss(network, take_own_part(x), take_own_part(y)).backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(pair[0].parameters(), reference.parameters(), strict=True))
        torch.save(pair[0], io.BytesIO())


def case_a_parameter_that_only_no_sync_batches_use_is_exchanged(world: World) -> None:
    parts, references = (nn.ModuleList([nn.Linear(24, 40), nn.Linear(24, 40)]) for _ in range(2))
    topkube.broadcast_parameters(parts)
    references.load_state_dict(parts.state_dict())
    optimizer, plain = build_optimizer(parts, build_plain_sgd), build_plain_sgd(references.parameters())
    for step in range(3):
        x, _ = draw_samples(4 * topkube.size(), step)
        with optimizer.no_sync():
            shrink(parts[1](take_own_part(x)).square().mean()).backward()
        shrink(parts[0](take_own_part(x)).square().mean()).backward()
        shrink(references[0](x).square().mean() + references[1](x).square().mean()).backward()
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(parts, references)


def case_a_schedule_with_numpy_rates_is_broadcast(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 100 + topkube.rank()))
    topkube.broadcast_optimizer_state(optimizer)
    assert len(set(topkube.world.current().comm.allgather(float(optimizer.param_groups[0]["lr"])))) == 1


def case_a_state_on_a_gpu_of_the_root_arrives_in_host_memory(world: World) -> None:
    """The files of tensors on a GPU name that GPU, on which the other ranks of a node have no room."""
    model = build_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if topkube.rank() == 0:
        compute_loss(model, *draw_samples(4)).backward()
        optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        topkube.broadcast_optimizer_state(optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(state["momentum_buffer"].device.type == "cpu" for state in optimizer.state.values())


def case_two_optimizers_share_uneven_batches(world: World) -> None:
    parts, references = (nn.ModuleList([nn.Linear(24, 40), nn.Linear(24, 40)]) for _ in range(2))
    topkube.broadcast_parameters(parts)
    references.load_state_dict(parts.state_dict())
    optimizers = [build_optimizer(part, build_plain_sgd) for part in parts]
    plain = build_plain_sgd(references.parameters())
    rank, size = topkube.rank(), topkube.size()
    batches = [[draw_samples(3 + r, 10 * r + i)[0] for i in range(2 if r == 0 else 1)] for r in range(size)]
    for x in optimizers[0].join(batches[rank]):
        shrink(sum(part(x).square().mean() for part in parts)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for step in range(2):
        x = torch.cat([row[step] for row in batches if step < len(row)])
        shrink(sum(part(x).square().mean() for part in references)).backward()
        plain.step()
        plain.zero_grad()
    assert_close(parts, references)
