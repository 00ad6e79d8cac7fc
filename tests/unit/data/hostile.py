"""A server that changes, cuts and delays responses, and lies about length, range, type and version, by a seed.

Its responses may be wrong in any way that a client can detect. With `lies_in_all` it may also send wrong bytes with
right headers, which only the checksums of a manifest detect.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
from dataclasses import dataclass, field
from urllib.parse import unquote

PAGE = b"<html><body>log in"
_TIMES = [f"Sun, 0{number} Nov 2026 08:49:37 GMT" for number in range(1, 8)]


@dataclass
class HostileServer:
    """Serves objects `o/NUMBER.bin`. Version 0 is listed; other versions have other bytes of the same length."""

    seed: int
    etags: str = "strong"
    lies_in_all: bool = False
    plain: bool = False
    """True if all bodies have a length, and nothing is redirected."""
    objects: int = 24
    requests: int = 0
    hostile: bool = False
    """False while the listing is read: the server is then honest."""
    responses: dict[str, int] = field(default_factory=dict)
    """How often each kind of response was sent."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.sizes = [self._random.choice([0, 1, 699, 700, 701, 1400, 2900]) for _ in range(self.objects)]
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(120)

    def build_bytes(self, number: int, version: int = 0) -> bytes:
        return random.Random(f"{number} {version}").randbytes(self.sizes[number])

    def build_validators(self, number: int, version: int) -> list[str]:
        tag = f'"{number}-{version}"'
        headers = [f"Last-Modified: {_TIMES[version]}"]
        if self.etags != "none":
            headers.append(f"ETag: {tag if self.etags == 'strong' else 'W/' + tag}")
        return headers

    # ---- the server

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = server = self._loop.run_until_complete(
            asyncio.start_server(self._handle_connection, "127.0.0.1", 0)
        )
        self.uri = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()

    def close(self) -> None:
        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(end(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    name.lower(): value for line in head[1:] if line for name, _, value in [line.partition(": ")]
                }
                if not await self._answer(method, unquote(path).strip("/"), headers, writer):
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Return True if the connection can be used for another request."""
        self.requests += 1
        if path in ("", "o"):
            names = [f"{number:03}.bin" for number in range(self.objects)] if path else ["o/"]
            page = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
            return await self._send(writer, method, 200, page, ["Content-Type: text/html"])
        name = path.removeprefix("o/").removesuffix(".bin")
        if not name.isdigit():
            return await self._send(writer, method, 404, b"", [])
        number = int(name)
        kind = self._random.choices(list(_KINDS), list(_KINDS.values()))[0] if self.hostile else "honest"
        if kind == "flipped" and not self.lies_in_all:
            kind = "changed"
        if self.plain and kind.startswith("chunked"):
            kind = "split"
        self.responses[kind] = self.responses.get(kind, 0) + 1
        return await self._respond(kind, method, number, headers, writer)

    async def _respond(
        self, kind: str, method: str, number: int, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> bool:
        """Send a response of this kind (_KINDS). Return True if the connection can be used for another request."""
        random_source = self._random
        version = random_source.randrange(1, 7) if kind in ("changed", "conditional") else 0
        data, header_lines = self.build_bytes(number, version), self.build_validators(number, version)
        size = len(data)
        match = headers.get("if-match")
        if kind == "conditional" and match is not None and match != f'"{number}-{version}"':
            return await self._send(writer, method, 412, b"", header_lines)
        status, start, stop = 200, 0, size
        requested_range = headers.get("range", "").removeprefix("bytes=")
        if requested_range and kind != "whole":
            first, _, last = requested_range.partition("-")
            status, start, stop = 206, int(first), int(last) + 1
            if kind == "elsewhere":  # another range, with the right Content-Range
                start = random_source.randrange(0, size)
                stop = min(size, start + int(last) + 1 - int(first))
            header_lines.append(f"Content-Range: bytes {start}-{stop - 1}/{size}")
        elif kind == "elsewhere":
            status, start, stop = 206, 0, max(1, size // 2)
            header_lines.append(f"Content-Range: bytes 0-{stop - 1}/{size}")
        body = data[start:stop]
        if kind == "nameless":
            header_lines, body = (
                [header for header in header_lines if header.startswith("Content-Range")],
                bytes(len(body)),
            )
        if kind == "rangeless":
            header_lines, status = [header for header in header_lines if not header.startswith("Content-Range")], 206
            body = data[: stop - start]
        if kind == "resized":
            header_lines = [header for header in header_lines if not header.startswith("Content-Range")]
            header_lines.append(f"Content-Range: bytes {start}-{stop - 1}/{size + 1}")
            body, status = bytes(len(body)), 206
        if kind == "junk":
            header_lines = [header for header in header_lines if not header.startswith("Content-Range")]
            header_lines.append(
                random_source.choice(
                    ["Content-Range: bytes x-y/z", "Content-Range: bytes -5-5/5", "Content-Range: lines 1-2/3"]
                )
            )
            body, status = bytes(len(body)), 206
        if kind == "page":
            body = PAGE.ljust(len(body))[: len(body)]
            header_lines.append("Content-Type: text/html")
        if kind == "compressed":
            body = gzip.compress(bytes(len(body)))
            header_lines.append("Content-Encoding: gzip")
        if kind == "status":
            status = random_source.choice([204, 304, 403, 404, 416, 429, 500, 503] + [301] * (not self.plain))
            body = bytes(len(body)) if status >= 400 else b""
            header_lines += ["Location: /o/"] if status == 301 else []
        if kind == "flipped" and body:
            at = random_source.randrange(len(body))
            body = random_source.choice(
                [body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], bytes(len(body)), body[::-1]]
            )
        return await self._send(writer, method, status, body, header_lines, kind)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        status: int,
        body: bytes,
        header_lines: list[str],
        kind: str = "",
    ) -> bool:
        random_source, length, sent, chunked = self._random, len(body), body, False
        if kind == "cut":
            sent = body[: random_source.randrange(0, len(body) + 1)] if body else b""
        elif kind == "short":
            length = random_source.randrange(0, len(body) + 1)
        elif kind == "long":
            sent, length = body + b"more", len(body) + 4
        elif kind in ("chunked", "chunked short", "chunked long"):
            chunked = True
            sent = {"chunked": body, "chunked short": body[:-1], "chunked long": body + b"x"}[kind]
        elif kind == "reset":
            writer.transport.abort()
            return False
        elif kind in ("late", "drip"):
            await asyncio.sleep(random_source.choice([0.001, 0.02] if kind == "late" else [2.5]))
        lines = [f"HTTP/1.1 {status} X", *header_lines]
        lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}")
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        if method != "HEAD" and status not in (204, 304):
            if chunked:
                at = len(sent) // 2
                for part in (sent[:at], sent[at:]):
                    if part:
                        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                writer.write(b"0\r\n\r\n")
            elif kind == "split":  # the body comes in several pieces
                for at in range(0, len(sent), 250):
                    writer.write(sent[at : at + 250])
                    await asyncio.sleep(0)
            else:
                writer.write(sent)
        await writer.drain()
        return kind not in ("cut", "short", "page", "status")


_KINDS: dict[str, float] = {
    "honest": 60,  # the requested bytes of the listed version
    "changed": 6,  # another version, with its own headers
    "conditional": 3,  # another version, or 412 if the request has If-Match
    "whole": 5,  # the whole object, although a range was requested
    "elsewhere": 4,  # another range, with the right Content-Range
    "nameless": 3,  # wrong bytes without a version
    "rangeless": 3,  # 206 without Content-Range, from the first byte on
    "resized": 2,  # wrong bytes with the Content-Range of a larger object
    "junk": 2,  # wrong bytes with an invalid Content-Range
    "page": 3,  # an HTML page
    "compressed": 1,  # wrong bytes in gzip
    "status": 3,  # another status
    "flipped": 5,  # wrong bytes with the right headers; only with `lies_in_all`
    "cut": 3,  # a body that ends too early
    "short": 2,  # a Content-Length that is too small
    "long": 2,  # more bytes than the object has, with their Content-Length
    "chunked": 4,  # the right body in chunks
    "chunked short": 2,  # one byte too few, in chunks
    "chunked long": 2,  # one byte too many, in chunks
    "reset": 2,  # no response: the connection is reset
    "late": 3,  # the right response, some milliseconds late
    "drip": 0.2,  # the right response, after the client's deadline for a stall
}
"""The kinds of responses, each with its weight in the random choice."""
