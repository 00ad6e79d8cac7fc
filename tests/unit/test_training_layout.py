"""Buckets, the density warm-up, residual pieces: pure parts of training."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkube.errors import ArgumentError
from topkube.settings import Settings
from topkube.training.aggregation import Aggregation
from topkube.training.buckets import Parameter, plan
from topkube.training.residuals import redistribute
from topkube.training.uneven import samples_of

SHAPES = st.lists(st.sampled_from([(3,), (5, 7), (40, 50), (64, 64), (0, 4), (200, 30)]), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(SHAPES, st.lists(DTYPES, min_size=12, max_size=12), st.integers(1, 40_000))
def test_buckets_hold_every_parameter_once_and_are_closed_in_order(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], size: int
) -> None:
    parameters = [
        Parameter(i, f"p{i}", torch.nn.Parameter(torch.empty(shape, dtype=dtype)))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    buckets = plan(parameters, size)
    placed = [p.index for bucket in buckets for p in bucket.parameters]
    assert sorted(placed) == [p.index for p in parameters if p.tensor.numel()]
    for bucket in buckets:
        assert {(p.tensor.dtype, p.small) for p in bucket.parameters} == {(bucket.dtype, bucket.small)}
        assert bucket.length == sum(p.tensor.numel() for p in bucket.parameters)
        assert len(bucket.parameters) == 1 or bucket.length * bucket.dtype.itemsize <= size
        assert [p.index for p in bucket.parameters] == sorted(p.index for p in bucket.parameters)
    last = [bucket.parameters[-1].index for bucket in buckets]
    assert last == sorted(last)


def test_the_density_falls_from_1_to_its_target_exponentially() -> None:
    aggregation = Aggregation.of(Settings(), density=0.01, warmup_steps=4)
    assert [round(aggregation.density_at(step), 4) for step in range(6)] == [1, 0.3162, 0.1, 0.0316, 0.01, 0.01]
    assert Aggregation.of(Settings(), density=0.01, warmup_steps=0).density_at(0) == 0.01


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
        ({"algorithm": "hitop"}, "hitopk"),
        ({"wire": "int8"}, "fp32, bf16, fp16"),
        ({"selection": "random"}, "mstopk"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(given: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        Aggregation.of(Settings(), **given)


def test_what_is_not_given_comes_from_the_job() -> None:
    settings = Settings(algorithm="naive", density=0.2, warmup_steps=7, wire="fp16")
    assert Aggregation.of(settings, density=0.5) == Aggregation("naive", 0.5, 7, "fp16", "topk")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 4))
def test_redistributed_residuals_keep_their_sum(old: int, new: int, length: int, shards: int) -> None:
    def summed(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        full = torch.zeros(length, dtype=torch.float64)
        for start, values in pieces:
            full[start : start + values.numel()] += values
        return full

    torch.manual_seed(length)
    saved = []
    for copy in range(old):
        cuts = [length * i // shards for i in range(shards + 1)]
        for start, stop in itertools.pairwise(cuts):
            saved.append({"copy": copy, "copies": old, "pieces": {"w": [(start, torch.randn(stop - start))]}})
    before = sum(summed(state["pieces"]["w"]) for state in saved)
    after = sum(summed(redistribute(saved, copy, new).get("w", [])) for copy in range(new))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ({"x": torch.zeros(3, 1), "name": ["a", "b", "c"]}, 3),
        ((torch.zeros(2, 2), {"y": 1}), 2),
        (["one", "two"], 2),
        (torch.tensor(1.0), 1),
    ],
)
def test_samples_of_a_batch(batch: object, count: int) -> None:
    assert samples_of(batch) == count
