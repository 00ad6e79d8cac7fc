"""Buckets, the density warm-up and the pieces of residuals, without an exchange."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from topkube.collectives.overlapped import is_narrow
from topkube.errors import ArgumentError
from topkube.examples.char_gpt import GPT
from topkube.settings import Settings
from topkube.training.checkpoint.residual_shares import recut
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets import fusion
from topkube.training.exchange.buckets.fusion import fill_buckets
from topkube.training.exchange.buckets.parameter import Parameter

SHAPES = st.lists(st.sampled_from([(3,), (5, 7), (40, 50), (64, 64), (0, 4), (200, 30)]), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(SHAPES, st.lists(DTYPES, min_size=12, max_size=12), st.integers(1, 40_000), st.booleans())
def test_buckets_hold_every_parameter_once_and_are_closed_in_order(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], size: int, mixes: bool
) -> None:
    parameters = [
        Parameter(i, f"p{i}", torch.nn.Parameter(torch.empty(shape, dtype=dtype)))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    buckets = fill_buckets(parameters, size, mixes=mixes)
    placed = [p.index for bucket in buckets for p in bucket.parameters]
    assert sorted(placed) == [p.index for p in parameters if p.tensor.numel()]
    for bucket in buckets:
        assert {p.tensor.dtype for p in bucket.parameters} == {bucket.dtype}
        small = {p.is_always_dense for p in bucket.parameters}
        assert bucket.is_always_dense == all(small)
        assert bucket.holds_small == any(small)
        assert mixes or len(small) == 1
        assert bucket.length == sum(p.tensor.numel() for p in bucket.parameters)
        assert len(bucket.parameters) == 1 or bucket.length * bucket.dtype.itemsize <= size
        assert [p.index for p in bucket.parameters] == sorted(p.index for p in bucket.parameters)
    last = [bucket.parameters[-1].index for bucket in buckets]
    assert last == sorted(last)


@given(SHAPES, st.lists(DTYPES, min_size=12, max_size=12), st.integers(1, 2000))
@example(
    [(40, 50), *[(64, 64)] * 2, *[(200, 30)] * 3, *[(40, 50)] * 2], [torch.float32] * 12, 250
)  # the last tensor is larger than the bound
def test_buckets_that_overlap_begin_small_and_end_small(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], bound: int
) -> None:
    parameters = [
        Parameter(i, f"p{i}", torch.nn.Parameter(torch.empty(shape, dtype=dtype)))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "LEAST_BUCKET_BYTES", bound)
        ends = fusion.find_overlap_ends(parameters)
        planned = fill_buckets(parameters, ends=ends)
    assert sorted(p.index for bucket in planned for p in bucket.parameters) == [
        p.index for p in parameters if p.tensor.numel()
    ]
    for dtype in torch.float32, torch.bfloat16:
        large = [bucket for bucket in planned if bucket.dtype == dtype and not bucket.is_always_dense]
        total = sum(bucket.length for bucket in large) * dtype.itemsize
        for bucket, is_edge in zip(large, [True, *[False] * (len(large) - 2), True], strict=False):
            most = bound if is_edge else max(bound, total // fusion.BUCKETS)
            assert len(bucket.parameters) == 1 or bucket.length * dtype.itemsize <= most


def test_a_gpt_overlaps_all_but_a_small_part() -> None:
    """One bucket for all tensors would begin when backward ends."""
    model = GPT(layers=6, width=256)
    parameters = [Parameter(i, name, p) for i, (name, p) in enumerate(reversed(list(model.named_parameters())))]
    large = [
        b.length * 4
        for b in fill_buckets(parameters, ends=fusion.find_overlap_ends(parameters))
        if not b.is_always_dense
    ]
    assert len(large) >= 8
    assert max(large) <= sum(large) / 8
    assert large[0] <= fusion.LEAST_BUCKET_BYTES
    assert large[-1] <= fusion.LEAST_BUCKET_BYTES


def test_a_fast_link_has_fewer_buckets() -> None:
    """Each bucket costs the processor time that computes gradients; on a fast link there is little to hide. If ranks
    share a processor, the work per bucket delays the other ranks too."""
    model = GPT(layers=6, width=256)
    parameters = [Parameter(i, name, p) for i, (name, p) in enumerate(reversed(list(model.named_parameters())))]

    def plan_sizes(rate: float, crowding: float = 0.5) -> list[int]:
        return [
            b.length * 4
            for b in fill_buckets(parameters, ends=fusion.find_overlap_ends(parameters, rate, crowding))
            if not b.is_always_dense
        ]

    assert plan_sizes(12e6) == plan_sizes(0.0)
    fast = plan_sizes(1e9)
    assert len(fast) <= 5
    assert max(fast) <= 1e9 * fusion.BUCKET_SECONDS
    assert fast[0] <= 1e9 * fusion.BUCKET_SECONDS / 4
    assert fast[-1] <= fusion.LEAST_BUCKET_BYTES
    assert plan_sizes(0.0, crowding=2.0) == plan_sizes(0.0)
    crowded = plan_sizes(0.0, crowding=4.0)
    assert len(crowded) < len(plan_sizes(0.0))
    assert max(crowded) <= 2 * sum(crowded) / fusion.BUCKETS


def test_buckets_of_equal_tensors_grow_at_most_twofold() -> None:
    """Otherwise the link waits while backward fills the second bucket."""
    parameters = [Parameter(i, f"p{i}", nn.Parameter(torch.empty(256, 256))) for i in range(160)]
    buckets = fill_buckets(parameters, ends=fusion.find_overlap_ends(parameters))
    sizes = [bucket.length * 4 for bucket in buckets]
    assert sizes[0] == fusion.LEAST_BUCKET_BYTES
    assert max(sizes) > 4 * sizes[0]
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))


def test_the_density_falls_from_1_to_its_target_exponentially() -> None:
    aggregation = AggregationSettings.from_settings(Settings(), density=0.01, warmup_steps=4)
    assert [round(aggregation.density_at(step), 4) for step in range(6)] == [1, 0.3162, 0.1, 0.0316, 0.01, 0.01]
    assert AggregationSettings.from_settings(Settings(), density=0.01, warmup_steps=0).density_at(0) == 0.01


@pytest.mark.parametrize(
    ("options", "word"),
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
def test_a_wrong_setting_is_named_with_the_allowed_values(options: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        AggregationSettings.from_settings(Settings(), **options)


def test_settings_that_are_not_passed_come_from_the_job() -> None:
    settings = Settings(algorithm="naive", density=0.2, warmup_steps=7, wire="fp16")
    assert AggregationSettings.from_settings(settings, density=0.5) == AggregationSettings(
        "naive", 0.5, 7, "fp16", "topk"
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 4))
def test_redistributed_residuals_keep_their_sum(old: int, new: int, length: int, shards: int) -> None:
    def sum_pieces(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
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
    before = sum(sum_pieces(state["pieces"]["w"]) for state in saved)
    after = sum(sum_pieces(recut(saved, copy, new)["pieces"].get("w", [])) for copy in range(new))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_a_dense_wire_needs_a_dense_algorithm() -> None:
    """Sparse values have a format of their own, and their dense warm-up stays exact."""
    for algorithm in ("dense", "auto", "hierarchical"):
        assert (
            AggregationSettings.from_settings(Settings(), algorithm=algorithm, dense_wire="bf16").dense_wire == "bf16"
        )
    for algorithm in ("hitopk", "torus2d", "onebit"):
        with pytest.raises(ArgumentError, match="does not read it"):
            AggregationSettings.from_settings(Settings(), algorithm=algorithm, dense_wire="bf16")


@pytest.mark.parametrize(("nodes", "is_rounded"), [(1, False), (2, True), (16, True), (17, True), (4096, True)])
def test_16_bits_travel_between_any_number_of_nodes(nodes: int, is_rounded: bool) -> None:
    assert is_narrow(SimpleNamespace(nodes=nodes), "bf16") is is_rounded
    assert not is_narrow(SimpleNamespace(nodes=nodes), "fp32")
