"""`topkube bench train`: measure the training step with each aggregation, beside DistributedDataParallel, on these
ranks and links. Start it under mpiexec.

The contenders are trainings of the same GPT in the same processes. They take turns: each makes a few steps and then
pauses, so that all see the same changes of the machine's speed. A step lasts until the slowest rank has made it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from topkube import world as worlds
from topkube.algorithms import OVERLAP
from topkube.bench.report import BenchReport, check_path, describe_machine
from topkube.collectives.coordination import barrier, broadcast_object, gather_object, reduce
from topkube.errors import ArgumentError, CollectiveError, TopKubeError
from topkube.installation import build_install_command
from topkube.telemetry import phases
from topkube.world import World

if TYPE_CHECKING:  # torch loads slowly, and `topkube bench --help` does not need it
    from topkube.bench.contenders import Task
    from topkube.bench.trainings import Training

AGGREGATIONS = "dense,auto,int8,int4,int3,hitopk,onebit"
WARM_STEPS = 4
"""Steps before a contender's first measured step: DistributedDataParallel plans its buckets again after the first."""

COLUMNS = {
    "contender": "contender",
    "median_ms": "ms",
    "minimum_ms": "min ms",
    "maximum_ms": "max ms",
    "speed": "times as fast",
    "sent_mb": "MB per node",
    "exchange_ms": "ms more",
    "choice": "chosen",
}


def command(
    aggregations: Annotated[
        str, typer.Option(help="Aggregations of TopKube, separated by commas: auto, dense or names of algorithms.")
    ] = AGGREGATIONS,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the GPT.")] = 6,
    width: Annotated[int, typer.Option(min=1, help="Features of the GPT, a multiple of 4.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of 128 characters per rank and step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps in each turn of a contender.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 6,
    overlap: Annotated[
        str, typer.Option(help=f"Overlap of TopKube's exchanges: {', '.join(OVERLAP.choices)}.")
    ] = OVERLAP.default,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file.")] = None,
) -> None:
    """Measure training steps on the ranks that mpiexec started, and compare them with DDP over gloo."""
    try:
        from topkube.bench.contenders import Task, list_aggregations
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"{error.name} is not installed", cause="training needs torch", next_step=build_install_command("train")
        ) from error
    task, names = Task(layers, width, batch, overlap), list_aggregations(aggregations)
    world = worlds.init()
    if world.rank == 0:
        check_path(json)
    report = measure(world, task, names, steps, rounds)
    if world.rank == 0:
        report.show()
        report.write(json)


def measure(world: World, task: Task, aggregations: list[str], steps: int, rounds: int) -> BenchReport:
    """Measure `rounds` turns of `steps` steps of each contender. A collective."""
    import torch

    from topkube.bench.contenders import CONTEXT, Contenders
    from topkube.bench.ddp import join_gloo, leave_gloo

    problem = attempt(world, lambda: join_gloo(world))
    if problem:
        _warn(world, f"the rows of DDP are left out: gloo cannot connect the ranks. {problem}")
    contenders = Contenders(world, task, aggregations, has_ddp=not problem)
    report = BenchReport(
        "Training steps: median ms on the slowest rank, ms more than no exchange",
        COLUMNS,
        facts={
            **describe_machine(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if contenders.is_on_gpu else "cpu",
            "threads": torch.get_num_threads(),
            "ranks": " + ".join(str(len(ranks)) for ranks in world.node_ranks),
            "parameters": contenders.parameters,
            "layers": task.layers,
            "width": task.width,
            "batch": task.batch,
            "context": CONTEXT,
            "overlap": task.overlap,
            "steps": rounds * steps,
        },
    )
    turns = [ContenderTurns(name, start, contenders.is_on_gpu) for name, start in contenders.starts.items()]
    for number in range(rounds):
        first = number % max(len(turns), 1)
        for contender in turns[first:] + turns[:first]:
            if problem := contender.take_turn(world, steps):
                _warn(world, f"{contender.name} is left out. {problem}")
                turns.remove(contender)
    _add_rows(report, world, turns, aggregations)
    for contender in turns:
        contender.end()
    leave_gloo()
    return report


def _add_rows(report: BenchReport, world: World, turns: list[ContenderTurns], aggregations: list[str]) -> None:
    """Add a row for each contender. The bytes of contenders other than TopKube's are not counted."""
    from topkube.bench.contenders import DDP, NO_EXCHANGE

    medians = {contender.name: median(contender.seconds) for contender in turns}
    plain = medians.get(NO_EXCHANGE)
    report.facts["times as fast as"] = base = DDP if DDP in medians else NO_EXCHANGE
    for contender in turns:
        name, seconds = contender.name, contender.seconds
        is_counted = name in aggregations
        report.add(
            contender=name,
            median_ms=medians[name] * 1e3,
            minimum_ms=min(seconds) * 1e3,
            maximum_ms=max(seconds) * 1e3,
            speed=medians[base] / medians[name] if base in medians else None,
            sent_mb=contender.sent_bytes / world.nodes / len(seconds) / 1e6 if is_counted else None,
            exchange_ms=(medians[name] - plain) * 1e3 if plain is not None and name != NO_EXCHANGE else None,
            choice=contender.describe_choice() or None,
        )


class ContenderTurns:
    """The turns of the contender called `name`, whose training `start` begins. `seconds` has the duration of each
    measured step on the slowest rank, and `sent_bytes` what all ranks have sent to other nodes in these steps."""

    def __init__(self, name: str, start: Callable[[], Training], is_on_gpu: bool) -> None:
        self.name, self._start, self._is_on_gpu = name, start, is_on_gpu
        self.seconds: list[float] = []
        self.sent_bytes = 0.0
        self._training: Training | None = None

    def take_turn(self, world: World, steps: int) -> str:
        """Make `steps` measured steps. Return why the contender cannot go on, the same on all ranks; "" if it can. A
        collective."""
        ends: list[float] = []
        gc.collect()
        problem = attempt(world, self._get_ready)
        if not problem:
            barrier(world=world)
            phases.current.take()
            problem = attempt(world, lambda: ends.extend(self._time_steps(steps)))
        if problem:
            attempt(world, self.end)
            return problem
        self.sent_bytes += float(reduce(float(phases.current.take().inter_bytes), world=world))
        slowest_ends = reduce(np.array(ends), "max", world=world)
        self.seconds += np.diff(slowest_ends, prepend=0.0).tolist()
        return attempt(world, self._get_training().pause)

    def describe_choice(self) -> str:
        """Return what `auto` or `dense` stands for; "" for other contenders."""
        return self._get_training().describe_choice()

    def end(self) -> None:
        """End the training, if it has begun. A collective."""
        training, self._training = self._training, None
        if training is not None:
            training.end()

    def _get_training(self) -> Training:
        assert self._training is not None
        return self._training

    def _get_ready(self) -> None:
        """Make the steps that are not measured: one in each turn, and in the first turn those of a new training, until
        the choice behind `auto` or `dense` is final."""
        if is_new := self._training is None:
            self._training = self._start()
        training, made = self._get_training(), 0
        training.resume()
        while is_new and (made < WARM_STEPS or not training.is_final()):
            training.step()
            made += 1
        training.step()
        self._wait_for_device()

    def _time_steps(self, steps: int) -> list[float]:
        """Return when each of `steps` steps ended, in seconds from now."""
        step, ends = self._get_training().step, []
        gc.disable()  # it would search the objects of all contenders
        start = perf_counter()
        try:
            for _ in range(steps):
                step()
                self._wait_for_device()
                ends.append(perf_counter() - start)
        finally:
            gc.enable()
        return ends

    def _wait_for_device(self) -> None:
        if self._is_on_gpu:
            import torch

            torch.cuda.synchronize()


def attempt(world: World, action: Callable[[], object]) -> str:
    """Call `action` on all ranks. Return the error of the first rank on which it fails, the same on all ranks; "" if it
    fails nowhere. A collective. Raises CollectiveError, after which ranks are out of step."""
    problem = ""
    try:
        action()
    except CollectiveError:
        raise
    except (TopKubeError, RuntimeError, OSError) as error:
        problem = next(iter(str(error).splitlines()), "") or type(error).__name__
    problems = gather_object(problem, world=world) or []
    first = next((f"Rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
    return str(broadcast_object(first, world=world))


def _warn(world: World, text: str) -> None:
    if world.rank == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)
