"""Buffers of batches are reused only when nothing refers to them, whatever a version of Python counts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from topkube.data.base import batch_buffers

SIZE = 1 << 20


@pytest.fixture(params=[0, 1], ids=["own", "one fewer, as Python 3.14"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, loaded by a Python that counts so many references fewer."""
    count = sys.getrefcount
    fewer = request.param + 1  # the argument of this function is one more reference
    monkeypatch.setattr(sys, "getrefcount", lambda value: count(value) - fewer)
    yield importlib.reload(batch_buffers)
    monkeypatch.undo()
    importlib.reload(batch_buffers)


def test_a_buffer_that_is_in_use_is_not_taken_again(module: ModuleType) -> None:
    buffers = module.BatchBuffers()
    used = buffers.take(SIZE)[10:]
    assert not np.shares_memory(used, buffers.take(SIZE))


def test_a_buffer_that_is_free_is_taken_again(module: ModuleType) -> None:
    buffers = module.BatchBuffers()
    buffers.take(SIZE)[:] = 7
    assert (buffers.take(SIZE) == 7).all()
