"""The algorithm that `auto` or `dense` stands for in a run: chosen from measurements, and corrected in the first steps.

At the first exchange all ranks measure their links and memory, agree on the slowest, and choose a dense algorithm by
the cost model that the catalogue declares. After a few steps they compare its prediction with what the steps took. If
the prediction was wrong by more than 10%, they fit the model to the steps and choose again. A new choice is kept only
if the steps become faster by 3% (trial.py). If `auto` may compress, and this is predicted to save 3% of the step, they
try the best algorithm that compresses gradients instead, under the same condition. On GPUs the host does not see how
long a stage takes: there the ranks do not fit the model. They try the best dense choice of the other transport (NCCL or
MPI), and then the best algorithm that compresses. With DeAR they only try the best algorithm that compresses. Every
decision follows from numbers that are the same on all ranks.

If nodes may have weights of their own (`onebit`), that is tried last, against what won before. Its exchange is shorter,
but begins only after backward, so predictions of the exchange do not tell which steps are faster. Before the nodes get
weights of their own, one dense step sends what residuals hold. The parts of the optimizer are then built again, and
again if the choice returns to an algorithm that exchanges gradients (training/optimizer_parts.py). The Tuning object
stays the same.

Several optimizers of a world compare their choices one after the other (measuring_turn.py).

When a rank saves the state, the choice becomes final, so that a run that resumes from the state makes the same steps.

With a schedule, a stage of `auto` or `dense` has a choice of its own. The machines are measured at the first exchange
of the run, whatever its first algorithm is. So the choice of a later stage follows from numbers that are in the state.
The first steps of that stage correct it only if no state was saved before: a run that resumes could not repeat that.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from topkube.algorithms import (
    CHOICES,
    DENSE_WIRE,
    NODE_WEIGHTS,
    Algorithm,
    BucketSize,
    Choice,
    Machines,
    sort_choices_by_time,
)
from topkube.collectives.device.rates import DeviceRates
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.tuning.candidates import (
    find_compressed,
    find_fastest_dense,
    find_other_transport,
    find_weights,
)
from topkube.training.exchange.tuning.fitted_machines import WRONG, find_same, fit_machines, is_same, is_wrong
from topkube.training.exchange.tuning.machines import agree_on_machines
from topkube.training.exchange.tuning.measuring_turn import find_measuring_turn
from topkube.training.exchange.tuning.saved_choice import (
    find_after_residuals,
    find_saved_algorithm,
    find_saved_choice,
    save_choice,
)
from topkube.training.exchange.tuning.step_times import Measurement, StepTimes
from topkube.training.exchange.tuning.trial import Side, Trial
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World

_OTHER_BUCKETS = 2.0
"""The sizes of buckets change if the rate of the link is this many times higher or lower than expected."""
_FROM_MEASUREMENTS = "chosen from measurements"
"""The reason for a choice that the first steps have not corrected."""
_SETTINGS = ("algorithm", "dense_wire")
"""The settings by which a choice is made."""


class Tuning:
    """The choice of one optimizer's exchange. `choice` is None while the job names its algorithm, before the first
    exchange, and with one node, where nothing is measured. `machines` holds the measured or fitted cluster. `summary`
    describes the choice and its reason, the same on all ranks; "" without a choice."""

    def __init__(
        self,
        world: World,
        aggregation: AggregationSettings,
        agreement: QueuedAgreement,
        measure_device: Callable[[], DeviceRates | None] = lambda: None,
        compressed_choices: Sequence[Algorithm] = (),
        is_on_device: bool = False,
    ) -> None:
        self.choice: Choice | None = None
        self.machines: Machines | None = None
        self.summary = ""
        self.measured: Measurement | None = None
        self.is_saved = False
        """True if this rank saved the state since the last exchange."""
        self._world, self._agreement = world, agreement
        self._job, self._aggregation = aggregation, aggregation.settings_at(0)
        self.measure_device, self.compressed_choices = measure_device, compressed_choices
        self._is_on_device = is_on_device
        self._trial: Trial | None = None
        self._after_residuals: Choice | None = None
        """The choice that follows when the present one, which is dense, has sent all residuals."""
        self._dense: Choice | None = None
        """The last dense choice."""
        self._probed: Machines | None = None
        """The machines as they were measured at the start, not fitted."""
        self._is_settled = self._must_repeat = False
        self._times, self._turn_key = StepTimes(), object()

    @property
    def rate(self) -> float:
        """The bytes per second that a node sends to other nodes; 0 if unknown."""
        if self.machines is None:
            return 0.0
        return self.machines.link if self.choice is None else self.machines.link_of(self.choice.algorithm)

    @property
    def predicted_seconds(self) -> float | None:
        """The predicted seconds of one step's exchange; None without a choice."""
        return self.choice.seconds if self.choice is not None else None

    @property
    def measured_seconds(self) -> float | None:
        """The measured seconds of one step's exchange, by the same model; None before the first comparison, and with
        DeAR, which divides the exchange."""
        if self.choice is None or self.measured is None or self._job.is_decoupled:
            return None
        parts = (self.measured.between, self.measured.inside)
        return max(parts) if self.choice.algorithm.overlaps_buckets(self._world.nodes) else sum(parts)

    def measure(self) -> None:
        """Measure the machines if it was not done yet for this world. All ranks call this together."""
        if self.machines is not None or self._world.nodes == 1:
            return
        self.machines = self._probed = agree_on_machines(
            self._world, self._agreement, self._is_on_device, self.measure_device
        )

    def choose(self, buckets: Sequence[BucketSize]) -> None:
        """Choose for a step that exchanges `buckets`, if there is a choice and none was made or loaded. If only a later
        stage of the schedule has a choice, just measure. All ranks call this together."""
        if self._world.nodes > 1 and any(name in CHOICES for name in self._job.algorithms):
            self.measure()
            if self.choice is None:
                self._choose_from_measurements(buckets)

    def change_to(self, aggregation: AggregationSettings, buckets: Sequence[BucketSize]) -> None:
        """Choose for the stage of a schedule that is in force, if it is another stage than before. All ranks call this
        before the same step."""
        is_same = all(getattr(aggregation, name) == getattr(self._aggregation, name) for name in _SETTINGS)
        self._aggregation = aggregation
        if is_same:
            return
        self.choice, self.summary, self.measured = None, "", None
        self._trial, self._after_residuals, self._is_settled = None, None, self._must_repeat
        self._times.restart()
        if self.machines is not None:
            self._choose_from_measurements(buckets)

    def _choose_from_measurements(self, buckets: Sequence[BucketSize]) -> None:
        if self._aggregation.algorithm in CHOICES:
            ranked = self._rank(buckets)
            self._adopt(find_fastest_dense(ranked), _FROM_MEASUREMENTS, ranked)

    # ---- the first steps

    def note_saved(self) -> None:
        """Keep the choice, and choose for later stages without their first steps, because a rank has saved the state.
        All ranks call this before the same step."""
        if self.choice is not None and not self._is_settled:
            when = "before the steps were compared" if self._trial is None else "during a trial"
            self._adopt(self._after_residuals or self.choice, f"kept: a state was saved {when}")
        self._must_repeat = True
        self.settle()

    def settle(self) -> None:
        """Keep the choice of this stage. All ranks call this before the same step."""
        self._is_settled, self._trial = True, None
        self.leave()

    def leave(self) -> None:
        """Let another optimizer measure its choice. All ranks call this between the same two steps."""
        find_measuring_turn(self._world).leave(self._turn_key)

    @property
    def is_sending_residuals(self) -> bool:
        """True if the present choice is dense for one step, which sends residuals before nodes get their own
        weights."""
        return self._after_residuals is not None

    def end_residuals(self) -> None:
        """Note that no residual is left. All ranks call this between the same two steps."""
        if self._after_residuals is not None:
            self.choice, self._after_residuals = self._after_residuals, None

    @property
    def is_settled(self) -> bool:
        """True if the choice stays, or if there is none."""
        return self._is_settled or self.choice is None

    def note_step(self, now: float, exchange: tuple[float, float], is_changing: bool = False) -> list[float] | None:
        """Note that the exchange of a step ended at `now` (seconds). `exchange` has the seconds of all exchanges so
        far, between nodes and inside the node. `is_changing` is True, on all ranks, if it was not yet that of the
        choice. After the last counted step, on all ranks the same step, return what this rank measured for `decide`;
        before that, return None."""
        if self.choice is None or self._is_settled or self.is_sending_residuals:
            return None
        if not find_measuring_turn(self._world).take(self._turn_key):
            self._times.restart()
            return None
        period = self._aggregation.period if self.choice.algorithm.in_weights else 1
        return self._times.note_step(now, exchange, is_changing, period)

    def decide(self, agreed: Sequence[float], buckets: Sequence[BucketSize]) -> bool:
        """Compare the prediction with the measurement of all ranks: the largest of each number that `note_step`
        returned. Return True if the choice or the sizes of buckets change."""
        assert self.choice is not None
        assert self.machines is not None
        self.measured = measured = Measurement.from_agreed(agreed)
        self._times.restart()
        if self._trial is not None:
            return self._go_on(self._trial, measured, buckets)
        expected = self._rank(buckets)
        if self._is_on_device:
            return self._try_on_device(measured, self.choice, expected)
        is_compared = not self._job.is_decoupled  # the times of two halves do not show if the prediction was right
        if not is_compared or not is_wrong(self.choice, measured):
            if self._try_to_compress(measured, self.choice, expected):
                return True
            self.settle()
            self._adopt(self.choice, "confirmed by the first steps" if is_compared else _FROM_MEASUREMENTS, expected)
            return False
        return self._fit_and_choose(measured, self.choice, self.machines, buckets)

    def _fit_and_choose(
        self, measured: Measurement, choice: Choice, before: Machines, buckets: Sequence[BucketSize]
    ) -> bool:
        """Fit the machines, which are `before`, to the measurement of the present `choice`, and choose again. Return
        True if the choice or the sizes of buckets change."""
        old_rate = self.rate
        self.machines = fit_machines(before, choice, measured, lambda machines: self._rank(buckets, machines))
        ranked = self._rank(buckets)
        present = find_same(ranked, choice)
        if self._try_to_compress(measured, present, ranked):
            return True
        # Stages inside the node also wait for ranks on the same processor, so the fitted memory can be far too slow.
        if self._try_to_compress(measured, present, self._rank(buckets, before)):
            return True
        ranked = [other for other in ranked if not other.algorithm.compresses]
        is_faster = ranked[0].seconds < (1 - WRONG) * present.seconds
        if is_faster or not 1 / _OTHER_BUCKETS < self.rate / old_rate < _OTHER_BUCKETS:
            tried = ranked[0] if is_faster else present
            self._try(tried, Side(choice, before, [measured]), "fitted to the first steps, on trial", ranked)
            return True
        self.settle()
        self._adopt(present, "fitted to the first steps", ranked)
        return False

    def _try_to_compress(self, measured: Measurement, present: Choice, ranked: Sequence[Choice]) -> bool:
        """Begin the trial of the best choice that compresses gradients, if it is predicted to save enough of the step,
        or else of weights of nodes. Return True if the trial begins. `present` is the choice in force; the predictions
        of `ranked` are compared. If several choices are about as fast, the one that changes values least is tried."""
        assert self.machines is not None
        if present.algorithm.compresses:
            return False
        earlier = Side(present, self.machines, [measured])
        compressed = find_compressed(present, measured.step, ranked, self.compressed_choices)
        if compressed is None:
            return self._try_weights(earlier, ranked)
        self._try(compressed, earlier, f"on trial against {present.algorithm.name}", ranked)
        return True

    def _try_weights(self, earlier: Side, ranked: Sequence[Choice]) -> bool:
        """Begin the trial of weights of nodes against an earlier choice, if that is worth it. Return True if the trial
        begins."""
        weights = find_weights(earlier.choice, earlier.step, ranked, self.compressed_choices)
        if weights is not None:
            self._try(weights, earlier, f"on trial against {earlier.choice.algorithm.name}", ranked)
        return weights is not None

    def _try_on_device(self, measured: Measurement, present: Choice, ranked: Sequence[Choice]) -> bool:
        """Begin a trial against the present choice on GPUs: of the other transport, or otherwise of the best choice
        that compresses. Return False, and keep the present choice, if neither is worth it."""
        assert self.machines is not None
        other = find_other_transport(present, ranked) if self.machines.nccl_link is not None else None
        if other is not None:
            reason = f"the other transport, on trial against {present.algorithm.name}"
            self._try(other, Side(present, self.machines, [measured]), reason, ranked)
            return True
        if self._try_to_compress(measured, present, ranked):
            return True
        self.settle()
        self._adopt(present, "far ahead of all others", ranked)
        return False

    def _try(self, tried: Choice, earlier: Side, reason: str, ranked: Sequence[Choice]) -> None:
        """Begin the trial of a choice, predicted from the present machines, against an earlier one."""
        assert self.machines is not None
        self._trial = Trial(earlier, Side(tried, self.machines))
        self._adopt(tried, reason, ranked)

    def _go_on(self, trial: Trial, measured: Measurement, buckets: Sequence[BucketSize]) -> bool:
        """Add the measurement of the side in force to the trial. If the trial is not decided, measure the other side.
        Otherwise keep the choice that won; another trial may follow. Return True if the choice changes."""
        measured_side = trial.in_force
        measured_side.measured.append(measured)
        is_faster = trial.judge()
        if is_faster is None:
            trial.change_sides()
            self.machines, self.measured = trial.in_force.machines, trial.in_force.measured[-1]
            self._adopt(trial.in_force.choice, "measured once more: the trial is not decided")
            return True
        self._trial = None
        winner = trial.tried if is_faster else trial.earlier
        self.machines, self.measured = winner.machines, winner.measured[-1]
        comparison = f"{trial.tried.step * 1e3:.3g} ms per step, {trial.earlier.step * 1e3:.3g} ms before"
        self._adopt(winner.choice, f"kept: {comparison}" if is_faster else f"restored after a trial: {comparison}")
        if self._try_next(trial.tried.choice.algorithm, winner, buckets):
            return True
        self.settle()
        return winner is not measured_side

    def _try_next(self, tried: Algorithm, winner: Side, buckets: Sequence[BucketSize]) -> bool:
        """Begin the trial that follows that of an algorithm, which `winner` has won. Return True if there is one."""
        if tried.in_weights:
            return False
        if tried.compresses:
            # Fitted memory can be far too slow, as in _fit_and_choose.
            rankings = (self._rank(buckets, machines) for machines in (self.machines, self._probed))
            return any(self._try_weights(winner, ranked) for ranked in rankings)
        return self._is_on_device and self._try_to_compress(winner.measured[-1], winner.choice, self._rank(buckets))

    def _rank(self, buckets: Sequence[BucketSize], machines: Machines | None = None) -> list[Choice]:
        """Return the possible choices, the fastest first, on `machines` or the present machines."""
        machines = machines or self.machines
        assert machines is not None
        aggregation = self._aggregation
        return sort_choices_by_time(
            aggregation.algorithm, machines, buckets, aggregation.dense_wire, self.compressed_choices
        )

    def _adopt(self, choice: Choice, reason: str, others: Sequence[Choice] = ()) -> None:
        """Use the choice from now on; if nodes then have their own weights, only after a dense step that sends the
        residuals of the present choice. With a run directory, rank 0 prints it with its reason and the predictions for
        `others`."""
        machines, name = self.machines, self._aggregation.algorithm
        assert machines is not None
        self._put_in_force(choice)
        self.summary = (
            f"{name} is {choice} per step, {reason}; link {machines.link * 8 / 1e9:.3g} Gbit/s, latency"
            f" {machines.latency * 1e6:.3g} us, memory {machines.memory / 1e9:.3g} GB/s"
        )
        if self._world.rank == 0 and self._world.run_directory is not None:
            rest = ", ".join(str(other) for other in others if not is_same(other, choice))
            more = f"; predicted for others: {rest}" if rest else ""
            print(f"topkube: {self.summary}{more}", file=sys.stderr, flush=True)

    def _put_in_force(self, choice: Choice) -> None:
        before = self.choice
        if not choice.algorithm.compresses:
            self._dense = choice
        if choice is self._after_residuals:
            return
        keeps_residuals = before is not None and before.algorithm.residual is not None
        if before is not None and keeps_residuals and choice.algorithm.in_weights > before.algorithm.in_weights:
            self.choice, self._after_residuals = self._dense, choice
        else:
            self.choice, self._after_residuals = choice, None

    # ---- checkpoints

    def save(self) -> dict[str, Any] | None:
        """Return the measured machines and the choice for a checkpoint; None before both."""
        if self.machines is None and self.choice is None:
            return None
        return {
            "settings": self._describe_job(),
            "machines": self.machines and dataclasses.asdict(self.machines),
            **save_choice(self.choice, self._after_residuals),
            "summary": self.summary,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Keep what was saved. If the job or the number of nodes and ranks has changed since, or if nothing was saved,
        the ranks measure and choose again. The stage of the saved step must be in force."""
        self.choice, self.machines, self.summary, self.measured = None, None, "", None
        self._trial, self._after_residuals, self._is_settled, self._must_repeat = None, None, False, False
        self._times.restart()
        if state is None or state["settings"] != self._describe_job():
            return
        saved, slots = state["machines"], max(map(len, self._world.node_ranks))
        if saved is None or (saved["nodes"], saved["slots"]) != (self._world.nodes, slots):
            self._keep_own_weights(state)
            return
        machines = Machines(**saved)
        if self._aggregation.algorithm in CHOICES:
            self.choice = find_saved_choice(state, self._rank((), machines))
            if self.choice is None or (self.choice.algorithm.needs_gpu and not self._is_on_device):
                self.choice = None
                self._keep_own_weights(state)  # more nodes than a new choice of it allows
                self.machines = machines if self.choice is not None else None
                return
            self._after_residuals = find_after_residuals(state, self.compressed_choices)
        self.machines, self.summary = machines, state["summary"]
        self._keep_restored()

    def _keep_restored(self) -> None:
        """Keep the choice of a saved state: a run that resumes makes the same steps as the run that went on."""
        self._must_repeat = True
        self.settle()

    def _keep_own_weights(self, state: Mapping[str, Any]) -> None:
        """Keep a saved algorithm with which nodes have weights of their own, although the number of nodes has changed:
        the state holds what these nodes have not sent."""
        algorithm = find_saved_algorithm(state)
        if algorithm is not None and algorithm in self.compressed_choices and algorithm.in_weights:
            self.choice = Choice(algorithm, DENSE_WIRE.default, *state["seconds"])
            self.summary = f"{self._aggregation.algorithm} is {algorithm.name}, as in the state of other nodes"
            self._keep_restored()

    def _describe_job(self) -> list[str]:
        """Return the settings on which the choices of a job depend."""
        node_weights = [] if self._job.node_weights == NODE_WEIGHTS.default else [self._job.node_weights]
        return [*self._job.algorithms, self._job.dense_wire, *node_weights]


def find_initial_dense_wire(aggregation: AggregationSettings) -> str:
    """Return the format of dense values before the first choice. It is float32 for `auto`, which may use 16 bits only
    after measurements."""
    return DENSE_WIRE.default if aggregation.algorithm == "auto" else aggregation.dense_wire
