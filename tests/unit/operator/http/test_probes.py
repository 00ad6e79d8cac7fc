"""The operator's HTTP port."""

from __future__ import annotations

import urllib.error
import urllib.request

from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.http.probes import Probes


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    return answer.status, answer.read().decode()


def test_probes_say_what_is_wrong_and_metrics_are_served() -> None:
    wrong = {"healthy": "", "ready": "the cluster has not been listed yet"}
    metrics = OperatorMetrics()
    metrics.set_leader(True)
    probes = Probes(0, metrics.text, lambda: wrong["healthy"], lambda: wrong["ready"], "127.0.0.1")
    probes.start()
    try:
        assert ask(probes.port, "/healthz") == (200, "ok\n")
        assert ask(probes.port, "/readyz") == (503, "the cluster has not been listed yet\n")
        wrong.update(healthy="a job has been waiting", ready="")
        assert ask(probes.port, "/healthz?verbose") == (503, "a job has been waiting\n")
        assert ask(probes.port, "/readyz")[0] == 200
        assert "topkube_leader 1.0" in ask(probes.port, "/metrics")[1]
        assert ask(probes.port, "/other")[0] == 404
    finally:
        probes.stop()
