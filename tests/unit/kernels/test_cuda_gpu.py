"""Tests that need a GPU: streams, graphs, and the public functions on CUDA tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_device import have_same_bits

from topkube import kernels
from topkube.errors import ArgumentError, WireError
from topkube.kernels.device.selection import SelectionKernels


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")(test))


@needs_gpu
def test_the_public_functions_take_cuda_tensors() -> None:
    x = torch.randn(100_000)
    indices, values = kernels.topk(x.cuda(), 1000)
    assert indices.is_cuda
    assert have_same_bits(values, kernels.topk(x, 1000)[1])
    with pytest.raises(ArgumentError, match=r"indices\[1\]"):
        kernels.scatter_add_(x.cuda(), torch.tensor([0, 10**6]).cuda(), torch.ones(2).cuda())
    with pytest.raises(WireError, match="does not begin"):
        kernels.decode(torch.zeros(64, dtype=torch.uint8).cuda())


@needs_gpu
def test_a_graph_captures_a_selection_and_replays_it_on_new_data() -> None:
    gradient, residual = torch.zeros(1 << 20).cuda(), torch.zeros(1 << 20).cuda()
    left = torch.empty_like(residual)
    kernels.compress_(gradient, residual, 1000, out=left)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, values = kernels.compress_(gradient, residual, 1000, out=left)
    for seed in range(3):
        torch.manual_seed(seed)
        new_gradient = torch.randn(1 << 20)
        gradient.copy_(new_gradient)
        graph.replay()
        expected = torch.empty(1 << 20)
        expected_indices, expected_values = kernels.compress_(new_gradient, torch.zeros(1 << 20), 1000, out=expected)
        assert have_same_bits(indices, expected_indices)
        assert have_same_bits(values, expected_values)
        assert have_same_bits(left, expected)


@needs_gpu
def test_a_selection_waits_for_its_own_stream_only() -> None:
    side = torch.cuda.Stream()
    x = torch.randn(1 << 22).cuda()
    kernels.topk(x * 2, 100)  # the first launch of a kernel loads it, which may wait for all streams
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # a quarter of a second
        doubled = x * 2
        indices, _ = kernels.topk(doubled, 100)
    assert not side.query()  # the call came back before the work was done
    side.synchronize()
    assert have_same_bits(indices, kernels.topk(doubled.cpu(), 100)[0])


def test_the_effort_of_a_selection_in_any_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class State:
        is_cuda, device = True, "cuda:1"

        def cpu(self) -> torch.Tensor:
            done.append("copied")
            return torch.zeros(256, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    library: Any = SimpleNamespace(read_effort=lambda _: SimpleNamespace(is_from_data=False))
    selection = SelectionKernels(library)
    selection._last.state, selection._last.passes = State(), SimpleNamespace(from_candidates=1)
    assert selection.read_effort()[0] == 1
    assert done == ["cuda:1", "copied"]


@needs_gpu
def test_kernels_wait_for_another_stream_as_torch_does() -> None:
    other = torch.cuda.Stream()
    x, fresh = torch.zeros(1 << 22).cuda(), torch.randn(1 << 22)
    device_copy = fresh.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        x.copy_(device_copy)
    torch.cuda.current_stream().wait_stream(other)
    assert have_same_bits(kernels.topk(x, 100)[0], kernels.topk(fresh, 100)[0])


@needs_gpu
def test_the_public_functions_pack_cuda_tensors() -> None:
    x, weights = torch.randn(100_003), [0.5, -1.0]
    left, on_device = x.clone(), x.cuda()
    *part, _ = kernels.sign_pack_(left)
    *own_part, is_finite = kernels.sign_pack_(on_device)
    assert is_finite
    kernels.sign_unpack_add_(left, [part] * 2, weights)
    kernels.sign_unpack_add_(on_device, [own_part] * 2, weights)
    assert have_same_bits(on_device, left)
    for bits in kernels.QUANTISED_BITS:
        message = torch.zeros(kernels.quantised_bytes(x.numel(), bits), dtype=torch.uint8)
        left, on_device, own = x.clone(), x.cuda(), message.cuda()
        assert kernels.quantised_pack_(left, bits, message) is kernels.quantised_pack_(on_device, bits, own)
        assert have_same_bits(own, message)
        kernels.quantised_unpack_add_(left, bits, [message] * 2, weights)
        kernels.quantised_unpack_add_(on_device, bits, [own] * 2, weights)
        assert have_same_bits(on_device, left)
    message = torch.zeros(kernels.top_sign_bytes(x.numel(), 9000), dtype=torch.uint8)
    left, on_device, own = x.clone(), x.cuda(), message.cuda()
    assert kernels.top_sign_pack_(left, 9000, message)
    assert kernels.top_sign_pack_(on_device, 9000, own)
    assert have_same_bits(own, message)
    kernels.top_sign_unpack_add_(left, 9000, message, 0.5)
    kernels.top_sign_unpack_add_(on_device, 9000, own, 0.5)
    assert have_same_bits(on_device, left)


@needs_gpu
def test_a_graph_captures_signs_and_integers() -> None:
    gradient, dense = torch.randn(1 << 18).cuda(), torch.zeros(1 << 18).cuda()
    message = torch.zeros(kernels.quantised_bytes(1 << 18, 8), dtype=torch.uint8).cuda()

    def pack_and_add() -> None:
        kernels.quantised_pack_(gradient, 8, message, wait=False)
        kernels.quantised_unpack_add_(dense, 8, [message] * 2, [1.0, 0.5])
        scales, bits, _ = kernels.sign_pack_(gradient, wait=False)
        kernels.sign_unpack_add_(dense, [(scales, bits)], [1.0])

    pack_and_add()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack_and_add()
    new_gradient = torch.randn(1 << 18)
    gradient.copy_(new_gradient)
    dense.zero_()
    graph.replay()
    expected, left = torch.zeros(1 << 18), new_gradient.clone()
    host_message = torch.zeros_like(message, device="cpu")
    kernels.quantised_pack_(left, 8, host_message)
    kernels.quantised_unpack_add_(expected, 8, [host_message] * 2, [1.0, 0.5])
    kernels.sign_unpack_add_(expected, [kernels.sign_pack_(left)[:2]], [1.0])
    assert have_same_bits(dense, expected)
    assert have_same_bits(gradient, left)


@needs_gpu
def test_a_graph_captures_the_codec() -> None:
    gradient, dense = torch.randn(1 << 18).cuda(), torch.zeros(1 << 18).cuda()

    def encode_and_decode() -> None:
        buffer = kernels.encode(*kernels.topk(gradient, 500), gradient.numel(), wire="bf16", wait=False)
        kernels.decode_add_(dense, buffer, wait=False)

    encode_and_decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode_and_decode()
        with pytest.raises(ArgumentError, match="wait=False while capturing"):
            kernels.encode(*kernels.topk(gradient, 500), gradient.numel())
    new_gradient = torch.randn(1 << 18)
    gradient.copy_(new_gradient)
    dense.zero_()
    graph.replay()
    expected = torch.zeros(1 << 18)
    kernels.decode_add_(expected, kernels.encode(*kernels.topk(new_gradient, 500), new_gradient.numel(), wire="bf16"))
    assert have_same_bits(dense, expected)
