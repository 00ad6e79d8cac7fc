"""Opening a dataset's cache: address, listing, limits, tiers. All ranks end up with the same listing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from topkube.data.cache import Cache, open_tier
from topkube.data.counters import Counters
from topkube.data.disk_tier import DiskTier, Limits
from topkube.data.listing import Listing
from topkube.data.patience import Patience
from topkube.data.place import Place
from topkube.data.session import Session
from topkube.data.shards import GROUP_BYTES, Format, Shards
from topkube.data.store import Store
from topkube.errors import DatasetError, TopKubeError
from topkube.settings import Settings

AnyPath = str | os.PathLike[str]


def open_cache(
    uri: str,
    settings: Settings,
    place: Place,
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
) -> Cache:
    """The cache of the dataset at `uri` (an address; see `address`). The arguments are CachedDataset's; what is None
    comes from `settings`. A collective where `place` has several ranks."""
    size_limit = settings.cache_size_limit if size_limit is None else size_limit
    for name, value in (("size_limit", size_limit), ("memory_limit", memory_limit)):
        if value < 0:
            raise DatasetError(f"{name} = {value} is negative", next_step="give bytes, or 0")
    directory = cache_folder(cache_directory, settings)
    store = Store(uri, storage_options, patience)
    tier = open_tier(directory, Limits(size_limit or None, free_bytes, settings.cache_free_percent))
    listing = _by_rank_0(lambda: list_dataset(store, tier), place)
    shards = Shards(uri, listing, format, group_bytes)
    check_limits(shards, size_limit, memory_limit, place.local_size)
    if tier is not None and tier.writable and place.local_rank == 0:
        _note(tier, shards)
    about = f"{directory.resolve()}\0{uri}\0{listing.digest()}\0{shards.format}\0{len(shards)}"
    name = xxhash.xxh3_64_hexdigest(about.encode())
    session = Session(memory or memory_folder(None, settings), name, len(shards))
    return Cache(store, shards, tier, session, Counters(settings.run_path), name, stall_seconds=wait_seconds)


def _note(tier: DiskTier, shards: Shards) -> None:
    """Leaves word of the listing in the dataset's folder. Where it is another than the last one, shards of the old one
    that nobody uses go."""
    with contextlib.suppress(OSError):
        folder = tier.dataset(shards.uri)
        summary = {"bytes": shards.listing.bytes, "shards": len(shards), "listing": shards.listing.digest()}
        before = folder.noted()
        if before.get("listing", summary["listing"]) != summary["listing"] and folder.log.total():
            folder.evict_outdated(shards.keys())
        folder.note(summary)


def cache_folder(directory: AnyPath | None, settings: Settings) -> Path:
    """The disk tier's directory."""
    return Path(directory or settings.cache_directory).expanduser()


def memory_folder(directory: AnyPath | None, settings: Settings) -> Path:
    """The memory tier's directory, one per user."""
    return Path(directory or settings.cache_memory_directory) / f"topkube-{os.getuid()}"


def _by_rank_0(make: Callable[[], Any], place: Place) -> Any:
    """What rank 0 makes, on all ranks; its failure too."""
    if place.world is None:
        return make()
    made: tuple[Any, TopKubeError | None] = (None, None)
    if place.rank == 0:
        try:
            made = (make(), None)
        except TopKubeError as error:
            made = (None, error)
    value, failure = place.world.comm.bcast(made)
    if failure is not None:
        raise failure
    return value


def address(uri: str, settings: Settings) -> str:
    """The dataset's address: of the mountPath the job's own; a local path becomes file://."""
    if settings.dataset_uri and uri.rstrip("/") == settings.dataset_mount.rstrip("/"):
        uri = settings.dataset_uri
    if "://" not in uri:
        uri = Path(uri).expanduser().absolute().as_uri().replace("%20", " ")
    return uri


def list_dataset(store: Store, tier: DiskTier | None) -> Listing:
    """The dataset's listing. One that comes from a manifest is kept in the cache for as long as the manifest does not
    change, so that the next job opens it at once."""
    version = store.manifest_version()
    if version is None or tier is None:
        return store.listing()
    name = xxhash.xxh3_128_hexdigest(f"{store.manifest_uri}\0{version}".encode())
    try:
        folder = tier.dataset(store.uri).path / "listings"
        with contextlib.suppress(OSError, ValueError):
            return Listing.load(folder / name)
        listing = store.listing()
        part = folder / f".{name}.{os.urandom(8).hex()}"
        listing.save(part)
        os.rename(part, folder / name)
    except OSError:
        return store.listing()
    return listing


def check_limits(shards: Shards, size_limit: int, memory_limit: int, workers: int) -> None:
    """Refuses limits that cannot hold what all ranks of a node fetch at once. Raises DatasetError with the numbers."""
    largest = int(shards.sizes.max())
    for name, limit in (("size_limit", size_limit), ("memory_limit", memory_limit)):
        if 0 < limit < largest * workers:
            raise DatasetError(
                f"{name} is {limit:,} bytes; the largest shard has {largest:,} bytes and {workers} "
                f"{'rank of this node fetches' if workers == 1 else 'ranks of this node fetch'} at once",
                cause=f"{largest * workers:,} bytes are the least",
                next_step="raise the limit, or cut the dataset into smaller shards",
            )
