"""The CustomResourceDefinitions, generated from the types: `topkube crd`.

pydantic writes the JSON schema of `Spec` and `Status`. This module converts it to what Kubernetes calls structural: no
references, no null, booleans for open bounds, list keys, and rules in CEL for what a schema cannot express. The schema
accepts whatever the types accept, so that a job that runs on a laptop can also be applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topkube.job.base.part import KEEP, RULES, Part
from topkube.job.base.reading import format_yaml
from topkube.job.cached_dataset import CACHED_KIND, CACHED_PLURAL, CachedDatasetSpec, CachedDatasetStatus
from topkube.job.changes import FIXED, WHILE_SUSPENDED
from topkube.job.metadata import Metadata
from topkube.job.spec import Spec
from topkube.job.status import Status
from topkube.job.training_job import GROUP, KIND, VERSION

PLURAL, SINGULAR, SHORT = "trainingjobs", "trainingjob", "tj"
# The first version of Kubernetes with CEL rules; kubectl refuses the rules for an older version.
RULES_SINCE = (1, 25)

_COLUMNS = (
    ("Phase", "string", ".status.phase", "phase of the job"),
    ("Workers", "string", ".status.workersReady", "ready workers and all workers"),
    ("Step", "integer", ".status.progress.step", "finished steps"),
    ("Progress", "integer", ".status.progress.percent", "finished share of all steps, in percent"),
    ("Rate", "number", ".status.progress.samplesPerSecond", "samples per second over all ranks"),
    ("Restarts", "integer", ".status.restarts", "restarts counted against backoffLimit"),
    ("Age", "date", ".metadata.creationTimestamp", "time since the job was created"),
)
_WIDE_COLUMNS = (
    ("Seconds-Left", "integer", ".status.progress.etaSeconds", "estimated seconds until the last step"),
    ("Loss", "string", ".status.progress.loss", "loss of the last step"),
    ("Checkpoint", "integer", ".status.progress.checkpointStep", "step of the newest checkpoint"),
)
"""The columns that only `kubectl get -o wide` prints."""
_CACHED_COLUMNS = (
    ("Dataset", "string", ".spec.uri", "address of the dataset"),
    ("Nodes", "string", ".status.where", "nodes that hold parts of the dataset"),
    ("Cached%", "integer", ".status.cachedPercent", "smallest share of the dataset that one of them holds"),
    ("Last-Used", "date", ".status.lastUsed", "time since a pod last opened the dataset"),
    ("Pinned", "boolean", ".spec.pinned", "never evicted to make room"),
    ("Age", "date", ".metadata.creationTimestamp", "time since the dataset was first cached"),
)
CACHED_SHORT = "cds"
# The key of the entries of each list: server-side apply then tracks the owner of each entry.
_LIST_KEYS = {"conditions": "type", "nodes": "name", "nodeFailures": "name", "avoidedNodes": "name"}
_MOST_CONDITIONS = 16
_HEADER = "# Generated from topkube.job: {command}\n"

Schema = dict[str, Any]


def build_crd(rules: bool = True) -> dict[str, Any]:
    """Return the definition of the TrainingJob as plain data. Without `rules` it also suits Kubernetes before 1.25."""
    names = {"kind": KIND, "plural": PLURAL, "singular": SINGULAR, "shortNames": [SHORT], "categories": ["all"]}
    definition = _build_definition(names, _COLUMNS, _build_root_schema(), _WIDE_COLUMNS)
    if not rules:
        _drop_rules(definition)
    return definition


def build_cached_dataset_crd() -> dict[str, Any]:
    """Return the definition of the CachedDataset, for every version of Kubernetes."""
    names = {
        "kind": CACHED_KIND,
        "plural": CACHED_PLURAL,
        "singular": CACHED_KIND.lower(),
        "shortNames": [CACHED_SHORT],
        "categories": ["topkube"],
    }
    root = {
        "type": "object",
        "description": "What the nodes' caches hold of a dataset. Deleting the object evicts the dataset from nodes "
        "on which no pod reads it.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"always {GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": f"always {CACHED_KIND}"},
            "metadata": {"type": "object"},
            "spec": build_structural_schema(CachedDatasetSpec),
            "status": _prepare_status(build_structural_schema(CachedDatasetStatus)),
        },
    }
    return _build_definition(names, _CACHED_COLUMNS, root)


def _build_definition(
    names: dict[str, Any], columns: tuple[tuple[str, ...], ...], root: Schema, wide: tuple[tuple[str, ...], ...] = ()
) -> dict[str, Any]:
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
                    ]
                    + [
                        {"name": name, "type": kind, "jsonPath": path, "description": text, "priority": 1}
                        for name, kind, path, text in wide
                    ],
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


def format_crd(rules: bool = True) -> str:
    """Return the definition of the TrainingJob as a manifest."""
    command = "topkube crd" if rules else "topkube crd --kubernetes 1.20"
    return _HEADER.format(command=command) + format_yaml(build_crd(rules))


def format_cached_dataset_crd() -> str:
    """Return the definition of the CachedDataset as a manifest."""
    return _HEADER.format(command="topkube crd --cached-datasets") + format_yaml(build_cached_dataset_crd())


def _build_root_schema() -> Schema:
    name = build_structural_schema(Metadata)["properties"]["name"]
    return {
        "type": "object",
        "description": "A training: what runs, on how many ranks, and its state.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"always {GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": f"always {KIND}"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": _add_change_rules(build_structural_schema(Spec)),
            "status": _prepare_status(build_structural_schema(Status)),
        },
    }


def build_structural_schema(part: type[Part]) -> Schema:
    """Return the schema of a type in the form that Kubernetes accepts."""
    schema = part.model_json_schema()
    return _convert(schema, schema.get("$defs", {}))


def _convert(schema: Schema, named: dict[str, Schema]) -> Schema:
    if "$ref" in schema:
        schema = {**named[schema["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in schema.items() if k != "$ref"}}
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1:  # an optional field; null means absent in Kubernetes too
        other_fields = {key: value for key, value in schema.items() if key != "anyOf"}
        return _convert({**other_fields, **options[0]}, named)
    result: Schema = {}
    for key in ("type", "description", *schema):
        if key in schema and key not in ("title", "$defs", "const", "additionalProperties"):
            result[key] = schema[key]
    if schema.get("type") == "object":
        result |= _convert_object(schema, named)
    if "items" in schema:
        result["items"] = _convert(schema["items"], named)
    if "exclusiveMinimum" in schema:
        result |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if schema.get("default", ...) is None:
        del result["default"]
    return result


def _convert_object(schema: Schema, named: dict[str, Schema]) -> Schema:
    result: Schema = {}
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        result |= {KEEP: True} if "$ref" in values else {"additionalProperties": _convert(values, named)}
    if "properties" in schema:
        result["properties"] = {name: _convert(below, named) for name, below in schema["properties"].items()}
        if isinstance(schema.get("default"), dict):
            result["default"] = {}  # the fields inside have defaults of their own
    return result


def _add_change_rules(spec: Schema) -> Schema:
    """Add the rules for what cannot be changed in a job. Their messages are those of the webhook."""
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


def _prepare_status(status: Schema) -> Schema:
    """Remove the defaults of a status, whose unknown fields are absent, and add the keys of its lists."""
    for schema in _walk_schema(status):
        schema.pop("default", None)
        for name, below in schema.get("properties", {}).items():
            if name in _LIST_KEYS:
                key = _LIST_KEYS[name]
                below |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
                below.setdefault("maxItems", _MOST_CONDITIONS)
    return status


def _walk_schema(schema: Schema) -> Iterator[Schema]:
    yield schema
    for below in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from _walk_schema(below)


def _drop_rules(data: Any) -> None:
    if isinstance(data, dict) and data.pop(RULES, None) and "items" in data:
        # The schema of containers exists for the rules only. Without rules it does harm: the API server of Debian's
        # 1.20 takes an empty string for null, although `command: [sh, -c, ""]` is valid.
        data["items"] = {"type": "object", KEEP: True}
    for below in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _drop_rules(below)
