"""Tells one deterministic transform from another: samples cached under one are never handed out for the other."""

from __future__ import annotations

import functools
import types
from typing import Any

import xxhash

from topkube.errors import DatasetError


def fingerprint(transform: Any) -> str:
    """32 hexadecimal digits of what the transform does, as far as its code tells; "" for None.

    An object with a `fingerprint` attribute (text) is believed. A function is known by its bytecode, constants,
    defaults and closed-over plain values. Raises DatasetError for others: they must say it themselves.
    """
    if transform is None:
        return ""
    own = getattr(transform, "fingerprint", None)
    parts: list[str] = [own] if isinstance(own, str) else _parts(transform)
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def _parts(value: Any) -> list[str]:
    if isinstance(value, functools.partial):
        return ["partial", *_parts(value.func), *_plain(value.args), *_plain(value.keywords)]
    if isinstance(value, types.MethodType) or not isinstance(value, types.FunctionType):
        raise _unknown(value)
    closed = [cell.cell_contents for cell in value.__closure__ or ()]
    return [
        value.__module__,
        value.__qualname__,
        *_code(value.__code__),
        *_plain(value.__defaults__),
        *_plain(value.__kwdefaults__),
        *(part for inner in closed for part in (_parts(inner) if callable(inner) else _plain(inner))),
    ]


def _code(code: types.CodeType) -> list[str]:
    constants = [
        part
        for constant in code.co_consts
        for part in (_code(constant) if isinstance(constant, types.CodeType) else [repr(constant)])
    ]
    return [code.co_code.hex(), *code.co_names, *constants]


def _plain(value: Any) -> list[str]:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return [repr(value)]
    if isinstance(value, (tuple, list)):
        return ["(", *(part for one in value for part in _plain(one)), ")"]
    if isinstance(value, dict):
        return ["{", *(part for pair in sorted(value.items()) for part in _plain(list(pair))), "}"]
    raise _unknown(value)


def _unknown(value: Any) -> DatasetError:
    return DatasetError(
        f"what decode does cannot be told from a {type(value).__name__}",
        cause="it is an object, or closes over one",
        next_step="pass fingerprint='...' and change that text whenever decode changes",
    )
