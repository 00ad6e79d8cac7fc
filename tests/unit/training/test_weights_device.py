"""Weights cross between the script's stream and the stream of their exchange between nodes (fake_streams.py). The
changes are packed on the device with `onebit`, and in host memory with `topk1bit`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from topkube.algorithms import Algorithm
from topkube.arrays import Array
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.device_chunk import DeviceChunk
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.node_weights.gradient_noise import GradientNoise
from topkube.world import current
from unit.training.fake_streams import Streams, simulate_device

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with simulate_device(monkeypatch) as fake:
        yield fake


PACKED_ON_DEVICE = ("onebit", "localsgd")


class Training:
    """Two parameters, and the exchange of their changes in a world of one node."""

    def __init__(
        self, weights: list[torch.nn.Parameter] | None = None, algorithm: str = "onebit", is_delayed: bool = False
    ) -> None:
        self.weights = weights or [torch.nn.Parameter(torch.randn(70, 100)) for _ in range(2)]
        parameters = [Parameter(i, f"weight{i}", weight) for i, weight in enumerate(self.weights)]
        aggregation = AggregationSettings.from_settings(Settings(), algorithm=algorithm)
        self.exchange = WeightExchange(current(), parameters, aggregation, current() if is_delayed else None, CPU)
        packs_on_device = all(isinstance(exchange, DeviceChunk) for exchange in self.exchange.chunk_exchanges)
        assert packs_on_device == (algorithm in PACKED_ON_DEVICE)
        self.noise = GradientNoise(current(), parameters, self.exchange.weights, self.exchange.device)
        self.exchange.capture()

    @torch.no_grad()
    def update(self) -> None:
        """Work as the script does: read the weights and write them."""
        for weight in self.weights:
            weight.grad = torch.randn(70, 100)
            weight -= 0.1 * weight.grad


def list_kept_changes(training: Training) -> list[Array]:
    """Return the changes that a delayed exchange sends."""
    return [training.exchange.find_delayed(chunk) for chunk in training.exchange.chunks]


def place_agreed(training: Training) -> None:
    training.exchange.place(training.exchange.agreed)


EXCHANGES: dict[str, Callable[[Training], None]] = {
    "run": lambda training: training.exchange.run(),
    "place": place_agreed,
    "noise": lambda training: training.noise.exchange(),
}


@pytest.mark.parametrize("algorithm", ["onebit", "localsgd", "topk1bit"])
@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_exchange_and_script_do_not_use_weights_at_the_same_time(
    streams: Streams, exchange: Callable[[Training], None], algorithm: str
) -> None:
    training = Training(algorithm=algorithm)
    for _ in range(3):
        training.update()
        training.exchange.device.run(lambda: exchange(training))
    training.update()
    streams.check_freed_memory()
    assert not streams.hazards
    assert "weights" in streams.count_submitted_work(), "the exchange worked in the stream of the script"


@pytest.fixture(params=["one stage", "two stages"])
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of stages in which onebit exchanges. It would take two from eight nodes on."""
    has_two = request.param == "two stages"
    monkeypatch.setattr(Algorithm, "has_two_stages", lambda algorithm, nodes: has_two)
    return 1 + has_two


@pytest.mark.parametrize("algorithm", PACKED_ON_DEVICE)
def test_an_exchange_on_the_device_waits_for_the_script(streams: Streams, stages: int, algorithm: str) -> None:
    training = Training(algorithm=algorithm)
    assert (training.exchange.find_stages(training.exchange.chunks[0]) is not None) == (stages == 2)
    for _ in range(3):
        training.update()
        training.exchange.device.run(training.exchange.run)
    training.exchange.capture()
    training.exchange.device.run(training.exchange.run)
    del training
    streams.check_freed_memory()
    assert not streams.hazards


@pytest.mark.parametrize("algorithm", PACKED_ON_DEVICE)
def test_a_delayed_exchange_on_the_device_is_added_in_order(streams: Streams, stages: int, algorithm: str) -> None:
    """The script packs in its stream, and changes the weights while another thread exchanges what was packed."""
    training = Training(algorithm=algorithm, is_delayed=True)
    exchange = training.exchange
    for _ in range(3):
        training.update()
        exchange.keep_changes()
        training.update()
        thread = threading.Thread(target=streams.run_watched(partial(exchange.run, is_delayed=True)))
        thread.start()
        training.update()
        thread.join()
        before = [weight.detach().clone() for weight in training.weights]
        exchange.device.run(exchange.apply)
    streams.check_freed_memory()
    assert not streams.hazards
    if stages == 1 and algorithm == "onebit":  # one node owes nothing, unless it is the owner of a segment
        assert all(torch.equal(weight, then) for weight, then in zip(training.weights, before, strict=True))
    assert "delayed" in streams.count_submitted_work(), "the exchange has a stream of its own"
    del training, exchange  # the parameters may still change
    streams.check_freed_memory()
    assert not streams.hazards


def test_a_delayed_exchange_in_host_memory_is_added_in_order(streams: Streams) -> None:
    training = Training(algorithm="topk1bit", is_delayed=True)
    exchange = training.exchange
    for _ in range(3):
        training.update()
        exchange.keep_changes()
        kept = [change.copy() for change in list_kept_changes(training)]
        assert any(change.any() for change in kept)
        training.update()  # the weights change while the exchange is under way
        assert all((now == then).all() for now, then in zip(list_kept_changes(training), kept, strict=True))
        exchange.device.run(exchange.apply)
    training.update()
    streams.check_freed_memory()
    assert not streams.hazards


def test_the_default_device_of_the_script_does_not_change_the_exchange(streams: Streams) -> None:
    weights = [torch.nn.Parameter(torch.randn(70, 100)) for _ in range(2)]
    with torch.device("meta"):
        training = Training(weights, "topk1bit", is_delayed=True)
        for weight in weights:
            weight.grad = torch.ones(70, 100, device=CPU)
        training.exchange.keep_changes()
        training.exchange.device.run(training.noise.exchange)
    assert not any(change.any() for change in list_kept_changes(training)), "the weights have not changed"
    with torch.device("meta"):
        on_device = Training(weights)
        with torch.no_grad():
            weights[0] += torch.ones(70, 100, device=CPU)
        before = [weight.detach().clone() for weight in weights]
        on_device.exchange.device.run(on_device.exchange.run)
    assert all(torch.equal(weight, then) for weight, then in zip(weights, before, strict=True)), "one node owes nothing"


def test_the_thread_of_the_exchange_uses_the_device_of_the_rank(streams: Streams) -> None:
    """Otherwise each rank of a node would create a CUDA context on the first GPU."""
    training = Training()
    training.exchange.device.run(training.exchange.run)
    threads = [thread for thread, device in streams.devices if device == CPU]
    assert threads
    assert threading.current_thread().name not in threads


def test_the_noise_of_gradients_keeps_few_entries_in_memory(streams: Streams) -> None:
    entries = Training().noise._entries
    assert [chosen.untyped_storage().nbytes() for chosen in entries] == [8 * 256, 8 * 256]
