"""Functions that tests send: a module of the user's own folder."""

from __future__ import annotations

import enum
import math
import os.path as paths
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

RATE, WORDS = 0.5, ("a", "b")
BEST, WORST, UNKNOWN, ZERO, LARGE = math.inf, -math.inf, math.nan, -0.0, -(7**6000)
PLANE, SINGLE, FOLDER, ARRAY = complex(-0.0, math.inf), np.float32(2), Path("a"), np.ones(2)
STATE, KIND, LIMITS = enum.Enum("STATE", "on").on, np.dtype("f4"), {"loss": math.inf}  # type: ignore[attr-defined]


class Configuration(dict[str, Any]):
    """A mapping whose entries are attributes too; others are None."""

    __getattr__ = dict.get


CONFIGURATION = Configuration(rate=0.5)


def helper() -> str:
    return "helped"


def stands_alone(epochs: int, rate: float = RATE) -> None:
    import json

    def inner() -> float:
        return math.sqrt(rate)

    print(json.dumps([epochs, inner(), paths.basename("a/b"), list(OrderedDict(c=1)), np.ones(1).tolist(), len("ab")]))


if True:

    def has_a_text_of_lines() -> None:
        text = """
        indented
          more
    """
        print(repr(text))


def uses_helper() -> None:
    print(helper())


def uses_tuple() -> None:
    print(WORDS)


def uses_numbers(limit: float = BEST, *, floor: float = WORST) -> None:
    print(limit, floor, BEST, WORST, UNKNOWN, ZERO, LARGE == -(7**6000), type(BEST).__name__)


def uses_complex() -> None:
    print(PLANE)


def uses_scalar() -> None:
    print(SINGLE)


def uses_path() -> None:
    print(FOLDER)


def uses_array() -> None:
    print(ARRAY)


def uses_member() -> None:
    print(STATE)


def uses_dtype() -> None:
    print(KIND)


def uses_dict() -> None:
    print(LIMITS)


def uses_configuration() -> None:
    print(CONFIGURATION)


def uses_nothing_known() -> None:
    print(absent_name)  # type: ignore[name-defined]  # noqa: F821


def counts_down(number: int) -> None:
    if number:
        counts_down(number - 1)
    print(number)


def build_closure(value: int) -> Any:
    def train() -> None:
        print(value)

    return train


def decorated(function: Any) -> Any:
    return function


@decorated
def with_decorator() -> None:
    pass


async def coroutine() -> None:
    pass


class Model:
    def train(self) -> None:
        pass


nameless = lambda: None  # noqa: E731
