"""Keep a pod away from nodes that are suspected of faults. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from topkube_operator.children.placement import HOSTNAME
from topkube_operator.children.templates import ensure_list, ensure_mapping
from topkube_operator.model import names

_POD_SPEC = "spec.template.spec"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def avoid_nodes(pod: dict[str, Any], hostnames: Iterable[str]) -> None:
    """Forbid the scheduler to place a pod on nodes with these values of `kubernetes.io/hostname`, in addition to the
    template's own affinity. An annotation of the pod lists them. Raises JobError if the template's affinity is
    malformed."""
    avoided = sorted(set(hostnames))
    if not avoided:
        return
    pod["metadata"]["annotations"][names.AVOIDED_NODES] = ",".join(avoided)
    affinity = ensure_mapping(
        ensure_mapping(pod["spec"], "affinity", _POD_SPEC), "nodeAffinity", f"{_POD_SPEC}.affinity"
    )
    required = ensure_mapping(affinity, _REQUIRED, f"{_POD_SPEC}.affinity.nodeAffinity")
    terms = ensure_list(required, "nodeSelectorTerms", f"{_POD_SPEC}.affinity.nodeAffinity.{_REQUIRED}")
    if not terms:
        terms.append({})
    for term in terms:  # a node fits if one of the terms matches, so each term needs the rule
        if isinstance(term, dict):
            path = f"{_POD_SPEC}.affinity.nodeAffinity.{_REQUIRED}"
            expressions = ensure_list(term, "matchExpressions", path)
            expressions.append({"key": HOSTNAME, "operator": "NotIn", "values": avoided})
