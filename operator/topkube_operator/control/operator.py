"""The complete operator without kopf: its parts, its options, and how it starts and stops."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from topkube.errors import TopKubeError
from topkube_operator.children import credentials
from topkube_operator.control.controller import Controller
from topkube_operator.control.event_recorder import EventRecorder
from topkube_operator.control.gang_detection import GangDetector, detect_gang, detect_workloads
from topkube_operator.control.leader_election import LeaderElection
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.control.plan_executor import ControlContext
from topkube_operator.http.certificates import Authority
from topkube_operator.http.probes import Probes
from topkube_operator.http.scrape_access import ScrapeOptions, TokenCheck
from topkube_operator.model.observed import Policy
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.watch_cache import WatchCache
from topkube_operator.watch.watchers import CHILDREN, Watchers
from topkube_operator.watch.work_queue import WorkQueue

_log = logging.getLogger(__name__)
_STUCK_SECONDS = 120.0
"""If the work on a job makes no progress for longer than this, the operator is unhealthy. A job may wait longer: if
hundreds of large jobs begin at the same time, the API server needs a quarter of an hour for their pods."""


@dataclass(frozen=True)
class OperatorOptions:
    """The options of the command line."""

    namespaces: tuple[str, ...] = ()
    """The namespaces whose jobs are reconciled; empty means all namespaces."""
    namespace: str = "topkube-system"
    """The operator's own namespace, which contains its Lease and its secret."""
    kubeconfig: str = ""
    metrics_port: int = 8080
    lease_name: str = "topkube-operator"
    secret_name: str = "topkube-operator"
    release: str = "topkube"
    """The name of this installation in metrics."""
    scrape: ScrapeOptions = field(default_factory=ScrapeOptions)
    leader_election: bool = True
    in_cluster: bool = False
    fault_conditions: tuple[str, ...] = ()
    """Further condition types of nodes that report a fault if their status is True."""
    policy: Policy = field(default_factory=Policy)


class Operator:
    """All parts that run beside kopf's event loop. Call `start` and `stop` once each."""

    def __init__(self, options: OperatorOptions) -> None:
        self.options = options
        self.identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.cache = WatchCache(options.fault_conditions)
        self.metrics = OperatorMetrics(self._list_served_jobs, namespace=options.namespace, release=options.release)
        self.cluster = ApiClient(options.kubeconfig, self.is_acting, self.metrics.observe_call)
        self.queue = WorkQueue(self.metrics.observe_queued)
        self.metrics.watch_queue(self.queue)
        self.recorder = EventRecorder(self.cluster, self.identity)
        self.seed = b""
        self.policy = options.policy
        self.controller: Controller | None = None
        self.watchers: Watchers | None = None
        self._election: LeaderElection | None = None
        self._stopping = False

    def is_acting(self) -> bool:
        """Return True if this replica may write: it leads, and has listed everything."""
        if self._stopping or self.watchers is None or not self.watchers.is_synced():
            return False
        return self._election is None or self._election.is_acting()

    def _list_served_jobs(self) -> Iterable[Mapping[str, Any]]:
        """Return the jobs whose series this replica serves. Replicas that stand by serve none, because they would serve
        the same series again."""
        jobs = self.cache.list_jobs() if self.is_acting() else []
        return [job for job in jobs if self._serves(job["metadata"]["namespace"])]

    def _serves(self, namespace: str) -> bool:
        return self.watchers is None or self.watchers.serves(namespace)

    def start(self) -> None:
        """Start all parts. Raises TopKubeError if the cluster refuses what the operator needs."""
        options = self.options
        self.seed = read_or_create_secret(self.cluster, options.namespace, options.secret_name)
        gang, workloads = detect_gang(self.cluster), detect_workloads(self.cluster)
        namespace = options.namespace if options.in_cluster else ""
        self.policy = replace(
            options.policy, seed=self.seed, gang=gang, workloads=workloads, operator_namespace=namespace
        )
        detector = GangDetector(self.cluster, self.policy, self._watch_kind, self._refuses)
        context = ControlContext(self.cluster, self.cache, self.queue, self.recorder, self.metrics)
        self.controller = Controller(context, detector.find_policy, self.is_acting, self._serves)
        kinds = [*CHILDREN, *(["PodGroup"] if gang else []), *(["Workload"] if workloads else [])]
        self.watchers = Watchers(self.cluster, self.cache, options.namespaces, kinds, self.controller.wake)
        names = (socket.gethostname(), "localhost")
        self.probes = Probes(
            options.metrics_port,
            self.metrics.render,
            self.find_health_problem,
            self.find_readiness_problem,
            tls=options.scrape.build_context(Authority.derive(self.seed), names),
            certificate=options.scrape.certificate,
            allows=TokenCheck(self.cluster.call).allows if options.scrape.authentication == "kubernetes" else None,
        )
        self.probes.start()
        self.recorder.start()
        self.watchers.start()
        self.controller.start()
        if options.leader_election:
            self._election = LeaderElection(
                self.cluster, options.namespace, options.lease_name, self.identity, self._change_leadership
            )
            self._election.start()
        else:
            self._change_leadership(True)

    def _watch_kind(self, kind: str) -> None:
        if self.watchers is not None:
            self.watchers.add(kind)

    def _refuses(self, kind: str) -> bool:
        return self.watchers is not None and self.watchers.refuses(kind)

    def stop(self) -> None:
        """Stop writing, release the Lease, and end the threads."""
        self._stopping = True
        if self._election is not None:
            self._election.stop()
        if self.controller is not None:
            self.controller.stop()
        if self.watchers is not None:
            self.watchers.stop()
        self.recorder.stop()
        with contextlib.suppress(AttributeError):  # `start` has failed before it created the probes
            self.probes.stop()

    def find_health_problem(self) -> str:
        """Return a problem that a restart of the operator would solve; empty if there is none."""
        if self.watchers is not None and not self.watchers.is_alive():
            return "a watcher has not heard from the API server for three minutes"
        standstill = self.queue.measure_standstill()
        if standstill > _STUCK_SECONDS and self.is_acting():
            return f"the work on jobs has made no progress for {standstill:.0f} seconds"
        return ""

    def find_readiness_problem(self) -> str:
        """Return why this replica cannot take over; empty if it can."""
        return "" if self.watchers is not None and self.watchers.is_synced() else "the cluster has not been listed yet"

    def receive_job(self, event_type: str, job: dict[str, Any]) -> None:
        """Store a job, or its deletion, from an event of kopf's watch. kopf reports jobs that existed before this
        replica without an event type."""
        metadata = job["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if event_type == "DELETED":
            self.cache.remove_job(key, metadata["uid"])
            self.queue.add(key)
            return
        if event_type == "ADDED" and self.cache.find_job(key) is None:
            self.metrics.count_created()
        if self.cache.put_job(job):
            self.queue.add(key)

    def _change_leadership(self, leads: bool) -> None:
        self.metrics.set_leader(leads)
        if leads and self.controller is not None:
            self.controller.wake_all()


def read_or_create_secret(cluster: ApiClient, namespace: str, name: str) -> bytes:
    """Return the operator's own secret; create it if there is none. All credentials of jobs derive from it."""
    for _ in range(3):  # another replica may create or delete the secret between the two calls
        try:
            return _read_seed(cluster.get("Secret", namespace, name), name)
        except ApiError as error:
            if error.status != 404:
                raise
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/name": "topkube"}},
            "stringData": {"seed": secrets.token_hex(credentials.SEED_BYTES)},
        }
        try:
            return _read_seed(cluster.call("POST", f"/api/v1/namespaces/{namespace}/secrets", manifest), name)
        except ApiError as error:
            if error.status != 409:
                raise
    raise ApiError(0, f"the secret {namespace}/{name} can neither be read nor created")


def _read_seed(secret: dict[str, Any], name: str) -> bytes:
    text = base64.b64decode((secret.get("data") or {}).get("seed") or "")
    if len(text) < credentials.SEED_BYTES:
        raise TopKubeError(
            f"the secret {name} has no usable 'seed'",
            cause="it was made by hand or belongs to something else",
            next_step=f"delete it (the operator creates a new one), or set it to {credentials.SEED_BYTES} random bytes",
        )
    return text
