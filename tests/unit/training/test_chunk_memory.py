"""The weights of a chunk, read where they are: also after a script has replaced them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.chunk_memory import ChunkMemory
from topkube.training.node_weights.layout import Chunk, ShardPiece
from topkube.training.node_weights.weights_device import WeightsDevice


def test_weights_are_read_where_they_are_after_a_script_replaced_them() -> None:
    tensors = [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(3))]
    parameters = [Parameter(i, str(i), tensor) for i, tensor in enumerate(tensors)]
    pieces = [ShardPiece(parameter, 0, parameter.length, 256 * i) for i, parameter in enumerate(parameters)]
    chunk = Chunk(0, False, parameters, starts=[0, 256], length=512, first=0, last=512, pieces=pieces)
    world: Any = SimpleNamespace(local_size=1)
    memory = ChunkMemory(world, WeightsDevice(None))

    def check() -> None:
        for tensor, weights in zip(tensors, memory.read(chunk), strict=True):
            np.testing.assert_array_equal(weights, tensor.detach().reshape(-1).numpy())

    for _ in range(2):
        check()
    memory.read(chunk)[0][:] = 7  # in place
    assert (tensors[0] == 7).all()
    tensors[0].data = torch.randn(4, 4)
    check()
    tensors[1].data = tensors[1].data.clone()
    check()
    tensors[0].data = tensors[0].data.t()  # at the same address
    check()
