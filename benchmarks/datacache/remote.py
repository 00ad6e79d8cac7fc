"""The remote store: nginx from Debian's packages, in its own node behind a shaped link."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

from allreduce.network import NetworkError, Node

_CONFIGURATION = """
daemon off;
user root;
worker_processes 1;
pid {home}/pid;
error_log {home}/error.log;
events {{ worker_connections 1024; }}
http {{
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  types {{ }}
  sendfile on;
  tcp_nopush on;
  keepalive_requests 100000000;
  autoindex on;
  autoindex_format json;
  log_format bytes '$body_bytes_sent $uri';
  access_log {home}/bytes bytes;
  server {{ listen {address}:80; root {root}; }}
}}
"""


def install_nginx() -> str | None:
    """Install nginx if it is missing. Return why it cannot be installed, else None."""
    if shutil.which("nginx"):
        return None
    command = "apt-get install -y --no-install-recommends nginx-light"
    if shutil.which("apt-get") is None:
        return "nginx not found; install it with this system's package manager"
    print("nginx is missing: installing it (nginx-light)", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # the package must not start nginx
    for step in ("apt-get update -qq", command):
        done = subprocess.run(step.split(), capture_output=True, text=True, env=quiet)
        if done.returncode:
            return f"`{step}` failed: {done.stderr.strip()[-300:]}; install nginx by hand"
    return None


class Remote:
    """nginx that serves `root` in `node`. `count_sent_bytes` counts the bytes of all bodies, without headers."""

    def __init__(self, node: Node, root: Path, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.uri = f"http://{node.address}"
        self._log = home / "bytes"
        path = home / "nginx.conf"
        path.write_text(_CONFIGURATION.format(home=home, root=root, address=node.address))
        self._process = subprocess.Popen(
            node.wrap_command(["nginx", "-p", str(home), "-e", str(home / "error.log"), "-c", str(path)]),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 10
        while not (home / "pid").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                assert self._process.stderr is not None
                raise NetworkError(f"nginx did not start: {self._process.stderr.read().strip()}")
            time.sleep(0.02)

    def count_sent_bytes(self) -> int:
        """Return the bytes of all bodies so far, from the log of nginx."""
        return sum(int(line.partition(" ")[0]) for line in self._log.read_text().splitlines())

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(10)

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
