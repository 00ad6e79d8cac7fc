"""Rows of Parquet and Arrow files are samples, and come through the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openers import Opener
from remotes import RemoteServer
from torch.utils.data import DataLoader

from topkube.data import DistributedSampler
from topkube.errors import DatasetError


def write_tables(folder: Path, kind: str) -> None:
    """Write 3 files of 100 rows, in groups of 30 rows."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    for number in range(3):
        table = arrow.table(
            {"id": list(range(number * 100, number * 100 + 100)), "text": [f"row {at}" for at in range(100)]}
        )
        if kind == "parquet":
            pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=30)
        else:
            with arrow.ipc.new_file(folder / f"{number}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=30)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_of_tables_are_read_through_the_cache(remote: RemoteServer, open_dataset: Opener, kind: str) -> None:
    write_tables(remote.folder, kind)
    dataset = open_dataset(remote.uri)
    assert len(dataset) == 300
    assert [dataset[at]["id"] for at in (0, 29, 30, 150, 299)] == [0, 29, 30, 150, 299]
    assert dataset[150] == {"id": 150, "text": "row 50"}
    loader: Any = DataLoader(dataset, 32, num_workers=2, shuffle=True)
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(300))
    sampler = DistributedSampler(dataset)
    order = sampler.indices()
    batches = list(dataset.batches(32, sampler, ahead=3))  # threads share the decoded groups
    assert [number for batch in batches for number in batch["id"].tolist()] == order.tolist()


def test_rows_of_a_table_that_is_not_in_the_cache_are_misses(remote: RemoteServer, open_dataset: Opener) -> None:
    write_tables(remote.folder, "parquet")
    dataset = open_dataset(remote.uri, prefetch=False)
    for _ in range(2):
        dataset.__getitems__(range(80))
    dataset.__getitems__(range(80, 100))
    assert dataset.statistics()["disk_requests"] == 180
    assert dataset.statistics()["disk_misses"] == 80


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_table_is_named(remote: RemoteServer, open_dataset: Opener, kind: str) -> None:
    write_tables(remote.folder, kind)
    path = remote.folder / f"1.{kind}"
    data = path.read_bytes()
    for damaged in (data[:-30], b"x" * len(data)):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=rf"1\.{kind}"):
            open_dataset(remote.uri)[150]
