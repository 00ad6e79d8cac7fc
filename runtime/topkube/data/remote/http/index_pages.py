"""The index pages of a web server, and the objects that they list."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from topkube.data.remote.listing import RemoteObject, check_path
from topkube.errors import DatasetError

_DEPTH = 32
"""The most levels of folders."""
_FOLDERS = 100_000
"""The most folders."""
_HREF = re.compile(rb"""<a\s[^<>]*?href\s*=\s*("[^"]*"|'[^']*')""", re.IGNORECASE)
"""The address in a link, with its quotes."""


def walk_index_pages(
    read: Callable[[str], bytes], base: str, uri: str, hidden: Collection[str]
) -> tuple[list[RemoteObject], list[str]]:
    """Return the objects in the folder `base` (an address that ends with a slash) and in the folders below it, and the
    paths whose sizes the pages do not show.

    `read` returns the page of an address. The objects `hidden` at the top are not part of the dataset. Every folder is
    read once. Raises DatasetError for a path that leaves the dataset and for an endless tree of folders.
    """
    objects: list[RemoteObject] = []
    unsized: list[str] = []
    folders, visited = [""], {""}

    def add_folder(path: str) -> None:
        if path.count("/") > _DEPTH or len(visited) >= _FOLDERS:
            raise DatasetError(
                f"{uri} has an endless tree of folders: {path[:100]!r}",
                cause=f"a link leads back to its own folder; at most {_DEPTH} levels and {_FOLDERS:,} folders are read",
                next_step="write a manifest for the dataset (`topkube cache manifest`)",
            )
        if path not in visited:
            visited.add(path)
            folders.append(path)

    while folders:
        folder = folders.pop()
        address = base + quote(folder)
        page = read(address)
        entries = parse_json_index(page)
        names = find_links(page, urlsplit(address).path) if entries is None else []
        for entry in entries or ():
            path = folder + entry["name"].rstrip("/")
            check_path(path, uri)
            if entry["type"] == "directory":
                add_folder(path + "/")
            elif path not in hidden:
                objects.append(RemoteObject(path, int(entry["size"]), str(entry["mtime"])))
        for name in names:
            path = folder + name
            check_path(path.rstrip("/"), uri)
            if path.endswith("/"):
                add_folder(path)
            elif path not in hidden:
                unsized.append(path)
    return objects, unsized


def parse_json_index(page: bytes) -> list[dict[str, Any]] | None:
    """Return the entries of a JSON page of nginx (autoindex_format json), with name, type, size and mtime; None for any
    other page."""
    if not page.lstrip().startswith(b"["):
        return None
    try:
        entries = json.loads(page)
        # `+ ""` raises TypeError unless the name is text
        return [
            entry
            for entry in entries
            if entry["name"] + "" and (entry["type"] == "directory" or (entry["size"] >= 0 and entry["mtime"]))
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def find_links(page: bytes, base: str) -> list[str]:
    """Return the names in the links of a page, of files and folders directly below the page. `base`: the path of the
    page. Links with a query sort the page, and are left out."""
    names = set()
    for quoted in _HREF.findall(page):
        try:
            parts = urlsplit(html.unescape(quoted[1:-1].decode("utf-8", "replace")))
        except ValueError:  # an invalid host
            continue
        if parts.query or parts.scheme not in ("", "http", "https"):
            continue
        link = parts.path
        if link.startswith(base):
            link = link[len(base) :]
        link = link.removeprefix("./")  # servers write it before names, always or if the name has a colon
        name = unquote(link)
        if name and link != ".." and not link.startswith(("/", "../")) and "/" not in name[:-1]:
            names.add(name)
    return sorted(names)
