"""The companion: a process in a worker's pod that fills the cache and shows the dataset's files under the mountPath.

`topkube worker` starts the companion when the pod starts. The ranks do not depend on it. When a rank opens a
`CachedDataset`, the companion stops fetching, because the dataset fills the cache in the order in which the ranks read.
Scripts that read plain files never open a CachedDataset. For these scripts, the companion also fetches the shards of
the other workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.disk.record_log import PUBLISHED, read_key
from topkube.data.cache.memory_folder import choose_memory_folder
from topkube.data.cache.node_state import OPEN
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.fill.disk_filler import THREADS
from topkube.data.fill.file_view import FileView
from topkube.data.opening import choose_cache_folder, open_cache, resolve_address
from topkube.errors import TopKubeError
from topkube.files import write_text
from topkube.settings import Settings

PLAIN_SECONDS = 15.0
"""If the ranks have not opened a dataset this long after their start, it is assumed that they read plain files."""
_POLL_SECONDS = 0.25
_PAUSES = (1.0, 30.0)
"""The first and the longest pause after an error of the remote."""


class Companion:
    """The companion of one pod. `share=(i, n)`: the pod is worker i of n.

    runs: the worker's directory. A folder of an attempt in it shows that ranks have started. sessions: the directory
    with the shared state of open datasets. report: a file to which the companion writes the size of the cache for the
    job's status. request: a file whose text is copied into the report; the text proves that the report is newer than
    the file.
    """

    def __init__(
        self,
        cache: ShardCache,
        view: FileView | None,
        share: tuple[int, int],
        *,
        runs: Path | None = None,
        sessions: Path | None = None,
        report: Path | None = None,
        request: Path | None = None,
        prefetch: bool = True,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        self._cache, self._view, self._share = cache, view, share
        self._runs, self._sessions = runs, sessions
        self._report, self._request = report, request
        self._prefetch, self._plain_seconds = prefetch, plain_seconds
        self._numbers_by_key = {cache.shards.compute_key(number): number for number in range(len(cache.shards))}
        self._records_seen = 0
        self._arrived: set[int] = set()
        """Shards that have been published and are not in the view yet."""
        self._shown: set[int] = set()
        self._start_time: float | None = None
        """The time at which the first attempt of the ranks was seen."""
        self._last_report = ""
        self._view_is_full = False
        self._stop = threading.Event()

    def stop(self) -> None:
        """End `run` after the shards that are being fetched."""
        self._stop.set()

    def run(self) -> None:
        """Fill the cache and the view until `stop` is called."""
        pause, retry_time = _PAUSES[0], 0.0
        fetching: dict[Future[None], int] = {}
        waiting = self._list_shards_to_fetch()
        with ThreadPoolExecutor(THREADS, "topkube-companion") as pool:
            while not self._stop.is_set():
                for future in [future for future in fetching if future.done()]:
                    number = fetching.pop(future)
                    try:
                        future.result()
                        pause = _PAUSES[0]
                    except (TopKubeError, OSError) as error:
                        _report_problem(f"shard {number}: {error}")
                        retry_time, pause = time.monotonic() + pause, min(2 * pause, _PAUSES[1])
                        waiting = self._list_shards_to_fetch()
                while len(fetching) < THREADS and time.monotonic() >= retry_time and self._may_fetch():
                    number = next(waiting, -1)
                    if number < 0:
                        break
                    if not self._cache.has(number):
                        fetching[pool.submit(self._fetch, number)] = number
                self._update_view()
                self._write_report()
                self._stop.wait(_POLL_SECONDS)
            for future in fetching:
                future.cancel()

    # ---- filling

    def _list_shards_to_fetch(self) -> Iterator[int]:
        """Yield the shards that this worker fetches: its share, and then all others if the ranks read plain files.
        Yield -1 while it is unknown if the ranks read plain files."""
        first, count = self._share
        yield from range(first, len(self._cache.shards), count)
        while not self._ranks_read_files():
            yield -1
        for number in range(len(self._cache.shards)):
            if number % count != first:
                yield number

    def _may_fetch(self) -> bool:
        """Return True if this process should begin to fetch a shard now."""
        return self._prefetch and self._cache.disk_state == OPEN and not self._ranks_read_samples()

    def _fetch(self, number: int) -> None:
        if not self._stop.is_set():
            self._cache.open(number, self._cache.fetch_from_store)

    def _ranks_read_samples(self) -> bool:
        """Return True if a rank of this pod has opened a CachedDataset."""
        if self._cache.node_state.filler_count:
            return True
        own_session = f"session-{self._cache.name}"
        sessions = self._sessions.glob("session-*.users") if self._sessions is not None else ()
        return any(path.stem != own_session for path in sessions)

    def _ranks_read_files(self) -> bool:
        """Return True if the ranks have run for some time and have not opened a CachedDataset, so that they probably
        read plain files. Also return True if the job has one worker, because its share is the whole dataset."""
        if self._share[1] == 1:
            return True
        if self._start_time is None and self._runs is not None and any(self._runs.glob("attempt-*")):
            self._start_time = time.monotonic()
        is_late = self._start_time is not None and time.monotonic() - self._start_time > self._plain_seconds
        return is_late and not self._ranks_read_samples()

    # ---- showing

    def _update_view(self) -> None:
        """Add the shards that have arrived since the last call to the view."""
        if self._view is None or self._view.is_complete or self._cache.folder is None:
            return
        records = self._cache.folder.log.read_all()
        if len(records) < self._records_seen:  # the dataset was removed from the cache and is filled again
            self._records_seen = 0
        for record in records[self._records_seen :]:
            number = self._numbers_by_key.get(read_key(record))
            if number is not None and record["kind"] == PUBLISHED and number not in self._shown:
                self._arrived.add(number)
        self._records_seen = len(records)
        for number in sorted(self._arrived):
            if self._stop.is_set():
                return
            if not self._cache.has(number) or not self._may_copy(number):
                continue
            try:
                self._view.show(number)
            except (TopKubeError, OSError) as error:
                _report_problem(f"the files of shard {number} cannot be added to {self._view.directory}: {error}")
                self._view_is_full = True
                self._arrived.clear()
                return
            self._arrived.discard(number)
            self._shown.add(number)
        if len(self._shown) == len(self._cache.shards):
            self._view.mark_complete()

    def _may_copy(self, number: int) -> bool:
        """Return True if the files of the shard may be added to the view.

        An object that is a shard takes no space. Small files are copied. They are not added if the ranks do not read
        plain files, or if the copies would take the space that shards need.
        """
        shards = self._cache.shards
        shard = shards[number]
        if shard.stop - shard.start == 1:
            return True
        if self._view_is_full or self._ranks_read_samples():
            return False
        assert self._cache.folder is not None
        tier, total = self._cache.folder.tier, shards.listing.bytes
        limit = tier.limits.size
        fits_limit = limit is None or 2 * total <= limit
        if fits_limit and total + shard.size <= tier.count_free_bytes() + self._count_copied_bytes():
            return True
        self._view_is_full = True
        _report_problem(
            f"{shards.uri}: {total:,} bytes of small files do not fit twice (as shards and as files), so the files are "
            "not shown; raise spec.dataset.cache.sizeLimit, or read them with topkube.data.CachedDataset"
        )
        return False

    def _count_copied_bytes(self) -> int:
        """Return the bytes of all shards in the view."""
        return int(sum(self._cache.shards.sizes[number] for number in self._shown))

    # ---- reporting

    def _write_report(self) -> None:
        """Write the report if it has changed."""
        if self._report is None or self._cache.folder is None:
            return
        request = ""
        if self._request is not None:
            with contextlib.suppress(OSError):  # read first, so that the report is newer than this text
                request = self._request.read_text(encoding="utf-8")
        cached = self._cache.folder.log.sum_shard_bytes()
        text = json.dumps(
            {
                "cachedBytes": cached,
                "totalBytes": self._cache.shards.listing.bytes,
                "remoteBytes": int(self._cache.counters.sum_rows()["remote_bytes"]),
                "asked": request,
            }
        )
        if text != self._last_report:
            self._last_report = text
            write_text(self._report, text)


def main(arguments: list[str] | None = None) -> int:
    """Run `python -m topkube.data.companion` with the settings of the worker's container."""
    parser = argparse.ArgumentParser(prog="topkube.data.companion")
    parser.add_argument("--share", default="0/1", metavar="I/N")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--asked", type=Path)
    options = parser.parse_args(arguments)
    first, _, count = options.share.partition("/")
    settings = Settings.from_environment()
    stop = threading.Event()
    companions: list[Companion] = []

    def stop_companions(*_: object) -> None:
        stop.set()
        for companion in companions:
            companion.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_companions)
    cache = _open_cache_with_retries(settings, stop)
    if cache is None:
        return 0
    companions.append(
        Companion(
            cache,
            _open_view(cache, settings),
            (int(first), int(count)),
            runs=options.runs,
            sessions=choose_memory_folder(None, settings),
            report=options.report,
            request=options.asked,
            prefetch=bool(settings.cache_prefetch),
        )
    )
    if not stop.is_set():
        companions[0].run()
    cache.close()
    return 0


def _open_cache_with_retries(settings: Settings, stop: threading.Event) -> ShardCache | None:
    """Open the cache of the job's dataset. Return None if `stop` is set before the remote answers."""
    pause = _PAUSES[0]
    while not stop.is_set():
        try:
            return open_cache(resolve_address(settings.dataset_uri, settings), settings, RankPlace(), for_samples=False)
        except (TopKubeError, OSError) as error:
            _report_problem(str(error))
            stop.wait(pause)
            pause = min(2 * pause, _PAUSES[1])
    return None


def _open_view(cache: ShardCache, settings: Settings) -> FileView | None:
    """Return the view of the dataset's files. Return None if the job has no view, or if its directory cannot be
    used."""
    if not settings.dataset_view:
        return None
    try:
        return FileView(cache, Path(settings.dataset_view), choose_cache_folder(None, settings))
    except OSError as error:
        _report_problem(f"{settings.dataset_view} cannot be used: {error.strerror}; the dataset's files are not shown")
        return None


def _report_problem(text: str) -> None:
    print(f"topkube data: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
