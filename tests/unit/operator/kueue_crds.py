"""Kueue's kinds as far as a job's controller uses them: the same names, required fields, limits, enums and list types
as Kueue's own definitions (v1beta1 and v1beta2), with the rules in CEL that API servers before 1.25 ignore.
Defaults of empty strings are left out: API servers of 1.20 refuse them.

Kueue serves both versions and converts between them by a webhook. A test installs one of them.
"""

from __future__ import annotations

from typing import Any

GROUP = "kueue.x-k8s.io"
_DNS = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_LABEL = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_MOST_POD_SETS = 18
_TEXT = {"type": "string"}
_NAME = {"type": "string", "maxLength": 253, "pattern": _DNS}
_POD_SET_NAME = {"type": "string", "maxLength": 63, "pattern": _LABEL}
_STRINGS = {"type": "object", "additionalProperties": _TEXT}
_TIME = {"type": "string", "format": "date-time"}
_COUNT = {"type": "integer", "format": "int32", "minimum": 0}
_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
_HAS_QUOTA = (
    "has({0}.status) && has({0}.status.conditions) && "
    "{0}.status.conditions.exists(c, c.type == 'QuotaReserved' && c.status == 'True')"
)


def build_definitions(version: str) -> list[dict[str, Any]]:
    """Return the CustomResourceDefinitions with one version, v1beta1 or v1beta2."""
    return [
        _build_definition("Workload", "workloads", version, _build_workload(version), namespaced=True, status=True),
        _build_definition("ResourceFlavor", "resourceflavors", version, _build_flavor()),
        _build_definition("WorkloadPriorityClass", "workloadpriorityclasses", version, _build_priority_class()),
    ]


def find_schema(kind: str, version: str) -> dict[str, Any]:
    """Return the OpenAPI schema of a kind."""
    named = {definition["spec"]["names"]["kind"]: definition for definition in build_definitions(version)}
    schema: dict[str, Any] = named[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _build_definition(
    kind: str, plural: str, version: str, schema: dict[str, Any], *, namespaced: bool = False, status: bool = False
) -> dict[str, Any]:
    schema["properties"] |= {"apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"}}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    if status:
        served["subresources"] = {"status": {}}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced" if namespaced else "Cluster",
            "versions": [served],
        },
    }


def _build_workload(version: str) -> dict[str, Any]:
    spec = _build_object(
        queueName=_NAME,
        priority={"type": "integer", "format": "int32"},
        active={"type": "boolean", "default": True},
        maximumExecutionTimeSeconds={"type": "integer", "format": "int32", "minimum": 1},
        podSets=_build_map("name", _build_pod_set(version), most=_MOST_POD_SETS, minItems=1),
    )
    if version == "v1beta1":
        sources = ["kueue.x-k8s.io/workloadpriorityclass", "scheduling.k8s.io/priorityclass", ""]
        spec["properties"] |= {
            "priorityClassName": _NAME,
            "priorityClassSource": {"type": "string", "enum": sources},
        }
        spec["required"] = ["podSets"]
        rule = "has(self.priorityClassName) ? has(self.priority) : true"
    else:
        spec["properties"]["priorityClassRef"] = _build_object(
            required=["group", "kind", "name"],
            group={"type": "string", "enum": [GROUP, "scheduling.k8s.io"]},
            kind={"type": "string", "enum": ["WorkloadPriorityClass", "PriorityClass"]},
            name=_NAME,
        )
        rule = "!has(self.priorityClassRef) || has(self.priority)"
    spec["x-kubernetes-validations"] = [{"rule": rule, "message": "a priority class without a priority"}]
    status = _build_object(
        conditions=_build_map("type", _build_condition(), most=16),
        admission=_build_admission(version),
        admissionChecks=_build_map("name", _build_admission_check(), most=8),
        requeueState=_build_object(count=_COUNT, requeueAt=_TIME),
        reclaimablePods=_build_map(
            "name", _build_object(required=["name", "count"], name=_POD_SET_NAME, count=_COUNT), most=_MOST_POD_SETS
        ),
    )
    schema = _build_object(spec=spec, status=status)
    before, after = _HAS_QUOTA.format("oldSelf"), _HAS_QUOTA.format("self")
    schema["x-kubernetes-validations"] = [
        {
            "rule": f"({after}) && has(self.status.admission) ? "
            "size(self.spec.podSets) == size(self.status.admission.podSetAssignments) : true",
            "message": "every pod set has an assignment",
        },
        {
            "rule": f"(({before}) && ({after})) ? oldSelf.spec.queueName == self.spec.queueName : true",
            "message": "queueName is immutable while workload quota reserved",
        },
    ]
    return schema


def _build_pod_set(version: str) -> dict[str, Any]:
    container = {**_OPEN, "required": ["name"], "properties": {"name": _TEXT, "image": _TEXT, "resources": _OPEN}}
    pod = {
        **_OPEN,
        "required": ["containers"],
        "properties": {
            "containers": _build_list(container),
            "initContainers": _build_list(container),
            "nodeSelector": _STRINGS,
        },
    }
    template = _build_object(metadata=_build_object(labels=_STRINGS, annotations=_STRINGS), spec=pod)
    return _build_object(
        required=["template"] if version == "v1beta2" else ["count", "template"],
        name={**_POD_SET_NAME, "default": "main"},
        count={**_COUNT, "default": 1},
        minCount={**_COUNT, "minimum": 1},
        template=template,
    )


def _build_condition() -> dict[str, Any]:
    return _build_object(
        required=["lastTransitionTime", "message", "reason", "status", "type"],
        type={"type": "string", "maxLength": 316},
        status={"type": "string", "enum": ["True", "False", "Unknown"]},
        reason={
            "type": "string",
            "minLength": 1,
            "maxLength": 1024,
            "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        },
        message={"type": "string", "maxLength": 32768},
        lastTransitionTime=_TIME,
        observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
    )


def _build_admission(version: str) -> dict[str, Any]:
    assignment = _build_object(
        name={**_POD_SET_NAME, "default": "main"},
        flavors={"type": "object", "additionalProperties": _NAME},
        resourceUsage={"type": "object", "additionalProperties": _QUANTITY},
        count=_COUNT,
    )
    if version == "v1beta1":
        assignment["required"] = ["name"]
    admission = _build_object(clusterQueue=_NAME, podSetAssignments=_build_map("name", assignment, most=_MOST_POD_SETS))
    if version == "v1beta1":
        admission["required"] = ["clusterQueue", "podSetAssignments"]
    return admission


def _build_admission_check() -> dict[str, Any]:
    update = _build_object(
        required=["name"],
        name=_POD_SET_NAME,
        labels=_STRINGS,
        annotations=_STRINGS,
        nodeSelector=_STRINGS,
        tolerations={**_build_list(_build_toleration()), "maxItems": 8},
    )
    return _build_object(
        required=["lastTransitionTime", "message", "name", "state"],
        name={"type": "string", "minLength": 1, "maxLength": 316},
        state={"type": "string", "enum": ["Pending", "Ready", "Retry", "Rejected"]},
        lastTransitionTime=_TIME,
        message={"type": "string", "maxLength": 32768},
        podSetUpdates={**_build_list(update), "maxItems": _MOST_POD_SETS},
    )


def _build_toleration() -> dict[str, Any]:
    return _build_object(
        key=_TEXT,
        operator=_TEXT,
        value=_TEXT,
        effect=_TEXT,
        tolerationSeconds={"type": "integer", "format": "int64"},
    )


def _build_flavor() -> dict[str, Any]:
    taint = _build_object(required=["effect", "key"], key=_TEXT, value=_TEXT, effect=_TEXT, timeAdded=_TIME)
    return _build_object(
        spec=_build_object(
            nodeLabels={**_STRINGS, "maxProperties": 8},
            nodeTaints={**_build_list(taint), "maxItems": 8},
            tolerations={**_build_list(_build_toleration()), "maxItems": 8},
        )
    )


def _build_priority_class() -> dict[str, Any]:
    return _build_object(required=["value"], value={"type": "integer", "format": "int32"}, description=_TEXT)


def _build_object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _build_list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "x-kubernetes-list-type": "atomic"}


def _build_map(key: str, items: dict[str, Any], *, most: int, **limits: int) -> dict[str, Any]:
    """Build the schema of a list of objects, each with its own `key`: required, unless it has a default."""
    needed = {*items.get("required", ())} | ({key} if "default" not in items["properties"][key] else set())
    entry = {**items, "required": sorted(needed)} if needed else items
    as_map = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": entry, "maxItems": most, **as_map, **limits}
