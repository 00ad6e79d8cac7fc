"""The two-stage exchange of changes, with all nodes in one process: nothing is lost, all nodes get the same, and an
owner keeps what it does not send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from topkube.collectives.codecs import Codec, Rounded, Signs
from topkube.collectives.top_signs import TopSigns
from topkube.collectives.two_stage import TwoStage
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.layout import Chunk, ShardPiece, list_tensors_of_ranges

BLOCK = 256


class Recorder(Signs):
    """A codec that shows the places that it was built for."""

    def __init__(self, places: list[slice]) -> None:
        super().__init__(places)
        self.places = places


def build_codec(kind: str, places: list[slice], length: int) -> Codec:
    kinds = {"signs": Signs, "top signs": TopSigns}
    return kinds[kind](places) if kind in kinds else Rounded(length, kind)


def exchange(stages: list[TwoStage], changes: list[Any]) -> list[Any]:
    """Pass the rows between the nodes. Return the values that each node adds to its agreed weights."""
    nodes = range(len(stages))
    sent = [stage.cut_rows(np.zeros(stage.total_bytes, np.uint8)) for stage in stages]
    for stage, change, rows in zip(stages, changes, sent, strict=True):
        stage.pack(change, rows)
    means = stages[0].cut_rows(np.zeros(stages[0].total_bytes, np.uint8))
    for owner, (stage, change) in enumerate(zip(stages, changes, strict=True)):
        stage.reduce(change[stage.segment], [sent[node][owner] for node in nodes], means[owner])
    added = []
    for stage in stages:
        out = np.zeros(stage.bounds[-1], np.float32)
        stage.add(out, means)
        added.append(out)
    return added


def join_owed(stages: list[TwoStage]) -> Any:
    return np.concatenate([stage.read_owed() for stage in stages])


@st.composite
def draw_layout(draw: Any) -> tuple[int, list[slice]]:
    """Draw a shard of tensors that begin at multiples of 256: (length, the places of the tensors)."""
    places, start = [], 0
    for length in draw(st.lists(st.integers(1, 900), min_size=1, max_size=5)):
        places.append(slice(start, start + length))
        start += -(-length // BLOCK) * BLOCK
    return start, places


def draw_values(rng: Any, length: int, places: list[slice]) -> Any:
    """Return values of very different sizes in the tensors, and zeros in the gaps between them."""
    x = np.zeros(length, np.float32)
    for place in places:
        x[place] = rng.standard_normal(place.stop - place.start) * 10.0 ** rng.integers(-3, 3)
    return x


@settings(deadline=None)
@given(
    draw_layout(), st.integers(2, 30), st.integers(0, 2**32), st.sampled_from(["signs", "top signs", "bf16", "fp32"])
)
def test_nothing_is_lost(layout: tuple[int, list[slice]], nodes: int, seed: int, kind: str) -> None:
    """Over several exchanges, the mean of the nodes' changes equals the sum of three parts: what was added to the
    agreed weights, the mean of what nodes have not sent, and what owners keep beside."""
    length, places = layout
    rng = np.random.default_rng(seed)
    weights = (rng.integers(1, 5, nodes) * 1.0).tolist()
    weights = [weight / sum(weights) for weight in weights]
    stages = [TwoStage(lambda p, n: build_codec(kind, p, n), places, length, node, weights) for node in range(nodes)]
    unsent = [np.zeros(length, np.float32) for _ in range(nodes)]
    added_sum, mean_of_changes, largest = np.zeros(length), np.zeros(length), 0.0
    for _ in range(4):
        for rest, weight in zip(unsent, weights, strict=True):
            change = draw_values(rng, length, places)
            rest += change
            mean_of_changes += change.astype(np.float64) * weight
        largest = max(largest, max(float(np.abs(rest).max()) for rest in unsent))
        added = exchange(stages, unsent)
        for other in added:
            assert other.tobytes() == added[0].tobytes()
        added_sum += added[0]
    mean_unsent = sum(rest.astype(np.float64) * weight for rest, weight in zip(unsent, weights, strict=True))
    np.testing.assert_allclose(
        added_sum + mean_unsent + join_owed(stages), mean_of_changes, rtol=0, atol=largest * 2.0**-18
    )
    if kind == "fp32":
        assert not any(rest.any() for rest in unsent)
        assert not join_owed(stages).any()


@pytest.mark.parametrize("nodes", [1, 4, 16, 40])
def test_an_owner_keeps_the_rest_of_the_mean(nodes: int) -> None:
    """Its own change is not compressed. The part of the mean that it does not send becomes its own change, times the
    number of nodes; from 17 nodes on, times 16, and `owed` keeps what the mean lacks then."""
    length = BLOCK * nodes
    rng = np.random.default_rng(nodes)
    changes = [rng.standard_normal(length, dtype=np.float32) for _ in range(nodes)]
    before = [change.copy() for change in changes]
    stages = [TwoStage(lambda p, n: Signs(p), [slice(0, length)], length, i, [1 / nodes] * nodes) for i in range(nodes)]
    added = exchange(stages, changes)[0]
    for node, stage in enumerate(stages):
        own = stage.segment
        sent = [change[own] - after[own] for change, after in zip(before, changes, strict=True)]
        sent[node] = before[node][own]
        rest = np.mean(sent, axis=0, dtype=np.float64) - added[own]
        np.testing.assert_allclose(changes[node][own], rest * min(nodes, 16), rtol=0, atol=1e-5)
        np.testing.assert_allclose(stage.read_owed(), rest * (1 - min(nodes, 16) / nodes), rtol=0, atol=1e-6)
        assert np.abs(rest).max() > 0.01
        assert stage.keeps_owed == (nodes > 16)


@settings(deadline=None)
@given(draw_layout(), st.integers(2, 40))
def test_each_segment_has_the_tensors_that_its_codec_packs(layout: tuple[int, list[slice]], nodes: int) -> None:
    """With more nodes than blocks, some segments are empty, also in the middle of a tensor."""
    length, places = layout
    stages = TwoStage(lambda p, n: Recorder(p), places, length, 0, [1.0] * nodes)
    parameters = [Parameter(i, str(i), nn.Parameter(torch.zeros(p.stop - p.start))) for i, p in enumerate(places)]
    pieces = [ShardPiece(own, 0, own.length, place.start) for own, place in zip(parameters, places, strict=True)]
    ranges = list_tensors_of_ranges(Chunk(0, False, pieces=pieces), stages.bounds)
    for codec, start, tensors in zip(stages.codecs, stages.bounds, ranges, strict=False):
        assert isinstance(codec, Recorder)
        expected = [slice(place.start + start, place.stop + start) for place in codec.places]
        first = [pieces[number].at for number, _ in tensors]
        assert [slice(at + own.start, at + own.stop) for at, (_, own) in zip(first, tensors, strict=True)] == expected


@pytest.mark.parametrize("nodes", [2, 7, 40])
def test_segments_cover_the_shard_in_whole_blocks(nodes: int) -> None:
    """With more nodes than blocks, some own nothing."""
    length = 20 * BLOCK
    weights = [1 / nodes] * nodes
    stages = [TwoStage(lambda p, n: Signs(p), [slice(0, length - 3)], length, node, weights) for node in range(nodes)]
    assert tuple(stage.segment.start for stage in stages) == stages[0].bounds[:-1]
    assert stages[0].bounds[0] == 0
    assert stages[0].bounds[-1] == length
    assert all(bound % BLOCK == 0 for bound in stages[0].bounds)
    assert sum(len(stage.read_owed()) for stage in stages) == length
    assert max(len(stage.read_owed()) for stage in stages) <= -(-20 // nodes) * BLOCK


@pytest.mark.parametrize("ranks", [[1, *[2] * 9], [7, 2], [1] * 16 + [20]])
def test_all_nodes_or_none_keep_a_part_beside_their_change(ranks: list[int]) -> None:
    """If only some did, a checkpoint that another world takes up would lose what they should keep."""
    weights = [count / sum(ranks) for count in ranks]
    stages = [TwoStage(lambda p, n: Signs(p), [slice(0, 8192)], 8192, i, weights) for i in range(len(ranks))]
    assert {stage.keeps_owed for stage in stages} == {min(weights) < 1 / 16}
