"""What a plan sees: everything that the watch cache knows about one job, as one value (`Observed`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube_operator.model import stored_job
from topkube_operator.model.observed import Child, LauncherReport, Observed, Pod, Policy, Trouble
from topkube_operator.watch.known_caches import KnownCaches
from topkube_operator.watch.known_children import KnownChildren
from topkube_operator.watch.known_jobs import KnownJobs
from topkube_operator.watch.known_nodes import KnownNodes
from topkube_operator.watch.owner import Owner
from topkube_operator.watch.removals import Removals


class Observer:
    """Reads the stores of the watch cache, and changes none. Not safe for threads: the watch cache holds its lock."""

    def __init__(
        self, jobs: KnownJobs, children: KnownChildren, nodes: KnownNodes, caches: KnownCaches, removals: Removals
    ) -> None:
        self._jobs, self._children, self._nodes, self._caches = jobs, children, nodes, caches
        self._removals = removals

    def observe(
        self,
        owner: Owner,
        policy: Policy,
        report: LauncherReport | None,
        troubles: Mapping[tuple[str, str], Trouble],
        logs: Mapping[str, str],
        job: Mapping[str, Any] | None = None,
        paused: frozenset[tuple[str, str]] = frozenset(),
    ) -> Observed:
        """Return everything known about the job `owner`; with `job`, also what the node cache holds for it."""
        values = self._children.list_children(owner)
        pods = tuple(sorted((value for value in values if isinstance(value, Pod)), key=lambda pod: pod.name))
        removed = self._removals.find_children(owner)
        last_seen = {name: pod for name, (_, pod) in removed.items() if pod is not None}
        lost = {pod.node for pod in (*pods, *last_seen.values()) if pod.node and self._nodes.is_lost(pod.node)}
        removed_at = {name: time for name, (time, _) in removed.items()}
        node_faults = dict(self._nodes.faults)
        node_failures = self._jobs.find_failures_of_others(owner.uid)
        nodes = self._nodes.count_schedulable()
        mentioned_nodes = {*node_faults, *(failure.node for failure in node_failures)}
        mentioned_nodes |= {pod.node for pod in (*pods, *last_seen.values())}
        mentioned_nodes |= {failure.node for failure in self._jobs.find_failures(owner.uid)}
        hostnames = {name: self._nodes.hostnames[name] for name in mentioned_nodes if name in self._nodes.hostnames}
        namespace = job["metadata"]["namespace"] if job is not None else ""
        has_cache = self._caches.has_cache(namespace)
        warm = (
            self._find_warm_nodes(namespace, stored_job.read_dataset_uri(job)) if job is not None and has_cache else {}
        )
        children = {(value.kind, value.name): value for value in values if isinstance(value, Child)}
        return Observed(
            pods=pods,
            children=children,
            troubles=troubles,
            paused=paused,
            lost_nodes=frozenset(lost),
            report=report,
            removed_at=removed_at,
            last_seen=last_seen,
            logs=logs,
            policy=policy,
            node_cache=has_cache,
            warm=warm,
            nodes=nodes,
            hostnames=hostnames,
            node_faults=node_faults,
            node_failures=node_failures,
        )

    def _find_warm_nodes(self, namespace: str, uri: str) -> dict[str, int]:
        """Return the percentage of the dataset that each node in contact holds, by hostname."""
        nodes, hostnames = self._caches.find_nodes(namespace, uri), self._nodes.hostnames
        return {
            hostnames.get(node, node): percent for node, percent in nodes.items() if self._nodes.is_in_contact(node)
        }
