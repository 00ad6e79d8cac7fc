"""The selection, encoding and decoding of a bucket as CUDA graphs: recorded once, then launched by one call each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import topkube
from topkube.collectives.device import graphs as graphs_module
from topkube.errors import DeviceError
from topkube.settings import Settings
from unit.training.fake_graphs import FakeGraphs
from unit.training.fake_streams import Streams, simulate_device


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with simulate_device(monkeypatch) as fake:
        yield fake


@pytest.fixture
def graphs(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return FakeGraphs(monkeypatch)


class GraphTraining:
    """A model with two parameters in each bucket, trained by a sparse algorithm: with graphs on the emulated device, or
    without them by the kernels of the CPU, which have the same bits."""

    def __init__(self, graphs: FakeGraphs, has_graphs: bool, buckets: int = 1, **options: Any) -> None:
        self._graphs, self._has_graphs = graphs, has_graphs
        self.weights = [torch.nn.Parameter(torch.zeros(40, 26)) for _ in range(2 * buckets)]
        named = [(f"weight{i}", weight) for i, weight in enumerate(self.weights)]
        settings = Settings(node_exchange="torch", device_graphs=has_graphs)
        options["bucket_bytes"] = 2 * self.weights[0].nbytes
        all_options = {"aggregation": "hitopk", "density": 0.05, "warmup_steps": 0, "wire": "bf16", **options}
        inner = torch.optim.SGD(self.weights, lr=0.5, momentum=0.9)
        self.optimizer = topkube.DistributedOptimizer(inner, named, settings=settings, **all_options)

    def run_step(self, seed: int, factor: float = 1.0) -> None:
        self._graphs.emulates = self._has_graphs
        generator = torch.Generator().manual_seed(seed)
        sum((weight * torch.randn(40, 26, generator=generator) * factor).sum() for weight in self.weights).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def have_equal_weights(first: GraphTraining, second: GraphTraining) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))


@pytest.mark.parametrize("options", [{}, {"selection": "mstopk"}, {"momentum_correction": True}], ids=str)
def test_recorded_buckets_train_with_the_same_bits(graphs: FakeGraphs, options: dict[str, Any]) -> None:
    with_graphs, without = (
        GraphTraining(graphs, has_graphs=True, **options),
        GraphTraining(graphs, has_graphs=False, **options),
    )
    for step in range(12):
        factor = torch.nan if step == 5 else 1.0  # a skipped step: the two buffers of the residual change places
        graphs.calls.clear()
        with_graphs.run_step(step, factor)
        if step == 11:
            assert not graphs.calls  # the graphs launched all kernels
        without.run_step(step, factor)
        assert have_equal_weights(with_graphs, without), step
    assert with_graphs.optimizer.skipped_steps == without.optimizer.skipped_steps == 1
    assert graphs.replayed >= 2 * 5
    assert bool(with_graphs.weights[0].any())


def test_a_number_of_buckets_that_is_no_multiple_of_the_buffers_records_each_graph_once(graphs: FakeGraphs) -> None:
    """A bucket has the same buffers in every step: a graph replays only the memory that it recorded."""
    training = GraphTraining(graphs, has_graphs=True, buckets=3)
    for step in range(6):
        training.run_step(step)
    assert len(training.optimizer._backward.plan.buckets) == 3
    recorded = graphs.recorded
    assert recorded == 3 * 2 * 2  # packing and unpacking, with both buffers of the residual
    for step in range(6):
        training.run_step(step)
    assert graphs.recorded == recorded


def test_a_graph_is_recorded_again_after_its_work_buffer_has_moved(graphs: FakeGraphs) -> None:
    with_graphs, without = GraphTraining(graphs, has_graphs=True), GraphTraining(graphs, has_graphs=False)
    for step in range(9):
        with_graphs.run_step(step)
        without.run_step(step)
        if step == 5:
            recorded = graphs.recorded
            engine = with_graphs.optimizer._backward.exchange.on_device
            assert engine is not None
            for slot in engine.slots:  # as if a larger bucket had come
                slot.buffers["scratch rows"] = torch.empty(100_000, dtype=torch.uint8)
    assert graphs.recorded > recorded
    assert have_equal_weights(with_graphs, without)


def test_a_graph_that_cannot_be_recorded_is_reported_once(
    graphs: FakeGraphs, capfd: pytest.CaptureFixture[str]
) -> None:
    graphs.refusal = "operation not permitted when stream is capturing"
    with_graphs, without = GraphTraining(graphs, has_graphs=True), GraphTraining(graphs, has_graphs=False)
    for step in range(5):
        with_graphs.run_step(step)
        without.run_step(step)
    assert have_equal_weights(with_graphs, without)
    reports = [line for line in capfd.readouterr().err.splitlines() if "one by one" in line]
    assert len(reports) == 1
    assert "RuntimeError: operation not permitted when stream is capturing" in reports[0]
    assert not graphs.replayed


def test_a_recording_that_cannot_end_is_an_error() -> None:
    """torch goes on as if it recorded: it would never free memory again."""

    class BrokenGraph:
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    for failure, shown in ((None, "a previous error during capture"), (ValueError("no .item() here"), "no .item")):
        with pytest.raises(DeviceError, match=rf"{shown}.*TOPKUBE_DEVICE_GRAPHS=0"):
            graphs_module._end_capture(BrokenGraph(), failure)


def test_memory_that_changes_in_every_step_ends_the_recording(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graphs_module, "MOST_GRAPHS", 6)
    with_graphs, without = GraphTraining(graphs, has_graphs=True), GraphTraining(graphs, has_graphs=False)
    old_buffers = []
    for step in range(8):
        buffers = with_graphs.optimizer._backward.exchange._reduction._staging._buffers
        old_buffers.append(dict(buffers))  # holds the old memory, so that new memory gets another address
        buffers.clear()
        with_graphs.run_step(step)
        without.run_step(step)
    assert have_equal_weights(with_graphs, without)
    assert "the memory of gradients changes from step to step" in capfd.readouterr().err
    assert not graphs.recorded


def test_graphs_are_off_by_default(graphs: FakeGraphs) -> None:
    assert not Settings().device_graphs
    training = GraphTraining(graphs, has_graphs=False)
    for step in range(4):
        training.run_step(step)
    assert not graphs.recorded
