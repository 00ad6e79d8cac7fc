"""`warm` fetches a whole dataset, and ends soon when somebody interrupts it."""

from __future__ import annotations

import _thread
from collections.abc import Iterator
from pathlib import Path

import pytest
from remotes import Answer, RemoteServer, write_tars

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.fill.disk_filler import THREADS
from topkube.data.fill.warm import warm
from topkube.data.opening import open_cache
from topkube.data.remote.retry import Patience
from topkube.errors import StoreError
from topkube.settings import Settings

SHARDS = 40


@pytest.fixture
def cache(remote: RemoteServer, tmp_path: Path) -> Iterator[ShardCache]:
    write_tars(remote.folder, [2] * SHARDS)
    settings = Settings(cache_directory=str(tmp_path / "cache"), cache_memory_directory=str(tmp_path / "shm"))
    opened = open_cache(remote.uri, settings, RankPlace(), patience=Patience(retries=0))
    yield opened
    opened.close()


def test_after_an_interruption_no_shard_is_begun(remote: RemoteServer, cache: ShardCache) -> None:
    fetched: list[int] = []

    def interrupt(size: int) -> None:
        fetched.append(size)
        if len(fetched) == 1:
            _thread.interrupt_main()

    def wait(name: str, answer: Answer) -> None:
        remote.released.wait(0.1)

    remote.alter = wait
    with pytest.raises(KeyboardInterrupt):
        warm(cache, progress=interrupt)
    assert len(fetched) <= 4 * THREADS


def test_an_error_of_a_shard_is_raised_after_the_others_were_fetched(remote: RemoteServer, cache: ShardCache) -> None:
    remote.faults["003.tar"] = ["404"]
    with pytest.raises(StoreError, match=r"003\.tar does not exist"):
        warm(cache)
    assert sum(cache.has(number) for number in range(SHARDS)) == SHARDS - 1
    assert warm(cache).is_complete
