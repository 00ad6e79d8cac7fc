"""The CUDA kernels against the CPU's, bit for bit: emulated on every machine, and on a GPU where there is one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulation import emulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkube import kernels
from topkube.errors import ArgumentError, DeviceError, WireError
from topkube.kernels import cuda_library
from topkube.kernels.device import NO_FAULT, DeviceKernels, device_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Device:
    """Where the kernels under test run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels = emulated() if name == "emulated" else DeviceKernels(cuda_library.load())

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self.name == "emulated" else x.cuda()


@pytest.fixture(scope="module", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU here")
        if cuda_library.path() is None:
            pytest.skip("this build has no CUDA kernels")
    return Device(request.param)


def bits(x: torch.Tensor) -> Any:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and bits(got) == bits(expected)


def adversarial(d: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(d)
    normal = rng.standard_normal(d).astype(np.float32)
    spike = np.zeros(d, np.float32)
    spike[d // 2] = -1e30
    nan = normal.copy()
    nan[rng.integers(0, d, 1 + d // 50)] = np.nan
    nan[-1] = -np.inf
    quarter = np.where(rng.random(d) < 0.3, normal, 0).astype(np.float32)
    cases = {
        "normal": normal,
        "reversed": np.arange(d, dtype=np.float32)[::-1].copy(),
        "constant": np.full(d, -1.5, np.float32),
        "zeros": np.zeros(d, np.float32),
        "few values": rng.integers(-2, 3, d).astype(np.float32),
        "spike": spike,
        "denormals": rng.integers(0, 4096, d, dtype=np.uint32).view(np.float32),
        "heavy tails": (rng.standard_cauchy(d) ** 3).astype(np.float32),
        "mostly zero": quarter,
        "nan": nan,
        "any bits": rng.integers(0, 2**32, d, dtype=np.uint32).view(np.float32),
    }
    return {name: torch.from_numpy(x) for name, x in cases.items()}


def counts(d: int) -> list[int]:
    return sorted({1, max(1, d // 1000), max(1, d // 100), max(1, d // 3), d})


def check_topk(device: Device, x: torch.Tensor, k: int) -> None:
    indices, values = device.kernels.topk(device.put(x), k)
    expected_indices, expected_values = kernels.topk(x, k)
    assert same(indices, expected_indices)
    assert same(values, expected_values)


def check_compress(device: Device, gradient: torch.Tensor, residual: torch.Tensor, k: int) -> None:
    left, expected_left = torch.full_like(residual, 7), torch.full_like(residual, 7)
    on_device, old = device.put(left), device.put(residual)
    indices, values = device.kernels.compress_(device.put(gradient), old, k, on_device)
    expected_indices, expected_values = kernels.compress_(gradient, residual, k, out=expected_left)
    assert same(indices, expected_indices)
    assert same(values, expected_values)
    assert same(on_device, expected_left)
    assert same(old, residual)
    if gradient.dtype == torch.float32:
        in_place = device.put(gradient)
        device.kernels.compress_(in_place, old, k, None)
        assert same(in_place, expected_left)


def check_mstopk(device: Device, x: torch.Tensor, k: int, iterations: int, seed: int) -> None:
    indices, values = device.kernels.mstopk(device.put(x), k, iterations, seed)
    expected_indices, expected_values = kernels.mstopk(x, k, iterations, seed)
    assert same(indices, expected_indices)
    assert same(values, expected_values)
    read, thresholds = device.kernels.last()[1], kernels.last_thresholds()
    assert (*read.thresholds, *read.above) == (
        thresholds.upper, thresholds.lower, thresholds.above_upper, thresholds.above_lower,
    )  # fmt: skip


# Lengths on both sides of what changes the way: a warp, a tile, the sample, several tiles.
@pytest.mark.parametrize("d", [1, 31, 33, 4097, 16_385, 40_003])
def test_selection_is_the_cpus(device: Device, d: int) -> None:
    rng = np.random.default_rng(0)
    for number, (name, x32) in enumerate(adversarial(d).items()):
        dtype = DTYPES[(number + d) % 3]
        for k in (int(rng.choice(counts(d))), max(1, d // 100)):
            try:
                check_topk(device, x32.to(dtype), k)
                check_compress(device, torch.randn(d).to(DTYPES[(number + d + 1) % 3]), x32, k)
                check_mstopk(device, x32.to(dtype), k, 30, number)
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}, k = {k}") from error


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("k", [1, 37, 400, 15_000, 40_003])
def test_every_dtype_and_density(device: Device, dtype: torch.dtype, k: int) -> None:
    x = adversarial(40_003)["heavy tails" if k < 100 else "normal"]
    check_topk(device, x.to(dtype), k)
    check_compress(device, x.to(dtype), torch.flip(x, (0,)).contiguous(), k)
    check_mstopk(device, x.to(dtype), k, 30, 3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 6000),
    share=st.floats(0, 1),
    levels=st.integers(1, 2**31),
    seed=st.integers(0, 2**31),
    iterations=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_any_bits(
    device: Device, length: int, share: float, levels: int, seed: int, iterations: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    words = (rng.integers(0, levels, length) * (2**32 // levels)).astype(np.uint32)
    x = torch.from_numpy(words.view(np.float32))
    if dtype != torch.float32:
        x = torch.from_numpy((words >> 16).astype(np.uint16).view(np.int16)).view(dtype)
    k = max(1, round(share * length))
    check_topk(device, x, k)
    check_mstopk(device, x, k, iterations, seed)
    finite = torch.nan_to_num(x.float(), 0, 1, -1)  # which of two NaNs a sum keeps is open
    check_compress(device, torch.ones(length).to(dtype), finite, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_a_part_of_an_array_that_begins_anywhere(device: Device, dtype: torch.dtype) -> None:
    """No load is wider than an element, so no offset is misaligned; the emulation traps where one is."""
    whole = adversarial(20_011)["heavy tails"].to(dtype)
    for start in (1, 3):
        part, there = whole[start:], device.put(whole)[start:]
        indices, values = device.kernels.topk(there, 150)
        expected_indices, expected_values = kernels.topk(part, 150)
        assert same(indices, expected_indices)
        assert same(values, expected_values)
        encoded, _, _ = device.kernels.encode(indices, values, len(part), "bf16", None)
        assert bits(encoded) == kernels.encode(expected_indices, expected_values, len(part), wire="bf16").tobytes()
        halved = torch.empty_like(part)
        kernels.sum_(halved, [part], 0.5)
        device.kernels.sum_(there, [there], 0.5)
        assert same(there, halved)


def test_a_selection_that_cannot_use_its_candidates_takes_at_most_four_passes(device: Device) -> None:
    ways = set()
    for x in adversarial(40_003).values():
        check_topk(device, x, 400)
        passes, read = device.kernels.last()
        ways.add((passes, read.from_the_data))
    assert ways == {(1, False), (4, True)}


def test_orders_of_blocks_do_not_matter(device: Device) -> None:
    if device.name != "emulated":
        pytest.skip("a GPU draws its own order")
    x = adversarial(40_003)["few values"]
    for _ in range(6):  # the emulation's generator goes on
        check_topk(device, x, 4000)


# ---- dense


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("d", [1, 255, 30_011])
def test_sums_casts_and_finiteness(device: Device, dtype: torch.dtype, d: int) -> None:
    inputs = [adversarial(d)[name].to(dtype) for name in ("normal", "heavy tails", "denormals")]
    for out_dtype in DTYPES:
        expected, out = torch.empty(d, dtype=out_dtype), device.put(torch.empty(d, dtype=out_dtype))
        kernels.sum_(expected, inputs, 0.37)
        device.kernels.sum_(out, [device.put(x) for x in inputs], 0.37)
        assert same(out, expected)
    for x in (torch.randn(d).to(dtype), inputs[0].clone().fill_(torch.inf), adversarial(d)["nan"].to(dtype)):
        flag = device.kernels.words(device.kernels.finite_flag(device.put(x)))[0]
        assert bool(flag) == kernels.is_finite(x)


# ---- scatter and wire


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("value_dtype", DTYPES, ids=NAMES.values())
def test_scatter_add_keeps_the_order(device: Device, dtype: torch.dtype, value_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    for indices in (np.arange(0, 900, 3), rng.integers(0, 1000, 700), rng.integers(0, 5, 300), np.zeros(40, np.int64)):
        dense, values = torch.randn(1000).to(dtype), torch.randn(len(indices)).to(value_dtype)
        for kind in (np.uint32, np.int64):
            at = torch.from_numpy(indices.astype(kind))
            expected, out = dense.clone(), device.put(dense)
            kernels.scatter_add_(expected, at, values)
            verdict, _ = device.kernels.scatter_add_(out, device.put(at), device.put(values))
            assert device.kernels.words(verdict)[0] == NO_FAULT
            assert same(out, expected)


@pytest.mark.parametrize("bad", [-1, 1000, 2**32 - 1, 2**32, 2**40])
def test_scatter_add_beyond_the_array_writes_nothing(device: Device, bad: int) -> None:
    out = device.put(torch.ones(1000))
    at = torch.tensor([3, 5, bad, 1, bad])
    verdict, _ = device.kernels.scatter_add_(out, device.put(at), device.put(torch.ones(5)))
    assert device.kernels.words(verdict)[0] == 2
    assert bool((out == 1).all())


# k around the hash's own borders: 16, 128, 240 and 1,024 bytes, and whole blocks of them.
SHARDS = [(0, 0), (1, 1), (40, 3), (70_000, 0), (70_000, 17), (70_000, 30), (70_000, 57), (70_000, 58), (200_000, 5001)]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("length", "k"), [*SHARDS, (70_000, 253), (70_000, 254), (300_000, 20_000)])
def test_the_wires_bytes_are_the_cpus(device: Device, wire: str, length: int, k: int) -> None:
    rng = np.random.default_rng(k)
    indices = torch.from_numpy(np.sort(rng.choice(length, k, replace=False)).astype(np.uint32))
    for dtype in DTYPES:
        values = (torch.randn(k) * 1e4).to(dtype)
        residual = torch.randn(length)
        left = device.put(residual)
        encoded, verdict, _ = device.kernels.encode(device.put(indices), device.put(values), length, wire, left)
        expected = kernels.encode(indices, values, length, wire=wire, residual=residual)
        assert device.kernels.words(verdict)[0] == NO_FAULT
        assert bits(encoded) == expected.tobytes()
        assert same(left, residual)
        got_indices, got_values, verdict = device.kernels.decode(encoded, length, k)
        assert device.kernels.words(verdict) == [NO_FAULT, NO_FAULT, k, length]
        expected_indices, expected_values = kernels.decode(expected)
        assert bits(got_indices) == expected_indices.tobytes()
        assert bits(got_values) == expected_values.tobytes()
        dense = torch.randn(length).to(dtype)
        out = device.put(dense)
        finite = kernels.decode_add_(dense, expected, 0.3)
        verdict = device.kernels.decode_add_(out, encoded, 0.3)
        assert device.kernels.words(verdict)[:2] == [NO_FAULT, NO_FAULT if finite else 0]
        assert same(out, dense)


def test_indices_out_of_order_are_not_encoded(device: Device) -> None:
    for indices, bad in (([1, 5, 5], 2), ([5, 1, 9], 1), ([1, 2, 100], 2), ([100, 2, 3], 0)):
        at, residual = torch.tensor(indices, dtype=torch.uint32), torch.zeros(100)
        left = device.put(residual)
        _, verdict, _ = device.kernels.encode(device.put(at), device.put(torch.full((3,), 0.1)), 100, "bf16", left)
        assert device.kernels.words(verdict)[0] == bad
        assert same(left, residual)


def test_what_could_not_be_encoded_does_not_pass_for_what_its_memory_held_before(device: Device) -> None:
    good, values = torch.tensor([1, 5, 9], dtype=torch.uint32), torch.ones(3)
    buffer, _, _ = device.kernels.encode(device.put(good), device.put(values), 100, "fp32", None)
    bad = torch.tensor([5, 1, 9], dtype=torch.uint32)
    device.kernels.encode(device.put(bad), device.put(values), 100, "fp32", None, out=buffer)
    out = device.put(torch.zeros(100))
    verdict = device.kernels.words(device.kernels.decode_add_(out, buffer, 1.0))
    assert verdict[0] == 2  # not a TopKube buffer
    assert not bool(out.any())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_buffer_is_refused_as_the_cpu_refuses_it(device: Device, data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([50, 66_000, 140_000]))
    k = data.draw(st.integers(0, 40))
    indices = np.sort(np.random.default_rng(k).choice(length, k, replace=False)).astype(np.uint32)
    buffer = kernels.encode(indices, np.ones(k, np.float32), length, wire=data.draw(st.sampled_from(["fp32", "bf16"])))
    damaged = buffer.copy()
    where = data.draw(st.integers(0, buffer.size - 1))
    damaged[where] ^= data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.sampled_from([buffer.size, buffer.size, 8, max(0, where)]))]
    if data.draw(st.booleans()) and damaged.size >= 24:
        damaged[16:24] = kernels.wire._checksum(damaged)  # what only the structure can show
    dense = torch.ones(length)
    try:
        kernels.decode_add_(dense, damaged)
        refused = ""
    except WireError as error:
        refused = str(error)
    out = device.put(torch.ones(length))
    raw = device.put(torch.from_numpy(damaged.copy()))
    verdict = device.kernels.words(device.kernels.decode_add_(out, raw, 1.0))
    told = ""
    try:
        kernels.wire._tell(damaged.size, verdict[0], verdict[3], length)
    except WireError as error:
        told = str(error)
    assert told == refused
    assert same(out, dense)


# ---- what cannot be used


def test_a_cuda_tensor_without_the_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "path", lambda: None)
    cuda_library.load.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"no CUDA kernels.*nvcc.*TOPKUBE_CUDA=on"):
            cuda_library.load()
    finally:
        cuda_library.load.cache_clear()


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    broken = tmp_path / cuda_library.NAME
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(cuda_library, "path", lambda: broken)
    cuda_library.load.cache_clear()
    try:
        with pytest.raises(DeviceError, match="do not load"):
            cuda_library.load()
    finally:
        cuda_library.load.cache_clear()


def test_tensors_of_two_devices() -> None:
    here, elsewhere = torch.zeros(3), torch.zeros(3, device="meta")
    with pytest.raises(ArgumentError, match=r"dense lies on meta, values on cpu.*values.to\(dense.device\)"):
        device_kernels(dense=elsewhere, values=here)
    with pytest.raises(ArgumentError, match=r"values on the CPU \(it is a ndarray\)"):
        device_kernels(dense=elsewhere, values=np.zeros(3))
    with pytest.raises(ArgumentError, match="kernels run on CPU and CUDA"):
        kernels.topk(elsewhere, 1)
    assert device_kernels(dense=here, values=np.zeros(3)) is None


def test_arguments_are_refused_as_on_the_cpu(device: Device) -> None:
    x, half = device.put(torch.randn(100)), device.put(torch.randn(100).half())
    table = device.kernels
    for call, words in (
        (lambda: table.topk(x, 0), "k = 0 is outside"),
        (lambda: table.topk(x, 101), "k = 101 is outside"),
        (lambda: table.topk(x.view(10, 10).t(), 3), "not contiguous"),
        (lambda: table.topk(x.double(), 3), "dtype"),
        (lambda: table.mstopk(x, 3, 0, 0), "iterations"),
        (lambda: table.compress_(half, x, 3, None), "out=torch.empty"),
        (lambda: table.compress_(x, x, 3, None), "overlap"),
        (lambda: table.compress_(x, x.clone()[:50], 3, None), "has 50 elements"),
        (lambda: table.sum_(x, [x] * 17), "17 inputs"),
        (lambda: table.sum_(x[:99], [x[1:]]), "overlap"),
        (lambda: table.scatter_add_(x, x, x), "indices has dtype"),
        (lambda: table.decode_add_(x, device.put(torch.zeros(64, dtype=torch.uint8))[1:], 1.0), "aligned to 8"),
    ):
        before = x.clone()
        with pytest.raises(ArgumentError, match=words):
            call()
        assert same(x, before)


class _NoRoom:
    """torch, but for an allocator that is full."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    class cuda:
        OutOfMemoryError = torch.cuda.OutOfMemoryError
        mem_get_info = staticmethod(lambda device: (5, 10))


def test_no_room_for_the_workspace(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = device.put(torch.randn(100))
    before = x.clone()
    monkeypatch.setattr(device.kernels, "torch", _NoRoom())
    with pytest.raises(DeviceError, match=r"no room for \d+ bytes \(5 of 10 are free\); nothing was written"):
        device.kernels.compress_(x, torch.zeros_like(x), 3, None)
    assert same(x, before)


# ---- only on a GPU


def gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")(test))


@gpu
def test_the_public_face_takes_cuda_tensors() -> None:
    x = torch.randn(100_000)
    indices, values = kernels.topk(x.cuda(), 1000)
    assert indices.is_cuda
    assert same(values, kernels.topk(x, 1000)[1])
    with pytest.raises(ArgumentError, match=r"indices\[1\]"):
        kernels.scatter_add_(x.cuda(), torch.tensor([0, 10**6]).cuda(), torch.ones(2).cuda())
    with pytest.raises(WireError, match="does not begin"):
        kernels.decode(torch.zeros(64, dtype=torch.uint8).cuda())


@gpu
def test_a_graph_captures_a_selection_and_replays_it_on_new_data() -> None:
    gradient, residual = torch.zeros(1 << 20).cuda(), torch.zeros(1 << 20).cuda()
    left = torch.empty_like(residual)
    kernels.compress_(gradient, residual, 1000, out=left)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, values = kernels.compress_(gradient, residual, 1000, out=left)
    for seed in range(3):
        torch.manual_seed(seed)
        new = torch.randn(1 << 20)
        gradient.copy_(new)
        graph.replay()
        expected = torch.empty(1 << 20)
        expected_indices, expected_values = kernels.compress_(new, torch.zeros(1 << 20), 1000, out=expected)
        assert same(indices, expected_indices)
        assert same(values, expected_values)
        assert same(left, expected)


@gpu
def test_a_selection_waits_for_its_own_stream_only() -> None:
    side = torch.cuda.Stream()
    x = torch.randn(1 << 22).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        doubled = x * 2
        indices, _ = kernels.topk(doubled, 100)
    assert not side.query()  # the call came back before the work was done
    side.synchronize()
    assert same(indices, kernels.topk(doubled.cpu(), 100)[0])


@gpu
def test_what_another_stream_writes_is_ordered_as_torch_orders_it() -> None:
    other = torch.cuda.Stream()
    x, fresh = torch.zeros(1 << 22).cuda(), torch.randn(1 << 22)
    there = fresh.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        x.copy_(there)
    torch.cuda.current_stream().wait_stream(other)
    assert same(kernels.topk(x, 100)[0], kernels.topk(fresh, 100)[0])


@gpu
def test_a_graph_captures_the_codec() -> None:
    gradient, dense = torch.randn(1 << 18).cuda(), torch.zeros(1 << 18).cuda()

    def there_and_back() -> None:
        buffer = kernels.encode(*kernels.topk(gradient, 500), gradient.numel(), wire="bf16", wait=False)
        kernels.decode_add_(dense, buffer, wait=False)

    there_and_back()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back()
        with pytest.raises(ArgumentError, match="wait=False while capturing"):
            kernels.encode(*kernels.topk(gradient, 500), gradient.numel())
    new = torch.randn(1 << 18)
    gradient.copy_(new)
    dense.zero_()
    graph.replay()
    expected = torch.zeros(1 << 18)
    kernels.decode_add_(expected, kernels.encode(*kernels.topk(new, 500), new.numel(), wire="bf16"))
    assert same(dense, expected)


# ---- the build


def test_the_build_has_cuda_kernels_where_nvcc_is() -> None:
    """This is how CI compiles them: the package was installed on this machine."""
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("no nvcc here")
    if os.environ.get("TOPKUBE_CUDA") == "off":
        pytest.skip("CUDA was left out on purpose")
    library = cuda_library.load()  # needs no driver
    assert {"sm_80", "sm_90", "compute_90"} <= set(library.build.split())


def test_a_call_without_a_driver_is_a_typed_error() -> None:
    if cuda_library.path() is None or torch.cuda.is_available():
        pytest.skip("needs the library and no GPU")
    with pytest.raises(DeviceError, match=r"CUDA refused is_finite: .*\(error \d+\).*topkube doctor"):
        cuda_library.load().call("is_finite", 0, 0, 0, 0, 0, 0)
