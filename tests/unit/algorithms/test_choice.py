"""The choice behind `auto` and `dense`, from measurements alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.algorithms import (
    LEAST_GAIN,
    BucketSize,
    Family,
    Machines,
    find_least_change,
    keep_device_choices,
    list_compressed_choices,
    sort_choices_by_time,
)

BUCKETS = [BucketSize(5_000_000), BucketSize(2_000, small=True)]


@given(st.floats(1e5, 1e11), st.floats(1e8, 1e12), st.floats(1e-7, 1e-1), st.integers(2, 4096), st.integers(1, 16))
def test_only_dense_algorithms_are_chosen_and_no_other_is_faster(
    link: float, memory: float, latency: float, nodes: int, slots: int
) -> None:
    cluster = Machines(nodes, slots, link, memory, latency)
    for name in ("auto", "dense"):
        ranked = sort_choices_by_time(name, cluster, BUCKETS, "fp32")
        assert {choice.algorithm.family for choice in ranked} == {Family.DENSE}
        assert ranked[0].seconds == min(choice.seconds for choice in ranked)
        assert {choice.dense_wire for choice in ranked} == {"fp32"}


def test_without_gpus_nccl_is_no_choice() -> None:
    machines = Machines(2, 2, 125e6, memory=10e9, latency=50e-6)
    names = {choice.algorithm.name for choice in sort_choices_by_time("auto", machines, BUCKETS, "fp32")}
    assert not any("nccl" in name for name in names)


def test_onebit_sends_small_tensors_as_bf16_with_the_other_weights() -> None:
    machines, buckets = Machines(4, 1, 1e6, memory=10e9, latency=0.0), [BucketSize(100_000, small=True)]
    ranked = sort_choices_by_time("auto", machines, buckets, "fp32", list_compressed_choices("own"))
    between = {choice.algorithm.name: choice.between for choice in ranked}
    assert between["onebit"] == pytest.approx(3 * 100_000 * 2 / 1e6)
    assert between["int8"] == between["hierarchical"] == pytest.approx(2 * 3 / 4 * 100_000 * 4 / 1e6)


@given(st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0, 1))
def test_the_least_change_that_is_worth_it_is_taken(
    dense: float, eight_bits: float, four_bits: float, three_bits: float, rest: float
) -> None:
    """`rest` is the part of the step that is not the exchange."""
    algorithms, step = list_compressed_choices("equal"), dense + rest
    times = dict(zip(("int8", "int4", "int3"), (eight_bits, four_bits, three_bits), strict=True))
    found = find_least_change(algorithms, list(times.values()), dense, step)
    worth = {name for name, time in times.items() if dense - time >= LEAST_GAIN * step}
    assert (found is None) == (not worth), "an algorithm is found if one saves enough"
    if found is not None:
        assert found.name in worth
        shortest = rest + min(times[name] for name in worth)
        assert rest + times[found.name] <= shortest * (1 + 1.01 * LEAST_GAIN), "its step is nearly the shortest"


def test_int4_is_tried_if_int8_alone_would_not_save_enough() -> None:
    """int8 saves 2% and int4 4.9%: they differ by less than 3%, but only int4 is worth a trial."""
    found = find_least_change(list_compressed_choices("equal"), [0.98, 0.951, 0.93], 1.0, 1.0)
    assert found is not None
    assert found.name == "int4"


def test_int3_is_tried_on_a_slow_link_although_dense_steps_are_far_longer() -> None:
    """The steps of int3 are 12% shorter than those of int4: 2% of a dense step. On a faster link, it would be 1%."""
    algorithms = list_compressed_choices("equal")
    for times, dense, step, name in (([0.6, 0.31, 0.25], 2.4, 2.6, "int3"), ([0.06, 0.031, 0.025], 0.24, 0.6, "int4")):
        found = find_least_change(algorithms, times, dense, step)
        assert found is not None
        assert found.name == name


def test_auto_takes_the_same_algorithms_on_gpus() -> None:
    choices = list_compressed_choices("own")
    assert [choice.name for choice in choices] == ["int8", "int4", "int3", "onebit"]
    assert [choice.name for choice in keep_device_choices(choices)] == ["int8", "int4", "int3", "onebit"]
