"""The names in the index pages of web servers, as these servers write them."""

from __future__ import annotations

import time

import pytest

from topkube.data.remote.http.index_pages import find_links

ROWS = [
    ("nginx", '<a href="../">../</a>\n<a href="a%20b.bin">a b.bin</a>', ["a b.bin"]),
    ("Apache", '<a href="?C=N;O=D">Name</a> <a href="/data/">Parent</a> <a href="x%25.bin">x%.bin</a>', ["x%.bin"]),
    ("Apache, an ampersand", '<a href="a&amp;b.bin">a&amp;b.bin</a>', ["a&b.bin"]),
    ("Apache, a colon", '<a href="./12:30.bin">12:30.bin</a> <a href="b.bin">b.bin</a>', ["12:30.bin", "b.bin"]),
    ("Go", '<a href="./12:30.bin">12:30.bin</a>\n<a href="a&#39;b.bin">a&#39;b.bin</a>', ["12:30.bin", "a'b.bin"]),
    ("Caddy", '<a href="..">Up</a> <a href="./?sort=size">Size</a> <a href="./sub/"><b>sub</b></a>', ["sub/"]),
    ("Caddy, a file", '<a href="./a.bin"><span class="name">a.bin</span></a>', ["a.bin"]),
    (
        "Python",
        '<li><a href="12%3A30.bin">12:30.bin</a></li><li><a href="%C3%A9.bin">é.bin</a></li>',
        ["12:30.bin", "é.bin"],
    ),
    (
        "whole addresses",
        '<a href="http://host/data/sets/a.bin">a</a> <a href="/data/sets/b.bin">b</a>',
        ["a.bin", "b.bin"],
    ),
    ("a footer", '<a href="mailto:admin@host">Help</a> <a href="javascript:top()">Top</a> <a href="#top">x</a>', []),
    ("an invalid address", '<a href="http://[x/">x</a> <a href=\'a"b.bin\'>x</a>', ['a"b.bin']),
]


@pytest.mark.parametrize(("server", "page", "names"), ROWS, ids=[row[0] for row in ROWS])
def test_all_files_of_a_page_are_found_and_nothing_else(server: str, page: str, names: list[str]) -> None:
    assert find_links(page.encode(), "/data/sets/") == names


def test_a_hostile_page_takes_no_time() -> None:
    begun = time.monotonic()
    assert find_links(b"<a " * 1_000_000, "/") == []
    assert time.monotonic() - begun < 20
