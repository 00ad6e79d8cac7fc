"""A rank's side of a benchmark's world: orders come in over a socket, answers go back, a line of JSON each."""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Callable
from typing import Any


def follow(path: str, rank: int, obey: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Carries out orders until the other side hangs up. An order that fails is answered with its traceback."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw")

        def say(answer: dict[str, Any]) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        say({"rank": rank})
        for line in stream:
            try:
                answer = obey(json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
            say(answer)
