"""How TopKube was installed, so that messages name the command that fits."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit


def build_install_command(extra: str) -> str:
    """Return the command that adds an extra of pyproject.toml: from the checkout, folder or wheel that TopKube was
    installed from, if it still exists; otherwise from the package index."""
    return _build_pip_command(extra, _read_origin())


def build_reinstall_command() -> str:
    """Return the command that installs TopKube again from where it came, without its dependencies."""
    return _build_pip_command("", _read_origin()).replace("pip install", "pip install --force-reinstall --no-deps", 1)


def _read_origin() -> str | None:
    try:
        return importlib.metadata.distribution("topkube").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_pip_command(extra: str, stored: str | None) -> str:
    """Return the command; an empty `extra` stands for none. `stored` is the file direct_url.json of the installation,
    which pip writes if the package did not come from an index (packaging.python.org, "Recording the Direct URL
    Origin")."""
    suffix = f"[{extra}]" if extra else ""
    try:
        origin = json.loads(stored or "{}")
        address = urlsplit(origin.get("url", ""))
        path = unquote(address.path) if address.scheme == "file" else ""
        editable = bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError, TypeError):
        path, editable = "", False
    if not path or not Path(path).exists():
        return f"pip install 'topkube{suffix}'"
    return f"pip install {'-e ' if editable else ''}'{path}{suffix}'"
