"""Views of arrays and tensors share memory, and errors name the arguments that cannot be used."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from topkube.arrays import view_flat, view_like
from topkube.errors import ArgumentError


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_view_shares_memory_and_is_flat(dtype: type) -> None:
    x = np.zeros((3, 4), dtype)
    view = view_flat(x, "x", writable=True)
    view[5] = 1
    assert x[1, 1] == 1
    assert view.shape == (12,)


def test_the_view_of_a_matrix_has_one_dimension() -> None:
    x = np.zeros((3, 4), np.float32).view(np.matrix)
    view = view_flat(x, "x", writable=True)
    assert (type(view), view.shape) == (np.ndarray, (12,))
    view[5] = 1
    assert x[1, 1] == 1


def test_a_tensor_is_viewed_without_a_copy_and_comes_back() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
        view = view_flat(x, "x", writable=True)
        view[4] = 2
        assert x[1, 1].item() == 2
        back = view_like(view, x)
        assert back.dtype == dtype
        assert back.data_ptr() == x.data_ptr()


def test_the_error_names_why_an_array_cannot_be_used() -> None:
    torch = pytest.importorskip("torch")
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    shifted_bytes = np.zeros(17, np.uint8)[1:]
    misaligned = np.frombuffer(shifted_bytes.data, np.float32, 4)
    for x, message in [
        (torch.zeros(4, device="meta"), "is on meta"),
        (torch.zeros(4).to_sparse(), "layout"),
        (torch.zeros(4, 4).t()[:2], "not contiguous"),
        (torch.zeros(4, dtype=torch.int32), "dtype int32"),
        (torch.zeros(4, dtype=torch.float8_e4m3fn), "dtype float8_e4m3fn"),
        (torch._neg_view(torch.zeros(4)), "negates"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "conjugates"),
        (np.ma.MaskedArray(np.zeros(4, np.float32), mask=[0, 1, 0, 0]), "masked"),
        (np.zeros(8, np.float32)[::2], "not contiguous"),
        (np.zeros(4, ">f4"), "dtype"),
        (misaligned, "not aligned"),
        (frozen, "read-only"),
        (3.0, "is a float"),
    ]:
        with pytest.raises(ArgumentError, match="x ") as caught:
            view_flat(x, "x", writable=True)
        assert message in str(caught.value)
