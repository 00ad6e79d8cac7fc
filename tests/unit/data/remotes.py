"""A real HTTP server on loopback that can misbehave, and datasets to serve."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import tarfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt


@dataclass
class Answer:
    """A response to a GET of a file, before it is sent: bytes `start` to `stop` of `size`."""

    status: HTTPStatus
    data: bytes
    headers: dict[str, str]
    start: int
    stop: int
    size: int


class RemoteServer:
    """Serves `folder`. `faults` maps a path to the faults of its next requests: truncate, stall, drip, 503, 404."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.requests: Counter[str] = Counter()
        self.sent_bytes = 0
        self.faults: dict[str, list[str]] = {}
        self.json_index = False
        """Send index pages like nginx with `autoindex_format json`, instead of links."""
        self.etags = "strong"
        """strong, weak, or none."""
        self.times = True
        """True if the server sends Last-Modified."""
        self.conditions = self.ranges = True
        """True if the server supports If-Match and If-Unmodified-Since, and Range."""
        self.page: Callable[[str], bytes | None] | None = None
        """A function that returns the index page of a path, instead of the page of the folder."""
        self.alter: Callable[[str, Answer], None] | None = None
        """A function that changes the responses to GETs of files."""
        self.released = threading.Event()
        """Set when the server closes: responses that stall or drip then end."""
        self._connections = set[socket.socket]()
        remote = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                remote._answer(self, body=False)

            def do_GET(self) -> None:
                remote._answer(self, body=True)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = False  # server_close waits for the threads, so that none runs during later tests

            def process_request(self, request: Any, client_address: Any) -> None:
                remote._connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                remote._connections.discard(request)
                super().shutdown_request(request)

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", port), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        name = unquote(urlsplit(request.path).path).lstrip("/")
        path = self.folder / name
        fault = self.faults[name].pop(0) if body and self.faults.get(name) else ""
        if self.page is not None and (page := self.page(name)) is not None:
            self.requests[name] += 1
            kind = "application/json" if page.startswith(b"[") else "text/html"
            return self._send(request, HTTPStatus.OK, page, {"Content-Type": kind}, body)
        if path.is_dir():
            if self.json_index:
                return self._send(
                    request, HTTPStatus.OK, _build_json_index(path), {"Content-Type": "application/json"}, body
                )
            names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
            page = "".join(f'<a href="{entry}">{entry}</a>\n' for entry in ["../", *names]).encode()
            return self._send(request, HTTPStatus.OK, page, {"Content-Type": "text/html"}, body, fault)
        if not path.is_file() or fault == "404":
            return self._send(request, HTTPStatus.NOT_FOUND, b"", {}, body)
        if fault == "503":
            return self._send(request, HTTPStatus.SERVICE_UNAVAILABLE, b"", {}, body)
        stat, data = path.stat(), path.read_bytes()
        etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        modified = formatdate(stat.st_mtime, usegmt=True)
        listed_etag = request.headers.get("If-Match", etag)
        listed_time = parsedate_to_datetime(request.headers.get("If-Unmodified-Since", modified))
        has_changed = listed_etag != etag or listed_time < parsedate_to_datetime(modified)
        if has_changed and self.conditions:
            return self._send(request, HTTPStatus.PRECONDITION_FAILED, b"", {}, body)
        headers = {"ETag": etag if self.etags == "strong" else f"W/{etag}", "Last-Modified": modified}
        if self.etags == "none":
            del headers["ETag"]
        if not self.times:
            del headers["Last-Modified"]
        answer = Answer(HTTPStatus.OK, data, headers, 0, len(data), len(data))
        requested_range = request.headers.get("Range")
        if requested_range and self.ranges:
            first, _, last = requested_range.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            answer = Answer(HTTPStatus.PARTIAL_CONTENT, data[start:stop], headers, start, stop, len(data))
        if body:
            self.requests[name] += 1
            if self.alter is not None:
                self.alter(name, answer)
        return self._send(request, answer.status, answer.data, answer.headers, body, fault)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: HTTPStatus,
        data: bytes,
        headers: dict[str, str],
        body: bool,
        fault: str = "",
    ) -> None:
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if not body:
            return
        if fault in ("truncate", "stall"):
            data = data[: len(data) // 2]
        if fault == "drip":
            for at in range(len(data)):
                request.wfile.write(data[at : at + 1])
                if self.released.wait(0.05):
                    break
        else:
            request.wfile.write(data)
        self.sent_bytes += len(data)
        if fault == "stall":
            request.wfile.flush()
            self.released.wait(30)
        if fault:
            request.close_connection = True

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        for connection in list(self._connections):  # clients keep connections for their next request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


def _build_json_index(folder: Path) -> bytes:
    entries: list[dict[str, object]] = []
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        entry: dict[str, object] = {"name": path.name, "mtime": formatdate(stat.st_mtime, usegmt=True)}
        entries.append(
            {**entry, "type": "directory"} if path.is_dir() else {**entry, "type": "file", "size": stat.st_size}
        )
    return json.dumps(entries).encode()


def write_files(folder: Path, count: int, size: int = 3072, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Write files of random bytes to two folders. Row i of the result has the bytes of file i of the listing."""
    data = np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = "a" if number < count // 2 else "b"
        (folder / name / f"{number:05}.bin").write_bytes(data[number].tobytes())
    return data


def write_tars(folder: Path, shards: list[int], size: int = 3072, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Write WebDataset shards; shards[i] is the number of samples in shard i. A sample has two fields: NUMBER.bin with
    random bytes, and NUMBER.cls with the number as text."""
    data = np.random.default_rng(seed).integers(0, 256, (sum(shards), size), np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, samples in enumerate(shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for _ in range(samples):
                add_member(tar, f"{number:06}.bin", data[number].tobytes())
                add_member(tar, f"{number:06}.cls", str(number).encode())
                number += 1
    return data


def add_member(tar: tarfile.TarFile, name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type = len(data), kind
    tar.addfile(member, io.BytesIO(data))
