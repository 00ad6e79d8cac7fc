"""Functions that tests send: a module of the user's own folder."""

from __future__ import annotations

import math
import os.path as paths
from collections import OrderedDict
from typing import Any

import numpy as np

RATE, WORDS = 0.5, ("a", "b")


def helper() -> str:
    return "helped"


def stands_alone(epochs: int, rate: float = RATE) -> None:
    import json

    def inner() -> float:
        return math.sqrt(rate)

    print(json.dumps([epochs, inner(), paths.basename("a/b"), list(OrderedDict(c=1)), np.ones(1).tolist(), len("ab")]))


def uses_helper() -> None:
    print(helper())


def uses_tuple() -> None:
    print(WORDS)


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
