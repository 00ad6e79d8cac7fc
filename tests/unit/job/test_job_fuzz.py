"""Arbitrary input ends in a valid job or a JobError, and valid jobs survive the way through YAML."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import choose

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.base.problems import list_field_names
from topkube.job.base.quantity import parse_bytes
from topkube.job.fields.aggregation import Aggregation
from topkube.job.fields.checkpoint import Checkpoint
from topkube.job.fields.dataset import Dataset
from topkube.job.fields.run_policy import RunPolicy
from topkube.job.metadata import Metadata
from topkube.job.spec import Spec
from topkube.settings import Settings

PARTS = (TrainingJob, Spec, Aggregation, Dataset, Checkpoint, RunPolicy, Metadata)
NAMES = sorted({name for part in PARTS for name in list_field_names(part)})
YAML_TOKENS = [*"{}[]:-?,&*!|>'\"#%@`\n\t ", "&a ", "*a", "<<: ", "- ", ": ", "1e3", "---\n", "!!int ", "~", *NAMES]
WORDS = [
    *NAMES,
    "containers",
    "worker",
    "image",
    "command",
    "limits",
    "nvidia.com/gpu",
    "1Gi",
    "hitopk",
    "s3://b",
    "/data",
]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(WORDS) | st.dates()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=8) | st.integers(), inner, max_size=6)
    ),
    max_leaves=25,
)


def parse_or_refuse(source: Any) -> TrainingJob | None:
    """Return the job, or None if it was refused with a JobError. Any other error fails the test."""
    try:
        return TrainingJob.from_yaml(source) if isinstance(source, str | bytes) else TrainingJob.parse(source)
    except JobError:
        return None


@given(st.text() | st.binary())
@settings(max_examples=choose(150, thorough=400))
def test_arbitrary_text_is_parsed_or_refused(text: str | bytes) -> None:
    parse_or_refuse(text)


@given(st.lists(st.sampled_from(YAML_TOKENS), max_size=40))
@settings(max_examples=choose(150, thorough=400))
def test_arbitrary_yaml_tokens_are_parsed_or_refused(tokens: list[str]) -> None:
    parse_or_refuse("".join(tokens))


@given(values)
@settings(max_examples=choose(120, thorough=300))
def test_arbitrary_data_is_parsed_or_refused(data: Any) -> None:
    parse_or_refuse(data)
    parse_or_refuse(yaml.safe_dump(data))


quantities = st.builds(
    "{}{}".format, st.integers(1, 10**6), st.sampled_from(["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti", "e3"])
)
paths = st.from_regex(r"[a-z0-9_]{1,8}(/[a-z0-9_]{1,8}){0,2}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=10)

variables = st.from_regex(r"[A-Z_]{1,8}", fullmatch=True)


def build_optional_fields(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


containers = st.fixed_dictionaries(
    {"image": texts, "command": st.lists(texts, min_size=1, max_size=3)},
    optional={
        "args": st.lists(texts, max_size=3),
        "env": st.lists(st.fixed_dictionaries({"name": variables, "value": texts}), max_size=2),
        "anything": st.dictionaries(texts, st.integers(-100, 100) | texts | st.booleans(), max_size=3),
    },
)
reasons = st.lists(st.sampled_from(["OOMKilled", "NodeLost", "OutOfnvidia.com/gpu"]), min_size=1, max_size=3)
failure_rules = st.fixed_dictionaries(
    {"action": st.sampled_from(["Fail", "Restart", "Ignore"]), "onReasons": reasons},
    optional={
        "onExitCodes": st.fixed_dictionaries(
            {"values": st.lists(st.integers(0, 255), min_size=1, max_size=5)},
            optional={"operator": st.sampled_from(["In", "NotIn"]), "containerName": st.just("worker")},
        )
    },
)
specs = st.fixed_dictionaries(
    {"template": containers.map(lambda container: {"spec": {"containers": [container]}})},
    optional={
        "workers": st.integers(1, 10_000),
        "slotsPerWorker": st.integers(1, 256),
        "spread": st.sampled_from(["Node", "None"]),
        "mpiImplementation": st.sampled_from(["MPICH", "OpenMPI"]),
        "aggregation": build_optional_fields(
            algorithm=st.sampled_from(["auto", "dense", "hitopk", "naive"]),
            density=st.floats(0, 1, exclude_min=True),
            warmupSteps=st.integers(0, 10**6),
            wire=st.sampled_from(["fp32", "bf16", "fp16"]),
            selection=st.sampled_from(["topk", "mstopk"]),
            momentumCorrection=st.booleans(),
        ),
        "source": st.one_of(
            st.fixed_dictionaries(
                {
                    "configMap": st.fixed_dictionaries(
                        {"name": st.just("code")},
                        optional={"items": st.just([{"key": "train.py", "path": "pkg/train.py"}])},
                    )
                }
            ),
            st.fixed_dictionaries(
                {"archive": st.just({"uri": "s3://bucket/code.tar.gz", "sha256": "0" * 64, "secretName": "keys"})}
            ),
            st.fixed_dictionaries({"git": st.just({"url": "git@host:repository", "commit": "0" * 40})}),
        ),
        "setup": st.fixed_dictionaries(
            {"requirements": st.lists(st.sampled_from(["einops", "x[y]==1.0; python_version < '4'"]), min_size=1)},
            optional={"wheels": paths},
        ),
        "dataset": st.fixed_dictionaries(
            {"uri": paths.map("s3://{}".format)},
            optional={"mountPath": paths.map("/{}".format), "cache": build_optional_fields(sizeLimit=quantities)},
        ),
        "checkpoint": st.fixed_dictionaries(
            {"claimName": st.just("c")}, optional={"path": paths, "everySteps": st.integers(1, 10**6)}
        ),
        "runPolicy": build_optional_fields(
            backoffLimit=st.integers(0, 1000),
            suspend=st.booleans(),
            failurePolicy=build_optional_fields(
                rules=st.lists(failure_rules, max_size=3),
                maxDisruptions=st.integers(0, 100),
                disruptionWindowSeconds=st.integers(1, 10**6),
                pendingTimeoutSeconds=st.integers(1, 10**6),
            ),
        ),
    },
)
jobs = st.builds(
    lambda name, spec: {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    },
    st.from_regex(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", fullmatch=True),
    specs,
)


@given(jobs)
@settings(max_examples=150)
def test_valid_jobs_round_trip(data: dict[str, Any]) -> None:
    job = TrainingJob.parse(data)
    assert job.to_dict() == data
    assert TrainingJob.from_yaml(job.to_yaml()) == job
    assert TrainingJob.from_cluster(data) == job
    assert Settings.from_environment(job.environment()) == job.settings()


@given(jobs, st.data())
@settings(max_examples=150)
def test_one_damaged_field_is_one_named_problem(data: dict[str, Any], draw: st.DataObject) -> None:
    damaged = copy.deepcopy(data)
    name = draw.draw(st.sampled_from(sorted(set(damaged["spec"]) - {"template"}) or ["workers"]))
    damaged["spec"][name] = object()
    with pytest.raises(JobError) as caught:
        TrainingJob.parse(damaged)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [f"spec.{name}"]


@given(
    st.integers(0, 10**6),
    st.sampled_from([("", 1), ("k", 1000), ("Mi", 2**20), ("Gi", 2**30), ("e2", 100), ("P", 10**15)]),
)
def test_quantities_are_converted_to_bytes(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{number}{unit[0]}") == number * unit[1]
    assert parse_bytes("1.5Gi") == 3 * 2**29
    assert parse_bytes("1500m") == 2
