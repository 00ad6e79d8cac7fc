"""One end of the link probe: a plain TCP stream. It runs inside a node and needs only Python.

stream.py listen|connect ADDRESS SIZES        the listener prints the seconds for each size
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

PORT = 29400
REPEATS = 5


def _exchange(stream: socket.socket, size: int) -> float:
    message, buffer = bytes(size), memoryview(bytearray(max(size, 1)))
    stream.sendall(b"!")
    _receive(stream, buffer[:1])
    start = time.perf_counter()
    sender = threading.Thread(target=stream.sendall, args=(message,))
    sender.start()
    _receive(stream, buffer[:size])
    sender.join()
    return time.perf_counter() - start


def _receive(stream: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = stream.recv_into(into[done:])
        if not count:
            raise ConnectionError("the other end of the probe closed")
        done += count


def _open_stream(role: str, address: str) -> socket.socket:
    if role == "listen":
        with socket.create_server((address, PORT)) as server:
            return server.accept()[0]
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:  # the listener has not started yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _main(role: str, address: str, sizes: list[int]) -> None:
    with _open_stream(role, address) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        byte = memoryview(bytearray(1))
        trips = []
        for _ in range(50):
            start = time.perf_counter()
            stream.sendall(b"!")
            _receive(stream, byte)
            trips.append(time.perf_counter() - start)
        seconds = [sorted(_exchange(stream, size) for _ in range(REPEATS))[REPEATS // 2] for size in sizes]
    if role == "listen":
        print(json.dumps({"bytes": sizes, "seconds": seconds, "latency": statistics.median_high(trips)}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3].split(",")])
