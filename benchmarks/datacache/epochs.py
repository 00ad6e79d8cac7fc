"""The epochs of benchmarks/cache.py: ranks in two nodes read a remote in a third node, and are timed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from allreduce.network import Network
from allreduce.worlds import RankWorld, Recipe
from datacache import remote
from datacache.problem import CacheProblem
from datacache.settings import OWN_SHARDS, PEERS, CacheSetting

LAYOUT = (2, 2)
LINK, NODES = "1gbit", "10gbit"
"""The links of the remote and of the nodes that read."""
EPOCHS = 5
"""The number of timed second epochs; the result is their median."""
PATIENCE_SECONDS = 60.0
"""After this time a contender reads no more second epochs."""
RECIPE = Recipe(
    "cache",
    "mpich",
    Path(sys.executable),
    (("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "eth0")),
    script=Path(__file__).with_name("rank.py"),
)


class Reader(NamedTuple):
    """A contender that takes turns with others. `arguments` are passed in addition to those of its setting. `reference`
    is the label of the contender with which it is compared, "" if there is none."""

    contender: CacheSetting
    arguments: dict[str, Any]
    reference: str


class CacheBench:
    """The benchmark: ranks in two nodes, and the remote in a third node."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory, self.root = directory, directory / "remote"
        self.root.mkdir()
        self._network = stack.enter_context(Network(len(LAYOUT) + 1, NODES))
        self.shape(LINK)
        self.remote = stack.enter_context(remote.Remote(self._network.nodes[-1], self.root, directory / "nginx"))
        self._world = stack.enter_context(RankWorld(RECIPE, LAYOUT, directory, self._network))
        self._turn = 0
        self.repeated: dict[str, int] = {}
        """For each peer that repeats samples, the most samples that came twice in an epoch."""

    def find_own_shards(self, contender: CacheSetting, problem: CacheProblem) -> Path | None:
        """Return the folder with the dataset in the peer's own format; None if it reads the same objects as TopKube."""
        return self.root / f"{problem.name}.{OWN_SHARDS[contender.kind][0]}" if contender.kind in OWN_SHARDS else None

    def shape(self, rate: str) -> None:
        """Limit the link of the remote."""
        self._network.shape(rate, [len(LAYOUT)])

    def measure_link(self, problem: CacheProblem, times: int = 3) -> float:
        """Return the bytes per second that both nodes get over the link with plain GETs; the best of `times`."""
        url = f"{self.remote.uri}/{problem.name}.flat"
        rates = []
        for _ in range(times):
            answers = self._world.ask(do="link", url=url)
            rates.append(sum(a["bytes"] for a in answers) / _compute_seconds(answers))
        return max(rates)

    def read_epoch(
        self, contender: CacheSetting, problem: CacheProblem, number: int, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Read an epoch on all ranks. Every sample must come once. A peer that repeats samples is measured all the
        same, and its number of repeated samples is reported."""
        answers = self._world.ask(
            do="epoch",
            name=contender.label,
            kind=contender.kind,
            arguments={**contender.arguments, **arguments},
            problem=problem.to_data(),
            folder=f"caches/{self._turn}",
            uri=self.remote.uri,
            epoch=number,
        )
        if missing := answers[0]["missing"]:
            raise SystemExit(f"{contender.label} left out {missing} samples and is not measured")
        repeated = answers[0]["repeated"]
        if repeated >= sum(LAYOUT):  # torch's sampler gives every rank the same number of samples
            if contender not in PEERS:
                raise SystemExit(f"{contender.label} returned {repeated} samples twice and is not measured")
            self.repeated[contender.label] = max(repeated, self.repeated.get(contender.label, 0))
        return answers

    def close(self, contender: CacheSetting, *, forget: bool = True) -> None:
        """Close the contender on all ranks. With `forget`, the cache is emptied too."""
        self._world.ask(do="close", name=contender.label)
        self.repeated.pop(contender.label, None)
        if forget:
            shutil.rmtree(self.directory / "caches", ignore_errors=True)
            self._turn += 1

    def measure_first_epoch(
        self, contender: CacheSetting, problem: CacheProblem, link: float, rate: str = LINK
    ) -> dict[str, Any]:
        """Read the epoch that fills an empty cache, including opening. `link`: bytes per second of plain GETs at
        `rate`."""
        os.sync()  # otherwise this epoch waits until the disk has written the bytes of earlier contenders
        before, times_before = self.remote.count_sent_bytes(), _read_processor_times()
        answers = self.read_epoch(contender, problem, 0)
        busy, available = (now - then for now, then in zip(_read_processor_times(), times_before, strict=True))
        fetched, least = self.remote.count_sent_bytes() - before, problem.count_bytes(self.root)
        if (own := self.find_own_shards(contender, problem)) is not None:
            least = sum(path.stat().st_size for path in own.iterdir())
        seconds = _compute_seconds(answers)
        row = {
            "problem": problem.name,
            "contender": contender.label,
            "link": rate,
            "seconds": round(seconds, 2),
            "mb_per_s": round(least / seconds / 1e6, 1),
            "percent_of_link": round(100 * least / seconds / link, 1),
            "fetched_of_dataset": round(fetched / least, 4),
            "processors_percent": round(100 * busy / available),
            "processor_seconds": round(sum(answer["processor_seconds"] for answer in answers), 2),
            "missing": answers[0]["missing"],
            "repeated": self.repeated.get(contender.label, 0),
        }
        print(
            f"{problem.name:12} first epoch   {contender.label:42}{seconds:7.2f} s {row['mb_per_s']:8.1f} MB/s "
            f"{row['percent_of_link']:6.1f}% of the link ({rate}), {row['fetched_of_dataset']:.3f} x the dataset "
            f"fetched, {row['processor_seconds']:.1f} s of processors in the ranks, processors "
            f"{row['processors_percent']}% busy",
            flush=True,
        )
        return row

    def measure_second_epochs(
        self, readers: list[Reader], problem: CacheProblem, first: int = 1
    ) -> list[dict[str, Any]]:
        """Read further epochs; the readers alternate. The first epoch of each is not timed, unless it takes more than
        half of PATIENCE_SECONDS."""
        seconds: dict[str, list[float]] = {reader.contender.label: [] for reader in readers}
        fetched = dict.fromkeys(seconds, 0)
        for turn in range(EPOCHS + 1):
            for contender, arguments, _ in readers:
                before = self.remote.count_sent_bytes()
                epoch_seconds = _compute_seconds(self.read_epoch(contender, problem, first + turn, **arguments))
                # The first epoch may open the contender. A slow first epoch counts, because few others follow.
                if turn or epoch_seconds > PATIENCE_SECONDS / 2:
                    seconds[contender.label].append(epoch_seconds)
                    fetched[contender.label] += self.remote.count_sent_bytes() - before
            if max(sum(times) for times in seconds.values()) > PATIENCE_SECONDS:
                break
        megabytes = problem.samples * problem.size / 1e6
        rate = {label: megabytes / median(times) for label, times in seconds.items()}
        rows = []
        for contender, _, reference in readers:
            times = seconds[contender.label]
            rows.append(
                {
                    "problem": problem.name,
                    "contender": contender.label,
                    "mb_per_s": round(rate[contender.label], 1),
                    "min": round(megabytes / max(times), 1),
                    "max": round(megabytes / min(times), 1),
                    "epochs": len(times),
                    "of": reference,
                    "percent": round(100 * rate[contender.label] / rate[reference], 1) if reference else None,
                    "fetched_mb_per_epoch": round(fetched[contender.label] / len(times) / 1e6, 1),
                    "repeated": self.repeated.get(contender.label, 0),
                }
            )
            share = f" {rows[-1]['percent']:6.1f}% of {reference}" if reference else ""
            print(
                f"{problem.name:12} second epoch  {contender.label:42}{rate[contender.label]:18.1f} MB/s{share}",
                flush=True,
            )
        return rows


def _read_processor_times() -> tuple[float, float]:
    """Return the busy time and the whole time of this machine's processors since it started, in clock ticks."""
    times = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = times[3] + times[4]
    return float(sum(times) - idle), float(sum(times))


def _compute_seconds(answers: list[dict[str, Any]]) -> float:
    return float(max(a["end"] for a in answers) - min(a["start"] for a in answers))
