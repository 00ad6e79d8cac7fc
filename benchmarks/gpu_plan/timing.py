"""The time of each call, for all sizes, densities and dtypes, and the time of each GPU kernel in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_plan.device import Device
from gpu_plan.rows import Row, Rows
from topkube import kernels

SIZES = {"0.82M": 819_200, "6.5M": 6_553_600, "25.6M": 25_557_032, "110M": 110_000_000, "1B": 1_000_000_000}
DENSITIES = (0.001, 0.01)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GOALS = {"topk % of a read": 60, "topk × torch.topk": 5, "compress_ % of 12 bytes": 65, "mstopk × torch": 5}
"""The least value of some columns of a row.

`topk % of a read`: 100 is the time of a sum, which reads the input once. `compress_ % of 12 bytes`: 100 is the time of
an addition of float32, which moves 12 bytes per element (it reads 8 and writes 4), as compress_ does. `×` is the time
of torch divided by our time.
"""
_NODES = (2, 8)
"""The numbers of nodes whose messages are added."""
_ROTATED_BYTES = 1 << 30
"""The memory of the inputs that take turns: more than the L2 cache holds."""


def run(device: Device, rows: Rows, quick: bool, names: Sequence[str] = tuple(SIZES)) -> None:
    """Measure every kernel on arrays of the sizes called `names`. Inputs rotate through more memory than the L2 cache
    holds."""
    sizes = {name: SIZES[name] for name in (["25.6M"] if quick else names)}
    for name, elements in sizes.items():
        for dtype_name, dtype in DTYPES.items():
            for density in DENSITIES[-1:] if quick else DENSITIES:
                key = f"time {name} {dtype_name} {density:g}"
                rows.measure(
                    key, lambda a=(name, elements, dtype_name, dtype, density): _measure_sparse_kernels(device, *a)
                )
                device.free()
        rows.measure(f"packing {name}", lambda a=(name, elements): _measure_packing(device, *a))
        device.free()


def _measure_packing(device: Device, name: str, elements: int) -> Row:
    """Time signs and integers. `% of its bytes` compares with an addition, which reads 8 and writes 4 bytes per
    element: 100 is the time of an addition of as many bytes."""
    elements = device.limit_elements(elements)
    copies = max(1, min(64, _ROTATED_BYTES // (4 * elements)))
    arrays, other = [device.make_normal(elements) for _ in range(copies)], torch.zeros(elements, device=device.place)
    without_wait: dict[str, Any] = {} if device.dry else {"wait": False}  # the kernels of the CPU have no such option
    add = device.measure_milliseconds(lambda i: arrays[i % copies].add_(other, alpha=0.0))
    row: Row = {"size": name, "elements": elements, "dtype": "fp32", "density": 1, "add ms": add}

    def time_kernel(kernel: str, message_bytes: int, run: Callable[[torch.Tensor], Any]) -> None:
        row[f"{kernel} ms"] = spent = device.measure_milliseconds(lambda i: run(arrays[i % copies]))
        row[f"{kernel} % of its bytes"] = 100 * add / spent * (8 * elements + message_bytes) / (12 * elements)
        row[f"{kernel} kernels us"] = device.measure_kernels(lambda: run(arrays[0]))

    scales, signs, _ = kernels.sign_pack_(other.clone())
    part = torch.as_tensor(scales), torch.as_tensor(signs)
    nbytes = sum(x.numel() * x.element_size() for x in part)
    time_kernel("sign_pack_", nbytes, lambda x: kernels.sign_pack_(x, *part, **without_wait))
    for nodes in _NODES:
        parts, weights = [tuple(x.clone() for x in part) for _ in range(nodes)], [1.0] * nodes
        time_kernel(
            f"sign_unpack_add_ {nodes} nodes",
            nodes * nbytes,
            lambda x, parts=parts, weights=weights: kernels.sign_unpack_add_(x, parts, weights),
        )
    for bits in kernels.QUANTISED_BITS:
        nbytes = kernels.quantised_bytes(elements, bits)
        messages = [torch.zeros(nbytes, dtype=torch.uint8, device=device.place) for _ in range(max(_NODES))]
        time_kernel(
            f"quantised_pack_ {bits}",
            nbytes,
            lambda x, bits=bits, to=messages[0]: kernels.quantised_pack_(x, bits, to, **without_wait),
        )
        for nodes in _NODES:
            received, weights = messages[:nodes], [1.0] * nodes
            time_kernel(
                f"quantised_unpack_add_ {bits} {nodes} nodes",
                nodes * nbytes,
                lambda x, bits=bits, received=received, weights=weights: kernels.quantised_unpack_add_(
                    x, bits, received, weights
                ),
            )
    for array in arrays:  # what packing has left is not what a step of training packs
        array.normal_()
    count = kernels.entries_kept(elements, 0.1)
    message = torch.zeros(kernels.top_sign_bytes(elements, count), dtype=torch.uint8, device=device.place)
    for kernel, run in (
        ("top_sign_pack_", lambda i: kernels.top_sign_pack_(arrays[i % copies], count, message, **without_wait)),
        (
            "top_sign_unpack_add_",
            lambda i: kernels.top_sign_unpack_add_(arrays[i % copies], count, message, 1.0, **without_wait),
        ),
    ):
        row[f"{kernel} ms"] = device.measure_milliseconds(run)
        row[f"{kernel} kernels us"] = device.measure_kernels(lambda run=run: run(0))
    return row


def _measure_sparse_kernels(
    device: Device, name: str, elements: int, dtype_name: str, dtype: torch.dtype, density: float
) -> Row:
    elements = device.limit_elements(elements)
    copies = max(1, min(64, _ROTATED_BYTES // (dtype.itemsize * elements)))
    inputs = [device.make_normal(elements, dtype) for _ in range(copies)]
    residuals = [device.make_normal(elements) for _ in range(max(1, min(copies, _ROTATED_BYTES // (4 * elements))))]
    accumulated = torch.empty(elements, device=device.place)
    k = kernels.entries_kept(elements, density)
    peer_repeats = 5 if elements > 5e8 else 9  # the operations of torch are slow

    def get_input(i: int) -> torch.Tensor:
        return inputs[i % copies]

    read = device.measure_milliseconds(lambda i: get_input(i).sum())
    add = device.measure_milliseconds(lambda i: residuals[i % len(residuals)].add_(accumulated, alpha=0.0))
    torch_topk = _time_torch_topk(device, inputs[0].abs(), k, peer_repeats)
    topk = device.measure_milliseconds(lambda i: kernels.topk(get_input(i), k))
    passes = kernels.last_effort().passes
    indices, values = kernels.topk(inputs[0], k)
    without_wait: dict[str, Any] = {} if device.dry else {"wait": False}  # the kernels of the CPU have no such option
    encode = device.measure_milliseconds(
        lambda _: kernels.encode(indices, values, elements, wire="bf16", **without_wait)
    )
    buffer = kernels.encode(indices, values, elements, wire="bf16")
    decode = device.measure_milliseconds(lambda _: kernels.decode_add_(accumulated, buffer, **without_wait))

    def compress(i: int) -> None:
        kernels.compress_(get_input(i), residuals[i % len(residuals)], k, out=accumulated)

    compress_ms = device.measure_milliseconds(compress)
    mstopk = device.measure_milliseconds(lambda i: kernels.mstopk(get_input(i), k))
    torch_mstopk = device.measure_milliseconds(lambda i: run_torch_mstopk(get_input(i), k), peer_repeats)
    return {
        "size": name,
        "elements": elements,
        "dtype": dtype_name,
        "density": density,
        "read ms": read,
        "read GB/s": dtype.itemsize * elements / read / 1e6,
        "add ms": add,
        "topk ms": topk,
        "topk passes": passes,
        "torch.topk ms": torch_topk,
        "compress_ ms": compress_ms,
        "encode ms": encode,
        "decode_add_ ms": decode,
        "mstopk ms": mstopk,
        "torch mstopk ms": torch_mstopk,
        "topk % of a read": 100 * read / topk,
        "topk × torch.topk": torch_topk / topk,
        "compress_ % of 12 bytes": 100 * add / compress_ms * (dtype.itemsize + 8) / 12,
        "mstopk × torch": torch_mstopk / mstopk,
        "topk kernels us": device.measure_kernels(lambda: kernels.topk(inputs[0], k)),
        "compress_ kernels us": device.measure_kernels(lambda: compress(0)),
        "mstopk kernels us": device.measure_kernels(lambda: kernels.mstopk(inputs[0], k)),
        "encode kernels us": device.measure_kernels(lambda: kernels.encode(indices, values, elements, wire="bf16")),
        "decode_add_ kernels us": device.measure_kernels(lambda: kernels.decode_add_(accumulated, buffer)),
    }


def _time_torch_topk(device: Device, magnitudes: torch.Tensor, k: int, repeats: int) -> float:
    return device.measure_milliseconds(lambda _: torch.topk(magnitudes, k, sorted=False), repeats)


def run_torch_mstopk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run MSTopK's Algorithm 1 with operations of torch."""
    a = x.abs()
    mean, top = a.double().mean().float(), a.max().float()
    left, right = torch.zeros((), device=x.device), torch.ones((), device=x.device)
    upper, lower = torch.full((), torch.inf, device=x.device), torch.zeros((), device=x.device)
    for _ in range(30):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (top - mean)
        at_most_k = (a >= threshold).sum() <= k
        right, left = torch.where(at_most_k, ratio, right), torch.where(at_most_k, left, ratio)
        upper, lower = torch.where(at_most_k, threshold, upper), torch.where(at_most_k, lower, threshold)
    above = (a >= upper).nonzero().view(-1)
    between = ((a >= lower) & (a < upper)).nonzero().view(-1)[: k - above.numel()]
    indices = torch.cat([above, between]).sort().values
    return indices, x[indices]


def list_missed_goals(rows: list[Row]) -> list[str]:
    """Return a line for each result that misses its goal."""
    return [
        f"{row['size']} {row['dtype']} at {row['density']:g}: {name} is {row[name]:.1f}, the goal is {goal}"
        for row in rows
        for name, goal in GOALS.items()
        if row.get(name, goal) < goal
    ]
