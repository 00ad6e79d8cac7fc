"""The CustomResourceDefinitions, from the types: `topkube crd`.

pydantic writes the JSON schema of `Spec` and `Status`; this module makes it what Kubernetes calls structural: no
references, no null, booleans for open bounds, list keys, and rules in CEL for what a schema cannot say. Whatever the
types accept, the schema accepts, so that a job that runs on a laptop can also be applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topkube.job.cached_dataset import CACHED_KIND, CACHED_PLURAL, CachedDatasetSpec, CachedDatasetStatus
from topkube.job.changes import FIXED, WHILE_SUSPENDED
from topkube.job.part import KEEP, RULES, Part
from topkube.job.reading import write
from topkube.job.spec import Metadata, Spec
from topkube.job.status import Status
from topkube.job.training_job import GROUP, KIND, VERSION

PLURAL, SINGULAR, SHORT = "trainingjobs", "trainingjob", "tj"
# Kubernetes from this version on knows rules; kubectl refuses them on an older one.
RULES_SINCE = (1, 25)

_COLUMNS = (
    ("Phase", "string", ".status.phase", "where the job is in its life"),
    ("Workers", "string", ".status.workersReady", "ready workers of all"),
    ("Step", "integer", ".status.progress.step", "finished steps"),
    ("Progress", "integer", ".status.progress.percent", "percent of the steps that are done"),
    ("Rate", "number", ".status.progress.samplesPerSecond", "samples per second over all ranks"),
    ("Restarts", "integer", ".status.restarts", "restarts counted against backoffLimit"),
    ("Age", "date", ".metadata.creationTimestamp", "time since the job was made"),
)
_CACHED_COLUMNS = (
    ("Dataset", "string", ".spec.uri", "its address"),
    ("Nodes", "string", ".status.where", "the nodes that hold some of it"),
    ("Cached%", "integer", ".status.cachedPercent", "the least that one of them holds, of the whole dataset"),
    ("Last-Used", "date", ".status.lastUsed", "time since a pod last opened it"),
    ("Pinned", "boolean", ".spec.pinned", "never evicted to make room"),
    ("Age", "date", ".metadata.creationTimestamp", "time since it was first cached"),
)
CACHED_SHORT = "cds"
# Lists whose entries have a key, by the name of the list: appliers then own entries rather than the whole list.
_LIST_KEYS = {"conditions": "type", "nodes": "name"}
_MOST_CONDITIONS = 16
_HEADER = "# Generated from topkube.job: {command}\n"

Schema = dict[str, Any]


def custom_resource_definition(rules: bool = True) -> dict[str, Any]:
    """The TrainingJob's, as plain data. Without `rules` it can be applied to a Kubernetes before 1.25 too."""
    names = {"kind": KIND, "plural": PLURAL, "singular": SINGULAR, "shortNames": [SHORT], "categories": ["all"]}
    definition = _definition(names, _COLUMNS, _root())
    if not rules:
        _drop_rules(definition)
    return definition


def cached_dataset_definition() -> dict[str, Any]:
    """The CachedDataset's, for every Kubernetes."""
    names = {
        "kind": CACHED_KIND,
        "plural": CACHED_PLURAL,
        "singular": CACHED_KIND.lower(),
        "shortNames": [CACHED_SHORT],
        "categories": ["topkube"],
    }
    root = {
        "type": "object",
        "description": "What nodes' caches hold of a dataset. Deleting it evicts the dataset where no pod reads it.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"always {GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": f"always {CACHED_KIND}"},
            "metadata": {"type": "object"},
            "spec": structural(CachedDatasetSpec),
            "status": _reported(structural(CachedDatasetStatus)),
        },
    }
    return _definition(names, _CACHED_COLUMNS, root)


def _definition(names: dict[str, Any], columns: tuple[tuple[str, ...], ...], root: Schema) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "topkube"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": names["kind"], "listKind": f"{names['kind']}List", **names},
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "description": text}
                        for name, kind, path, text in columns
                    ],
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


def crd_yaml(rules: bool = True) -> str:
    """The TrainingJob's as a manifest."""
    command = "topkube crd" if rules else "topkube crd --kubernetes 1.20"
    return _HEADER.format(command=command) + write(custom_resource_definition(rules))


def cached_dataset_yaml() -> str:
    """The CachedDataset's as a manifest."""
    return _HEADER.format(command="topkube crd --cached-datasets") + write(cached_dataset_definition())


def _root() -> Schema:
    name = structural(Metadata)["properties"]["name"]
    return {
        "type": "object",
        "description": "One training: what is to run, on how much, and how it is going.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"always {GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": f"always {KIND}"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": _with_changes(structural(Spec)),
            "status": _reported(structural(Status)),
        },
    }


def structural(part: type[Part]) -> Schema:
    """A type's schema in the form that Kubernetes takes."""
    schema = part.model_json_schema()
    return _converted(schema, schema.get("$defs", {}))


def _converted(schema: Schema, named: dict[str, Schema]) -> Schema:
    if "$ref" in schema:
        schema = {**named[schema["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in schema.items() if k != "$ref"}}
    options = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(options) == 1:  # what may be absent; null means absent, to Kubernetes too
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return _converted({**rest, **options[0]}, named)
    result: Schema = {}
    for key in ("type", "description", *schema):
        if key in schema and key not in ("title", "$defs", "const", "additionalProperties"):
            result[key] = schema[key]
    if schema.get("type") == "object":
        result |= _object(schema, named)
    if "items" in schema:
        result["items"] = _converted(schema["items"], named)
    if "exclusiveMinimum" in schema:
        result |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if schema.get("default", ...) is None:
        del result["default"]
    return result


def _object(schema: Schema, named: dict[str, Schema]) -> Schema:
    result: Schema = {}
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        result |= {KEEP: True} if "$ref" in values else {"additionalProperties": _converted(values, named)}
    if "properties" in schema:
        result["properties"] = {name: _converted(below, named) for name, below in schema["properties"].items()}
        if isinstance(schema.get("default"), dict):
            result["default"] = {}  # the fields inside have defaults of their own
    return result


def _with_changes(spec: Schema) -> Schema:
    """Rules for what may not change during the life of a job; each says what a webhook would say."""
    for path in FIXED:
        above, field = spec, spec
        for key in path:
            above, field = field, field["properties"][key]
        message = f"{path[-1]} cannot be changed: delete the job and create it again"
        _add_rule(field, "self == oldSelf", message)
        if "default" not in field:
            _add_rule(above, f"has(self.{path[-1]}) == has(oldSelf.{path[-1]})", message)
    for path in WHILE_SUSPENDED:
        name = ".".join(path)
        _add_rule(
            spec,
            f"self.{name} == oldSelf.{name} || self.runPolicy.suspend || oldSelf.runPolicy.suspend",
            f"{name} can be changed only while the job is suspended: set runPolicy.suspend first",
        )
    return spec


def _add_rule(schema: Schema, rule: str, message: str) -> None:
    schema.setdefault(RULES, []).append({"rule": rule, "message": message})


def _reported(status: Schema) -> Schema:
    """A status has no defaults (what is not known is absent), and its lists have keys."""
    for schema in _all(status):
        schema.pop("default", None)
        for name, below in schema.get("properties", {}).items():
            if name in _LIST_KEYS:
                key = _LIST_KEYS[name]
                below |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
                below.setdefault("maxItems", _MOST_CONDITIONS)
    return status


def _all(schema: Schema) -> Iterator[Schema]:
    yield schema
    for below in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from _all(below)


def _drop_rules(data: Any) -> None:
    if isinstance(data, dict) and data.pop(RULES, None) and "items" in data:
        # The rules' view of containers. Where there are no rules it does harm: the API server of Debian's 1.20 takes an
        # empty string for null, and `command: [sh, -c, ""]` is right.
        data["items"] = {"type": "object", KEEP: True}
    for below in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _drop_rules(below)
