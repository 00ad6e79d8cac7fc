"""Nodes send each other a shard in one stage, in parts. The parts cover the shard, and results have the same bits as
without parts."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.collectives import one_stage
from topkube.collectives.codecs import Codec, Rounded, Signs
from topkube.collectives.one_stage import OneStage
from topkube.collectives.top_levels import TopLevels
from topkube.collectives.top_signs import TopSigns


def build_codec(kind: str, places: list[slice], length: int) -> Codec:
    kinds = {"signs": Signs, "top signs": TopSigns}
    return kinds[kind](places) if kind in kinds else Rounded(length, kind)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 900), max_size=6),
    st.integers(1, 2000),
    st.integers(0, 2**32),
    st.sampled_from(["signs", "top signs", "bf16", "fp32"]),
)
def test_parts_send_what_the_whole_shard_sends(lengths: list[int], part_elements: int, seed: int, kind: str) -> None:
    places, length = [], 0
    for elements in lengths:
        places.append(slice(length, length + elements))
        length += -(-elements // 256) * 256  # each tensor begins at a multiple of 256
    values = np.zeros(length, np.float32)
    rng = np.random.default_rng(seed)
    for place in places:
        values[place] = rng.standard_normal(place.stop - place.start)
    whole = build_codec(kind, places, length)
    row, expected_rest, expected_sum = np.zeros(whole.row_bytes, np.uint8), values.copy(), np.zeros(length, np.float32)
    whole.pack(expected_rest, row)
    whole.unpack_add(expected_sum, [row], [1.0])
    with mock.patch.object(one_stage, "PART_ELEMENTS", part_elements):
        stage = OneStage(lambda p, n: build_codec(kind, p, n), places, length)
    rest, received = values.copy(), np.zeros(length, np.float32)
    for codec, start, stop in zip(stage.codecs, stage.bounds, stage.bounds[1:], strict=False):
        part_row = np.zeros(codec.row_bytes, np.uint8)
        codec.pack(rest[start:stop], part_row)
        codec.unpack_add(received[start:stop], [part_row], [1.0])
    assert (stage.bounds[0], stage.bounds[-1]) == (0, length)
    assert (rest.tobytes(), received.tobytes()) == (expected_rest.tobytes(), expected_sum.tobytes())


@settings(deadline=None)
@given(st.lists(st.integers(0, 900), max_size=4), st.integers(0, 2**32), st.sampled_from([Signs, TopSigns, TopLevels]))
def test_differences_are_sent_like_values(
    lengths: list[int], seed: int, kind: type[Signs | TopSigns | TopLevels]
) -> None:
    """Weights and agreed weights give the row that their difference gives, and neither changes."""
    ends = [int(end) for end in np.cumsum([0, *lengths])]
    codec = kind([slice(start, stop) for start, stop in itertools.pairwise(ends)])
    rng = np.random.default_rng(seed)
    weights, agreed = ([rng.standard_normal(n).astype(np.float32) for n in lengths] for _ in range(2))
    before = [x.copy() for x in (*weights, *agreed)]
    row, expected = np.zeros(codec.row_bytes, np.uint8), np.zeros(codec.row_bytes, np.uint8)
    assert codec.pack_differences(weights, agreed, row)
    change = np.concatenate([own - common for own, common in zip(weights, agreed, strict=True)] or [np.zeros(0, "f4")])
    rest = change.copy()
    assert codec.pack(rest, expected)
    assert row.tobytes() == expected.tobytes()
    assert all((a == b).all() for a, b in zip((*weights, *agreed), before, strict=True))
    codec.unpack_add_tensors([rest[a:b] for a, b in itertools.pairwise(ends)], [row], [1.0])
    np.testing.assert_allclose(rest, change, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("lengths", "bounds"), [([], [0, 0]), ([512], [0, 512]), ([256] * 4, [0, 512, 1024])])
def test_a_part_ends_with_a_tensor(lengths: list[int], bounds: list[int]) -> None:
    ends = np.cumsum([0, *lengths])
    places = [slice(int(start), int(stop)) for start, stop in itertools.pairwise(ends)]
    assert OneStage(lambda p, n: Signs(p), places, sum(lengths), part_elements=400).bounds == bounds


def test_tags_of_two_shards_never_meet() -> None:
    """A shard of very many small tensors still has fewer parts than a shard has tags."""
    count = 40_000
    places = [slice(256 * number, 256 * number + 256) for number in range(count)]
    stage = OneStage(lambda p, n: Rounded(n, "bf16"), places, 256 * count, part_elements=1)
    assert len(stage.codecs) < one_stage._MOST_PARTS
