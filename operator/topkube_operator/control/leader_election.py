"""Leader election by a Lease: one of several replicas acts. A replica that loses the Lease stops acting at once.

A replica leads until `_RENEW_WITHIN` after the *beginning* of its last successful renewal. The other replicas take over
after a whole `_LEASE` without a renewal, measured on their own clocks. Clocks are never compared.
"""

from __future__ import annotations

import http
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from topkube.timestamps import format_microtime
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

_log = logging.getLogger(__name__)
_LEASE = 12.0
"""Seconds without a renewal after which another replica takes the Lease."""
_RENEW_WITHIN = 8.0
"""Seconds for which a replica leads after a renewal."""
_RENEW_EVERY = 2.5
"""Seconds between two renewals."""
_CHECK_EVERY = 1.0
"""Seconds between two checks by a replica that does not lead."""


class LeaderElection:
    """One replica's part in the election. It calls `on_change`, in a thread of its own, when the replica wins or
    loses."""

    def __init__(
        self, cluster: ApiClient, namespace: str, name: str, identity: str, on_change: Callable[[bool], None]
    ) -> None:
        self._cluster, self._namespace, self._name, self._identity = cluster, namespace, name, identity
        self._on_change = on_change
        self._leads_until = 0.0
        self._announced = False
        self._newest_version: tuple[str, float] = ("", 0.0)
        """The newest version of the Lease, and when this replica saw it first."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_acting(self) -> bool:
        """Return True if this replica may write now."""
        return time.monotonic() < self._leads_until

    def stop(self) -> None:
        """Stop acting, and release the Lease."""
        was_acting = self.is_acting()
        self._leads_until = 0.0
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._leads_until = 0.0  # again, because the thread may have set it in the meantime
        if was_acting:
            try:
                lease = self._cluster.get("Lease", self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    # Kubernetes accepts no duration of 0.
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    self._cluster.replace_lease(lease)
            except ApiError as error:
                _log.warning("the Lease could not be released and will expire: %s", error)

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun = time.monotonic()
            try:
                if self._acquire_or_renew() and not self._stopped.is_set():
                    self._leads_until = begun + _RENEW_WITHIN
            except ApiError as error:
                _log.warning("the Lease could not be renewed: %s", error)
            except Exception:
                _log.exception("the election failed and starts again")
            if self.is_acting() != self._announced:
                self._announced = self.is_acting()
                _log.info("this replica %s", "leads" if self._announced else "does not lead any more")
                self._on_change(self._announced)
            pause = _RENEW_EVERY if self.is_acting() else _CHECK_EVERY
            self._stopped.wait(pause)

    def _acquire_or_renew(self) -> bool:
        """Acquire or renew the Lease if that is possible. Return True if this replica holds it."""
        try:
            lease = self._cluster.get("Lease", self._namespace, self._name)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            return self._write_lease(None)
        holder, version = lease["spec"].get("holderIdentity") or "", lease["metadata"]["resourceVersion"]
        if holder == self._identity:
            return self._write_lease(lease)
        if version != self._newest_version[0]:
            self._newest_version = (version, time.monotonic())
        if not holder or time.monotonic() - self._newest_version[1] >= _LEASE:
            return self._write_lease(lease)
        return False

    def _write_lease(self, lease: dict[str, Any] | None) -> bool:
        now = format_microtime(datetime.now(UTC))
        spec: dict[str, Any] = dict(lease["spec"]) if lease else {}
        if spec.get("holderIdentity") != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": int(_LEASE), "renewTime": now}
        try:
            if lease is None:
                metadata = {"name": self._name, "namespace": self._namespace}
                manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
                path = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"
                self._cluster.call("POST", path, manifest)  # `create` refuses to write while this replica stands by
            else:
                self._cluster.replace_lease({**lease, "spec": spec})
        except ApiError as error:
            if error.status == http.HTTPStatus.CONFLICT:  # another replica was faster
                return False
            raise
        return True
