"""Pod templates are complete in the pods: every field of a template is there, in its order, beside the operator's
fields."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_job import build_job
from thorough import choose

from topkube.job import TrainingJob
from topkube.job.template import remove_nulls
from topkube_operator.children import pods
from topkube_operator.model.observed import Policy

POLICY = Policy(seed=b"s" * 32, gang="volcano")
NAME = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)
TEXT = st.text("abc XYZ019-/.$({", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAME, below, max_size=3),
    max_leaves=6,
)
MAPPING, LIST = st.dictionaries(NAME, VALUES, max_size=3), st.lists(VALUES, max_size=3)
TERM = st.fixed_dictionaries({"topologyKey": NAME, "labelSelector": MAPPING})
AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        "nodeAffinity": MAPPING,
        "podAffinity": MAPPING,
        "podAntiAffinity": st.fixed_dictionaries(
            {},
            optional={
                "requiredDuringSchedulingIgnoredDuringExecution": st.lists(TERM, max_size=2),
                "preferredDuringSchedulingIgnoredDuringExecution": LIST,
            },
        ),
    },
)
SECURITY = st.fixed_dictionaries(
    {},
    optional={
        "runAsUser": st.sampled_from([0, 1000, 4711]),
        "runAsNonRoot": st.booleans(),
        "privileged": st.booleans(),
        "capabilities": MAPPING,
        "seccompProfile": MAPPING,
        "fsGroup": st.integers(0, 9),
        "allowPrivilegeEscalation": st.booleans(),
        "readOnlyRootFilesystem": st.booleans(),
    },
)
MOUNT = st.fixed_dictionaries({"name": NAME, "mountPath": st.sampled_from(["/data", "/tmp", "/dev/shm", "/x/y"])})
CONTAINER = {
    "args": st.lists(TEXT, max_size=3),
    "env": st.lists(st.fixed_dictionaries({"name": NAME, "value": TEXT}), max_size=3),
    "envFrom": LIST,
    "ports": st.lists(st.fixed_dictionaries({"containerPort": st.integers(1, 65535)}), max_size=2),
    "resources": st.fixed_dictionaries({}, optional={"requests": MAPPING, "limits": MAPPING, "claims": LIST}),
    "volumeMounts": st.lists(MOUNT, max_size=3),
    "volumeDevices": LIST,
    "lifecycle": MAPPING,
    "livenessProbe": MAPPING,
    "workingDir": TEXT,
    "terminationMessagePolicy": TEXT,
    "imagePullPolicy": TEXT,
    "securityContext": SECURITY,
    "tty": st.booleans(),
    "fromTheFuture": VALUES,
}
POD = {
    "initContainers": st.lists(MAPPING, max_size=3),
    "ephemeralContainers": LIST,
    "volumes": st.lists(st.fixed_dictionaries({"name": NAME, "emptyDir": MAPPING}), max_size=3),
    "tolerations": LIST,
    "nodeSelector": MAPPING,
    "affinity": AFFINITY,
    "topologySpreadConstraints": LIST,
    "runtimeClassName": NAME,
    "priorityClassName": NAME,
    "schedulerName": NAME,
    "serviceAccountName": NAME,
    "automountServiceAccountToken": st.booleans(),
    "hostNetwork": st.booleans(),
    "hostAliases": LIST,
    "dnsConfig": MAPPING,
    "imagePullSecrets": LIST,
    "securityContext": SECURITY,
    "terminationGracePeriodSeconds": st.integers(0, 600),
    "overhead": MAPPING,
    "schedulingGates": LIST,
    "resourceClaims": LIST,
    "fromTheFuture": VALUES,
}
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "labels": st.dictionaries(NAME, TEXT, max_size=3),
        "annotations": st.dictionaries(NAME, TEXT, max_size=3),
    },
)
TRAINER = st.fixed_dictionaries(
    {"name": st.just("worker"), "image": st.just("image:1"), "command": st.just(["python", "train.py"])},
    optional=CONTAINER,
)
SIDECARS = st.lists(
    st.fixed_dictionaries({"name": NAME.map(lambda name: "side" + name), "image": NAME}, optional=CONTAINER),
    max_size=2,
    unique_by=lambda item: item["name"],
)
quick = settings(max_examples=choose(25, thorough=60))


@st.composite
def templates(draw: st.DrawFn, main: st.SearchStrategy[dict[str, Any]] = TRAINER) -> dict[str, Any]:
    containers = draw(SIDECARS)
    containers.insert(draw(st.integers(0, len(containers))), draw(main))
    spec = {**draw(st.fixed_dictionaries({}, optional=POD)), "containers": containers}
    return {"metadata": draw(METADATA), "spec": spec}


def find_lost_paths(actual: Any, expected: Any, path: str = "") -> list[str]:
    """Return the paths at which `actual` lacks a part of `expected`. Lists of `actual` can have more items."""
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            return [path]
        return [
            place
            for key, value in expected.items()
            for place in find_lost_paths(actual.get(key, ...), value, f"{path}.{key}")
        ]
    if isinstance(expected, list) and isinstance(actual, list):
        remaining = iter(actual)
        matches = [any(not find_lost_paths(item, expected_item) for item in remaining) for expected_item in expected]
        return [f"{path}[{index}]" for index, is_found in enumerate(matches) if not is_found]
    return [] if actual == expected else [path]


def select_kept_parts(template: dict[str, Any]) -> Any:
    """Return the parts that must be kept: all but null fields and the wrapped command."""
    kept = remove_nulls(template)
    for container in kept["spec"]["containers"]:
        if container["name"] == "worker":
            del container["command"]
    return kept


def parse_job(**spec: Any) -> TrainingJob:
    return TrainingJob.from_cluster(build_job(**spec, checkpoint={"claimName": "claim"}))


@quick
@given(templates(), st.booleans(), st.sampled_from(["Node", "None"]))
def test_every_field_of_a_workers_template_is_in_its_pods(
    template: dict[str, Any], colocate: bool, spread: str
) -> None:
    job = parse_job(template=template, launcher={"colocate": colocate}, spread=spread)
    before = copy.deepcopy(template)
    kept = select_kept_parts(template)
    for pod in (
        pods.build_worker(job, "uid-1", 1, 1, "10.0.0.9", POLICY),
        *([pods.build_colocated_worker(job, "uid-1", 1, [(0, 1), (1, 1)], POLICY)] if colocate else []),
    ):
        assert find_lost_paths(pod, kept) == []
        trainer = next(item for item in pod["spec"]["containers"] if item["name"] == "worker")
        assert trainer["command"] == ["topkube", "worker", "--", "python", "train.py"]
        names = [item["name"] for item in pod["spec"]["containers"]]
        assert [name for name in names if name != "launcher"] == [item["name"] for item in kept["spec"]["containers"]]
    assert template == before


@quick
@given(templates(st.fixed_dictionaries({"name": st.just("launcher")}, optional={**CONTAINER, "image": NAME})))
def test_every_field_of_a_launchers_template_is_in_its_pod(template: dict[str, Any]) -> None:
    job = parse_job(launcher={"template": template})
    pod = pods.build_launcher(job, "uid-1", 1, [(0, 1), (1, 1)], POLICY)
    assert find_lost_paths(pod, remove_nulls(template)) == []


@given(VALUES, VALUES)
def test_the_comparison_notices_missing_fields(item: Any, other: Any) -> None:
    assert find_lost_paths(item, item) == []
    assert find_lost_paths({"a": [1, 2, 3]}, {"a": [1, 3]}) == []
    assert find_lost_paths({"a": [3, 1]}, {"a": [1, 3]}) != []
    assert find_lost_paths({"a": item}, {"a": item, "b": other}) == [".b"]
