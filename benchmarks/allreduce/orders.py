"""The orders that a rank of a benchmark receives over a socket. Orders and answers are lines of JSON."""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Callable
from typing import Any


def follow(path: str, rank: int, execute: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Execute orders until the other side closes the socket. If an order fails, the answer is the traceback."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw")

        def send(answer: dict[str, Any]) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        send({"rank": rank})
        for line in stream:
            try:
                answer = execute(json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
            send(answer)
