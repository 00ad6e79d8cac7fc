"""The conversion of the values that `reduce` adds up (numbers, arrays, tensors) to int64 or float64, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.arrays import is_tensor, refuse_masked
from topkube.errors import ArgumentError

_LOW_HALF = (1 << 32) - 1
_INT64 = np.iinfo(np.int64)


class Reducible:
    """A `value` during a reduction by `op`. `sent` holds the numbers that ranks combine, 1-D int64 or float64;
    `description` is the same on all ranks whose values fit together. Raises ArgumentError for values that are not
    numbers, and for integers beyond int64.

    Integers are added as two halves of 32 bits, so that up to 2^31 ranks add without overflow and a total beyond int64
    is noticed.
    """

    def __init__(self, value: Any, op: str) -> None:
        self._op, self._is_tensor, self._device = op, is_tensor(value), None
        if self._is_tensor:
            self._dtype, self._device = value.dtype, value.device
            host = _copy_to_host(value)
        elif isinstance(value, bool | int | float | np.ndarray | np.generic):
            refuse_masked(value, "value")
            try:
                host = np.asarray(value)
            except OverflowError:
                raise _explain_overflow(value) from None
            self._dtype = host.dtype
        else:
            raise _explain_type(type(value).__name__)
        self._python_type = (
            type(value) if isinstance(value, bool | int | float) and not isinstance(value, np.generic) else None
        )
        self._shape = host.shape
        if self._is_tensor:
            kind = "tensor"
        elif self._python_type is not None:
            kind = self._python_type.__name__
        else:
            kind = f"array dtype={host.dtype}"
        self.description = f"{kind}{f' dtype={self._dtype}' if self._is_tensor else ''} shape={tuple(self._shape)}"
        if host.dtype.kind in "iub":
            if host.dtype.kind == "u" and host.size and int(host.max()) > _INT64.max:
                raise _explain_overflow(int(host.max()))
            self._is_integer, numbers = True, host.reshape(-1).astype(np.int64)
        elif host.dtype.kind == "f" or host.dtype.name == "bfloat16":
            self._is_integer, numbers = False, host.reshape(-1).astype(np.float64)
        else:
            raise _explain_type(f"{kind} of {host.dtype}")
        self._is_sum = op in ("sum", "mean")
        self.sent: npt.NDArray[Any] = numbers
        if self._is_integer and self._is_sum:
            self.sent = np.concatenate([numbers >> 32, numbers & _LOW_HALF])

    def restore(self, combined: npt.NDArray[Any], ranks: int) -> Any:
        """Return the reduction, given what `ranks` ranks combined."""
        if self._is_integer and self._is_sum:
            high, low = np.split(combined, 2)
            if self._op == "mean":
                return self._restore_kind(_divide(high, low, ranks))
            high = high + (low >> 32)
            if high.size and (high.max() >= 1 << 31 or high.min() < -(1 << 31)):
                raise _explain_overflow("the sum")
            return self._restore_kind((high << 32) | (low & _LOW_HALF))
        if self._op == "mean":
            combined = combined / ranks
        return self._restore_kind(combined, keeps_type=True)

    def _restore_kind(self, flat: npt.NDArray[Any], keeps_type: bool = False) -> Any:
        """Return `flat` in the value's shape and kind; with `keeps_type` also in its type."""
        if self._python_type is not None:
            number = flat.reshape(-1)[0].item()
            return self._python_type(number) if keeps_type else number
        shaped = flat.reshape(self._shape)
        if not self._is_tensor:
            array = shaped.astype(self._dtype) if keeps_type else shaped
            return array if self._shape else array[()]
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(shaped).reshape(self._shape))
        return tensor.to(self._device, self._dtype if keeps_type else tensor.dtype)


def _divide(high: npt.NDArray[Any], low: npt.NDArray[Any], ranks: int) -> npt.NDArray[np.float64]:
    """Return the sums high * 2^32 + low, divided by `ranks`. float64 would round a sum beyond 2^53 before it is
    divided: of such a sum, the whole part of the quotient is computed first."""
    quotient, rest = np.divmod(high, ranks)
    low_quotient, rest = np.divmod((rest << 32) + low, ranks)
    large = (quotient << 32) + low_quotient + rest / ranks
    means: npt.NDArray[np.float64] = np.where(np.abs(high) < 1 << 20, (high * 2.0**32 + low) / ranks, large)
    return means


def _copy_to_host(tensor: Any) -> npt.NDArray[Any]:
    """Return a tensor's values as a NumPy array."""
    import torch

    if tensor.is_complex() or tensor.layout is not torch.strided:
        raise _explain_type(f"tensor of {tensor.dtype}, {tensor.layout}")
    host = tensor.detach().cpu().resolve_neg()
    array: npt.NDArray[Any] = (host.double() if tensor.is_floating_point() else host).numpy()
    return array


def _explain_overflow(value: Any) -> ArgumentError:
    return ArgumentError(
        f"{value if isinstance(value, str) else f'the integer {value}'} exceeds int64",
        next_step="pass float(value): float64 holds larger numbers, rounded",
    )


def _explain_type(kind: str) -> ArgumentError:
    return ArgumentError(
        f"reduce takes numbers, arrays and tensors of integers or real numbers, not a {kind}",
        next_step="pass one of these, or use topkube.gather_object",
    )
