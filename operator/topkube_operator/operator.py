"""The whole operator put together, without kopf: what runs, what it is told, and how it stops."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass, field, replace
from typing import Any

from topkube.errors import TopKubeError
from topkube_operator import credentials
from topkube_operator.cluster import ApiError, Cluster
from topkube_operator.controller import Controller
from topkube_operator.gangs import Gangs, known_gang
from topkube_operator.leadership import Leadership
from topkube_operator.metrics import OperatorMetrics
from topkube_operator.observed import Policy
from topkube_operator.probes import Probes
from topkube_operator.queue import WorkQueue
from topkube_operator.recorder import Recorder
from topkube_operator.store import Store
from topkube_operator.watching import CHILDREN, Watching

_log = logging.getLogger(__name__)
_STUCK_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    namespaces: tuple[str, ...] = ()
    """Where jobs are reconciled; empty: everywhere."""
    namespace: str = "topkube-system"
    """The operator's own: its Lease and its secret are there."""
    kubeconfig: str = ""
    metrics_port: int = 8080
    lease_name: str = "topkube-operator"
    secret_name: str = "topkube-operator"
    leader_election: bool = True
    in_cluster: bool = False
    policy: Policy = field(default_factory=Policy)


class Operator:
    """Everything that runs beside kopf's loop. `start` and `stop` once each."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.cluster = Cluster(options.kubeconfig, self.acting)
        self.store, self.queue = Store(), WorkQueue()
        self.metrics = OperatorMetrics(self.store.jobs)
        self.recorder = Recorder(self.cluster, self.identity)
        self.seed = b""
        self.policy = options.policy
        self.controller: Controller | None = None
        self.watching: Watching | None = None
        self._leadership: Leadership | None = None
        self._stopping = False

    def acting(self) -> bool:
        """Whether this replica may write: it leads, and has seen all there is."""
        if self._stopping or self.watching is None or not self.watching.synced():
            return False
        return self._leadership is None or self._leadership.acting()

    def start(self) -> None:
        """Raises TopKubeError where the cluster does not let us."""
        options = self.options
        self.seed = own_secret(self.cluster, options.namespace, options.secret_name)
        gang = known_gang(self.cluster)
        namespace = options.namespace if options.in_cluster else ""
        self.policy = replace(options.policy, seed=self.seed, gang=gang, operator_namespace=namespace)
        gangs = Gangs(self.cluster, self.policy, self._gang_found)
        self.controller = Controller(
            self.cluster, self.store, self.queue, self.recorder, self.metrics, gangs.policy, self.acting
        )
        kinds = [*CHILDREN, *(["PodGroup"] if gang else [])]
        self.watching = Watching(self.cluster, self.store, options.namespaces, kinds, self.controller.woken)
        self.probes = Probes(options.metrics_port, self.metrics.text, self.unhealthy, self.unready)
        self.probes.start()
        self.recorder.start()
        self.watching.start()
        self.controller.start()
        if options.leader_election:
            self._leadership = Leadership(self.cluster, options.namespace, options.lease_name, self.identity, self._led)
            self._leadership.start()
        else:
            self._led(True)

    def _gang_found(self) -> None:
        if self.watching is not None:
            self.watching.add("PodGroup")

    def stop(self) -> None:
        """Stops acting, hands the Lease over, ends the threads."""
        self._stopping = True
        if self._leadership is not None:
            self._leadership.stop()
        if self.controller is not None:
            self.controller.stop()
        if self.watching is not None:
            self.watching.stop()
        self.recorder.stop()
        with contextlib.suppress(AttributeError):
            self.probes.stop()

    def unhealthy(self) -> str:
        """What keeps the operator from getting on; empty where nothing does. A restart would help."""
        if self.watching is not None and not self.watching.alive():
            return "a watcher has not heard from the API server for three minutes"
        if self.queue.oldest() > _STUCK_SECONDS and self.acting():
            return f"a job has been waiting for {self.queue.oldest():.0f} seconds"
        return ""

    def unready(self) -> str:
        """What keeps this replica from taking over; empty where nothing does."""
        return "" if self.watching is not None and self.watching.synced() else "the cluster has not been listed yet"

    def jobs_seen(self, kind: str, job: dict[str, Any]) -> None:
        """Takes a job, or its end, from kopf."""
        metadata = job["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if kind == "DELETED":
            self.store.remove_job(key, metadata["uid"])
            self.queue.add(key)
        elif self.store.put_job(job):
            self.queue.add(key)

    def _led(self, leads: bool) -> None:
        self.metrics.leads(leads)
        if leads and self.controller is not None:
            self.controller.everything()


def own_secret(cluster: Cluster, namespace: str, name: str) -> bytes:
    """The operator's own secret, made where there is none. All that it gives to jobs derives from it."""
    for _ in range(3):
        try:
            return _seed(cluster.get("Secret", namespace, name), name)
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
            return _seed(cluster.call("POST", f"/api/v1/namespaces/{namespace}/secrets", manifest), name)
        except ApiError as error:
            if error.status != 409:
                raise
    raise ApiError(0, f"the secret {namespace}/{name} can neither be read nor made")


def _seed(secret: dict[str, Any], name: str) -> bytes:
    text = base64.b64decode((secret.get("data") or {}).get("seed") or "")
    if len(text) < credentials.SEED_BYTES:
        raise TopKubeError(
            f"the secret {name} has no usable 'seed'",
            cause="it was made by hand or belongs to something else",
            next_step=f"delete it (the operator makes a new one), or give it {credentials.SEED_BYTES} random bytes",
        )
    return text
