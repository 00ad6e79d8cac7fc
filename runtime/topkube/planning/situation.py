"""The cluster and the settings for which a step is predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from topkube.algorithms import DELAY, MATRIX_RANK, Algorithm, Cost, Machines, Workload, estimate_cost


@dataclass(frozen=True)
class Situation:
    """The cluster, the settings of the aggregation, and what overlaps in a step that is predicted.

    `dense_wire` is the format of dense values between nodes. `period` is the number of steps from one exchange of
    weights to the next (the prediction is the mean step); None stands for the smallest period of each algorithm.
    `cores` are the processor cores of a node that its ranks share, infinite if a thread never waits for a core. The
    network takes `network_cores` of them while the link is busy, beyond the time of the threads that send and receive:
    interrupts, the encryption of packets, and their way between namespaces.
    `overlap` is False if exchanges begin after backward and follow one another. `is_decoupled` is True with DeAR, for
    the algorithms that support it. `delay` is 1 if exchanges of weights overlap with the next step, for the algorithms
    that support it. `is_input_pipelined` is False if the step waits until its batch is prepared. `matrix_rank` is the
    rank of the approximation of matrices.
    """

    machines: Machines
    density: float = 0.01
    wire: str = "bf16"
    cores: float = math.inf
    overlap: bool = True
    is_input_pipelined: bool = True
    dense_wire: str = "fp32"
    period: int | None = None
    is_decoupled: bool = False
    matrix_rank: int = MATRIX_RANK.default
    delay: int = DELAY.default
    network_cores: float = 0.0

    @property
    def ranks(self) -> int:
        return self.machines.nodes * self.machines.slots

    def build_workload(self, algorithm: Algorithm, elements: int, is_always_dense: bool = False) -> Workload:
        """Return the workload of `elements` values with `algorithm`. Values of a bucket that `is_always_dense` are
        never rounded."""
        period = algorithm.least_period if self.period is None else self.period
        machines, dense_wire = self.machines, "fp32" if is_always_dense else self.dense_wire
        return Workload(
            machines.nodes, machines.slots, elements, self.density, self.wire, dense_wire, period, self.matrix_rank
        )

    def estimate_cost(self, algorithm: Algorithm, elements: int, is_always_dense: bool = False) -> Cost:
        """Return the cost of an exchange of `elements` values with `algorithm`."""
        workload = self.build_workload(algorithm, elements, is_always_dense)
        return estimate_cost(
            algorithm,
            self.machines,
            elements,
            workload.density,
            workload.wire,
            workload.dense_wire,
            workload.period,
            workload.matrix_rank,
        )
