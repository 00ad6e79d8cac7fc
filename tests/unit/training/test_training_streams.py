"""Gradients cross between the script's stream and the stream of the exchange. A fake allocator finds what a GPU would
overwrite too early (fake_streams.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import topkube
from topkube.algorithms import Stage
from unit.training.fake_streams import FakeStream, Streams, simulate_device


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with simulate_device(monkeypatch) as fake:
        yield fake


def build_optimizer(*parameters: torch.Tensor, **options: Any) -> topkube.DistributedOptimizer:
    named = [(f"weight{i}", parameter) for i, parameter in enumerate(parameters)]
    return topkube.DistributedOptimizer(
        torch.optim.SGD(list(parameters), lr=0.1), named, aggregation="hitopk", density=0.01, warmup_steps=0, **options
    )


def test_two_synchronised_backwards_per_step_free_no_gradient_too_early(streams: Streams) -> None:
    weights = [torch.nn.Parameter(torch.randn(70, 100)) for _ in range(3)]
    optimizer = build_optimizer(*weights)
    for _ in range(3):
        for _ in range(2):
            sum((weight * torch.randn(70, 100)).sum() for weight in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    streams.check_freed_memory()
    assert not streams.hazards


def test_a_gradient_that_the_exchange_created_is_not_overwritten_while_the_optimizer_reads_it(
    streams: Streams,
) -> None:
    used, unused = (torch.nn.Parameter(torch.randn(70, 100)) for _ in range(2))
    optimizer = build_optimizer(used, unused)
    (used * torch.randn(70, 100) + unused * 100 * torch.randn(70, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (used * torch.randn(70, 100)).sum().backward()
    assert unused.grad is not None  # a part of the residual
    optimizer.step()
    optimizer.zero_grad()
    streams.check_freed_memory()
    assert not streams.hazards


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["doubles", "small"])
def test_buckets_that_do_not_run_in_the_pipeline_wait_for_the_script(streams: Streams, dtype: torch.dtype) -> None:
    large, other = torch.nn.Parameter(torch.randn(70, 100)), torch.nn.Parameter(torch.randn(30, dtype=dtype))
    optimizer = build_optimizer(large, other)
    for _ in range(3):
        for _ in range(2):
            ((large * torch.randn(70, 100)).sum() + (other * torch.randn(30, dtype=dtype)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    streams.check_freed_memory()
    assert not streams.hazards


def test_sparse_gradients_wait_for_the_script(streams: Streams) -> None:
    embedding, large = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Parameter(torch.randn(70, 100))
    optimizer = build_optimizer(embedding.weight, large)
    for _ in range(3):
        for _ in range(2):
            (embedding(torch.arange(5)).sum() + (large * torch.randn(70, 100)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    streams.check_freed_memory()
    assert not streams.hazards


def test_the_communication_thread_works_on_the_device_of_the_gradients(streams: Streams) -> None:
    weight = torch.nn.Parameter(torch.randn(70, 100))
    optimizer = build_optimizer(weight)
    assert not streams.devices
    (weight * 2).sum().backward()
    optimizer.step()
    assert set(streams.devices) == {("topkube-communication", weight.device)}


def test_the_fake_allocator_finds_memory_that_is_freed_too_early() -> None:
    streams = Streams()
    first, second = FakeStream("first", streams), FakeStream("second", streams)
    with streams.watch(), streams.stream(first):
        x = torch.ones(3)
        second.wait_stream(first)
        with streams.stream(second):
            y = x + 1
        del x
        streams.check_freed_memory()
        assert streams.hazards == ["ones of first was freed while second used it"]
        y += 1
    assert streams.hazards[1:] == ["add_ in first does not wait for second: add"]


def test_one_gpu_sends_residuals_in_the_stream_of_the_exchange(streams: Streams) -> None:
    """The first dense step of a schedule adds what was not sent before, also in a world of one rank."""
    weights = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    optimizer = build_optimizer(*weights, schedule=[Stage(3, "dense")])
    for _ in range(5):
        sum((weight * torch.randn(64, 64)).sum() for weight in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not streams.hazards
