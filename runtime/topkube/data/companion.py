"""What a worker's pod runs beside the ranks for its dataset: it fills the cache from the pod's first second on, and
shows the dataset's files under the job's mountPath. `topkube worker` starts it; the ranks need not know of it.

A `CachedDataset` in the ranks fills the cache too, in the order in which they read; once there is one it is left to it.
Scripts that read plain files never open one: for them this process brings the shards of other workers as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from topkube.data.cache import Cache
from topkube.data.fill import THREADS
from topkube.data.opening import address, memory_folder, open_cache
from topkube.data.place import Place
from topkube.data.records import PUBLISHED, key_of
from topkube.data.session import OPEN
from topkube.data.view import View
from topkube.errors import TopKubeError
from topkube.settings import Settings

PLAIN_SECONDS = 15.0
"""Ranks that have opened no dataset so long after their start read plain files."""
_LOOK_SECONDS = 0.25
_PAUSES = (1.0, 30.0)
"""After the remote has failed: growing."""


class Companion:
    """One pod's dataset. `share=(i, n)`: this is worker i of n. `runs`: the worker's directory, in which an attempt's
    folder shows that ranks have started. `report` gets what the cache holds, for the job's status; what is in `asked`
    goes along, so that who wrote it knows that the report is younger."""

    def __init__(
        self,
        cache: Cache,
        view: View | None,
        share: tuple[int, int],
        *,
        runs: Path | None = None,
        sessions: Path | None = None,
        report: Path | None = None,
        asked: Path | None = None,
        prefetch: bool = True,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        self._cache, self._view, self._share = cache, view, share
        self._runs, self._sessions = runs, sessions
        self._report, self._asked = report, asked
        self._prefetch, self._plain_seconds = prefetch, plain_seconds
        self._numbers = {cache.shards.key(number): number for number in range(len(cache.shards))}
        self._seen = 0
        self._arrived: set[int] = set()
        """Shards that have been published and are not shown yet."""
        self._shown: set[int] = set()
        self._started: float | None = None
        self._reported = ""
        self._full = False
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Until `stop`."""
        pause, again = _PAUSES[0], 0.0
        under_way: dict[Future[None], int] = {}
        waiting = self._wanted()
        with ThreadPoolExecutor(THREADS, "topkube-companion") as pool:
            while not self._stop.is_set():
                for done in [one for one in under_way if one.done()]:
                    number = under_way.pop(done)
                    try:
                        done.result()
                        pause = _PAUSES[0]
                    except (TopKubeError, OSError) as error:
                        _say(f"shard {number}: {error}")
                        again, pause = time.monotonic() + pause, min(2 * pause, _PAUSES[1])
                        waiting = self._wanted()
                while len(under_way) < THREADS and time.monotonic() >= again and self._fetching():
                    number = next(waiting, -1)
                    if number < 0:
                        break
                    if not self._cache.has(number):
                        under_way[pool.submit(self._bring, number)] = number
                self._show()
                self._tell()
                self._stop.wait(_LOOK_SECONDS)
            for one in under_way:
                one.cancel()

    # ---- filling

    def _wanted(self) -> Iterator[int]:
        """Shards that this worker brings: its share; then, for plain files, those of the others."""
        first, count = self._share
        yield from range(first, len(self._cache.shards), count)
        while not self._plain():
            yield -1
        for number in range(len(self._cache.shards)):
            if number % count != first:
                yield number

    def _fetching(self) -> bool:
        return self._prefetch and self._cache.state == OPEN and not self._read_as_samples()

    def _bring(self, number: int) -> None:
        if not self._stop.is_set():
            self._cache.open(number, self._cache.from_store)

    def _read_as_samples(self) -> bool:
        """Whether somebody in this pod has opened the dataset as samples."""
        if self._cache.session.fillers:
            return True
        own = f"session-{self._cache.name}"
        sessions = self._sessions.glob("session-*.users") if self._sessions is not None else ()
        return any(path.stem != own for path in sessions)

    def _plain(self) -> bool:
        """Whether the ranks are old enough to be known for readers of plain files."""
        if self._share[1] == 1:
            return True
        if self._started is None and self._runs is not None and any(self._runs.glob("attempt-*")):
            self._started = time.monotonic()
        old = self._started is not None and time.monotonic() - self._started > self._plain_seconds
        return old and not self._read_as_samples()

    # ---- showing

    def _show(self) -> None:
        """Puts what has arrived since the last look into the view."""
        if self._view is None or self._view.is_complete or self._cache.folder is None:
            return
        records = self._cache.folder.log.all()
        if len(records) < self._seen:  # the dataset was removed and is being filled anew
            self._seen = 0
        for record in records[self._seen :]:
            number = self._numbers.get(key_of(record))
            if number is not None and record["kind"] == PUBLISHED and number not in self._shown:
                self._arrived.add(number)
        self._seen = len(records)
        for number in sorted(self._arrived):
            if self._stop.is_set():
                return
            if not self._cache.has(number) or not self._may_copy(number):
                continue
            try:
                self._view.show(number)
            except (TopKubeError, OSError) as error:
                _say(f"the files of shard {number} cannot be shown: {error}")
                self._full = True
                self._arrived.clear()
                return
            self._arrived.discard(number)
            self._shown.add(number)
        if len(self._shown) == len(self._cache.shards):
            self._view.complete()

    def _may_copy(self, number: int) -> bool:
        """Files that are a shard of their own cost nothing to show. Small ones are copies: not where nobody reads them,
        not where they would take the room of shards."""
        shards = self._cache.shards
        shard = shards[number]
        if shard.stop - shard.start == 1:
            return True
        if self._full or self._read_as_samples():
            return False
        assert self._cache.folder is not None
        tier, total = self._cache.folder.tier, shards.listing.bytes
        limit = tier.limits.size
        if (limit is None or 2 * total <= limit) and total + shard.size <= tier.free() + self._copied():
            return True
        self._full = True
        _say(
            f"{shards.uri}: {total:,} bytes of small files do not fit twice (as shards and as files) and are not "
            "shown; raise spec.dataset.cache.sizeLimit, or read them with topkube.data.CachedDataset"
        )
        return False

    def _copied(self) -> int:
        return int(sum(self._cache.shards.sizes[number] for number in self._shown))

    # ---- telling

    def _tell(self) -> None:
        if self._report is None or self._cache.folder is None:
            return
        asked = ""
        if self._asked is not None:
            with contextlib.suppress(OSError):  # before looking: the report is younger than the question
                asked = self._asked.read_text(encoding="utf-8")
        held = self._cache.folder.log.total()
        text = json.dumps(
            {
                "cachedBytes": held,
                "totalBytes": self._cache.shards.listing.bytes,
                "remoteBytes": int(self._cache.counters.totals()["remote_bytes"]),
                "asked": asked,
            }
        )
        if text != self._reported:
            self._reported = text
            part = self._report.with_name(f".{self._report.name}.part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, self._report)


def main(arguments: list[str] | None = None) -> int:
    """`python -m topkube.data.companion`, with the settings of the worker's container."""
    parser = argparse.ArgumentParser(prog="topkube.data.companion")
    parser.add_argument("--share", default="0/1", metavar="I/N")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--asked", type=Path)
    options = parser.parse_args(arguments)
    first, _, count = options.share.partition("/")
    settings = Settings.from_environment()
    stop = threading.Event()
    companion: list[Companion] = []

    def end(*_: object) -> None:
        stop.set()
        for one in companion:
            one.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    cache, pause = None, _PAUSES[0]
    while cache is None and not stop.is_set():
        try:
            cache = open_cache(address(settings.dataset_uri, settings), settings, Place())
        except (TopKubeError, OSError) as error:
            _say(str(error))
            stop.wait(pause)
            pause = min(2 * pause, _PAUSES[1])
    if cache is None:
        return 0
    try:
        view = View(cache, Path(settings.dataset_view)) if settings.dataset_view else None
    except OSError as error:
        _say(f"{settings.dataset_view} cannot be used: {error.strerror}; the dataset's files are not shown")
        view = None
    companion.append(
        Companion(
            cache,
            view,
            (int(first), int(count)),
            runs=options.runs,
            sessions=memory_folder(None, settings),
            report=options.report,
            asked=options.asked,
            prefetch=bool(settings.cache_prefetch),
        )
    )
    if not stop.is_set():
        companion[0].run()
    cache.close()
    return 0


def _say(text: str) -> None:
    print(f"topkube data: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
