"""The operator's HTTP port: /metrics, /healthz (does it get on?) and /readyz (has it seen the cluster once?)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.exposition import CONTENT_TYPE_LATEST

Check = Callable[[], str]
"""Gives what is wrong; empty where nothing is."""


class Probes:
    """Serves on `port` (0: a free one) until `stop`. `metrics` gives what /metrics answers."""

    def __init__(self, port: int, metrics: Callable[[], bytes], healthy: Check, ready: Check, host: str = "") -> None:
        checks = {"/healthz": healthy, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics(), CONTENT_TYPE_LATEST)
                elif path in checks:
                    wrong = checks[path]()
                    self._answer(503 if wrong else 200, (wrong or "ok").encode() + b"\n", "text/plain")
                else:
                    self._answer(404, b"try /metrics, /healthz or /readyz\n", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing: probes come every few seconds."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
