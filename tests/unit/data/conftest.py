"""A remote server, and datasets with a cache in the folder of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openers import Opener
from remotes import RemoteServer


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
