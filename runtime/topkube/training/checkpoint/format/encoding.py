"""Typed encoding of state: values of a `state_dict()` become tensors and plain containers that
`torch.load(weights_only=True)` accepts, and are decoded to equal values of the same types.

None, bool, int, float, str, lists, tuples, dicts and tensors stay as they are, so that a file can be read without
TopKube. Every other type becomes a dict whose key "__topkube__" names the type. A value without an
encoding raises an error with the path of its key, for example `more['tracker']['started']`.
"""

from __future__ import annotations

import datetime
import pathlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from topkube.errors import CheckpointError

CopyTensor = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the tensor to be saved for a tensor of the state and the path of its key."""

_TAG = "__topkube__"
_DEEPEST = 100
"""Levels of nesting: pickle, which `torch.save` uses, runs into Python's recursion limit at a few hundred."""
_PLAIN = (type(None), bool, float, str)
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Undecodable(Exception):
    """A file holds a value that `encode` does not write."""


def encode(state: Any, copy: CopyTensor = lambda tensor, path: tensor.detach()) -> Any:
    """Return `state` encoded. Containers are new objects, tensors are the results of `copy`, and arrays are copied.
    Raises CheckpointError, which names the path of the key, for a value that has no encoding."""
    return _Encoder(copy).encode(state, "")


def decode(value: Any) -> Any:
    """Return the state that `encode` has encoded as `value`. Raises Undecodable."""
    try:
        return _decode(value)
    except Undecodable:
        raise
    except Exception as error:
        raise Undecodable(f"{type(error).__name__}: {error}") from error


class _Encoder:
    """One traversal of a state. `_open` holds the ids of the containers around the value: a container inside itself
    has no end."""

    def __init__(self, copy: CopyTensor) -> None:
        self._copy = copy
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN or (kind is int and -(2**63) <= value < 2**63):
            return value
        if kind in (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter, deque):
            return self._container(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic | np.ndarray):
            return _array(value, path)
        if kind is datetime.datetime:
            numbers = (value.year, value.month, value.day, *_clock(value))
            return self._tagged("datetime", path, numbers=numbers, fold=value.fold, zone=value.tzinfo)
        if kind is datetime.time:
            return self._tagged("time", path, numbers=_clock(value), fold=value.fold, zone=value.tzinfo)
        if kind is datetime.timezone:
            return self._tagged("timezone", path, arguments=value.__getinitargs__())
        encoding = _simple(value)
        if encoding is None:
            _refuse(value, path)
        return encoding

    def _tagged(self, tag: str, path: str, **fields: Any) -> dict[str, Any]:
        return {_TAG: tag, **{name: self.encode(value, path) for name, value in fields.items()}}

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{path or 'the state'} cannot be saved: it contains itself", next_step=_NEXT)
        if len(self._open) >= _DEEPEST:
            raise CheckpointError(
                f"{path} cannot be saved: it lies more than {_DEEPEST} levels deep",
                cause="nested containers that grow from step to step",
                next_step="save a flat list or dict instead",
            )
        self._open.add(id(value))
        try:
            return self._mapping(value, path) if isinstance(value, dict) else self._sequence(value, path)
        finally:
            self._open.discard(id(value))

    def _sequence(self, value: Any, path: str) -> Any:
        items = [self.encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
        kind = type(value)
        if kind is list:
            return items
        if kind is tuple:
            return tuple(items)
        encoded = {_TAG: kind.__name__, "items": items}
        return {**encoded, "maxlen": value.maxlen} if kind is deque else encoded

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        kind = type(value)
        plain = _TAG not in value and all(type(key) in _PLAIN or _is_short_int(key) for key in value)
        if kind in (dict, OrderedDict) and plain:
            encoded = kind((key, self.encode(item, _below(path, key))) for key, item in value.items())
        else:
            items = [
                [self.encode(key, f"{path} (a key)"), self.encode(item, _below(path, key))]
                for key, item in value.items()
            ]
            encoded = {_TAG: kind.__name__, "items": items}
        if isinstance(value, OrderedDict):  # torch keeps the versions of modules in an attribute of a state dict
            attributes = {name: self.encode(item, f"{path}.{name}") for name, item in vars(value).items()}
            if type(encoded) is OrderedDict:
                vars(encoded).update(attributes)
            else:
                encoded["attributes"] = attributes
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise CheckpointError(
                    f"{path} cannot be saved: it is a defaultdict of {factory!r}",
                    cause="only the factories " + ", ".join(_FACTORIES) + " can be rebuilt by a safe load",
                    next_step="save a plain dict with the same items instead",
                )
            encoded["factory"] = None if factory is None else getattr(factory, "__name__", "")
        return encoded

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout in _LAYOUTS
        if not plain or value.is_nested or value.is_quantized or value.device.type == "meta":
            _refuse(value, path)
        copied = self._copy(value, path)
        parameter = isinstance(value, torch.nn.Parameter)
        if not parameter and not value.requires_grad:
            return copied
        return {_TAG: "tensor", "values": copied, "parameter": parameter, "requires_grad": value.requires_grad}


def _is_short_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _below(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if path else str(key)


def _clock(value: datetime.datetime | datetime.time) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def _bytes(data: bytes | bytearray | npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _array(value: np.generic | npt.NDArray[Any], path: str) -> dict[str, Any]:
    """Return the encoding of a NumPy scalar or array: its dtype, shape and bytes."""
    known = isinstance(value, np.generic) or type(value) is np.ndarray
    values = np.array(value, order="C")
    dtype = values.dtype
    if not known or dtype.hasobject or not dtype.itemsize or np.dtype(dtype.str) != dtype:
        _refuse(value, path)
    tag = "ndarray" if isinstance(value, np.ndarray) else "numpy scalar"
    return {_TAG: tag, "dtype": dtype.str, "shape": values.shape, "values": _bytes(values.tobytes())}


def _simple(value: Any) -> dict[str, Any] | None:
    """Return the encoding of a value that contains no other values; None if there is none."""
    kind = type(value)
    if kind is int:
        return {_TAG: "int", "digits": hex(value)}
    if kind is complex:
        return {_TAG: "complex", "parts": (value.real, value.imag)}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "values": _bytes(value)}
    if kind is range:
        return {_TAG: "range", "ends": (value.start, value.stop, value.step)}
    if _PATHS.get(kind.__name__) is kind:
        return {_TAG: kind.__name__, "path": str(value)}
    if kind is datetime.date:
        return {_TAG: "date", "numbers": (value.year, value.month, value.day)}
    if kind is datetime.timedelta:
        return {_TAG: "timedelta", "numbers": (value.days, value.seconds, value.microseconds)}
    if kind is zoneinfo.ZoneInfo and value.key is not None:
        return {_TAG: "ZoneInfo", "key": value.key}
    if kind is torch.Size:
        return {_TAG: "Size", "items": tuple(value)}
    if kind is torch.dtype:
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {_TAG: "device", "name": str(value)}
    return None


_NEXT = "return numbers, strings, tensors, arrays, dates, paths and plain containers of them from state_dict()"


def _refuse(value: Any, path: str) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path or 'the state'} cannot be saved: it is a {kind}",
        cause="a checkpoint is read without running code, so that it cannot hold objects of this type",
        next_step=_NEXT,
    )


# ---- decoding


def _decode(value: Any) -> Any:
    if isinstance(value, OrderedDict):
        decoded: Any = OrderedDict((key, _decode(item)) for key, item in value.items())
        vars(decoded).update({name: _decode(item) for name, item in vars(value).items()})
        return decoded
    if isinstance(value, dict):
        if _TAG in value:
            return _rebuild(value)
        return {key: _decode(item) for key, item in value.items()}
    if type(value) is list:
        return [_decode(item) for item in value]
    if type(value) is tuple:
        return tuple(_decode(item) for item in value)
    return value


def _items(value: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    return ((_decode(key), _decode(item)) for key, item in value["items"])


def _ordered_dict(value: dict[str, Any]) -> OrderedDict[Any, Any]:
    rebuilt = OrderedDict(_items(value))
    vars(rebuilt).update(_decode(value["attributes"]))
    return rebuilt


def _default(value: dict[str, Any]) -> defaultdict[Any, Any]:
    name = value["factory"]
    return defaultdict(None if name is None else _FACTORIES[name], _items(value))


def _counter(value: dict[str, Any]) -> Counter[Any]:
    rebuilt: Counter[Any] = Counter()
    for key, count in _items(value):
        rebuilt[key] = count
    return rebuilt


def _tensor(value: dict[str, Any]) -> torch.Tensor:
    values: torch.Tensor = value["values"]
    if value["parameter"]:
        return torch.nn.Parameter(values, value["requires_grad"])
    return values.requires_grad_(value["requires_grad"])


def _ndarray(value: dict[str, Any]) -> npt.NDArray[Any]:
    dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
    if dtype.hasobject:
        raise Undecodable(f"an array of {dtype}")
    rebuilt: npt.NDArray[Any] = np.zeros(shape, dtype)
    if rebuilt.nbytes:
        rebuilt = np.frombuffer(value["values"].numpy().tobytes(), dtype).reshape(shape).copy()
    return rebuilt


def _time(value: dict[str, Any]) -> datetime.time:
    hour, minute, second, microsecond = value["numbers"]
    return datetime.time(hour, minute, second, microsecond, _decode(value["zone"]), fold=value["fold"])


def _datetime(value: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime(*value["numbers"]).replace(tzinfo=_decode(value["zone"]), fold=value["fold"])


def _dtype(value: dict[str, Any]) -> torch.dtype:
    rebuilt = getattr(torch, value["name"])
    if not isinstance(rebuilt, torch.dtype):
        raise Undecodable(f"torch.{value['name']} is not a dtype")
    return rebuilt


_REBUILD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda value: int(value["digits"], 16),
    "complex": lambda value: complex(*value["parts"]),
    "bytes": lambda value: value["values"].numpy().tobytes(),
    "bytearray": lambda value: bytearray(value["values"].numpy().tobytes()),
    "range": lambda value: range(*value["ends"]),
    "set": lambda value: set(_decode(value["items"])),
    "frozenset": lambda value: frozenset(_decode(value["items"])),
    "deque": lambda value: deque(_decode(value["items"]), value["maxlen"]),
    "dict": lambda value: dict(_items(value)),
    "OrderedDict": _ordered_dict,
    "defaultdict": _default,
    "Counter": _counter,
    "tensor": _tensor,
    "ndarray": _ndarray,
    "numpy scalar": lambda value: _ndarray(value)[()],
    "date": lambda value: datetime.date(*value["numbers"]),
    "time": _time,
    "datetime": _datetime,
    "timedelta": lambda value: datetime.timedelta(*value["numbers"]),
    "timezone": lambda value: datetime.timezone(*_decode(value["arguments"])),
    "ZoneInfo": lambda value: zoneinfo.ZoneInfo(value["key"]),
    "Size": lambda value: torch.Size(value["items"]),
    "dtype": _dtype,
    "device": lambda value: torch.device(value["name"]),
    **{name: lambda value, kind=kind: kind(value["path"]) for name, kind in _PATHS.items()},  # type: ignore[misc]
}


def _rebuild(value: dict[str, Any]) -> Any:
    tag = value[_TAG]
    if not isinstance(tag, str) or tag not in _REBUILD:
        raise Undecodable(f"a value of the type {tag!r}, which this version does not write")
    return _REBUILD[tag](value)
