"""The schedule of an aggregation: the values at each step, and the mistakes that are refused."""

from __future__ import annotations

import pytest

from topkube.algorithms import Stage
from topkube.errors import ArgumentError
from topkube.job import TrainingJob
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.node_weights.guard import DriftGuard

SPARSE_THEN_DENSE = (Stage(100, density=0.1), Stage(200, algorithm="dense"))


def build_settings(algorithm: str = "hitopk", **options: object) -> AggregationSettings:
    return AggregationSettings.from_settings(Settings(), algorithm=algorithm, **options)


def test_stages_take_effect_at_their_step_and_keep_the_rest() -> None:
    whole = build_settings(density=0.01, warmup_steps=10, schedule=SPARSE_THEN_DENSE)
    in_force = [
        (step, whole.settings_at(step).algorithm, whole.settings_at(step).density_at(step))
        for step in (50, 99, 100, 199, 200)
    ]
    assert in_force == [(50, "hitopk", 0.01), (99, "hitopk", 0.01), (100, "hitopk", 0.1), (199, "hitopk", 0.1),
                        (200, "dense", 0.1)]  # fmt: skip
    assert whole.settings_at(0).density_at(0) == 1
    assert [step for step in range(300) if whole.begins_stage_at(step)] == [100, 200]


def test_a_dense_stage_takes_the_format_of_dense_values() -> None:
    whole = build_settings(dense_wire="bf16", schedule=SPARSE_THEN_DENSE)
    assert whole.settings_at(150).dense_wire == "fp32"
    assert whole.settings_at(200).dense_wire == "bf16"


def test_the_ranks_get_the_schedule_of_the_job() -> None:
    stages = [{"fromStep": 100, "density": 0.1}, {"fromStep": 200, "algorithm": "dense"}]
    job = TrainingJob.parse(
        {
            "apiVersion": "topkube.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {
                "aggregation": {"algorithm": "hitopk", "schedule": stages},
                "template": {"spec": {"containers": [{"name": "worker", "image": "a:1", "command": ["true"]}]}},
            },
        }
    )
    settings = Settings.from_environment(job.environment())
    assert AggregationSettings.from_settings(settings).schedule == SPARSE_THEN_DENSE


MISTAKES: list[tuple[str, tuple[Stage, ...], dict[str, object], str]] = [
    ("hitopk", (Stage(0, "dense"),), {}, "stage 1 .* does not begin after the first step"),
    ("hitopk", (Stage(9, "dense"), Stage(9, "hitopk")), {}, "stage 2 .* does not begin after step 9"),
    ("hitopk", (Stage(9, "dense"),), {"warmup_steps": 10}, "within the warm-up of 10 steps"),
    ("hitopk", (Stage(9),), {}, "changes nothing"),
    ("hitopk", (Stage(9, "hitopkk"),), {}, "did you mean 'hitopk'"),
    ("hitopk", (Stage(9, density=2.0),), {}, "density is 2.0"),
    ("hitopk", (Stage(9, period=2),), {}, "sets the period, but hitopk does not read it"),
    ("hitopk", (Stage(9, "dense", density=0.1),), {}, "sets the density, but dense does not read it"),
    ("hitopk", (Stage(9, "dense"),), {"momentum_correction": True}, "does not work with momentum correction"),
    ("hitopk", (Stage(9, "naive"),), {}, "hitopk and naive, which keep what was not sent in different ways"),
    ("onebit", (Stage(9, "dense"),), {}, "from onebit to dense.* with onebit, every node has weights"),
    ("dense", (Stage(9, "onebit"),), {}, "from dense to onebit"),
    ("diloco", (Stage(9, period=1),), {"period": 8}, "period of diloco is 1"),
]


@pytest.mark.parametrize(("algorithm", "schedule", "options", "problem"), MISTAKES)
def test_mistakes_in_a_schedule_are_refused(
    algorithm: str, schedule: tuple[Stage, ...], options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=problem):
        build_settings(algorithm, schedule=schedule, **options)


@pytest.mark.parametrize(
    "text",
    [
        *("[", "3", "[3]", '[{"step": 3}]', '[{"algorithm": "dense"}]'),
        *('[{"fromStep": "3", "density": 0.1}]', '[{"fromStep": 3, "density": "x"}]', '[{"fromStep": null}]'),
        *('[{"fromStep": 3, "algorithm": 5}]', '[{"fromStep": 3, "period": 2.5}]'),
    ],
)
def test_a_malformed_variable_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a list of stages"):
        AggregationSettings.from_settings(Settings(schedule=text))


def test_a_new_period_replaces_the_one_that_the_guard_has_shortened() -> None:
    guard = DriftGuard(8, "onebit")
    guard.check_drift(1e9, 1e9, 1.0)
    assert guard.period == 4
    guard.set_period(8)
    assert guard.period == 4
    guard.set_period(2)
    assert guard.period == 2
    assert guard.save() == {"period": 2, "wanted": 2}
