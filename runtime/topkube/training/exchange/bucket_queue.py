"""The buckets of a backward on their way through the communication thread."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait

import torch

from topkube.collectives.device.memory import DeviceFlag
from topkube.collectives.occupancy import find_occupancy
from topkube.errors import TrainingError
from topkube.telemetry import phases
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.reduction.bucket_exchange import BucketExchange
from topkube.training.exchange.settings_in_force import SettingsInForce
from topkube.training.ranks import communication_thread
from topkube.training.reporting.step_trace import StepTrace
from topkube.world import World


class BucketQueue:
    """The buckets that this backward has handed over to the communication thread, in the order of the plan: `futures`
    holds a result for each of them, True if its values were finite. `loss_scale` is the factor on the loss of this
    backward."""

    def __init__(self, world: World, plan: BucketPlan, exchange: BucketExchange, in_force: SettingsInForce) -> None:
        self._world, self._plan, self._exchange, self._in_force = world, plan, exchange, in_force
        self.futures: list[Future[bool]] = []
        self.loss_scale: torch.Tensor | float = 1.0
        self.step_trace: StepTrace | None = None
        """The recorder of a trace, None if no trace is recorded."""
        self._left_out: list[Bucket] = []
        self.exchange_seconds = (0.0, 0.0)
        """The seconds between nodes and inside the node of all exchanges of this optimizer that have ended."""
        self._seconds_before: tuple[float, float] | None = None
        """What the process had spent, for all optimizers, before the first bucket that is under way."""

    def hand_over_full(self) -> None:
        """Hand over the next buckets of the plan, as long as all their gradients are ready."""
        buckets = self._plan.buckets
        while len(self.futures) < len(buckets) and buckets[len(self.futures)].waiting <= 0:
            self._hand_over_next()

    def hand_over_rest(self) -> None:
        """Hand over all buckets that remain."""
        while len(self.futures) < len(self._plan.buckets):
            self._hand_over_next()

    def _hand_over_next(self) -> None:
        bucket = self._plan.buckets[len(self.futures)]
        if self._plan.is_active(bucket):
            self.futures.append(self._submit(bucket))
        else:  # all its parameters were frozen when the ranks last compared
            self._left_out.append(bucket)
            self.futures.append(communication_thread.make_done(True))

    def _submit(self, bucket: Bucket) -> Future[bool]:
        density, is_warming_up = self._in_force.density, self._in_force.is_warming_up
        algorithms, run = self._exchange.algorithms, self._exchange.run
        if self.step_trace is not None:
            number = next(n for n, planned in enumerate(self._plan.buckets) if planned is bucket)
            algorithm = algorithms.choose(bucket, density, is_warming_up).algorithm.name
            run = self.step_trace.around_exchange(run, number, bucket.length, bucket.dtype.itemsize, algorithm, density)
        is_alone = self._exchange.world.size == 1 and not algorithms.large.compresses
        if is_alone and not algorithms.drains(bucket):  # nothing to send: no thread is needed
            return communication_thread.make_done(run(bucket, density, is_warming_up))
        find_occupancy(self._exchange.world).begin_exchange(self._exchange.world, self)
        self._seconds_before = self._seconds_before or read_exchange_seconds()
        # Only residuals need the factor on the loss. It may be on a device, so it is not read here.
        scale = self.loss_scale if algorithms.is_sparse(bucket) else 1.0
        mark = self._exchange.mark_caller()
        return communication_thread.submit(lambda: run(bucket, density, is_warming_up, mark, scale))

    def finish(self) -> tuple[bool | DeviceFlag, list[Bucket]]:
        """Wait for all buckets. Return True if a value was not finite, or a flag of the device (see `exchange_more`);
        and the buckets that were left out because their parameters were frozen."""
        futures, self.futures = self.futures, []
        left_out, self._left_out = self._left_out, []
        return self._wait(futures), left_out

    def exchange_more(self, buckets: Iterable[Bucket]) -> bool | DeviceFlag:
        """Exchange these buckets too, and wait for them. Return True if something that this rank saw was not finite; or
        a flag of the device, the same on all ranks, that is 1 if something that a rank saw was not finite."""
        return self._wait([self._submit(bucket) for bucket in buckets])

    def _wait(self, futures: Iterable[Future[bool]]) -> bool | DeviceFlag:
        finite = all([future.result() for future in futures])
        flagged = self._flush(finite)
        if self._seconds_before is not None:
            times = zip(self.exchange_seconds, self._seconds_before, read_exchange_seconds(), strict=True)
            self.exchange_seconds = tuple(so_far + now - before for so_far, before, now in times)  # type: ignore[assignment]
        self._end_exchange()
        return flagged

    def _flush(self, finite: bool) -> bool | DeviceFlag:
        """Finish the exchanges that are under way. `finite` and the result are those of `_wait`."""
        if self._exchange.can_check_finite_on_device(self._plan.buckets):
            assert finite  # values that are not finite set the flag, not the result of a future
            flag = communication_thread.run(self._exchange.flush_undecided)
            self._exchange.make_caller_wait()
            return flag
        if self._exchange.is_pipelined:
            finite = communication_thread.run(self._exchange.flush) and finite
            self._exchange.make_caller_wait()
        return not finite

    def wait_for_handed_over(self) -> None:
        """Wait for the buckets that an unfinished backward had handed over: they would still write into `.grad`."""
        wait(self.futures)
        if self.futures and self._exchange.is_pipelined:
            wait([communication_thread.submit(self._exchange.flush)])
        self._end_exchange()

    def abandon(self) -> None:
        """Undo the exchanges of a backward that did not finish. Raises TrainingError if other ranks have already
        exchanged a part of it, because they wait for the rest."""
        handed_over, self.futures, self._left_out = self.futures, [], []
        for future in handed_over:
            future.result()
        if self._exchange.is_pipelined:
            communication_thread.run(self._exchange.flush)
            self._exchange.make_caller_wait()
        self._end_exchange()
        self._exchange.residuals.reject()
        if self._exchange.reduced_parts is not None:
            self._exchange.reduced_parts.take()
        if handed_over and self._world.size > 1:
            raise TrainingError(
                f"backward() began after another backward() that did not finish: {len(handed_over)} of"
                f" {len(self._plan.buckets)} buckets were exchanged",
                cause="an exception in backward()",
                next_step="end the process on an exception: the ranks are out of step",
            )

    def _end_exchange(self) -> None:
        """Let other calls use the world: no bucket is under way."""
        self._seconds_before = None
        find_occupancy(self._exchange.world).end_exchange(self)


def read_exchange_seconds() -> tuple[float, float]:
    """Return the seconds between nodes and inside the node that this process has spent in exchanges."""
    return phases.current.total("inter"), phases.current.total("intra")
