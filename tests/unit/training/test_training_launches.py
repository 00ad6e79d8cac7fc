"""The launches of the exchange of a bucket on a device: their number must not grow with the number of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import topkube
from topkube.algorithms import find_algorithm
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.fusion import BUCKET_BYTES, DEVICE_BUCKET_BYTES, choose_largest_size
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.reduction.bucket_exchange import BucketExchange

_VIEWS = ("view", "slice", "select", "detach", "alias", "as_strided", "unsqueeze", "empty", "_local_scalar_dense")


class Launches(TorchDispatchMode):
    """Counts the operations of torch that start work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = str(operation.name()).removeprefix("aten::")
        if not name.startswith(_VIEWS):
            self.names.append(name)
        return operation(*arguments, **(options or {}))


def _list_launches(parameters: int, stashed: bool) -> list[str]:
    world = topkube.world.init()
    bucket = Bucket(torch.float32, is_always_dense=False)
    for i in range(parameters):
        parameter = Parameter(i, f"w{i}", torch.nn.Parameter(torch.zeros(64, 32)))
        parameter.tensor.grad = torch.full((64, 32), float(i + 1))
        parameter.stash = torch.ones(64, 32) if stashed else None
        bucket.append(parameter)
    settings = AggregationSettings("hitopk", 1.0, 0, "fp32", "topk")
    exchange = BucketExchange(world, settings, lambda: (0.0, 1.0), torch.device("cpu"))
    with Launches() as counted:
        exchange.run(bucket, 1.0, False)
        assert exchange.flush()
    for i, parameter in enumerate(bucket.parameters):
        assert bool((parameter.tensor.grad == i + 1 + stashed).all())
    return counted.names


def test_buckets_on_a_device_are_large() -> None:
    """Each bucket costs launches. On CPUs, the link decides how large buckets of dense exchanges are."""
    dense, sparse, integers = (find_algorithm(name) for name in ("hierarchical", "hitopk", "int4"))
    for algorithm in (dense, integers):
        assert choose_largest_size(algorithm, is_on_cpu=True, nodes=4, ranks=8, total_bytes=2**30) is None
    assert choose_largest_size(sparse, is_on_cpu=True, nodes=4, ranks=8, total_bytes=2**30) == BUCKET_BYTES
    assert choose_largest_size(dense, is_on_cpu=False, nodes=4, ranks=8, total_bytes=2**30) == BUCKET_BYTES
    for algorithm in (sparse, integers):
        assert (
            choose_largest_size(algorithm, is_on_cpu=False, nodes=4, ranks=8, total_bytes=2**30) == DEVICE_BUCKET_BYTES
        )
        assert (
            choose_largest_size(algorithm, is_on_cpu=False, nodes=4, ranks=8, total_bytes=4 * BUCKET_BYTES)
            == BUCKET_BYTES
        )
    # With many nodes, the rows of all of them would take too much memory; those of two stages are one row together.
    assert choose_largest_size(sparse, is_on_cpu=False, nodes=128, ranks=128, total_bytes=2**30) == BUCKET_BYTES
    assert (
        choose_largest_size(integers, is_on_cpu=False, nodes=128, ranks=128, total_bytes=2**30) == DEVICE_BUCKET_BYTES
    )


def test_the_launches_of_a_bucket_do_not_grow_with_its_parameters() -> None:
    for stashed in (False, True):
        of_two_parameters, of_forty_parameters = _list_launches(2, stashed), _list_launches(40, stashed)
        assert of_two_parameters == of_forty_parameters, (of_two_parameters, of_forty_parameters)
