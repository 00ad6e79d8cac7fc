"""Answers of a simulated API server, and kubeconfigs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Answer = tuple[int, bytes, dict[str, str]]
Answers = Callable[[str, str], Answer]


def build_status(code: int, message: str, **details: Any) -> Answer:
    body = {"kind": "Status", "code": code, "message": message, "details": details}
    return code, json.dumps(body).encode(), {}


def write_kubeconfig(path: Path, address: str, **context: str) -> Path:
    data = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", **context}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(data))
    return path
