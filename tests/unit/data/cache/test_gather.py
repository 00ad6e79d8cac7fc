"""The kernels that gather a batch return the same bytes as NumPy, or raise an error before anything is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube import _kernels


@settings(max_examples=80)
@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 63), st.data())
def test_rows_and_records_are_those_that_numpy_gathers(
    row_count: int, length: int, shift: int, data: st.DataObject
) -> None:
    source = np.random.default_rng(row_count).integers(0, 256, row_count * length + shift, np.uint8)
    rows = np.array(data.draw(st.lists(st.integers(0, row_count - 1), max_size=30)), np.int64)
    out = np.zeros(shift + rows.size * length + 7, np.uint8)
    _kernels.gather_rows(source, length, rows, out[shift:-7])
    np.testing.assert_array_equal(
        out[shift:-7], source[: row_count * length].reshape(row_count, length)[rows].reshape(-1)
    )
    assert not out[:shift].any()
    assert not out[-7:].any()

    lengths = np.array([data.draw(st.integers(0, length)) for _ in rows], np.int64)
    expected = [source[row * length : row * length + n] for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)]
    gathered = np.empty(int(lengths.sum()), np.uint8)
    _kernels.gather_memory(source, rows * length, lengths, gathered)
    np.testing.assert_array_equal(gathered, np.concatenate([*expected, np.empty(0, np.uint8)]))


@pytest.mark.parametrize("length", [1 << 16, (1 << 16) + 13])
def test_a_batch_larger_than_the_caches_is_the_same(length: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (20, length), np.uint8)
    rows = np.random.default_rng(1).integers(0, 20, 300)
    for shift in (0, 5):
        out = np.zeros(300 * length + shift, np.uint8)
        _kernels.gather_rows(source.reshape(-1), length, rows, out[shift:])
        np.testing.assert_array_equal(out[shift:].reshape(300, length), source[rows])


@pytest.mark.parametrize("row", [-1, 10, 2**62])
def test_a_row_outside_is_refused_and_nothing_is_written(row: int) -> None:
    out = np.zeros(60, np.uint8)
    with pytest.raises(IndexError, match="outside"):
        _kernels.gather_rows(np.ones(300, np.uint8), 30, np.array([0, row]), out)
    with pytest.raises(ValueError, match="not the total size"):
        _kernels.gather_rows(np.ones(300, np.uint8), 30, np.array([0, 1]), out[:59])
    assert not out.any()


@pytest.mark.parametrize("missing", [None, 0, 9])
def test_rows_are_gathered_only_if_all_of_them_are_set(missing: int | None) -> None:
    source = np.random.default_rng(0).integers(0, 256, (10, 30), np.uint8)
    flags, rows, out = np.ones(10, np.uint8), np.array([9, 3, 0, 3]), np.zeros(120, np.uint8)
    flags[5] = 0  # of a row that is not asked for
    if missing is not None:
        flags[missing] = 2  # being written
    assert _kernels.gather_set_rows(flags, source.reshape(-1), 30, rows, out) is (missing is None)
    np.testing.assert_array_equal(out.reshape(4, 30), source[rows] if missing is None else np.zeros((4, 30)))
    with pytest.raises(IndexError, match="outside"):
        _kernels.gather_set_rows(flags[:9], source.reshape(-1), 30, rows, out)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 40), st.data())
def test_samples_of_one_length_are_read_from_their_shards(counts: list[int], length: int, data: st.DataObject) -> None:
    starts, total = np.cumsum([0, *counts]), sum(counts)
    content = np.random.default_rng(total).integers(0, 256, (total, length), np.uint8)
    files, offsets = [], np.zeros(total, np.int64)
    for first, count in zip(starts.tolist(), counts, strict=False):
        files.append(os.memfd_create("shard"))
        for at in reversed(range(count)):  # not in the order of their numbers
            offsets[first + at] = 7 + (count - 1 - at) * (length + 3)
            os.pwrite(files[-1], content[first + at].tobytes() + b"end", int(offsets[first + at]))
    try:
        chosen = np.array(
            data.draw(st.lists(st.integers(0, total - 1), max_size=8) if total else st.just([])), np.int64
        )
        lengths, opened = np.full(total, length), np.array(files, np.int32)
        out = np.zeros(chosen.size * length, np.uint8)
        assert _kernels.gather_samples(starts, opened, offsets, lengths, chosen, length, out)
        np.testing.assert_array_equal(out.reshape(chosen.size, length), content[chosen])
        if chosen.size:
            closed = opened.copy()
            closed[np.searchsorted(starts, chosen[-1], "right") - 1] = -1
            assert not _kernels.gather_samples(starts, closed, offsets, lengths, chosen, length, out)
            lengths[chosen[-1]] += 1
            assert not _kernels.gather_samples(starts, opened, offsets, lengths, chosen, length, out)
    finally:
        for file in files:
            os.close(file)


def test_samples_that_cannot_be_read_or_do_not_exist_are_reported() -> None:
    starts, lengths, out = np.array([0, 2]), np.array([10, 10]), np.zeros(10, np.uint8)
    with open(os.memfd_create("shard"), "wb") as shard:
        os.pwrite(shard.fileno(), bytes(15), 0)
        arguments = (starts, np.array([shard.fileno()], np.int32), np.array([0, 10]), lengths)
        assert _kernels.gather_samples(*arguments, np.array([0]), 10, out)
        assert not _kernels.gather_samples(*arguments, np.array([1]), 10, out)  # the file ends in it
        for sample in (-1, 2):
            with pytest.raises(IndexError, match="outside"):
                _kernels.gather_samples(*arguments, np.array([sample]), 10, out)
        with pytest.raises(ValueError, match="not the total size"):
            _kernels.gather_samples(*arguments, np.array([0, 0]), 10, out)
        with pytest.raises(ValueError, match="one more element"):
            _kernels.gather_samples(starts[:1], *arguments[1:], np.array([0]), 10, out)


@settings(max_examples=40)
@given(st.integers(0, 200), st.lists(st.integers(0, 39), unique=True, max_size=30))
def test_rows_written_to_a_file_lie_where_they_belong_and_nothing_else_changes(length: int, chosen: list[int]) -> None:
    before = np.random.default_rng(1).integers(0, 256, (40, length), np.uint8)
    after = np.random.default_rng(2).integers(0, 256, (len(chosen), length), np.uint8)
    file = os.memfd_create("rows")
    try:
        os.write(file, before.tobytes())
        rows = np.array(chosen, np.int64)
        assert _kernels.write_rows(file, length, rows, after.reshape(-1)) == (len(chosen), 0)
        before[rows] = after
        assert os.pread(file, 1 << 20, 0) == before.tobytes()
    finally:
        os.close(file)


def test_rows_that_cannot_be_written_are_reported_with_the_reason(tmp_path: Path) -> None:
    rows, source = np.array([0, 1]), np.ones(20, np.uint8)
    with open("/dev/full", "wb") as full:
        assert _kernels.write_rows(full.fileno(), 10, rows, source) == (0, errno.ENOSPC)
    with (tmp_path / "file").open("wb") as file:
        for wrong in (np.array([0, -1]), np.array([0, 2**62])):
            with pytest.raises(IndexError, match="outside"):
                _kernels.write_rows(file.fileno(), 10, wrong, source)
        with pytest.raises(ValueError, match="not the total size"):
            _kernels.write_rows(file.fileno(), 10, rows, source[:19])
    assert (tmp_path / "file").stat().st_size == 0
