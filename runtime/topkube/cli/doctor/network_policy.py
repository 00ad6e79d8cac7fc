"""A probe of a cluster: does its network enforce NetworkPolicies? They are what keeps other pods from the ranks' ports.

A pod listens, and another pod connects to it: first without a policy, then with one that allows nobody. All objects
belong to the listening pod, so that they go with it, and it ends by itself if this process is killed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from topkube.cli.cluster.api import Api, ClusterLocation, build_path, connect, ignore_missing
from topkube.cli.doctor.check import Check, report_ok
from topkube.errors import ClusterError

_PORT = 7077
_WAIT_SECONDS = 180.0
"""The longest wait for a pod to start and end: its image may have to be pulled."""
_LIFE_SECONDS = 900
_SLEEP_SECONDS = 0.5
_LISTEN = f"""
import socket
if socket.has_dualstack_ipv6():
    server = socket.create_server(("", {_PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
else:
    server = socket.create_server(("", {_PORT}))
while True:
    server.accept()[0].close()
"""
_CONNECT = """
import socket, sys, time
address, port, expected = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "open"
end, in_a_row = time.monotonic() + 60, 0
while in_a_row < 3:
    if time.monotonic() > end:
        sys.exit(1)
    try:
        socket.create_connection((address, port), 2).close()
        is_open = True
    except OSError:
        is_open = False
    in_a_row = in_a_row + 1 if is_open == expected else 0
    time.sleep(0.3)
"""


def check_network_policies(location: ClusterLocation, image: str) -> Iterator[Check]:
    """Yield whether the cluster enforces NetworkPolicies. `image` has Python, and must be one that its nodes can pull.
    Raises ClusterError if the probe cannot be made."""
    probe = Probe(connect(location), image)
    try:
        yield probe.run()
    finally:
        probe.remove()


class Probe:
    """The pods and the policy of one probe, with names that nothing else has."""

    def __init__(self, api: Api, image: str) -> None:
        self._api, self._image = api, image
        self._name = f"topkube-doctor-{secrets.token_hex(4)}"
        self._owner: list[dict[str, Any]] = []

    def run(self) -> Check:
        """Return what the cluster does with a policy that allows nobody."""
        listener = self._create_pod(self._name, ["-c", _LISTEN])
        uid = listener["metadata"]["uid"]
        self._owner = [{"apiVersion": "v1", "kind": "Pod", "name": self._name, "uid": uid}]
        address = self._await(self._name, lambda status: bool(status.get("podIP")))["podIP"]
        if not self._finds(address, "open"):
            return Check(
                "network policy",
                "warn",
                f"a pod cannot reach another pod in the namespace {self._api.namespace}, so the probe says nothing",
                "probe a namespace without NetworkPolicies: topkube doctor --network-policy --namespace NAME",
            )
        self._create("networkpolicies", self._build_policy(), "networking.k8s.io/v1")
        if self._finds(address, "closed") and self._read(self._name)["status"].get("phase") == "Running":
            return report_ok("network policy", "the cluster enforces NetworkPolicies")
        return Check(
            "network policy",
            "warn",
            "the cluster does not enforce NetworkPolicies: every pod in it can reach the ports of all ranks",
            "install a network plugin that enforces them, or read docs/threat-model.md",
        )

    def remove(self) -> None:
        """Remove all objects of the probe."""
        if not self._owner:
            return
        with ignore_missing():
            path = build_path(self._api.namespace, "pods", self._name)
            self._api.request("DELETE", path, {"propagationPolicy": "Background", "gracePeriodSeconds": 0})

    def _finds(self, address: str, expected: str) -> bool:
        """Return True if a pod finds the port of the listening pod `expected`: open or closed."""
        name = f"{self._name}-{expected}"
        self._create_pod(name, ["-c", _CONNECT, address, str(_PORT), expected])
        return bool(self._await(name, _has_ended)["phase"] == "Succeeded")

    def _await(self, name: str, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the status of a pod when it is reached. Raises ClusterError after a while, or if the pod ends
        before."""
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            status: dict[str, Any] = self._read(name).get("status", {})
            if is_reached(status):
                return status
            if _has_ended(status):
                raise ClusterError(
                    f"the pod {name} has ended: {status.get('reason', status['phase'])}",
                    cause=f"{self._image} has no python3, or the node refused the pod",
                    next_step="pass --image with an image that has Python",
                )
            if time.monotonic() > end:
                raise ClusterError(
                    f"the pod {name} did not start within {_WAIT_SECONDS:g} s",
                    cause=f"it cannot be scheduled, or its node cannot pull {self._image}",
                    next_step=f"kubectl describe pod {name} -n {self._api.namespace}, while the probe runs; or pass"
                    " --image with an image that has Python",
                )
            time.sleep(_SLEEP_SECONDS)

    def _read(self, name: str) -> dict[str, Any]:
        return self._api.get(build_path(self._api.namespace, "pods", name))

    def _create(self, kind: str, body: Mapping[str, Any], group: str = "") -> dict[str, Any]:
        return self._api.request("POST", build_path(self._api.namespace, kind, group=group), body=body).data

    def _create_pod(self, name: str, arguments: list[str]) -> dict[str, Any]:
        container = {
            "name": "probe",
            "image": self._image,
            "command": ["python3", *arguments],
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "128Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
        }
        spec = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        }
        return self._create("pods", {"kind": "Pod", "apiVersion": "v1", "metadata": self._describe(name), "spec": spec})

    def _build_policy(self) -> dict[str, Any]:
        """Return a policy for the listening pod that allows nobody."""
        labels = self._describe(self._name)["labels"]
        return {
            "kind": "NetworkPolicy",
            "apiVersion": "networking.k8s.io/v1",
            "metadata": self._describe(self._name),
            "spec": {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]},
        }

    def _describe(self, name: str) -> dict[str, Any]:
        labels = {"app.kubernetes.io/managed-by": "topkube-doctor", "topkube.dev/probe": name}
        return {"name": name, "labels": labels, "ownerReferences": self._owner}


def _has_ended(status: Mapping[str, Any]) -> bool:
    return status.get("phase") in ("Succeeded", "Failed")
