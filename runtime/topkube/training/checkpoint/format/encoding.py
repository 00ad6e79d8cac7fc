"""Typed encoding of state: values of a `state_dict()` become tensors and plain containers that
`torch.load(weights_only=True)` accepts. `decoding.py` rebuilds equal values of the same types.

None, bool, int, float, str, lists, tuples, dicts and tensors stay as they are, so that a file can be read without
TopKube. Every other type becomes a dict whose key "__topkube__" names the type. A value without an
encoding raises an error with the path of its key, for example `more['tracker']['started']`.
"""

from __future__ import annotations

import datetime
import pathlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from topkube.errors import CheckpointError

CopyTensor = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the tensor to be saved for a tensor of the state and the path of its key."""

TAG = "__topkube__"
"""The key that names the type of an encoded value."""
_DEEPEST = 100
"""Levels of nesting: pickle, which `torch.save` uses, runs into Python's recursion limit at a few hundred."""
_PLAIN = (type(None), bool, float, str)
FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def encode(state: Any, copy: CopyTensor = lambda tensor, path: tensor.detach()) -> Any:
    """Return `state` encoded. Containers are new objects, tensors are the results of `copy`, and arrays are copied.
    Raises CheckpointError, which names the path of the key, for a value that has no encoding."""
    return _Encoder(copy).encode(state, "")


class _Encoder:
    """One traversal of a state. `_enclosing` holds the ids of the containers around the value, to refuse a container
    that contains itself."""

    def __init__(self, copy: CopyTensor) -> None:
        self._copy = copy
        self._enclosing: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN or _is_short_int(value):
            return value
        if kind in (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter, deque):
            return self._encode_container(value, path)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, np.generic | np.ndarray):
            return _encode_array(value, path)
        if kind is datetime.datetime:
            numbers = (value.year, value.month, value.day, *_list_clock(value))
            return self._encode_tagged("datetime", path, numbers=numbers, fold=value.fold, zone=value.tzinfo)
        if kind is datetime.time:
            return self._encode_tagged("time", path, numbers=_list_clock(value), fold=value.fold, zone=value.tzinfo)
        if kind is datetime.timezone:
            return self._encode_tagged("timezone", path, arguments=value.__getinitargs__())
        encoding = _encode_simple(value)
        if encoding is None:
            _refuse(value, path)
        return encoding

    def _encode_tagged(self, tag: str, path: str, **fields: Any) -> dict[str, Any]:
        return {TAG: tag, **{name: self.encode(value, path) for name, value in fields.items()}}

    def _encode_container(self, value: Any, path: str) -> Any:
        if id(value) in self._enclosing:
            raise CheckpointError(f"{path or 'the state'} cannot be saved: it contains itself", next_step=_NEXT)
        if len(self._enclosing) >= _DEEPEST:
            raise CheckpointError(
                f"{path} cannot be saved: it lies more than {_DEEPEST} levels deep",
                cause="nested containers that grow from step to step",
                next_step="save a flat list or dict instead",
            )
        self._enclosing.add(id(value))
        try:
            return self._encode_mapping(value, path) if isinstance(value, dict) else self._encode_sequence(value, path)
        finally:
            self._enclosing.discard(id(value))

    def _encode_sequence(self, value: Any, path: str) -> Any:
        items = [self.encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
        kind = type(value)
        if kind is list:
            return items
        if kind is tuple:
            return tuple(items)
        encoded = {TAG: kind.__name__, "items": items}
        return {**encoded, "maxlen": value.maxlen} if kind is deque else encoded

    def _encode_mapping(self, value: dict[Any, Any], path: str) -> Any:
        kind = type(value)
        plain = TAG not in value and all(type(key) in _PLAIN or _is_short_int(key) for key in value)
        if kind in (dict, OrderedDict) and plain:
            encoded = kind((key, self.encode(item, _extend_path(path, key))) for key, item in value.items())
        else:
            items = [
                [self.encode(key, f"{path} (a key)"), self.encode(item, _extend_path(path, key))]
                for key, item in value.items()
            ]
            encoded = {TAG: kind.__name__, "items": items}
        if isinstance(value, OrderedDict):  # torch keeps the versions of modules in an attribute of a state dict
            attributes = {name: self.encode(item, f"{path}.{name}") for name, item in vars(value).items()}
            if type(encoded) is OrderedDict:
                vars(encoded).update(attributes)
            else:
                encoded["attributes"] = attributes
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise CheckpointError(
                    f"{path} cannot be saved: it is a defaultdict of {factory!r}",
                    cause="only the factories " + ", ".join(FACTORIES) + " can be rebuilt by a safe load",
                    next_step="save a plain dict with the same items instead",
                )
            encoded["factory"] = None if factory is None else getattr(factory, "__name__", "")
        return encoded

    def _encode_tensor(self, value: torch.Tensor, path: str) -> Any:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout in _LAYOUTS
        if not plain or value.is_nested or value.is_quantized or value.device.type == "meta":
            _refuse(value, path)
        copied = self._copy(value, path)
        parameter = isinstance(value, torch.nn.Parameter)
        if not parameter and not value.requires_grad:
            return copied
        return {TAG: "tensor", "values": copied, "parameter": parameter, "requires_grad": value.requires_grad}


def _is_short_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _extend_path(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if path else str(key)


def _list_clock(value: datetime.datetime | datetime.time) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def _encode_bytes(data: bytes | bytearray | npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _encode_array(value: np.generic | npt.NDArray[Any], path: str) -> dict[str, Any]:
    """Return the encoding of a NumPy scalar or array: its dtype, shape and bytes."""
    is_array = isinstance(value, np.generic) or type(value) is np.ndarray
    values = np.array(value, order="C")
    dtype = values.dtype
    if not is_array or dtype.hasobject or not dtype.itemsize or np.dtype(dtype.str) != dtype:
        _refuse(value, path)
    tag = "ndarray" if isinstance(value, np.ndarray) else "numpy scalar"
    return {TAG: tag, "dtype": dtype.str, "shape": values.shape, "values": _encode_bytes(values.tobytes())}


def _encode_simple(value: Any) -> dict[str, Any] | None:
    """Return the encoding of a value that contains no other values; None if there is none."""
    kind = type(value)
    if kind is int:
        return {TAG: "int", "digits": hex(value)}
    if kind is complex:
        return {TAG: "complex", "parts": (value.real, value.imag)}
    if kind in (bytes, bytearray):
        return {TAG: kind.__name__, "values": _encode_bytes(value)}
    if kind is range:
        return {TAG: "range", "ends": (value.start, value.stop, value.step)}
    if PATHS.get(kind.__name__) is kind:
        return {TAG: kind.__name__, "path": str(value)}
    if kind is datetime.date:
        return {TAG: "date", "numbers": (value.year, value.month, value.day)}
    if kind is datetime.timedelta:
        return {TAG: "timedelta", "numbers": (value.days, value.seconds, value.microseconds)}
    if kind is zoneinfo.ZoneInfo and value.key is not None:
        return {TAG: "ZoneInfo", "key": value.key}
    if kind is torch.Size:
        return {TAG: "Size", "items": tuple(value)}
    if kind is torch.dtype:
        return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {TAG: "device", "name": str(value)}
    return None


_NEXT = "return numbers, strings, tensors, arrays, dates, paths and plain containers of them from state_dict()"


def _refuse(value: Any, path: str) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path or 'the state'} cannot be saved: it is a {kind}",
        cause="a checkpoint is read without running code, so that it cannot hold objects of this type",
        next_step=_NEXT,
    )
