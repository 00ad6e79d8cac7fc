"""Several ranks in one process, each with its `Links`."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.links import Links

LARGE = 32 << 20
"""More bytes than the buffers of a connection hold."""


def connect(ranks: int, lanes: int = 1) -> list[Links]:
    """Return the links of all ranks; their connections are made when they are needed."""
    listeners = [[socket.create_server(("127.0.0.1", 0)) for _ in range(lanes)] for _ in range(ranks)]
    tokens = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(ranks)]
    ports = [[listener.getsockname()[1] for listener in own] for own in listeners]
    made = []
    for rank, own in enumerate(listeners):
        tcp = _kernels.TcpLinks(rank, ranks, [listener.detach() for listener in own], *tokens[rank])
        for peer in range(ranks):
            assert peer == rank or tcp.set_peer(peer, "127.0.0.1", ports[peer], *tokens[peer])
        made.append(Links(tcp, rank, ranks))
    return made


def advance_until(all_links: Sequence[Links], ready: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, [one.list_broken() for one in all_links]
        for one in all_links:
            one.advance()


def fill(size: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)
