"""A simulated API server for the tests of the cluster commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cluster_answers import Answers, write_kubeconfig


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[Answers], Path]]:
    """Start a server that answers by (method, path). Return a kubeconfig for it."""
    started: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> Path:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code, body, headers = answers(self.command, self.path)
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PATCH = do_DELETE = do_POST = _answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        started.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{server.server_address[1]}")

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
