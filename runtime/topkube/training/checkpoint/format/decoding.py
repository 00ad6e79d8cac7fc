"""The decoding of states from their typed encoding (`encoding.py`)."""

from __future__ import annotations

import datetime
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from topkube.training.checkpoint.format.encoding import FACTORIES, PATHS, TAG


class Undecodable(Exception):
    """A file holds a value that `encode` does not write."""


def decode(value: Any) -> Any:
    """Return the state that `encode` has encoded as `value`. Raises Undecodable."""
    try:
        return _decode(value)
    except Undecodable:
        raise
    except Exception as error:
        raise Undecodable(f"{type(error).__name__}: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, OrderedDict):
        decoded: Any = OrderedDict((key, _decode(item)) for key, item in value.items())
        vars(decoded).update({name: _decode(item) for name, item in vars(value).items()})
        return decoded
    if isinstance(value, dict):
        if TAG in value:
            return _rebuild(value)
        return {key: _decode(item) for key, item in value.items()}
    if type(value) is list:
        return [_decode(item) for item in value]
    if type(value) is tuple:
        return tuple(_decode(item) for item in value)
    return value


def _decode_items(value: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    return ((_decode(key), _decode(item)) for key, item in value["items"])


def _rebuild_ordered_dict(value: dict[str, Any]) -> OrderedDict[Any, Any]:
    rebuilt = OrderedDict(_decode_items(value))
    vars(rebuilt).update(_decode(value["attributes"]))
    return rebuilt


def _rebuild_defaultdict(value: dict[str, Any]) -> defaultdict[Any, Any]:
    name = value["factory"]
    return defaultdict(None if name is None else FACTORIES[name], _decode_items(value))


def _rebuild_counter(value: dict[str, Any]) -> Counter[Any]:
    rebuilt: Counter[Any] = Counter()
    for key, count in _decode_items(value):
        rebuilt[key] = count
    return rebuilt


def _rebuild_tensor(value: dict[str, Any]) -> torch.Tensor:
    values: torch.Tensor = value["values"]
    if value["parameter"]:
        return torch.nn.Parameter(values, value["requires_grad"])
    return values.requires_grad_(value["requires_grad"])


def _rebuild_array(value: dict[str, Any]) -> npt.NDArray[Any]:
    dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
    if dtype.hasobject:
        raise Undecodable(f"an array of {dtype}")
    rebuilt: npt.NDArray[Any] = np.zeros(shape, dtype)
    if rebuilt.nbytes:
        rebuilt = np.frombuffer(value["values"].numpy().tobytes(), dtype).reshape(shape).copy()
    return rebuilt


def _rebuild_time(value: dict[str, Any]) -> datetime.time:
    hour, minute, second, microsecond = value["numbers"]
    return datetime.time(hour, minute, second, microsecond, _decode(value["zone"]), fold=value["fold"])


def _rebuild_datetime(value: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime(*value["numbers"]).replace(tzinfo=_decode(value["zone"]), fold=value["fold"])


def _rebuild_dtype(value: dict[str, Any]) -> torch.dtype:
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
    "dict": lambda value: dict(_decode_items(value)),
    "OrderedDict": _rebuild_ordered_dict,
    "defaultdict": _rebuild_defaultdict,
    "Counter": _rebuild_counter,
    "tensor": _rebuild_tensor,
    "ndarray": _rebuild_array,
    "numpy scalar": lambda value: _rebuild_array(value)[()],
    "date": lambda value: datetime.date(*value["numbers"]),
    "time": _rebuild_time,
    "datetime": _rebuild_datetime,
    "timedelta": lambda value: datetime.timedelta(*value["numbers"]),
    "timezone": lambda value: datetime.timezone(*_decode(value["arguments"])),
    "ZoneInfo": lambda value: zoneinfo.ZoneInfo(value["key"]),
    "Size": lambda value: torch.Size(value["items"]),
    "dtype": _rebuild_dtype,
    "device": lambda value: torch.device(value["name"]),
    **{name: lambda value, kind=kind: kind(value["path"]) for name, kind in PATHS.items()},  # type: ignore[misc]
}


def _rebuild(value: dict[str, Any]) -> Any:
    tag = value[TAG]
    if not isinstance(tag, str) or tag not in _REBUILD:
        raise Undecodable(f"a value of the type {tag!r}, which this version does not write")
    return _REBUILD[tag](value)
