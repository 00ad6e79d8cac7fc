"""The data cache with real ranks: every remote byte is read once per job, all samples are right, and every wait
ends."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "data"))
from remotes import write_files, write_tars

from topkube.data import ArrayOf, DistributedSampler, collate, opening
from topkube.data.dataset import CachedDataset
from topkube.data.fill.disk_filler import DiskFiller
from topkube.data.remote.listing import Listing, Texts
from topkube.errors import DatasetError
from topkube.world import World

SIZE = 3072


@contextmanager
def make_dataset(world: World, shards: list[int] | None = None) -> Iterator[tuple[Path, npt.NDArray[np.uint8]]]:
    """Yield a folder for all ranks that has a dataset in `source`, and the samples of the dataset."""
    home = tempfile.mkdtemp(prefix="topkube-data-") if world.rank == 0 else ""
    folder = Path(world.comm.bcast(home))
    count = sum(shards) if shards else 120
    if world.rank == 0:
        if shards:
            write_tars(folder / "source", shards, SIZE)
        else:
            write_files(folder / "source", count, SIZE)
    world.comm.Barrier()
    data = np.random.default_rng(0).integers(0, 256, (count, SIZE), np.uint8)
    try:
        yield folder, data
    except BaseException:
        traceback.print_exc()  # at once: the others may be in a collective, and never reach the barrier
        raise
    finally:
        world.comm.Barrier()
        if world.rank == 0:
            import shutil

            shutil.rmtree(folder)


def open_dataset(world: World, folder: Path, **options: Any) -> CachedDataset:
    """Open the dataset with a cache per node. `options` are those of CachedDataset."""
    all_options: dict[str, Any] = {
        "cache_directory": folder / f"cache-{world.node}",
        "memory_directory": folder / f"memory-{world.node}",
        "free_bytes": 0,
        "decode": ArrayOf("uint8", (SIZE,), field="bin"),
        "wait_seconds": 20.0,
        **options,
    }
    return CachedDataset(folder / "source", **all_options)


def sum_over_ranks(world: World, dataset: CachedDataset, name: str) -> float:
    return float(world.comm.allreduce(dataset.statistics()[name]))


def case_every_remote_byte_crosses_once_per_job(world: World) -> None:
    with make_dataset(world, [20, 3, 31, 8, 16, 12]) as (folder, data):
        dataset = open_dataset(world, folder)
        dataset.warm()
        world.comm.Barrier()
        size = sum(path.stat().st_size for path in (folder / "source").iterdir())
        assert all(dataset.cache.has(number) for number in range(6))
        np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(90)))), data)
        assert sum_over_ranks(world, dataset, "remote_bytes") == size
        assert sum_over_ranks(world, dataset, "peer_bytes") == size * (world.nodes - 1)
        world.comm.Barrier()
        dataset.close()


def case_nodes_with_one_cache_directory_do_not_wait_for_each_other(world: World) -> None:
    """As with `topkube run --workers 2`, or several pods on a node: the folder and its locks are the same."""
    with make_dataset(world, [20, 3, 31, 8, 16, 12]) as (folder, data):
        start = time.monotonic()
        dataset = open_dataset(world, folder, cache_directory=folder / "cache", memory_directory=folder / "memory")
        dataset.warm()
        np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(90)))), data)
        assert time.monotonic() - start < 20, "a rank has waited for the lock of another"
        size = sum(path.stat().st_size for path in (folder / "source").iterdir())
        world.comm.Barrier()
        assert sum_over_ranks(world, dataset, "remote_bytes") == size
        world.comm.Barrier()
        dataset.close()


def case_a_node_without_a_disk_tier_trains_with_the_others(world: World) -> None:
    """The cache directory of one node cannot be used: its ranks read from the remote and from the other nodes."""
    with make_dataset(world, [20, 3, 31, 8, 16, 12]) as (folder, data):
        directory = folder / f"cache-{world.node}"
        if world.node == 1:
            directory = Path(os.devnull) / "cache"
        for prefetch in (True, False):
            dataset = open_dataset(world, folder, cache_directory=directory, prefetch=prefetch)
            dataset.warm()
            np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(90)))), data)
            assert ("dropped" in repr(dataset)) == (world.node == 1)
            world.comm.Barrier()
            dataset.close()


def case_ranks_do_not_fetch_the_shard_of_a_late_rank(world: World) -> None:
    """The rank that fetches the only shard starts to fill long after the other ranks could start to read."""
    with make_dataset(world) as (folder, data):
        start = DiskFiller.start

        def start_late(self: DiskFiller) -> None:
            if self.share:
                time.sleep(0.5)
            start(self)

        with mock.patch.object(DiskFiller, "start", start_late):
            dataset = open_dataset(world, folder, decode=ArrayOf("uint8", (SIZE,)))
        np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(120)))), data)
        assert sum_over_ranks(world, dataset, "remote_bytes") == data.nbytes
        world.comm.Barrier()
        dataset.close()


def case_the_first_epoch_overlaps_with_filling_and_ranks_share_every_sample(world: World) -> None:
    with make_dataset(world) as (folder, data):
        dataset = open_dataset(
            world, folder, decode=ArrayOf("uint8", (SIZE,)), group_bytes=30_000, memory_limit=1 << 22
        )
        sampler = DistributedSampler(dataset, window=3)
        loader: Any = DataLoader(
            dataset, 16, sampler=sampler, num_workers=1, persistent_workers=True, collate_fn=collate
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected = sampler.indices()
            own_samples = torch.cat(list(loader)).numpy()
            np.testing.assert_array_equal(own_samples, data[expected])
            indices_of_ranks = np.concatenate(world.comm.allgather(expected))
            assert sorted(indices_of_ranks.tolist()) == list(range(120))
        loader = None  # ends its worker, which has the dataset open
        assert sum_over_ranks(world, dataset, "remote_bytes") == data.nbytes
        world.comm.Barrier()
        dataset.close()


def case_a_warm_node_sends_its_shards_to_a_cold_node(world: World) -> None:
    """Node 0 has all shards, so the other nodes do not read all of them from the remote."""
    with make_dataset(world, [10, 10, 10]) as (folder, data):
        if world.rank == 0:
            from topkube.data.base.rank_place import RankPlace
            from topkube.data.fill.warm import warm
            from topkube.data.opening import open_cache
            from topkube.settings import Settings

            cache = open_cache(
                (folder / "source").as_uri(),
                Settings(),
                RankPlace(),
                cache_directory=folder / "cache-0",
                memory=folder / "memory-warm",
                free_bytes=0,
            )
            assert warm(cache).is_complete
            cache.close()
        world.comm.Barrier()
        dataset = open_dataset(world, folder)
        np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(30)))), data)
        size = sum(path.stat().st_size for path in (folder / "source").iterdir())
        assert sum_over_ranks(world, dataset, "remote_bytes") < size
        world.comm.Barrier()
        dataset.close()


def case_a_rank_that_closes_early_does_not_hold_up_the_others(world: World) -> None:
    with make_dataset(world) as (folder, data):
        dataset = open_dataset(world, folder, decode=ArrayOf("uint8", (SIZE,)), group_bytes=10_000)
        if world.rank == world.size - 1:
            dataset.close()
        else:
            np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(120)))), data)
            dataset.close()


def case_opening_a_dataset_and_sending_shards_unpickles_nothing(world: World) -> None:
    """Messages between ranks are typed and bounded: a hostile rank can break a run, but cannot run code."""
    from mpi4py import MPI

    def refuse(*_: object) -> Any:
        raise AssertionError("pickled")

    with make_dataset(world, [10, 10, 10]) as (folder, data):
        MPI.pickle.__init__(refuse, refuse)  # type: ignore[misc]
        try:
            dataset = open_dataset(world, folder)
            dataset.warm()
        finally:
            MPI.pickle.__init__()  # type: ignore[misc]
        np.testing.assert_array_equal(np.stack(list(dataset.__getitems__(range(30)))), data)
        world.comm.Barrier()
        dataset.close()


def case_ranks_and_their_spawned_workers_share_objects_without_a_version(world: World) -> None:
    list_dataset = opening.list_dataset

    def list_without_versions(*arguments: Any) -> Listing:
        listing = list_dataset(*arguments)
        return replace(listing, versions=Texts.from_strings([""] * len(listing)))

    with (
        make_dataset(world, [10, 10, 10]) as (folder, data),
        mock.patch.object(opening, "list_dataset", list_without_versions),
    ):
        dataset = open_dataset(world, folder)
        assert len(set(world.comm.allgather(dataset.cache.shards.compute_key(0)))) == 1
        with closing(pickle.loads(pickle.dumps(dataset))) as worker:
            np.testing.assert_array_equal(np.stack(list(worker.__getitems__(range(30)))), data)
        world.comm.Barrier()
        dataset.close()


def case_a_dataset_that_cannot_be_opened_fails_on_all_ranks(world: World) -> None:
    with make_dataset(world) as (folder, _):
        try:
            open_dataset(world, folder, format="tar")
        except DatasetError:
            return
        raise AssertionError(os.listdir(folder))


def case_a_limit_that_is_too_small_for_the_largest_node_fails_on_all_ranks(world: World) -> None:
    """Also on smaller nodes, for which it is large enough: their ranks would wait for the others."""
    with make_dataset(world, [20, 20]) as (folder, _):
        shard = next((folder / "source").iterdir()).stat().st_size
        limit = shard * max(map(len, world.node_ranks)) - 1
        with pytest.raises(DatasetError, match="size_limit"):
            open_dataset(world, folder, size_limit=limit)
