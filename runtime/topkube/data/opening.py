"""Opens the cache of a dataset: address, listing, limits and tiers. All ranks get the same listing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from topkube.data.base.rank_place import RankPlace
from topkube.data.base.shared_counters import CacheCounters
from topkube.data.cache.disk.dataset_folder import DatasetFolder
from topkube.data.cache.disk.disk_tier import DiskLimits, DiskTier
from topkube.data.cache.memory_folder import choose_memory_folder
from topkube.data.cache.node_state import NodeState
from topkube.data.cache.shard_cache import ShardCache, open_tier
from topkube.data.formats.shards import GROUP_BYTES, Format, Shards
from topkube.data.rank_messages import share_failure, share_listing, share_text
from topkube.data.remote.listing import Listing
from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.retry import Patience
from topkube.data.remote.store_listing import has_manifest
from topkube.errors import DatasetError, TopKubeError
from topkube.files import create_folder
from topkube.settings import Settings

_LISTING_FORMAT = 4
"""The format of listings in the cache. If a listing has another format, its manifest is read again."""
_SESSION_FORMAT = 3
"""The format of the state that processes share. Another version of TopKube on this node uses its own state."""
_BEING_WRITTEN_SECONDS = 3600.0
"""A hidden folder that is younger than this may be a listing that another process writes."""
AnyPath = str | os.PathLike[str]


def open_cache(
    uri: str,
    settings: Settings,
    place: RankPlace,
    *,
    format: Format = "auto",
    cache_directory: AnyPath | None = None,
    size_limit: int | None = None,
    memory_limit: int = 0,
    memory: Path | None = None,
    free_bytes: int | None = None,
    group_bytes: int = GROUP_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    patience: Patience | None = None,
    wait_seconds: float = 30.0,
    for_samples: bool = True,
    job: str = "",
) -> ShardCache:
    """Open the cache of the dataset at `uri` (see `resolve_address`).

    The arguments have the meaning that they have for CachedDataset. `cache_directory`, `size_limit` and `free_bytes`
    come from `settings` if they are None. `memory` is the folder of the memory tier. If `place` has several ranks, this
    is a collective. `for_samples`: False if only whole objects are needed, for scripts that read plain files. Then
    shards whose samples cannot be read are accepted too. `job`: a name under which objects without a version are
    cached, so that other jobs do not read them. If it is empty, such objects get the uid of the TrainingJob, else a
    random name. Raises DatasetError, StoreError or CacheError, on all ranks.
    """
    size_limit = settings.cache_size_limit if size_limit is None else size_limit
    for name, value in (("size_limit", size_limit), ("memory_limit", memory_limit)):
        if value < 0:
            raise DatasetError(f"{name} = {value} is negative", next_step="pass a number of bytes, or 0")
    directory = choose_cache_folder(cache_directory, settings)
    store = ObjectStore(uri, storage_options, patience)
    tier = open_tier(
        directory, DiskLimits(size_limit or None, free_bytes, settings.cache_free_percent), settings.cache_sharing
    )
    listing = _list_on_rank_0(lambda: list_dataset(store, tier), place)
    if not listing.has_versions:
        job = job or _choose_job(uri, settings, place)
        listing = listing.fill_versions(f"job {job}")
    shards = Shards(uri, listing, format, group_bytes)
    if for_samples and format == "auto" and shards.format == "files":
        shards.check_compressions()
    # Those of the largest node, on all ranks: after an error on some ranks, the others would wait for ever.
    check_limits(shards, size_limit, memory_limit, max(map(len, place.node_ranks)))
    if tier is not None and tier.is_writable and place.local_rank == 0:
        _write_summary(tier, shards)
    identity = (
        f"{_SESSION_FORMAT}\0{directory.resolve()}\0{uri}\0{listing.compute_digest()}\0{shards.format}\0{len(shards)}"
    )
    name = xxhash.xxh3_64_hexdigest(identity.encode())
    node_state = NodeState(memory or choose_memory_folder(None, settings), name, shards.cache_number_limit)
    counters = CacheCounters(settings.run_path)
    return ShardCache(
        store, shards, tier, node_state, counters, name, job, stall_seconds=wait_seconds, for_samples=for_samples
    )


def _write_summary(tier: DiskTier, shards: Shards) -> None:
    """Write a summary of the listing to the dataset's folder. If the listing has changed and no process uses the
    dataset, remove the shards that are no longer listed."""
    with contextlib.suppress(OSError):
        folder = tier.open_folder(shards.uri)
        summary = {"bytes": shards.listing.bytes, "shards": len(shards), "listing": shards.listing.compute_digest()}
        previous = folder.read_summary()
        if previous.get("listing", summary["listing"]) != summary["listing"] and folder.log.sum_shard_bytes():
            folder.evict_if_unused(shards.list_keys())
        folder.write_summary(summary)


def choose_cache_folder(directory: AnyPath | None, settings: Settings) -> Path:
    """Return the folder of the disk tier."""
    return Path(directory or settings.cache_directory).expanduser()


def _list_on_rank_0(list_objects: Callable[[], Listing], place: RankPlace) -> Listing:
    """Return rank 0's listing on all ranks. Raises rank 0's error on all ranks."""
    if place.world is None:
        return list_objects()
    listing, failure = None, None
    if place.rank == 0:
        try:
            listing = list_objects()
        except TopKubeError as error:
            failure = error
    if (failure := share_failure(place.world.comm, failure)) is not None:
        raise failure
    return share_listing(place.world.comm, listing)


def _choose_job(uri: str, settings: Settings, place: RankPlace) -> str:
    """Return a name of this job for objects without a version, the same on all ranks, and print a warning."""
    if place.rank == 0:
        print(
            f"topkube: the store states no version (etag or time) of objects of {uri}, so changes of them are not "
            "detected; what the cache fetches is used by this job only, and later jobs fetch it again; to keep it, "
            f"write a manifest (`topkube cache manifest {uri} --checksums`) whenever the dataset changes",
            file=sys.stderr,
            flush=True,
        )
    name = settings.job_uid or uuid.uuid4().hex
    return name if place.world is None else share_text(place.world.comm, name)


def resolve_address(uri: str, settings: Settings) -> str:
    """Return the address of a dataset. If `uri` is the mountPath of the job, this is the address in the job's spec; for
    a folder below the mountPath, it is the address of that folder in the remote, because the files below the mountPath
    are those that have arrived on this node. A local path becomes a file:// address. Raises DatasetError for an empty
    address, and for a folder of a dataset whose address is a manifest."""
    if not uri.strip():
        raise DatasetError(
            "the address of the dataset is empty",
            cause="a variable of the shell or of the script is not set",
            next_step="pass a URI or a path; the current directory is .",
        )
    if "://" in uri:
        return uri
    path = os.path.normpath(uri)
    mount = os.path.normpath(settings.dataset_mount) if settings.dataset_uri and settings.dataset_mount else None
    if mount is not None and path == mount:
        return settings.dataset_uri
    if mount is not None and path.startswith(f"{mount}/"):
        if has_manifest(settings.dataset_uri):
            raise DatasetError(
                f"{uri} is a folder of the job's dataset, which is the manifest {settings.dataset_uri}",
                cause="a manifest describes the whole dataset",
                next_step=f"open {mount}, or write a manifest for the folder and pass its address",
            )
        return settings.dataset_uri.rstrip("/") + path.removeprefix(mount)
    return f"file://{Path(uri).expanduser().absolute()}"


def list_dataset(store: ObjectStore, tier: DiskTier | None) -> Listing:
    """Return the listing of the dataset. If the listing comes from a manifest, the cache stores it until the manifest
    changes. Therefore the next job opens the dataset without reading the manifest."""
    version = store.read_manifest_version()
    if version is None or tier is None:
        return store.read_listing()
    name = xxhash.xxh3_128_hexdigest(f"{_LISTING_FORMAT}\0{store.manifest_uri}\0{version}".encode())
    folder: DatasetFolder | None = None
    with contextlib.suppress(OSError, ValueError):
        folder = tier.open_folder(store.uri)
        return Listing.load(folder.path / "listings" / name)
    listing = store.read_listing()
    if folder is not None:
        with contextlib.suppress(OSError):  # the volume is full or read-only, or another process was faster
            with folder.open_subfolder("listings") as listings:
                _remove_listings(listings)
            with create_folder(folder.path / "listings" / name) as part:
                listing.save(part)
    return listing


def _remove_listings(folder: int) -> None:
    """Remove the listings in an open folder: of older manifests, a damaged one, and what killed processes have left
    behind. Jobs that use one of them have mapped its files."""
    recent = time.time() - _BEING_WRITTEN_SECONDS
    for name in os.listdir(folder):
        if not name.startswith(".") or os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < recent:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def check_limits(shards: Shards, size_limit: int, memory_limit: int, ranks_per_node: int) -> None:
    """Raise DatasetError if a limit is smaller than the shards that all ranks of a node can fetch at the same time."""
    largest = int(shards.sizes.max())
    for name, limit in (("size_limit", size_limit), ("memory_limit", memory_limit)):
        if 0 < limit < largest * ranks_per_node:
            raise DatasetError(
                f"{name} is {limit:,} bytes; the largest shard has {largest:,} bytes and {ranks_per_node} "
                f"{'rank' if ranks_per_node == 1 else 'ranks'} of this node can fetch at the same time",
                cause=f"the limit must be at least {largest * ranks_per_node:,} bytes",
                next_step="raise the limit, or divide the dataset into smaller shards",
            )
