"""The cache directory of a node: one folder per namespace, each a disk tier of its own (`topkube.data.disk_tier`).

Pods write into their namespace's folder and may put anything there: links that lead elsewhere, pipes that never answer,
files without end. So whatever looks into such a folder is a child process that sees nothing else (chroot), with little
memory and a deadline; what it says is checked.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import select
import signal
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from topkube.data.disk_tier import DiskTier
from topkube.errors import TopKubeError
from topkube.job.cached_dataset import dataset_id
from topkube_operator.node_cache.plan import Folder

_log = logging.getLogger(__name__)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://\S{1,2000}")
_LOOK_SECONDS, _ACT_SECONDS = 20.0, 300.0
_MOST_SAID = 16 << 20
_MEMORY = 1 << 30
_MOST_BYTES = 1 << 62
_ACL = "system.posix_acl_default"
_EVERYBODY = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, 7, 0xFFFFFFFF) for tag in (1, 4, 0x20))
"""Default access list: owner, group and others may do everything with what is made in the folder, whatever the maker's
umask. Who is not in the namespace never gets as far as the folder."""


class Unusable(TopKubeError):
    """A namespace's folder cannot be looked at; its datasets stay as they are."""


class Volume:
    """The directory `root`, which nobody but us may enter by its own path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o711)
        for left in root.glob(".new-*"):
            _remove(left)
        _rehearse()

    def free(self) -> int:
        volume = os.statvfs(self.root)
        return volume.f_bavail * volume.f_frsize

    def size(self) -> int:
        volume = os.statvfs(self.root)
        return volume.f_blocks * volume.f_frsize

    def namespaces(self) -> frozenset[str]:
        """Those with a folder."""
        with os.scandir(self.root) as entries:
            return frozenset(
                one.name for one in entries if _NAMESPACE.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
            )

    def make(self, namespace: str) -> None:
        """The folder of a namespace, in which every user of its pods may write. It has its name when it is whole: pods
        wait for it."""
        if not _NAMESPACE.fullmatch(namespace):
            raise Unusable(f"{namespace!r} is no namespace")
        new = self.root / f".new-{uuid.uuid4().hex}"
        new.mkdir(mode=0o700)
        try:
            os.setxattr(new, _ACL, _EVERYBODY)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM):
                raise
            _log.warning("%s knows no access lists: jobs of %s share it under one user only", self.root, namespace)
        DiskTier(new)
        new.chmod(0o777)
        try:
            os.rename(new, self.root / namespace)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            _remove(new)

    def look(self, namespace: str) -> list[Folder]:
        """The datasets of a namespace. Raises Unusable."""
        said = _confined(self.root / namespace, _looked, _LOOK_SECONDS)
        return [folder for one in said if (folder := _folder(namespace, one)) is not None]

    def act(self, namespace: str, evict: Iterable[str], pin: Iterable[str], unpin: Iterable[str]) -> set[str]:
        """Removes datasets that nobody uses, sets and takes away pins; gives the ids that are gone. Raises Unusable."""
        wanted = (frozenset(evict), frozenset(pin), frozenset(unpin))

        def act(tier: DiskTier) -> list[str]:
            gone = []
            for folder in tier.datasets():
                if folder.name in wanted[0] and folder.remove():
                    gone.append(folder.name)
                elif folder.name in wanted[1] or folder.name in wanted[2]:
                    folder.pin(folder.name in wanted[1])
            return gone

        return set(map(str, _confined(self.root / namespace, act, _ACT_SECONDS))) & wanted[0]


def _rehearse() -> None:
    """Loads all that a child needs, which sees no library any more."""
    with tempfile.TemporaryDirectory() as scratch:
        tier = DiskTier(Path(scratch))
        folder = tier.dataset("file:///rehearsal")
        os.close(folder.publish("0" * 32, 1, lambda file: os.truncate(file, 1)))
        _looked(tier)
        folder.remove()


def _looked(tier: DiskTier) -> list[dict[str, Any]]:
    return [
        {
            "id": folder.name,
            "uri": folder.uri,
            "cachedBytes": folder.log.total(),
            "shards": int(folder.entries().size),
            "totalBytes": folder.noted().get("bytes"),
            "lastUsed": folder.last_used,
            "inUse": folder.in_use,
            "pinned": folder.pinned,
        }
        for folder in tier.datasets()
    ]


def _folder(namespace: str, said: Any) -> Folder | None:
    """What a child said about a dataset, where it can be true."""
    try:
        uri, total = str(said["uri"]), said["totalBytes"]
        if not _URI.fullmatch(uri) or dataset_id(uri) != said["id"]:
            return None
        return Folder(
            namespace,
            str(said["id"]),
            uri,
            cached_bytes=_bytes(said["cachedBytes"]),
            shards=_bytes(said["shards"]),
            total_bytes=None if total is None else _bytes(total),
            last_used=min(max(0.0, float(said["lastUsed"])), time.time()),
            in_use=bool(said["inUse"]),
            pinned=bool(said["pinned"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _bytes(value: Any) -> int:
    return min(max(0, int(value)), _MOST_BYTES)


def _confined(folder: Path, work: Callable[[DiskTier], Any], seconds: float) -> Any:
    """What `work` gives for the disk tier in `folder`, done by a child that sees only that folder. This process has one
    thread, so that a fork is whole."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            text = _alone(folder, work)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(text.encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    try:
        said = _read(reading, time.monotonic() + seconds)
    except TimeoutError:
        raise Unusable(
            f"{folder.name}: its folder did not answer within {seconds:.0f} s",
            cause="a slow disk, or a pod that put something there which never ends",
            next_step=f"look into {folder}",
        ) from None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        answer = json.loads(said)
    except ValueError:
        raise Unusable(f"{folder.name}: its folder cannot be read", next_step=f"look into {folder}") from None
    if "error" in answer:
        raise Unusable(f"{folder.name}: {answer['error']}")
    return answer["done"]


def _alone(folder: Path, work: Callable[[DiskTier], Any]) -> str:
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        place = folder
        if os.geteuid() == 0:
            os.chroot(folder)
            os.chdir("/")
            place = Path("/")
        os.umask(0)
        return json.dumps({"done": work(DiskTier(place))})
    except (TopKubeError, OSError, ValueError, MemoryError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})


def _read(pipe: int, deadline: float) -> bytes:
    parts, size = list[bytes](), 0
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(pipe, 1 << 16)
        size += len(part)
        if not part or size > _MOST_SAID:
            return b"".join(parts)
        parts.append(part)


def _remove(folder: Path) -> None:
    """A folder of our own that never got its name."""
    for below, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(Path(below, name))
        for name in folders:
            os.rmdir(Path(below, name))
    os.rmdir(folder)
