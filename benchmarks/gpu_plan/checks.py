"""Correctness at the sizes that are measured: every kernel against operations of torch, or against the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gpu_plan.device import Device
from gpu_plan.rows import Row, Rows
from topkube import kernels

_BEYOND_2_31 = 2_200_000_000
_PACKED = ("25.6M fp32", "unaligned", "99.5% zeros", "nan")
"""The cases that are packed as signs and integers too: the CPU packs them in less than a second."""


def run(device: Device, rows: Rows, quick: bool) -> None:
    """Check every case. Raises nothing: a wrong result is a row whose `wrong` is not empty."""
    for name, make, density in _list_cases(device, quick):
        rows.measure(f"check {name} {density:g}", lambda make=make, density=density: _check_case(make(), density))
        device.free()
    for name, make, _ in _list_cases(device, quick):
        if name in _PACKED:
            rows.measure(f"check packing {name}", lambda make=make: _check_packing(make()))
            device.free()


def _list_cases(device: Device, quick: bool) -> Iterator[tuple[str, Callable[[], torch.Tensor], float]]:
    def make_unaligned() -> torch.Tensor:
        return device.make_normal(device.limit_elements(25_557_032) + 3)[3:]

    def make_mostly_zero() -> torch.Tensor:
        x = device.make_normal(device.limit_elements(110_000_000))
        return x * (torch.rand_like(x) < 0.005)

    def make_with_nans() -> torch.Tensor:
        x = device.make_normal(device.limit_elements(25_557_032))
        x[::1009] = torch.nan
        x[7::100_003] = -torch.inf
        return x

    def prepare_normal(elements: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
        return lambda: device.make_normal(device.limit_elements(elements), dtype)

    yield "25.6M fp32", prepare_normal(25_557_032), 0.01
    yield "25.6M bf16", prepare_normal(25_557_032, torch.bfloat16), 0.001
    yield "25.6M fp16 half", prepare_normal(25_557_032, torch.float16), 0.5
    yield "unaligned", make_unaligned, 0.01
    yield "99.5% zeros", make_mostly_zero, 0.01
    yield "constant", lambda: torch.full((device.limit_elements(110_000_000),), -1.5, device=device.place), 0.01
    yield "nan", make_with_nans, 0.01
    if not quick:
        yield "1B fp32", prepare_normal(1_000_000_000), 0.001
        yield "2.2G bf16", prepare_normal(_BEYOND_2_31, torch.bfloat16), 0.001


def convert_indices(indices: torch.Tensor) -> torch.Tensor:
    """Return uint32 indices as int64, which torch takes as an index."""
    return indices.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _check_case(x: torch.Tensor, density: float) -> Row:
    elements, checks = x.numel(), {}
    k = kernels.entries_kept(elements, density)
    indices, values = kernels.topk(x, k)
    positions = convert_indices(indices)
    checks["topk: indices ascend"] = bool((positions[1:] > positions[:-1]).all())
    checks["topk: values are those of the array"] = _have_same_bits(x[positions], values)
    previous = kernels.PreviousThreshold(x.device)
    again = [kernels.topk(x, k, previous=previous) for _ in range(2)]  # the second begins at the threshold of the first
    checks["topk: the same after itself"] = all(_have_equal_entries((indices, values), entries) for entries in again)
    finite = bool(values.isfinite().all())
    if finite:
        least = values.abs().min()
        above, reaching = int((x.abs() > least).sum()), int((x.abs() >= least).sum())
        checks["topk: the largest"] = above <= k <= reaching
    buffer = kernels.encode(indices, values, elements, wire="fp32")
    if finite:
        decoded, exact = kernels.decode(buffer, length=elements)
        checks["codec: indices"] = _have_same_bits(torch.as_tensor(decoded), indices)
        checks["codec: values"] = _have_same_bits(torch.as_tensor(exact), values.float())
        mstopk_indices, mstopk_values = kernels.mstopk(x, k)
        checks["mstopk: values are those of the array"] = _have_same_bits(
            x[convert_indices(mstopk_indices)], mstopk_values
        )
        upper = kernels.last_thresholds().upper
        reached = int((x.float().abs() >= upper).sum())
        checks["mstopk: above the threshold"] = int((mstopk_values.float().abs() >= upper).sum()) == reached
    if x.dtype == torch.float32:
        residual = torch.empty_like(x).normal_()
        whole = x + residual
        whole[whole.isnan()] = torch.nan  # 0x7fc00000, as the kernels write it
        rest = x.clone()
        indices, values = kernels.compress_(rest, residual, k)
        positions = convert_indices(indices)
        checks["compress_: values"] = _have_same_bits(whole[positions], values)
        whole[positions] = 0
        checks["compress_: what is left"] = _have_same_bits(whole, rest)
    return {"elements": elements, "k": k, "wrong": [name for name, is_right in checks.items() if not is_right]}


def _check_packing(x: torch.Tensor) -> Row:
    """Compare signs and integers with those of the CPU: messages, what is left, and a sum of three messages."""
    host, checks = x.cpu(), {}
    rest, host_rest = x.clone(), host.clone()
    *part, is_finite = kernels.sign_pack_(rest)
    *host_part, host_is_finite = kernels.sign_pack_(host_rest)
    checks["sign_pack_"] = _have_equal_entries(map(torch.as_tensor, part), map(torch.as_tensor, host_part))
    checks["sign_pack_: finite"] = is_finite == host_is_finite
    checks["sign_pack_: what is left"] = _have_same_bits(rest, host_rest)
    weights = [0.5, -1.0, 0.1]
    kernels.sign_unpack_add_(rest, [part] * 3, weights)
    kernels.sign_unpack_add_(host_rest, [host_part] * 3, weights)
    checks["sign_unpack_add_"] = _have_same_bits(rest, host_rest)
    for bits in kernels.QUANTISED_BITS:
        rest, host_rest = x.clone(), host.clone()
        message = torch.empty(kernels.quantised_bytes(x.numel(), bits), dtype=torch.uint8, device=x.device)
        host_message = torch.empty_like(message, device="cpu")
        is_finite = kernels.quantised_pack_(rest, bits, message)
        checks[f"quantised_pack_ {bits}: finite"] = is_finite == kernels.quantised_pack_(host_rest, bits, host_message)
        checks[f"quantised_pack_ {bits}"] = _have_same_bits(message, host_message)
        checks[f"quantised_pack_ {bits}: what is left"] = _have_same_bits(rest, host_rest)
        kernels.quantised_unpack_add_(rest, bits, [message] * 3, weights)
        kernels.quantised_unpack_add_(host_rest, bits, [host_message] * 3, weights)
        checks[f"quantised_unpack_add_ {bits}"] = _have_same_bits(rest, host_rest)
    rest, host_rest, count = x.clone(), host.clone(), kernels.entries_kept(x.numel(), 0.1)
    message = torch.empty(kernels.top_sign_bytes(x.numel(), count), dtype=torch.uint8, device=x.device)
    host_message = torch.empty_like(message, device="cpu")
    is_finite = kernels.top_sign_pack_(rest, count, message)
    checks["top_sign_pack_: finite"] = is_finite == kernels.top_sign_pack_(host_rest, count, host_message)
    checks["top_sign_pack_"] = _have_same_bits(message, host_message)
    checks["top_sign_pack_: what is left"] = _have_same_bits(rest, host_rest)
    kernels.top_sign_unpack_add_(rest, count, message, 0.5)
    kernels.top_sign_unpack_add_(host_rest, count, host_message, 0.5)
    checks["top_sign_unpack_add_"] = _have_same_bits(rest, host_rest)
    return {"elements": x.numel(), "wrong": [name for name, is_right in checks.items() if not is_right]}


def _have_equal_entries(a: Iterable[torch.Tensor], b: Iterable[Any]) -> bool:
    return all(_have_same_bits(x, y) for x, y in zip(a, b, strict=True))


def _have_same_bits(a: torch.Tensor, b: Any) -> bool:
    """Return True if two tensors have the same bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.to(a.device).contiguous().view(torch.uint8))
