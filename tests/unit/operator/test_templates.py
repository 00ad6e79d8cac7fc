"""Pod templates are passed on whole: whatever one says is in the pods, in its order, whatever we add."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import job

from topkube.job import TrainingJob
from topkube.job.template import without_nulls
from topkube_operator import pods
from topkube_operator.observed import Policy

POLICY = Policy(seed=b"s" * 32, gang="volcano")
NAME = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)
TEXT = st.text("abc XYZ019-/.$({", max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAME, below, max_size=3),
    max_leaves=6,
)
MAPPING, LIST = st.dictionaries(NAME, PLAIN, max_size=3), st.lists(PLAIN, max_size=3)
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
    "fromTheFuture": PLAIN,
}
POD = {
    "initContainers": LIST,
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
    "fromTheFuture": PLAIN,
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
    unique_by=lambda one: one["name"],
)
quick = settings(max_examples=60)


@st.composite
def templates(draw: st.DrawFn, main: st.SearchStrategy[dict[str, Any]] = TRAINER) -> dict[str, Any]:
    containers = draw(SIDECARS)
    containers.insert(draw(st.integers(0, len(containers))), draw(main))
    spec = {**draw(st.fixed_dictionaries({}, optional=POD)), "containers": containers}
    return {"metadata": draw(METADATA), "spec": spec}


def lost(made: Any, written: Any, path: str = "") -> list[str]:
    """Where `made` does not hold what `written` says. Lists may have got more, anywhere."""
    if isinstance(written, dict):
        if not isinstance(made, dict):
            return [path]
        return [place for key, value in written.items() for place in lost(made.get(key, ...), value, f"{path}.{key}")]
    if isinstance(written, list) and isinstance(made, list):
        left = iter(made)
        found = [any(not lost(one, wanted) for one in left) for wanted in written]
        return [f"{path}[{index}]" for index, there in enumerate(found) if not there]
    return [] if made == written else [path]


def without_command(template: dict[str, Any]) -> Any:
    """What has to be kept: all but what null says, and the command that we wrap."""
    kept = without_nulls(template)
    for container in kept["spec"]["containers"]:
        if container["name"] == "worker":
            del container["command"]
    return kept


def stored(**spec: Any) -> TrainingJob:
    return TrainingJob.from_cluster(job(**spec, checkpoint={"claimName": "claim"}))


@quick
@given(templates(), st.booleans(), st.sampled_from(["Node", "None"]))
def test_all_that_a_workers_template_says_is_in_its_pods(template: dict[str, Any], colocate: bool, spread: str) -> None:
    made = stored(template=template, launcher={"colocate": colocate}, spread=spread)
    before = copy.deepcopy(template)
    kept = without_command(template)
    for pod in (
        pods.worker(made, "uid-1", 1, 1, "10.0.0.9", POLICY),
        *([pods.colocated(made, "uid-1", 1, [(0, 1), (1, 1)], POLICY)] if colocate else []),
    ):
        assert lost(pod, kept) == []
        trainer = next(one for one in pod["spec"]["containers"] if one["name"] == "worker")
        assert trainer["command"] == ["topkube", "worker", "--", "python", "train.py"]
        names = [one["name"] for one in pod["spec"]["containers"]]
        assert [name for name in names if name != "launcher"] == [one["name"] for one in kept["spec"]["containers"]]
    assert template == before


@quick
@given(
    templates(
        st.fixed_dictionaries({"name": st.just("launcher")}, optional={**CONTAINER, "image": NAME}).map(lambda one: one)
    )
)
def test_all_that_a_launchers_template_says_is_in_its_pod(template: dict[str, Any]) -> None:
    made = stored(launcher={"template": template})
    pod = pods.launcher(made, "uid-1", 1, [(0, 1), (1, 1)], POLICY)
    assert lost(pod, without_nulls(template)) == []


@given(PLAIN, PLAIN)
def test_the_comparison_itself_notices_what_is_missing(one: Any, other: Any) -> None:
    assert lost(one, one) == []
    assert lost({"a": [1, 2, 3]}, {"a": [1, 3]}) == []
    assert lost({"a": [3, 1]}, {"a": [1, 3]}) != []
    assert lost({"a": one}, {"a": one, "b": other}) == [".b"] or other is ...
