"""The CustomResourceDefinition: its content, and its agreement with the types that it is generated from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cel
import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_job_fuzz import jobs, values
from thorough import choose

from topkube.cli.entry import run_app
from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.job.changes import find_refused_changes
from topkube.job.crd import build_cached_dataset_crd, build_crd, format_cached_dataset_crd, format_crd

MANIFESTS = Path(__file__).parents[3] / "manifests"
RULES = "x-kubernetes-validations"
DEFINITION = build_crd()
SCHEMA = DEFINITION["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
CACHED = build_cached_dataset_crd()["spec"]
CACHED_SCHEMA = CACHED["versions"][0]["schema"]["openAPIV3Schema"]


def test_the_manifests_are_fresh() -> None:
    assert (MANIFESTS / "crd.yaml").read_text() == format_crd(rules=False), (
        "stale: topkube crd --kubernetes 1.20 > manifests/crd.yaml"
    )
    assert (MANIFESTS / "crd-cached-datasets.yaml").read_text() == format_cached_dataset_crd(), (
        "stale: topkube crd --cached-datasets > manifests/crd-cached-datasets.yaml"
    )
    folder = MANIFESTS / "kubernetes-1.25"
    assert (folder / "crd.yaml").read_text() == format_crd(), "stale: topkube crd > manifests/kubernetes-1.25/crd.yaml"


def test_the_command_prints_the_definition_for_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["crd"]) == 0
    printed = capsys.readouterr().out
    assert printed == format_crd()
    assert yaml.safe_load(printed) == DEFINITION
    assert run_app(["crd", "--kubernetes", "v1.24.3"]) == 0
    assert RULES not in capsys.readouterr().out
    assert run_app(["crd", "--kubernetes", "new"]) == 2
    assert "'new' is not a version of Kubernetes" in capsys.readouterr().err


def test_kubectl_shows_the_columns_that_users_need() -> None:
    names, version = DEFINITION["spec"]["names"], DEFINITION["spec"]["versions"][0]
    assert (names["shortNames"], names["categories"]) == (["tj"], ["all"])
    columns = ["NAME", *(column["name"].upper() for column in version["additionalPrinterColumns"])]
    always = ["NAME", "PHASE", "WORKERS", "STEP", "PROGRESS", "RATE", "RESTARTS", "AGE"]
    assert columns == [*always, "SECONDS-LEFT", "LOSS", "CHECKPOINT"]
    wide = [column["name"] for column in version["additionalPrinterColumns"] if column.get("priority")]
    assert wide == ["Seconds-Left", "Loss", "Checkpoint"], "kubectl prints these with -o wide only"
    assert version["subresources"] == {"status": {}}
    for column in version["additionalPrinterColumns"]:
        field: Any = {"properties": {**SCHEMA["properties"], "metadata": {"properties": {"creationTimestamp": {}}}}}
        for key in column["jsonPath"].split(".")[1:]:
            field = field["properties"][key]
        assert field.get("type", "string") == ("string" if column["type"] == "date" else column["type"]), column


def test_kubectl_shows_the_nodes_and_the_percentage_of_cached_datasets() -> None:
    version = CACHED["versions"][0]
    assert (CACHED["names"]["plural"], CACHED["scope"], RULES in format_cached_dataset_crd()) == (
        "cacheddatasets",
        "Namespaced",
        False,
    )
    columns = [column["name"].upper() for column in version["additionalPrinterColumns"]]
    assert columns == ["DATASET", "NODES", "CACHED%", "LAST-USED", "PINNED", "AGE"]
    for column in version["additionalPrinterColumns"][:-1]:
        field = CACHED_SCHEMA
        for key in column["jsonPath"].split(".")[1:]:
            field = field["properties"][key]
    nodes = CACHED_SCHEMA["properties"]["status"]["properties"]["nodes"]
    assert nodes["x-kubernetes-list-map-keys"] == ["name"]


# The requirements of Kubernetes for a schema. The real API servers of the cluster tests check them too.


def walk_schema(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from walk_schema(below, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if key in schema:
            yield from walk_schema(schema[key], f"{path}{mark}")


@pytest.mark.parametrize("root", [SCHEMA, CACHED_SCHEMA])
def test_the_schema_is_structural(root: dict[str, Any]) -> None:
    for path, schema in walk_schema(root):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "$defs", "title", "const", "allOf", "oneOf", "not"} & set(schema), path
        assert isinstance(schema.get("exclusiveMinimum", True), bool), path
        if schema.get("type") == "object" and path != ".metadata":
            assert {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(schema), path


def test_statuses_have_no_defaults_and_lists_have_keys() -> None:
    status = SCHEMA["properties"]["status"]
    assert all("default" not in schema for _, schema in walk_schema(status))
    for name, key in (("conditions", "type"), ("cache.nodes", "name")):
        field = status
        for step in name.split("."):
            field = field["properties"][step]
        assert field["x-kubernetes-list-map-keys"] == [key]
        assert key in field["items"]["required"]
        assert "maxItems" in field


def test_fields_that_rules_read_are_bounded() -> None:
    """A rule's cost is estimated from bounds; without them a CRD is refused."""
    for path, schema in walk_schema(SCHEMA):
        if schema.get(RULES) and schema.get("type") == "string":
            assert "maxLength" in schema or "enum" in schema, path
        if schema.get(RULES) and schema.get("type") == "array":
            assert "maxItems" in schema, path
        for rule in schema.get(RULES, ()):
            assert set(rule) == {"rule", "message"}, "other keys need a newer Kubernetes than 1.25"


# The part of the API server: null is absent, defaults are filled in, and the schema and the rules are checked.


def fill_defaults(data: Any, schema: dict[str, Any]) -> Any:
    if isinstance(data, dict):
        data = {
            key: value for key, value in data.items() if value is not None or key not in schema.get("properties", {})
        }
        for name, below in schema.get("properties", {}).items():
            if name not in data and "default" in below:
                data[name] = copy.deepcopy(below["default"])
            if name in data:
                data[name] = fill_defaults(data[name], below)
        return data
    if isinstance(data, list) and "items" in schema:
        return [fill_defaults(item, schema["items"]) for item in data]
    return data


def is_integer(_: Any, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1


Checker = jsonschema.validators.extend(
    jsonschema.Draft4Validator, type_checker=jsonschema.Draft4Validator.TYPE_CHECKER.redefine("integer", is_integer)
)


def find_refusals(data: Any, old: Any = None) -> list[str]:
    """Return the answer of an API server of 1.25 or newer about a job, as `path: message`."""
    checker = Checker(SCHEMA)
    errors = [f"{error.json_path}: {error.message}" for error in checker.iter_errors(data)]
    return errors or [*find_broken_rules(data, old, SCHEMA, "")]


def find_broken_rules(data: Any, old: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    for entry in schema.get(RULES, ()):
        if "oldSelf" in entry["rule"] and old is None:
            continue
        if not cel.evaluate(entry["rule"], {"self": data, "oldSelf": old}):
            yield f"{path.removeprefix('.')}: {entry['message']}"
    if isinstance(data, dict):
        for name, below in schema.get("properties", {}).items():
            if name in data:
                yield from find_broken_rules(data[name], (old or {}).get(name), below, f"{path}.{name}")
    if isinstance(data, list) and "items" in schema:
        for index, item in enumerate(data):
            yield from find_broken_rules(item, None, schema["items"], f"{path}[{index}]")


@given(jobs)
@settings(max_examples=choose(80, thorough=150))
def test_a_job_of_a_laptop_can_be_applied_and_means_the_same(data: dict[str, Any]) -> None:
    job = TrainingJob.parse(data)
    stored = fill_defaults(data, SCHEMA)
    assert find_refusals(stored) == []
    read_back = TrainingJob.from_cluster(stored)
    assert read_back.spec.model_dump() == job.spec.model_dump()
    assert stored["spec"] == job.spec.model_dump(by_alias=True, exclude_none=True)


@given(values)
@settings(max_examples=choose(80, thorough=200))
def test_an_arbitrary_spec_that_is_refused_by_kubernetes_is_refused_here(spec: Any) -> None:
    data = {"apiVersion": "topkube.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    try:
        TrainingJob.parse(data)
    except JobError:
        return
    assert find_refusals(fill_defaults(data, SCHEMA)) == []


@given(jobs, jobs, st.booleans())
@settings(max_examples=choose(80, thorough=200))
def test_rules_and_the_webhook_allow_the_same_changes(
    before: dict[str, Any], after: dict[str, Any], same_template: bool
) -> None:
    if same_template:
        after = {**after, "spec": {**after["spec"], "template": before["spec"]["template"]}}
    after = {**after, "metadata": before["metadata"]}
    old, new = fill_defaults(before, SCHEMA), fill_defaults(after, SCHEMA)
    problems = find_refused_changes(TrainingJob.parse(before).spec, TrainingJob.parse(after).spec)
    in_rules = [
        problem for problem in problems if "spec.template" not in problem and "spec.launcher.template" not in problem
    ]
    assert bool(find_refusals(new, old)) == bool(in_rules), "rules see all but what is inside templates"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spread", "None"),
        ("runPolicy.schedulingPolicy", {"queue": "gold"}),
        ("workers", 3),
        ("launcher.resources", {"limits": {"nvidia.com/gpu": "8"}}),
    ],
)
def test_a_rule_guards_each_field_that_may_not_change(path: str, value: Any) -> None:
    container = {"name": "worker", "image": "i:1", "command": ["a"]}
    spec: dict[str, Any] = {"workers": 2, "template": {"spec": {"containers": [container]}}, "runPolicy": {}}
    data = {"apiVersion": "topkube.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    after: dict[str, Any] = copy.deepcopy(spec)
    *parents, last = path.split(".")
    (after.setdefault(parents[0], {}) if parents else after)[last] = value
    old, new = (fill_defaults({**data, "spec": changed_spec}, SCHEMA) for changed_spec in (spec, after))
    [refused] = find_refusals(new, old)
    assert last in refused
    suspended = copy.deepcopy(old)
    suspended["spec"]["runPolicy"]["suspend"] = True
    assert bool(find_refusals(new, suspended)) == (path in ("workers", "launcher.resources"))


INVALID_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"launcher": {"colocate": True, "template": {}}}, "spec.launcher: template has no effect when colocate is true"),
    ({"checkpoint": {"claimName": "c", "path": "a/../b"}}, "spec.checkpoint.path: leaves the claim"),
    ({"runPolicy": {"schedulingPolicy": {"minAvailable": 3}}}, "spec: runPolicy.schedulingPolicy.minAvailable is more"),
    ({"source": {}}, "spec.source: needs one of configMap, archive and git"),
    (
        {"source": {"configMap": {"name": "c"}, "git": {"url": "https://h/r", "commit": "0" * 40}}},
        "spec.source: needs one of configMap, archive and git",
    ),
    (
        {"source": {"configMap": {"name": "c", "archive": "a.tar", "items": [{"key": "a", "path": "b"}]}}},
        "spec.source.configMap: items has no effect with archive",
    ),
    ({"source": {"configMap": {"name": "c", "sha256": "0" * 64}}}, "sha256 is the checksum of archive"),
    (
        {"source": {"configMap": {"name": "c", "items": [{"key": "a", "path": "a/../../b"}]}}},
        "spec.source.configMap.items[0].path: leaves the folder of the source",
    ),
    ({"template": {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}}, "no container is called 'worker'"),
    ({"template": {"spec": {"containers": [{"command": ["a"]}]}}}, "the worker's image is required"),
    ({"template": {"spec": {"containers": [{"image": "a", "command": []}]}}}, "the worker's command is required"),
]


@pytest.mark.parametrize(("change", "words"), INVALID_CHANGES)
def test_rules_and_types_refuse_the_same_jobs(change: dict[str, Any], words: str) -> None:
    spec = {"template": {"spec": {"containers": [{"name": "worker", "image": "i", "command": ["a"]}]}}, **change}
    data = {"apiVersion": "topkube.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    assert [words in refusal for refusal in find_refusals(fill_defaults(data, SCHEMA))] == [True]
    with pytest.raises(JobError):
        TrainingJob.parse(data)


def test_rules_hold_for_the_defaults_themselves() -> None:
    """Kubernetes refuses a CRD whose default breaks a rule. It checks this before it fills in the defaults of inner
    fields."""
    for path, schema in walk_schema(SCHEMA):
        for entry in schema.get(RULES, ()):
            if "default" in schema:
                default = schema["default"]
                assert cel.evaluate(entry["rule"], {"self": default, "oldSelf": default}), path
