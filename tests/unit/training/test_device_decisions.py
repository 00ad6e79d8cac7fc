"""The device decides if a step is finite: no host waits for it, and the steps are those that the host would decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import topkube
from topkube.settings import Settings
from topkube.training.exchange.step.device_decisions import can_skip_on_device
from unit.training.fake_streams import Streams, simulate_device

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
ADAMW: Make = partial(torch.optim.AdamW, lr=0.1, fused=True)
MOMENTUM: Make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
PLAIN: Make = partial(torch.optim.SGD, lr=0.1, fused=True)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with simulate_device(monkeypatch) as fake:
        yield fake


class ConstantGradientTraining:
    """A model of two parameters. All values of their gradients are the factor that `backward` gets."""

    def __init__(self, streams: Streams, make: Make, check: str) -> None:
        self._streams = streams
        self.weights = [torch.nn.Parameter(torch.ones(20, 3)), torch.nn.Parameter(torch.ones(5))]
        self.inner = make(self.weights)
        named = [(f"weight{i}", weight) for i, weight in enumerate(self.weights)]
        settings = Settings(finite_check=check, node_exchange="torch")
        self.optimizer = topkube.DistributedOptimizer(self.inner, named, aggregation="dense", settings=settings)

    def backward(self, factor: float) -> None:
        sum((weight * factor).sum() for weight in self.weights).backward()

    def run_step(self, *factors: float) -> int:
        """Make a step with a backward for each factor. Return how often the host waited for work of this step."""
        before, waits = self._streams.count_submitted_work(), len(self._streams.waits)
        for factor in factors:
            self.backward(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(
            any(time > before.get(name, 0) for name, time in clock.items()) for clock in self._streams.waits[waits:]
        )

    def read_result(self) -> Any:
        counted = self.optimizer.steps, self.optimizer.skipped_steps
        return counted, [weight.tolist() for weight in self.weights]


def test_the_host_does_not_wait_for_a_step_if_the_device_decides(streams: Streams) -> None:
    factors = (1.0, 2.0, torch.inf, 3.0, torch.nan, torch.nan, 4.0)
    left_to_device, decided_by_host = (ConstantGradientTraining(streams, ADAMW, check) for check in ("auto", "host"))
    assert [left_to_device.run_step(factor) for factor in factors] == [0] * len(factors)
    assert all(decided_by_host.run_step(factor) for factor in factors)
    assert left_to_device.read_result() == decided_by_host.read_result()
    assert left_to_device.read_result()[0] == (4, 3)
    streams.check_freed_memory()
    assert not streams.hazards


@pytest.mark.parametrize("make", [ADAMW, MOMENTUM, PLAIN], ids=["adamw", "momentum", "sgd"])
@pytest.mark.parametrize(
    "steps",
    [
        [(torch.nan,), (1.0,), (2.0,)],  # SGD fills its buffers in the first step, unless it is skipped
        [(1.0,), (2.0, torch.nan), (torch.nan, 2.0), (3.0, 4.0)],
        [(1.0,), (torch.nan, torch.nan), (2.0,)],
    ],
    ids=["first", "accumulated", "all"],
)
def test_the_steps_are_those_of_the_host(streams: Streams, make: Make, steps: list[tuple[float, ...]]) -> None:
    trainings = [ConstantGradientTraining(streams, make, check) for check in ("auto", "host")]
    for factors in steps:
        for training in trainings:
            training.run_step(*factors)
    assert trainings[0].read_result() == trainings[1].read_result()
    streams.check_freed_memory()
    assert not streams.hazards


def test_numbers_of_steps_can_be_read_at_any_time(streams: Streams) -> None:
    training = ConstantGradientTraining(streams, ADAMW, "auto")
    training.run_step(1.0)
    before = training.weights[0].detach().clone()
    training.backward(torch.nan)
    assert (training.optimizer.steps, training.optimizer.skipped_steps) == (1, 1)
    training.optimizer.step()
    assert (training.optimizer.steps, training.optimizer.skipped_steps) == (1, 1)
    training.optimizer.zero_grad()
    training.backward(torch.nan)
    training.optimizer.step()
    assert training.optimizer.counted_skipped_steps == 1  # without a wait
    assert training.optimizer.state_dict()["topkube"]["skipped_steps"] == 2
    assert torch.equal(training.weights[0], before)
    training.optimizer.zero_grad()
    training.run_step(1.0)
    assert (training.optimizer.steps, training.optimizer.skipped_steps) == (2, 2)
    assert not torch.equal(training.weights[0], before)


@pytest.mark.parametrize("check", ["auto", "host"])
def test_a_second_step_with_the_same_gradients_is_skipped_too(streams: Streams, check: str) -> None:
    training = ConstantGradientTraining(streams, ADAMW, check)
    training.backward(torch.nan)
    training.optimizer.step()
    training.optimizer.step()
    assert training.read_result()[0] == (0, 1)
    training.optimizer.step()  # the host has read the decision
    assert training.read_result()[0] == (0, 1)
    assert all(bool((weight == 1).all()) for weight in training.weights)
    for weight in training.weights:
        assert weight.grad is not None
        weight.grad.zero_()
    training.optimizer.step()
    assert training.optimizer.steps == 1


def test_clipping_sees_a_step_that_is_not_finite(streams: Streams) -> None:
    training = ConstantGradientTraining(streams, ADAMW, "auto")
    training.backward(torch.inf)
    assert any(weight.grad is not None and weight.grad.isnan().any() for weight in training.weights)
    assert not torch.nn.utils.clip_grad_norm_(training.weights, 1.0).isfinite()


def test_optimizers_whose_step_does_more_than_their_kernels_are_left_to_the_host(streams: Streams) -> None:
    weights = [torch.nn.Parameter(torch.ones(3))]
    assert can_skip_on_device(ADAMW(weights))
    assert can_skip_on_device(PLAIN(weights))
    assert not can_skip_on_device(MOMENTUM(weights))  # before its first step
    assert not can_skip_on_device(torch.optim.AdamW(weights, fused=False))
    hooked = ADAMW(weights)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_skip_on_device(hooked)
    calls: list[int] = []
    training = ConstantGradientTraining(streams, ADAMW, "auto")
    training.backward(torch.nan)
    # A hook that comes after backward has left the decision to the device.
    training.inner.register_step_post_hook(lambda *_: calls.append(1))
    training.optimizer.step()
    assert not calls
    assert training.read_result()[0] == (0, 1)


@pytest.mark.parametrize("check", ["auto", "host"])
def test_steps_that_are_skipped_for_ever_are_reported(
    streams: Streams, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ConstantGradientTraining(streams, ADAMW, check)
    for factors in [[torch.nan] * 15, [1.0], [torch.inf] * 16]:
        for factor in factors:
            training.run_step(factor)
    assert not capsys.readouterr().err
    for factor in [torch.nan] * 17:
        training.run_step(factor)
    reported = capsys.readouterr().err
    assert reported.count("16 steps in a row were skipped") == reported.count("32 steps in a row were skipped") == 1
    assert reported.count("steps in a row were skipped") == 2
