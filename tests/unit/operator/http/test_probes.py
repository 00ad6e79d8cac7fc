"""The operator's HTTP port: probes, metrics, and the check of tokens."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from topkube.errors import TopKubeError
from topkube_operator.__main__ import build_parser, main
from topkube_operator.control.metrics import OperatorMetrics
from topkube_operator.http import scrape_access
from topkube_operator.http.certificates import Authority
from topkube_operator.http.probes import Probes
from topkube_operator.http.scrape_access import TokenCheck


def send_request(port: int, path: str, token: str = "", trust: ssl.SSLContext | None = None) -> tuple[int, str]:
    url = f"{'https' if trust else 'http'}://127.0.0.1:{port}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120, context=trust)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    return answer.status, answer.read().decode()


def find_no_problem() -> str:
    return ""


def test_probes_name_the_problem_and_metrics_are_served() -> None:
    problems = {"healthy": "", "ready": "the cluster has not been listed yet"}
    metrics = OperatorMetrics()
    metrics.set_leader(True)
    probes = Probes(0, metrics.render, lambda: problems["healthy"], lambda: problems["ready"], "127.0.0.1")
    probes.start()
    try:
        assert send_request(probes.port, "/healthz") == (200, "ok\n")
        assert send_request(probes.port, "/readyz") == (503, "the cluster has not been listed yet\n")
        problems.update(healthy="a job has been waiting", ready="")
        assert send_request(probes.port, "/healthz?verbose") == (503, "a job has been waiting\n")
        assert send_request(probes.port, "/readyz")[0] == 200
        assert (
            'topkube_leader{namespace="topkube-system",release="topkube"} 1.0'
            in send_request(probes.port, "/metrics")[1]
        )
        assert send_request(probes.port, "/other")[0] == 404
    finally:
        probes.stop()


class ReviewingApi:
    """Answers TokenReviews and SubjectAccessReviews, and counts them."""

    def __init__(self, may_read: Mapping[str, bool]) -> None:
        self.may_read, self.calls, self.works = may_read, 0, True

    def call(self, method: str, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert method == "POST"
        self.calls += 1
        if not self.works:
            raise TopKubeError("the API server cannot be reached")
        if path.endswith("tokenreviews"):
            token = body["spec"]["token"]
            if token not in self.may_read:
                return {"status": {"authenticated": False, "error": "unknown"}}
            return {"status": {"authenticated": True, "user": {"username": token, "groups": ["g"]}}}
        assert body["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        assert body["spec"]["groups"] == ["g"]
        return {"status": {"allowed": self.may_read[body["spec"]["user"]]}}


def test_metrics_over_tls_need_a_token_and_probes_need_none() -> None:
    api, authority = ReviewingApi({"prometheus": True, "somebody": False}), Authority.create_random()
    probes = Probes(
        0,
        OperatorMetrics().render,
        find_no_problem,
        find_no_problem,
        "127.0.0.1",
        tls=authority.build_server_context(["127.0.0.1"]),
        allows=TokenCheck(api.call).allows,
    )
    trust = ssl.create_default_context(cadata=base64.b64decode(authority.bundle).decode())
    probes.start()
    try:
        assert send_request(probes.port, "/healthz", trust=trust) == (200, "ok\n")
        assert send_request(probes.port, "/metrics", trust=trust)[0] == 401
        assert send_request(probes.port, "/metrics", "wrong", trust)[0] == 403
        assert send_request(probes.port, "/metrics", "somebody", trust)[0] == 403
        assert "topkube_leader" in send_request(probes.port, "/metrics", "prometheus", trust)[1]
        api.works = False
        assert send_request(probes.port, "/metrics", "prometheus", trust)[0] == 200, (
            "the answer is remembered for a minute"
        )
        assert send_request(probes.port, "/metrics", "another", trust)[0] == 503
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            send_request(probes.port, "/metrics", "prometheus", ssl.create_default_context())
    finally:
        probes.stop()


def test_callers_that_guess_tokens_do_not_load_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ReviewingApi({"prometheus": True})
    check = TokenCheck(api.call)
    assert check.allows("prometheus")
    for number in range(1000):
        assert not check.allows(f"guess-{number}")
    assert api.calls <= 2 + scrape_access._UNKNOWN_PER_MINUTE
    monkeypatch.setattr(scrape_access, "_REMEMBER_SECONDS", 0.0)
    assert check.allows("prometheus"), "a scraper is served while others guess"
    assert not check.allows("x" * 100_000)


def test_tokens_never_travel_without_tls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--metrics-authentication=kubernetes"])
    assert "--metrics-authentication needs --metrics-tls" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[1]",
        "[{}]",
        '[{"podSelectr": {}}]',
        '[{"podSelector": {"matchLabel": {"a": "b"}}}]',  # the API server would store a selector of all pods
        '[{"ipBlock": "10.0.0.0/8"}]',
    ],
)
def test_a_malformed_list_of_peers_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--metrics-from={text}"])
    assert "--metrics-from" in capsys.readouterr().err


def test_empty_parts_of_peers_that_the_api_server_does_not_store_are_left_out() -> None:
    """Otherwise every stored policy would differ from the wanted one, and would be written again and again."""
    block = {"ipBlock": {"cidr": "10.0.0.0/8", "except": []}}
    selectors = {
        "namespaceSelector": {"matchLabels": {}, "matchExpressions": []},
        "podSelector": {"matchExpressions": [{"key": "scrapes", "operator": "Exists", "values": []}]},
    }
    peers = build_parser().parse_args([f"--metrics-from={json.dumps([block, selectors])}"]).metrics_from
    assert peers == [
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        {"namespaceSelector": {}, "podSelector": {"matchExpressions": [{"key": "scrapes", "operator": "Exists"}]}},
    ]


def test_tokens_that_take_long_to_check_do_not_delay_the_kubelets_probes() -> None:
    release = threading.Event()
    probes = Probes(
        0,
        OperatorMetrics().render,
        find_no_problem,
        find_no_problem,
        "127.0.0.1",
        allows=lambda token: release.wait(60),
    )
    probes.start()
    callers = [
        threading.Thread(target=send_request, args=(probes.port, "/metrics", f"token-{number}")) for number in range(10)
    ]
    try:
        for caller in callers:
            caller.start()
        assert send_request(probes.port, "/healthz") == (200, "ok\n")
    finally:
        release.set()
        for caller in callers:
            caller.join(60)
        probes.stop()
