"""`topkube doctor --network-policy` with a simulated cluster; tests/cluster probes a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_answers import Answer, Answers, build_status

from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.doctor import network_policy
from topkube.cli.doctor.check import Check
from topkube.cli.doctor.network_policy import check_network_policies
from topkube.errors import ClusterError


class Cluster:
    """A cluster whose network is open, closed, or follows policies. `requests` are the changes that were asked for."""

    def __init__(self, network: str) -> None:
        self.network, self.requests = network, list[str]()
        self._has_policy = False

    def answer(self, method: str, path: str) -> Answer:
        kind, _, name = path.partition("?")[0].partition("/namespaces/n/")[2].partition("/")
        if method != "GET":
            self.requests.append(f"{method} {kind}")
        self._has_policy = self._has_policy or (method, kind) == ("POST", "networkpolicies")
        status: dict[str, Any] = {"phase": "Running", "podIP": "10.0.0.9"}
        if name.endswith(("-open", "-closed")):
            is_open = self.network == "open" or (self.network == "policies" and not self._has_policy)
            status["phase"] = "Succeeded" if is_open == name.endswith("-open") else "Failed"
        body = {"metadata": {"uid": "u", "name": name}, "status": status}
        return 200, json.dumps(body).encode(), {}


@pytest.mark.parametrize(
    ("network", "state", "message"),
    [
        ("policies", "ok", "the cluster enforces NetworkPolicies"),
        ("open", "warn", "does not enforce NetworkPolicies: every pod in it can reach the ports of all ranks"),
        ("closed", "warn", "so the probe says nothing"),
    ],
)
def test_the_probe_tells_what_the_network_does_and_leaves_nothing(
    start_server: Callable[[Answers], Path], network: str, state: str, message: str
) -> None:
    cluster = Cluster(network)
    config = start_server(cluster.answer)
    checks: list[Check] = list(check_network_policies(ClusterLocation(config, None, "n"), "an-image"))
    assert [check.state for check in checks] == [state]
    assert message in checks[0].message
    assert cluster.requests[0] == "POST pods"
    assert cluster.requests[-1] == "DELETE pods"


def test_a_probe_that_is_refused_or_never_starts_is_an_error(
    start_server: Callable[[Answers], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = start_server(lambda method, path: build_status(403, "pods is forbidden: no"))
    with pytest.raises(ClusterError, match="pods is forbidden"):
        list(check_network_policies(ClusterLocation(config, None, "n"), "an-image"))
    pending = json.dumps({"metadata": {"uid": "u"}, "status": {"phase": "Pending"}}).encode()
    config = start_server(lambda method, path: (200, pending, {}))
    monkeypatch.setattr(network_policy, "_WAIT_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=r"did not start within 0.1 s.*an-image"):
        list(check_network_policies(ClusterLocation(config, None, "n"), "an-image"))
