"""Fake streams and a fake allocator, which record accesses to memory: they find data that a GPU would corrupt.

Every tensor operation runs on the CPU at once. The bookkeeping treats it as work that its thread put into the current
stream. Vector clocks record which work of one stream waits for which work of another stream. As with torch's allocator
on a GPU, a stream owns the memory that was allocated while it was current. `Streams.hazards` lists:
- two streams that use the same memory, one of them to write it, if neither waits for the other;
- memory of the host that a message uses before the host has waited for the streams that use it;
- memory that is freed while a stream other than its owner uses it, unless the tensor was recorded for that stream
  (`record_stream`) or the owner waits for the work. The owner would use the memory for its next tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import topkube
from topkube.collectives.device import pipeline, rows
from topkube.collectives.device.memory import DeviceMemory
from topkube.settings import Settings
from topkube.training.node_weights import exchange as weight_exchange
from topkube.training.node_weights import weights_device
from topkube.training.ranks import communication_thread

_HOST_WAITS = ("_local_scalar_dense", "is_nonzero", "equal")
"""The operations whose result the host waits for."""
_ALLOCATIONS = ("empty", "empty_like", "empty_strided")
"""The operations that only allocate memory. They are no work of a stream."""
Clock = dict[str, int]
"""For each stream, by its name: a number of operations of this stream."""


@dataclass
class FakeEvent:
    clock: Clock
    streams: Streams

    def synchronize(self) -> None:
        self.streams.wait_on_host(self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True


@dataclass
class FakeStream:
    """A stream. `clock` has an entry for each stream: how much of that stream's work is done before the next work of
    this stream."""

    name: str
    streams: Streams
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> FakeEvent:
        self.streams.check_freed_memory()
        return FakeEvent(dict(self.clock), self.streams)

    def wait_event(self, event: FakeEvent) -> None:
        self.streams.check_freed_memory()
        merge(self.clock, event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


@dataclass
class Memory:
    """The memory of a tensor: its owner, and the last read and the last write of each stream."""

    owner: FakeStream
    storage_reference: StorageWeakRef
    made_by: str
    reads: Clock = field(default_factory=dict)
    writes: Clock = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class Streams:
    """All streams of a test, and the memory that was allocated while `watch` was active."""

    def __init__(self) -> None:
        self.hazards: list[str] = []
        self.devices: list[tuple[str, Any]] = []
        """The calls of `set_device`: name of the thread, device."""
        self.waits: list[Clock] = []
        """For each wait of the host: the work of each stream that it waited for."""
        self.host_memory: list[torch.Tensor] = []
        """Tensors in the memory of the host, which it reads without a wait."""
        self._default = FakeStream("default", self)
        self._current = threading.local()
        self._host: Clock = {}
        self._submitted: Clock = {}
        self._memory: dict[int, Memory] = {}
        self._lock = threading.RLock()

    # ---- the functions that replace those of torch.cuda

    def current(self, _device: Any = None) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self._default)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current()
        self._current.stream = stream
        yield
        self._current.stream = before

    def set_device(self, device: Any) -> None:
        self.devices.append((threading.current_thread().name, device))

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self._find_memory(tensor).recorded.add(stream.name)

    # ---- bookkeeping

    def wait_on_host(self, clock: Clock) -> None:
        with self._lock:
            self.waits.append(dict(clock))
            merge(self._host, clock)

    def count_submitted_work(self) -> Clock:
        """Return the number of operations that were put into each stream so far."""
        with self._lock:
            return dict(self._submitted)

    def is_in_host_memory(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata for other in self.host_memory)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Observe the operations of this thread."""
        with _Observer(self):
            yield

    def run_watched(self, work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self.watch():
                return work()

        return run

    def record_operation(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Record an operation of the current stream, and the hazards that the operation causes."""
        with self._lock:
            self.check_freed_memory()
            stream = self.current()
            if name.split(".")[0] in _ALLOCATIONS:
                for tensor in written:
                    self._find_memory(tensor, name)
                return
            merge(stream.clock, self._host)
            stream.clock[stream.name] = now = stream.clock.get(stream.name, 0) + 1
            self._submitted[stream.name] = now
            for tensor in read:
                memory = self._find_memory(tensor, name)
                self._check_access(memory, memory.writes, stream, name)
                memory.reads[stream.name] = now
            for tensor in written:
                memory = self._find_memory(tensor, name)
                self._check_access(memory, memory.writes | memory.reads, stream, name)
                memory.writes[stream.name] = now
            if name.split(".")[0] in _HOST_WAITS and not all(map(self.is_in_host_memory, read)):
                self.wait_on_host(stream.clock)

    def check_host_access(self, tensor: torch.Tensor) -> None:
        """Record a hazard if the host has not waited for all work on the memory of `tensor`, which it uses now."""
        with self._lock:
            memory = self._find_memory(tensor)
            for other, time in (memory.reads | memory.writes).items():
                if self._host.get(other, 0) < time:
                    self.hazards.append(f"the host does not wait for {other}: {memory.made_by}")

    def check_freed_memory(self) -> None:
        """Check the memory that was freed since the last operation."""
        with self._lock:
            for key, memory in [
                (key, memory) for key, memory in self._memory.items() if memory.storage_reference.expired()
            ]:
                del self._memory[key]
                owner = memory.owner
                merge(owner.clock, self._host)
                for name, time in (memory.reads | memory.writes).items():
                    if name != owner.name and name not in memory.recorded and owner.clock.get(name, 0) < time:
                        self.hazards.append(f"{memory.made_by} of {owner.name} was freed while {name} used it")

    def _find_memory(self, tensor: torch.Tensor, made_by: str = "a tensor") -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.storage_reference.expired():
            memory = self._memory[storage._cdata] = Memory(self.current(), StorageWeakRef(storage), made_by)
        return memory

    def _check_access(self, memory: Memory, others: Clock, stream: FakeStream, name: str) -> None:
        for other, time in others.items():
            if other != stream.name and stream.clock.get(other, 0) < time:
                self.hazards.append(f"{name} in {stream.name} does not wait for {other}: {memory.made_by}")


def merge(clock: Clock, other: Clock) -> None:
    """Raise each entry of `clock` to that of `other`."""
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


@contextmanager
def simulate_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Exchange CPU tensors as on a GPU, while the script works in a separate stream."""
    fake = Streams()

    class FakeMemory(DeviceMemory):
        stream_name = "exchange"

        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.is_cuda, self.stream = True, FakeStream(self.stream_name, fake)

        def allocate_host_number(self) -> torch.Tensor:
            fake.host_memory.append(torch.empty(()))
            return fake.host_memory[-1]

    class FakeWeightsMemory(FakeMemory):
        stream_name = "weights"

    class FakeDelayedMemory(FakeMemory):
        stream_name = "delayed"

    def list_checked_rows(tensors: Sequence[torch.Tensor]) -> list[Any]:
        for tensor in tensors:
            fake.check_host_access(tensor)
        return [tensor.numpy() for tensor in tensors]

    monkeypatch.setattr(rows, "_list_rows", list_checked_rows)
    monkeypatch.setattr(pipeline, "DeviceMemory", FakeMemory)
    monkeypatch.setattr(weights_device, "DeviceMemory", FakeWeightsMemory)
    monkeypatch.setattr(weight_exchange, "DeviceMemory", FakeDelayedMemory)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "set_device", fake.set_device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: fake.record_stream(tensor, stream))
    submit = communication_thread.CommunicationThread.submit
    monkeypatch.setattr(
        communication_thread.CommunicationThread, "submit", lambda self, work: submit(self, fake.run_watched(work))
    )
    monkeypatch.setenv(Settings.__dataclass_fields__["node_exchange"].metadata["variable"], "torch")
    topkube.init()
    with fake.stream(FakeStream("script", fake)), fake.watch():
        yield fake


class _Observer(TorchDispatchMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        passed = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False), **(kwargs or {}))
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(_list_tensors(passed.get(argument.name)))
        passed_storages = {tensor.untyped_storage()._cdata for tensor in [*read, *written]}
        new_tensors = [
            tensor for tensor in _list_tensors(result) if tensor.untyped_storage()._cdata not in passed_storages
        ]
        if any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns):
            return result  # a view: no work
        self._streams.record_operation(str(func._schema.name).removeprefix("aten::"), read, written + new_tensors)
        return result


def _list_tensors(values: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            tensors += [leaf._indices(), leaf._values()] if leaf.is_sparse else [leaf]
    return tensors
