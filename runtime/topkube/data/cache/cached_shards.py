"""The shards of a dataset in the disk tier of this node, and the reaction to failures of the tier's volume.

After the dataset was opened, each shard is verified once per node. If the volume is full or fails, the tier is frozen
or dropped, and readers continue with the remote.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from topkube.data.base.open_files import FilesPressure, is_files_pressure
from topkube.data.base.shared_counters import CacheCounters
from topkube.data.cache.disk.dataset_folder import DatasetFolder
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.cache.disk.shard_file import compute_digest
from topkube.data.cache.node_state import DROPPED, FROZEN, NodeState
from topkube.data.cache.open_shards import ShardFile
from topkube.data.formats.shards import DataShard, Shards

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


class CachedShards:
    """The cached shards of one dataset. If `tier` is None, no shard is cached."""

    def __init__(self, shards: Shards, tier: DiskTier | None, node_state: NodeState, counters: CacheCounters) -> None:
        self._shards, self._node_state, self._counters = shards, node_state, counters
        self.folder: DatasetFolder | None = None
        self._use_lock = None
        if tier is None:
            node_state.degrade(DROPPED)
            return
        try:
            self.folder = tier.open_folder(shards.uri)
            self._use_lock = self.folder.begin_use()
        except OSError as error:
            self._degrade(FROZEN if self.folder is not None else DROPPED, error)
        if not tier.is_writable:
            self._degrade(FROZEN, OSError(errno.EROFS, "the volume is read-only"))

    def _degrade(self, state: int, error: OSError) -> None:
        """Freeze or drop the tier. Only one process of the node reports the change."""
        if not self._node_state.degrade(state):
            return
        what = {FROZEN: "takes no more shards", DROPPED: "is no longer used"}[state]
        place = self.folder.tier.directory if self.folder is not None else "of this node"
        print(
            f"topkube: the disk cache {place} {what} ({error.strerror or error}); "
            "training continues; shards that are not cached are read from the remote",
            file=sys.stderr,
            flush=True,
        )

    def handle_volume_error(self, error: OSError) -> None:
        """Freeze or drop the tier after an error of its volume. Raises FilesPressure if the volume works but too many
        files are open."""
        if is_files_pressure(error):
            raise FilesPressure from error
        self._degrade(FROZEN if error.errno in _NO_ROOM else DROPPED, error)

    def has(self, key: str) -> bool:
        """Return True if the tier has a file with this key."""
        if self.folder is None or self._node_state.disk_state == DROPPED:
            return False
        try:
            return self.folder.get_shard_path(key).exists()
        except OSError:
            return False

    def open(self, shard: DataShard) -> ShardFile | None:
        """Open the shard in the disk tier. Return None if the tier does not have it. The shard is verified unless a
        process of this node has verified it since the dataset was opened. A damaged shard is quarantined."""
        if self.folder is None or self._node_state.disk_state == DROPPED:
            return None
        try:
            file = self.folder.open(shard.key)
            if file is None:
                return None
            opened = ShardFile(shard, file, is_cached=True)
            if self._node_state.is_verified(shard.cache_number):
                return opened
            begun = time.monotonic()
            if self.is_good(shard, file):
                self._node_state.set_verified(shard.cache_number, begun)
                return opened
            return self._recheck_damaged(shard)
        except OSError as error:
            self.handle_volume_error(error)
            return None

    def is_good(self, shard: DataShard, file: int) -> bool:
        """Return True if the cached shard matches its record and the checksums of the manifest."""
        assert self.folder is not None
        if self._shards.is_decompressed(shard):
            return self.folder.is_whole(shard.key, file)
        return (
            os.fstat(file).st_size == shard.size
            and self.folder.is_whole(shard.key, file)
            and self._matches_manifest(shard, file)
        )

    def _matches_manifest(self, shard: DataShard, file: int) -> bool:
        """Return True if every object has the checksum of the manifest. Objects without a checksum always match."""
        if not self._shards.listing.checksums[shard.start : shard.stop].any():
            return True
        offset = 0
        for remote_object in self._shards.list_objects(shard):
            if remote_object.checksum and compute_digest(file, remote_object.size, offset) != remote_object.checksum:
                return False
            offset += remote_object.size
        return True

    def _recheck_damaged(self, shard: DataShard) -> ShardFile | None:
        """Verify the shard again under its lock, because another process may have replaced it. Quarantine it if it is
        damaged."""
        assert self.folder is not None
        lock = self.folder.get_lock(shard.key)
        lock.acquire()
        try:
            file = self.folder.open(shard.key)
            if file is None:
                return None
            opened = ShardFile(shard, file, is_cached=True)
            if self.is_good(shard, file):
                return opened
            self._counters.add("corruptions")
            self.folder.quarantine(shard.key)
            return None
        finally:
            lock.release()

    def create_folder_again(self) -> bool:
        """Create the folder of the dataset again, after another process has removed it. Return False if the volume
        fails."""
        assert self.folder is not None
        try:
            self.folder.create()
        except OSError as error:
            self.handle_volume_error(error)
            return False
        return True

    def evict_outdated(self) -> int:
        """Remove the shards that are no longer in the listing. Return the number of removed shards."""
        assert self.folder is not None
        try:
            return self.folder.evict_all_but(self._shards.list_keys())
        except OSError:
            return 0

    def close(self) -> None:
        """Stop using the dataset, and store the time."""
        if self._use_lock is not None and self._use_lock.is_held:
            assert self.folder is not None
            self.folder.touch()
            self._use_lock.release()
