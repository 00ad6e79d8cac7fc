"""The cache directory of a node: one folder per namespace, each with its own disk tier (`topkube.data.cache`).

Pods write into their namespace's folder and may put anything there: links to other places, pipes that never answer,
endless files. Therefore a child process reads such a folder. The child sees nothing else (chroot), and has little
memory and a deadline. Records that exceed the memory, and small files that are large, are not read. The child's answer
is checked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import resource
import select
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.errors import TopKubeError
from topkube.files import create_folder
from topkube.job.cached_dataset import compute_dataset_id
from topkube_operator.node_cache.decisions import LocalDataset

_log = logging.getLogger(__name__)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://\S{1,2000}")
_READ_SECONDS, _APPLY_SECONDS = 20.0, 300.0
"""The longest time that a child process may take to read a folder, and to remove and pin datasets."""
_LARGEST_ANSWER = 16 << 20
_MEMORY_BYTES = 192 << 20
"""The memory that a child may use in addition to its copy of the agent's memory. All processes of the agent fit into
the container's limit, 512 MiB. The records of a million shards with their indexes need less than 128 MiB."""
_TOUCH_SECONDS = 600.0
"""The age at which the time of last use of a dataset in use is stored again."""
_MOST_BYTES = 1 << 62
_ACL = "system.posix_acl_default"
# Version 2 of the format; the tags of owner, group and others; an ID that names nobody (acl(5)).
_EVERYBODY = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, 7, 0xFFFFFFFF) for tag in (1, 4, 0x20))
"""Default access list: owner, group and others have all rights to new files in the folder, whatever the creator's
umask. Pods of other namespaces never reach the folder."""


class UnusableFolder(TopKubeError):
    """A namespace's folder cannot be read. Its datasets stay unchanged."""


class Volume:
    """The directory `root`. Nobody but the agent may list it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o711)
        for unfinished in root.glob(".*.part"):  # of an agent that was killed
            shutil.rmtree(unfinished)
        _load_modules()

    def measure_free_bytes(self) -> int:
        """Return the free bytes of the volume."""
        volume = os.statvfs(self.root)
        return volume.f_bavail * volume.f_frsize

    def measure_total_bytes(self) -> int:
        """Return the size of the volume in bytes."""
        volume = os.statvfs(self.root)
        return volume.f_blocks * volume.f_frsize

    def list_namespaces(self) -> frozenset[str]:
        """Return the namespaces that have a folder."""
        with os.scandir(self.root) as entries:
            return frozenset(
                entry.name
                for entry in entries
                if _NAMESPACE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def create_folder(self, namespace: str) -> None:
        """Create the folder of a namespace. Every user of its pods may write in it. The folder gets its name when it is
        complete, because pods wait for the name."""
        if not _NAMESPACE.fullmatch(namespace):
            raise UnusableFolder(f"{namespace!r} is not a valid namespace")
        with contextlib.suppress(FileExistsError), create_folder(self.root / namespace) as new:
            new.mkdir(mode=0o700)
            try:
                os.setxattr(new, _ACL, _EVERYBODY)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EPERM):
                    raise
                _log.warning("%s has no access lists: all jobs of %s must run as the same user", self.root, namespace)
            DiskTier(new)
            new.chmod(0o777)

    def read_datasets(self, namespace: str) -> list[LocalDataset]:
        """Return the datasets of a namespace. Raises UnusableFolder."""
        answers = _run_confined(self.root / namespace, _describe_datasets, _READ_SECONDS)
        return [dataset for answer in answers if (dataset := _parse_dataset(namespace, answer)) is not None]

    def apply(self, namespace: str, evict: Iterable[str], pin: Iterable[str], unpin: Iterable[str]) -> set[str]:
        """Remove datasets that nobody uses, and set and remove pins. Return the ids of the removed datasets. Raises
        UnusableFolder."""
        to_evict, to_pin, to_unpin = frozenset(evict), frozenset(pin), frozenset(unpin)

        def apply_in_folder(tier: DiskTier) -> list[str]:
            removed = []
            for folder in tier.list_folders():
                if folder.name in to_evict and folder.remove():
                    removed.append(folder.name)
                elif folder.name in to_pin or folder.name in to_unpin:
                    folder.pin(folder.name in to_pin)
            return removed

        return set(map(str, _run_confined(self.root / namespace, apply_in_folder, _APPLY_SECONDS))) & to_evict


def _load_modules() -> None:
    """Load everything that a child needs, because a confined child sees no libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        tier = DiskTier(Path(scratch))
        folder = tier.open_folder("file:///rehearsal")
        os.close(folder.publish("0" * 32, 1, lambda file: os.truncate(file, 1)))
        _describe_datasets(tier)
        folder.remove()


def _describe_datasets(tier: DiskTier) -> list[dict[str, Any]]:
    descriptions = []
    for folder in tier.list_folders():
        is_in_use = folder.is_in_use
        if is_in_use and folder.last_used < time.time() - _TOUCH_SECONDS:
            # A job stores the time at which it opens the dataset. Without this, the dataset of a long job would be the
            # least recently used when the job is killed.
            folder.touch()
        descriptions.append(
            {
                "id": folder.name,
                "uri": folder.uri,
                "cachedBytes": folder.log.sum_shard_bytes(),
                "shards": folder.log.count_shards(),
                "totalBytes": folder.read_summary().get("bytes"),
                "lastUsed": folder.last_used,
                "inUse": is_in_use,
                "pinned": folder.is_pinned,
            }
        )
    return descriptions


def _parse_dataset(namespace: str, answer: Any) -> LocalDataset | None:
    """Return the dataset that a child describes; None if the description cannot be true."""
    try:
        uri, total = str(answer["uri"]), answer["totalBytes"]
        if not _URI.fullmatch(uri) or compute_dataset_id(uri) != answer["id"]:
            return None
        return LocalDataset(
            namespace,
            str(answer["id"]),
            uri,
            cached_bytes=_clamp_bytes(answer["cachedBytes"]),
            shards=_clamp_bytes(answer["shards"]),
            total_bytes=None if total is None else _clamp_bytes(total),
            last_used=min(max(0.0, float(answer["lastUsed"])), time.time()),
            in_use=bool(answer["inUse"]),
            pinned=bool(answer["pinned"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _clamp_bytes(value: Any) -> int:
    return min(max(0, int(value)), _MOST_BYTES)


def _run_confined(folder: Path, work: Callable[[DiskTier], Any], seconds: float) -> Any:
    """Return the result of `work` on the disk tier in `folder`. A child process that sees only this folder runs it.
    This process has one thread, so the fork is safe. Raises UnusableFolder."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            text = _run_in_child(folder, work)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(text.encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    try:
        answer_bytes = _read_answer(reading, time.monotonic() + seconds)
    except TimeoutError:
        raise UnusableFolder(
            f"{folder.name}: its folder did not answer within {seconds:.0f} s",
            cause="the disk is slow, or a pod put a pipe or an endless file into the folder",
            next_step=f"inspect {folder}",
        ) from None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        answer = json.loads(answer_bytes)
    except ValueError:
        raise UnusableFolder(f"{folder.name}: its folder cannot be read", next_step=f"inspect {folder}") from None
    if "error" in answer:
        raise UnusableFolder(f"{folder.name}: {answer['error']}")
    return answer["result"]


def _run_in_child(folder: Path, work: Callable[[DiskTier], Any]) -> str:
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
        visible_folder = folder
        if os.geteuid() == 0:
            os.chroot(folder)
            os.chdir("/")
            visible_folder = Path("/")
        os.umask(0)
        return json.dumps({"result": work(DiskTier(visible_folder))})
    except (TopKubeError, OSError, ValueError, MemoryError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})


def _read_answer(pipe: int, deadline: float) -> bytes:
    parts, size = list[bytes](), 0
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(pipe, 1 << 16)
        size += len(part)
        if not part or size > _LARGEST_ANSWER:
            return b"".join(parts)
        parts.append(part)
