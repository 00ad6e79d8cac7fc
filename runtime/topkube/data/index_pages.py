"""What a web server's index page of a folder lists."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit


def json_index(page: bytes) -> list[dict[str, Any]] | None:
    """Entries with name, type, size and mtime as nginx writes them (autoindex_format json); None for another page."""
    if not page.lstrip().startswith(b"["):
        return None
    try:
        entries = json.loads(page)
        return [e for e in entries if e["type"] == "directory" or (e["size"] >= 0 and e["mtime"])]
    except (ValueError, TypeError, KeyError):
        return None


def links(page: bytes, base: str) -> list[str]:
    """Names below this page that its links lead to."""
    found = []
    for raw in re.findall(rb"""<a\s[^>]*?href\s*=\s*["']([^"'?#]+)["']""", page, re.IGNORECASE):
        link = urlsplit(raw.decode("utf-8", "replace")).path
        if link.startswith(base):
            link = link[len(base) :]
        name = unquote(link)
        if name and not link.startswith(("/", "../", "./")) and "/" not in name[:-1]:
            found.append(name)
    return sorted(set(found))
