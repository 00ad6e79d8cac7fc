"""Gradients of a DistributedOptimizer on one rank: their memory, sparse ones, and those that are not finite."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import topkube
from topkube.errors import TrainingError
from topkube.training.exchange.buckets.storage import is_shared
from unit.training.one_rank import build_model, build_optimizer, run_backward


@pytest.fixture(autouse=True)
def world() -> None:
    topkube.init()
    torch.manual_seed(0)


def test_gradients_of_one_rank_are_not_copied() -> None:
    model = build_model()
    computed: list[int] = []
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda gradient: computed.append(gradient.data_ptr()))
    optimizer = build_optimizer(model)
    for step in range(3):  # the first backward plans the buckets
        computed.clear()
        run_backward(model, seed=step)
        assert [model[2].weight.grad.data_ptr(), model[0].weight.grad.data_ptr()] == computed
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_that_share_memory_are_separated_after_backward() -> None:
    """Otherwise clipping would scale their memory twice."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.zeros(40, 50)), nn.Parameter(torch.zeros(2000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first.view(2000) + self.second.view(2000) - x).square().sum()

    model = Sum()
    optimizer = build_optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):  # the second backward adds to gradients that were delivered
            model(torch.ones(2000)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 3.0)
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, torch.full_like(parameter, -3.0))
        assert model.first.grad.data_ptr() != model.second.grad.data_ptr()


def find_shared(model: nn.Module, loss: torch.Tensor) -> dict[str, bool]:
    """Return which gradients of a backward are shared when they arrive, by the names of the parameters."""
    shared: dict[str, bool] = {}
    nodes = []
    for name, parameter in model.named_parameters():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        nodes.append(node)  # the hook lives as long as this object

        def note(
            _: object, arrived: tuple[torch.Tensor], name: str = name, parameter: torch.Tensor = parameter
        ) -> None:
            assert parameter.grad is not None
            shared[name] = is_shared(parameter.grad, arrived[0])

        node.register_hook(note)
    loss.backward()
    return shared


def test_gradients_of_a_usual_model_are_not_shared_when_they_arrive() -> None:
    """Autograd holds them then, and the tensors of which they are views; copying them would be in vain."""
    model = build_model()
    assert not any(find_shared(model, model(torch.randn(4, 20)).square().sum()).values())


@pytest.mark.parametrize("keeps", [False, True])
def test_a_gradient_is_shared_while_something_else_still_needs_its_memory(keeps: bool) -> None:
    """The other branch of the graph has not read the tensor yet of which the gradient is a view, or a script keeps
    it."""
    kept = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            kept.append(gradient)
            return gradient

    model = nn.ParameterDict({"early": torch.ones(4, 5), "late": torch.ones(20)})
    late = torch.tanh(model["late"])
    early = model["early"].view(-1)  # backward begins with what forward did last
    total = Keep.apply(early) if keeps else late + early
    shared = find_shared(model, (total * torch.arange(20.0)).sum())
    assert shared["early"]


def test_memory_is_shared_while_a_script_keeps_its_storage() -> None:
    tensor = torch.ones(4)
    assert not is_shared(tensor)
    storage = tensor.untyped_storage()
    assert is_shared(tensor)
    del storage
    assert not is_shared(tensor)


def test_the_first_import_may_be_in_inference_mode() -> None:
    program = "import torch\nwith torch.inference_mode():\n    import topkube.training.distributed"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_step_after_no_sync_alone_is_noticed() -> None:
    model = build_model()
    optimizer = build_optimizer(model)
    run_backward(model)  # plans the buckets
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        run_backward(model)
    assert optimizer.accumulating
    run_backward(model)
    assert not optimizer.accumulating


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9 and newer have grad_dtype")
@pytest.mark.parametrize("steps", [0, 2])
def test_gradients_of_another_dtype_are_refused(steps: int) -> None:
    model = build_model()
    optimizer = build_optimizer(model)
    for _ in range(steps):
        run_backward(model)
        optimizer.step()
        optimizer.zero_grad()
    model[0].weight.grad_dtype = torch.bfloat16
    with pytest.raises(TrainingError, match=r"0\.weight has dtype torch\.bfloat16"):
        run_backward(model)


def test_gradients_stay_in_the_memory_that_a_script_chose() -> None:
    """Gradients are views of a flat buffer, and several backwards add to them."""
    model = build_model()
    optimizer = build_optimizer(model)
    run_backward(model)  # plans the buckets
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    pieces = flat.split([p.numel() for p in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    optimizer.zero_grad(set_to_none=False)
    for _ in range(3):
        run_backward(model)
    assert [p.grad.data_ptr() for p in model.parameters()] == [piece.data_ptr() for piece in pieces]
    expected = build_model()
    run_backward(expected, factor=3.0)
    torch.testing.assert_close(flat, torch.cat([p.grad.flatten() for p in expected.parameters()]))


@pytest.mark.parametrize("aggregation", ["dense", "hitopk"])
def test_a_gradient_that_a_script_assigns_during_backward_stays_in_its_memory(aggregation: str) -> None:
    model = build_model()
    optimizer = build_optimizer(model, aggregation=aggregation)
    first, flat = model[0].weight, torch.zeros(64 * 20)

    def assign(module: nn.Module, *_: Any) -> None:
        first.grad = flat.view(64, 20)

    for step in range(3):  # the first backward plans the buckets
        handle = model[3].register_full_backward_hook(assign)
        run_backward(model, seed=step)
        handle.remove()
        assert first.grad.data_ptr() == flat.data_ptr()
        optimizer.step()
        optimizer.zero_grad()
        flat.zero_()


def test_layers_that_are_unfrozen_later_are_exchanged_in_the_order_of_backward() -> None:
    model = build_model()
    model[:3].requires_grad_(False)
    optimizer = build_optimizer(model)
    run_backward(model)
    optimizer.zero_grad()
    model.requires_grad_(True)
    run_backward(model)
    layers = [name.split(".")[0] for name in optimizer._backward.plan.order or []]
    assert layers == ["3", "3", "2", "2", "0", "0"]


def test_sparse_gradients_train_as_with_the_plain_optimizer() -> None:
    embedding, reference = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
    reference.load_state_dict(embedding.state_dict())
    optimizer, plain = build_optimizer(embedding), torch.optim.SGD(reference.parameters(), lr=0.1)
    for rows in ([1, 2, 2], [3], [1, 9]):
        for network, each_optimizer in ((embedding, optimizer), (reference, plain)):
            network(torch.tensor(rows)).square().sum().backward()
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert embedding.weight.grad is None
    torch.testing.assert_close(embedding.weight, reference.weight, rtol=1e-6, atol=0)


def test_a_weight_that_is_used_sparsely_and_densely_is_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = build_optimizer(embedding)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TrainingError, match="sparse=False"):
        embedding.weight.sum().backward()


@pytest.mark.parametrize("aggregation", ["dense", "hitopk"])
@pytest.mark.parametrize("zero", ["optimizer", "model", "in place"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(aggregation: str, zero: str) -> None:
    model = build_model()
    optimizer = build_optimizer(model, aggregation=aggregation, density=0.1)
    for step, factor in enumerate((1.0, torch.inf, 1.0, 1.0)):
        before = model[2].weight.detach().clone()
        run_backward(model, step, factor)
        optimizer.step()
        assert torch.equal(before, model[2].weight) == (step == 1)
        assert optimizer.skipped_steps == (step >= 1)
        if zero == "optimizer":
            optimizer.zero_grad()
        else:
            model.zero_grad(set_to_none=zero == "model")


def test_one_backward_that_is_not_finite_skips_the_accumulated_step() -> None:
    model = build_model()
    optimizer = build_optimizer(model)
    before = model[0].weight.detach().clone()
    for factor in (1.0, torch.inf, 1.0):
        run_backward(model, factor=factor)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(before, model[0].weight)
    assert (optimizer.skipped_steps, optimizer.steps) == (1, 0)


def test_after_a_backward_that_raised_the_next_one_is_whole() -> None:
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    model, reference = build_model(), build_model()
    optimizer = build_optimizer(model, aggregation="hitopk", density=1.0, wire="fp32", bucket_bytes=1000)
    run_backward(model)
    optimizer.zero_grad()
    hidden = Refuse.apply(model[0](torch.randn(8, 20)))
    with pytest.raises(RuntimeError, match="no"):
        model[3](model[2](hidden)).sum().backward()
    optimizer.zero_grad()
    run_backward(model, 1)
    run_backward(reference, 1)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_part_that_clipping_removes_from_sparse_gradients_is_lost() -> None:
    """An entry is sent with the sum of its gradients since it was last sent, so norms are larger than those of dense
    gradients. The part that clipping removes is lost: the residual does not hold it either."""
    lost: dict[float, float] = {}
    norm_ratios: list[float] = []
    for limit in (0.0, 0.001):
        model = build_model()
        optimizer = build_optimizer(model, lr=1.0, aggregation="hitopk", density=0.05, warmup_steps=0)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(40):
            torch.manual_seed(step % 4)
            x = torch.randn(8, 20)
            dense = torch.autograd.grad(model(x).square().mean() * 0.01, list(model.parameters()))
            for total, gradient in zip(totals, dense, strict=True):
                total += gradient
            run_backward(model, step % 4, 0.01)
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
            if not limit and step >= 20:
                norm_ratios.append(float(norm) / float(nn.utils.get_total_norm(dense)))
            optimizer.step()
            optimizer.zero_grad()
        owed = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
        lost[limit] = 0.0
        for (name, parameter), first, total in zip(model.named_parameters(), start, totals, strict=True):
            missing = (total - (first - parameter.detach())).view(-1)
            for begin, values in owed.get(name, []):
                missing[begin : begin + values.numel()] -= values
            lost[limit] += float(missing.norm())
    assert sum(norm_ratios) / len(norm_ratios) > 1.2
    assert lost[0.0] < 1e-4
    assert lost[0.001] > 100 * lost[0.0]
