"""The stored form of a shard's index with checksums: it is read as it was written, and damage is
an error, never a wrong place."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from remotes import write_tars

from topkube.data.formats.checked_index import CheckedIndex, compute_checked_index, unpack_checked_index
from topkube.data.formats.sample_index import ABSENT, IndexBuilder
from topkube.data.formats.tar import index_tar

SHARD_BYTES = 1 << 20


def build(samples: list[list[int]]) -> CheckedIndex:
    """Return an index of samples with these fields: field j of every sample is named after its number."""
    builder, at = IndexBuilder(), 512
    for number, fields in enumerate(samples):
        builder.begin(f"sample-{number}-ä")
        for field in fields:
            builder.add(f"f{field}", at, field * 7)
            at += 512 + field * 7
    index = builder.finish()
    checksums = np.random.default_rng(0).integers(0, 2**64, (len(index), 2), np.uint64)
    return CheckedIndex(index, checksums)


SAMPLES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=8)


@given(SAMPLES)
def test_an_index_comes_back(samples: list[list[int]]) -> None:
    checked = build(samples)
    unpacked = unpack_checked_index(checked.pack(), SHARD_BYTES)
    for name, column in checked.index.to_columns().items():
        np.testing.assert_array_equal(unpacked.index.to_columns()[name], column)
    assert unpacked.index.fields == checked.index.fields
    np.testing.assert_array_equal(unpacked.checksums, checked.checksums)


@given(SAMPLES, st.data())
def test_a_damaged_index_is_an_error_or_names_places_within_the_shard(
    samples: list[list[int]], data: st.DataObject
) -> None:
    packed = bytearray(build(samples).pack())
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    packed = packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed
    try:
        index = unpack_checked_index(bytes(packed), SHARD_BYTES).index
    except ValueError:
        return
    ends = index.offsets + index.sizes
    assert (index.offsets >= 0).all()
    assert (index.sizes >= 0).all()
    assert (ends <= SHARD_BYTES).all()
    present = index.lengths != ABSENT
    assert (index.starts[present] >= 0).all()
    assert (
        (index.starts + index.lengths)[present] <= np.broadcast_to(index.sizes[:, None], present.shape)[present]
    ).all()
    for number in range(len(index)):
        index.names.view_bytes(number, number + 1)


@pytest.mark.parametrize("at", [8, 16, 24, 32])
def test_a_head_with_huge_numbers_is_refused_before_memory_is_taken(at: int) -> None:
    packed = bytearray(build([[1, 2]]).pack())
    struct.pack_into("<Q", packed, at, 2**63)
    with pytest.raises(ValueError, match="format or length"):
        unpack_checked_index(bytes(packed), SHARD_BYTES)


def test_a_sample_outside_of_the_shard_is_refused() -> None:
    packed = build([[5], [5]]).pack()
    unpack_checked_index(packed, 512 + 35 + 512 + 35)
    with pytest.raises(ValueError, match="outside of its shard"):
        unpack_checked_index(packed, 512 + 35 + 512 + 34)


def test_checksums_are_those_of_the_samples_in_the_shard(tmp_path: Path) -> None:
    write_tars(tmp_path, [5], size=1_500_000)
    data = (tmp_path / "000.tar").read_bytes()
    with (tmp_path / "000.tar").open("rb") as file:
        index = index_tar(file.fileno(), len(data), "000.tar")
        checked = compute_checked_index(file.fileno(), index)
    for sample, (offset, size) in enumerate(zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)):
        assert checked.get_checksum(sample) == xxhash.xxh3_128_intdigest(data[offset : offset + size])


@pytest.mark.parametrize("end", [-1, 2**40])
def test_damaged_names_are_refused(end: int) -> None:
    packed = bytearray(build([[1], [2]]).pack())
    struct.pack_into("<q", packed, 40, end)  # where the name of the first sample ends
    with pytest.raises(ValueError, match="names"):
        unpack_checked_index(bytes(packed), SHARD_BYTES)
