"""A remote server, and datasets with a cache in the folder of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openers import Opener
from remotes import RemoteServer

from topkube.data.remote import transfer_reader


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteServer]:
    (tmp_path / "remote").mkdir()
    server = RemoteServer(tmp_path / "remote")
    yield server
    server.close()


@pytest.fixture
def open_dataset(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path)
    yield opener
    opener.close()


@pytest.fixture
def without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp must not be used unless a test sets this function again."""
    monkeypatch.setattr(transfer_reader, "read_range", None)
