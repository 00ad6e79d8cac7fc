"""Scripts as users write them: they take gradients themselves, hook them, or use several optimizers. One process does
the same for comparison."""

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
    assert_close,
    distributed,
    loss_of,
    network,
    own_part,
    plain_sgd,
    same_on_all_ranks,
    samples,
    sgd,
    small,
    weights,
)
from topkube.errors import ArgumentError, TrainingError
from topkube.world import World


def case_optimizers_that_ranks_reach_differently(world: World) -> None:
    """Two optimizers in one backward; some ranks use one of them, some the other, in another order."""
    torch.manual_seed(0)
    parts = [nn.Linear(24, 40), nn.Linear(24, 40)]
    references = copy.deepcopy(parts)
    optimizers = [distributed(part, plain_sgd) for part in parts]
    plain = [plain_sgd(part.parameters()) for part in references]
    for step in range(3):
        x, _ = samples(4 * topkube.size(), step)

        def loss(layers: list[nn.Module], rank: int, part: torch.Tensor, alone: bool = step == 1) -> torch.Tensor:
            used = [layers[rank % 2]] if alone else layers if rank % 2 else layers[::-1]
            return sum((small(layer(part).square().mean()) for layer in used), torch.zeros(()))

        loss(parts, topkube.rank(), own_part(x)).backward()
        for rank in range(topkube.size()):
            (loss(references, rank, x[rank :: topkube.size()]) / topkube.size()).backward()
        for optimizer in (*optimizers, *plain):
            optimizer.step()
            optimizer.zero_grad()
    for part, reference in zip(parts, references, strict=True):
        assert_close(part, reference)


def case_autograd_grad_on_one_rank_starts_nothing(world: World) -> None:
    for options in ({}, SPARSE):
        model, reference = network(), network()
        optimizer, plain = distributed(model, **options), sgd(reference.parameters())
        for step in range(4):
            x, y = samples(8 * topkube.size(), step)
            if topkube.rank() == 0:
                loss = loss_of(model, own_part(x), own_part(y))
                same = copy.deepcopy(model)
                true = torch.autograd.grad(loss_of(same, own_part(x), own_part(y)), list(same.parameters()))
                taken = torch.autograd.grad(loss, list(model.parameters()))
                assert all(torch.equal(a, b) for a, b in zip(true, taken, strict=True))
                assert all(p.grad is None for p in model.parameters())
            loss_of(model, own_part(x), own_part(y)).backward()
            loss_of(reference, x, y).backward()
            for chosen in (optimizer, plain):
                chosen.step()
                chosen.zero_grad()
        if not options:
            assert_close(model, reference)
        assert same_on_all_ranks(weights(model))


def case_a_gradient_penalty_takes_gradients_inside_the_loss(world: World) -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        x, y = samples(4 * topkube.size(), step)
        for network_, part, target in ((model, own_part(x), own_part(y)), (reference, x, y)):
            part = part.clone().requires_grad_()
            slope = torch.autograd.grad(network_(part).sum(), part, create_graph=True)[0]
            (loss_of(network_, part, target) + slope.square().sum(1).mean()).backward()
        for chosen in (optimizer, plain):
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)


def case_hooks_of_the_script_see_aggregated_gradients(world: World) -> None:
    """Hooks work if they are registered before or after the model is wrapped."""
    for early in (True, False):
        model, reference = network(), network()
        seen: dict[str, torch.Tensor] = {}

        def add(model: nn.Module = model, seen: dict[str, torch.Tensor] = seen) -> None:
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name, seen=seen: seen.__setitem__(name, p.grad.clone())
                )

        if early:
            add()
        optimizer = distributed(model)
        if not early:
            add()
        for step in range(3):
            x, y = samples(4 * topkube.size(), step)
            seen.clear()
            loss_of(model, own_part(x), own_part(y)).backward()
            reference.load_state_dict(model.state_dict())
            reference.zero_grad()
            loss_of(reference, x, y).backward()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-5, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad()


def case_an_optimizer_inside_backward(world: World) -> None:
    """Each parameter is updated by a hook: right with dense exchanges, refused with sparse ones."""
    model, reference = network(), network()
    optimizer, plain = distributed(model, plain_sgd), torch.optim.SGD(reference.parameters(), lr=0.05)

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(4):
        x, y = samples(4 * topkube.size(), step)
        loss_of(model, own_part(x), own_part(y)).backward()
        loss_of(reference, x, y).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)
    optimizer.unwrap()
    distributed_again = distributed(model, plain_sgd, **SPARSE)
    with pytest.raises(TrainingError, match="hook set the gradient"):
        loss_of(model, *samples(4)).backward()
    distributed_again.unwrap()


def case_a_group_of_parameters_is_added(world: World) -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(5):
        x, y = samples(4 * topkube.size(), step)
        if step == 2:
            for network_, chosen, pairs in ((model, optimizer, True), (reference, plain, False)):
                torch.manual_seed(5)
                network_.append(nn.Linear(1, 1))
                added = list(network_[6].named_parameters("added"))
                chosen.add_param_group({"params": added if pairs else [p for _, p in added], "lr": 0.01})
        loss_of(model, own_part(x), own_part(y)).backward()
        loss_of(reference, x, y).backward()
        for chosen in (optimizer, plain):
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)
    with pytest.raises(ArgumentError, match="already has a parameter named added"):
        optimizer.add_param_group({"params": list(nn.Linear(1, 1).named_parameters("added"))})


def case_gradients_by_hand_are_noticed_and_exchanged_on_demand(world: World) -> None:
    for options in ({}, {"aggregation": "hitopk", "density": 1.0}):
        model, reference = network(), network()
        optimizer, plain = distributed(model, **options), sgd(reference.parameters())
        for step in range(3):
            x, y = samples(4 * topkube.size(), step)
            for network_, part, target in ((model, own_part(x), own_part(y)), (reference, x, y)):
                gradients = torch.autograd.grad(loss_of(network_, part, target), list(network_.parameters()))
                for parameter, gradient in zip(network_.parameters(), gradients, strict=True):
                    parameter.grad = gradient.clone()
            with pytest.raises(TrainingError, match=r"not exchanged.*synchronize"):
                optimizer.step()
            optimizer.synchronize()
            for chosen in (optimizer, plain):
                chosen.step()
                chosen.zero_grad(set_to_none=False)
        assert_close(model, reference)
        assert same_on_all_ranks(weights(model))


def case_gradients_that_a_script_changes_after_the_exchange_are_its_own(world: World) -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        x, y = samples(4 * topkube.size(), step)
        loss_of(model, own_part(x), own_part(y)).backward()
        loss_of(reference, x, y).backward()
        for network_, chosen in ((model, optimizer), (reference, plain)):
            for parameter in network_.parameters():
                parameter.grad = parameter.grad / 2
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)


class Nothing(torch.autograd.Function):
    """A function whose second input gets no gradient."""

    @staticmethod
    def forward(context: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def case_a_function_that_gives_no_gradient(world: World) -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        x, y = samples(4 * topkube.size(), step)
        loss_of(model, own_part(x), own_part(y)).backward() if step != 1 else (
            Nothing.apply(loss_of(model, own_part(x), own_part(y)), model[3].weight).backward()
        )
        loss_of(reference, x, y).backward()
        for chosen in (optimizer, plain):
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)
    weight = nn.Parameter(torch.ones(2000, 2))
    alone = topkube.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], "dense")
    Nothing.apply(torch.ones((), requires_grad=True), weight).backward()
    alone.step()
    assert weight.grad is None
    assert weight.eq(1).all()


def case_one_rank_loads_and_the_others_follow(world: World) -> None:
    """Horovod's way to resume, with and without broadcast_optimizer_state."""
    for broadcast in (True, False):
        model, reference = network(), network()
        optimizer, plain = distributed(model), sgd(reference.parameters())

        def train(steps: range, model: nn.Module, chosen: torch.optim.Optimizer, whole: bool) -> None:
            for step in steps:
                x, y = samples(4 * topkube.size(), step)
                loss_of(model, *((x, y) if whole else (own_part(x), own_part(y)))).backward()
                chosen.step()
                chosen.zero_grad()

        train(range(3), model, optimizer, False)
        train(range(6), reference, plain, True)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        again = network()
        optimizer_again = distributed(again)
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
        assert same_on_all_ranks(weights(again))


def case_the_state_of_another_rank_brings_no_residuals(world: World) -> None:
    model = network()
    optimizer = distributed(model, plain_sgd, **SPARSE)
    loss_of(model, *samples(4)).backward()
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


def case_copies_and_pickles_train_on(world: World) -> None:
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        model, reference = network(), network()
        pair = (model, distributed(model, **SPARSE))
        plain = (reference, distributed(reference, **SPARSE))
        for step in range(6):
            x, y = samples(4 * topkube.size(), step)
            if step == 3:
                pair = copied(pair)
            for network_, chosen in (pair, plain):
                loss_of(network_, own_part(x), own_part(y)).backward()
                chosen.step()
                chosen.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(pair[0].parameters(), reference.parameters(), strict=True))
        torch.save(pair[0], io.BytesIO())


def case_gradients_that_a_script_assigns_before_backward_are_its_own(world: World) -> None:
    model = network()
    reference = network()
    optimizer, plain = distributed(model, plain_sgd), plain_sgd(reference.parameters())
    for step in range(3):
        x, y = samples(4 * topkube.size(), step)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.001 * topkube.rank())
        for parameter in reference.parameters():
            parameter.grad = torch.full_like(parameter, 0.001 * (topkube.size() - 1) / 2)
        small(loss_of(model, own_part(x), own_part(y))).backward()
        small(loss_of(reference, x, y)).backward()
        optimizer.step()
        plain.step()
    assert_close(model, reference)


def case_a_parameter_of_no_sync_batches_alone(world: World) -> None:
    parts, references = (nn.ModuleList([nn.Linear(24, 40), nn.Linear(24, 40)]) for _ in range(2))
    topkube.broadcast_parameters(parts)
    references.load_state_dict(parts.state_dict())
    optimizer, plain = distributed(parts, plain_sgd), plain_sgd(references.parameters())
    for step in range(3):
        x, _ = samples(4 * topkube.size(), step)
        with optimizer.no_sync():
            small(parts[1](own_part(x)).square().mean()).backward()
        small(parts[0](own_part(x)).square().mean()).backward()
        small(references[0](x).square().mean() + references[1](x).square().mean()).backward()
        for chosen in (optimizer, plain):
            chosen.step()
            chosen.zero_grad()
    assert_close(parts, references)


def case_a_schedule_with_numpy_rates_is_broadcast(world: World) -> None:
    model = network()
    optimizer = distributed(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 100 + topkube.rank()))
    topkube.broadcast_optimizer_state(optimizer)
    assert len(set(topkube.world.current().comm.allgather(float(optimizer.param_groups[0]["lr"])))) == 1


def case_two_optimizers_share_uneven_batches(world: World) -> None:
    parts, references = (nn.ModuleList([nn.Linear(24, 40), nn.Linear(24, 40)]) for _ in range(2))
    topkube.broadcast_parameters(parts)
    references.load_state_dict(parts.state_dict())
    optimizers = [distributed(part, plain_sgd) for part in parts]
    plain = plain_sgd(references.parameters())
    rank, size = topkube.rank(), topkube.size()
    batches = [[samples(3 + r, 10 * r + i)[0] for i in range(2 if r == 0 else 1)] for r in range(size)]
    for x in optimizers[0].join(batches[rank]):
        small(sum(part(x).square().mean() for part in parts)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for step in range(2):
        x = torch.cat([row[step] for row in batches if step < len(row)])
        small(sum(part(x).square().mean() for part in references)).backward()
        plain.step()
        plain.zero_grad()
    assert_close(parts, references)
