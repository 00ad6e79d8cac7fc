"""The operator writes only valid JSON to the API server, asks for no other path, and reads logs with a bound."""

from __future__ import annotations

import types
from typing import Any

import pytest

from topkube_operator.watch import api_client, api_connection
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError


def make_cluster() -> tuple[ApiClient, list[Any]]:
    """Return a client without an API server, and the list of queries that it sends."""
    cluster, sent = ApiClient.__new__(ApiClient), list[Any]()
    cluster._resources = dict(api_client._RESOURCES)

    def send(method: str, path: str, *, query: Any, **_: Any) -> Any:
        sent.append((method, path, query))
        return types.SimpleNamespace(data=b"x" * 10_000 + b"\xff\x00END")

    cluster.connection = types.SimpleNamespace(send=send)  # type: ignore[assignment]
    return cluster, sent


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_does_not_have_is_never_sent(number: float) -> None:
    with pytest.raises(ApiError, match="cannot be written as JSON") as error:
        api_connection._to_json({"status": {"progress": {"samplesPerSecond": number}}})
    assert error.value.reason == "NotJSON"


def test_a_log_with_lines_without_end_is_not_read_whole() -> None:
    cluster, sent = make_cluster()
    text = cluster.read_log_tail("team", "pod", "worker", 20, 4096)
    assert len(text) <= 4096
    assert text.endswith("END")
    assert int(sent[0][2]["limitBytes"]) <= 1 << 20


@pytest.mark.parametrize(
    "name", ["../../../../api/v1/namespaces/kube-system/secrets", "..", ".", "high?watch=1", "a/b", "a%2Fb", "a#b", "A"]
)
def test_a_name_that_a_user_chooses_leads_to_no_other_path(name: str) -> None:
    """A template contains any text as its priorityClassName. HTTP clients resolve "..", so the operator read any path
    with its own rights, and waited for the end of a watch that never ends."""
    cluster, sent = make_cluster()
    with pytest.raises(ApiError, match="no PriorityClass can have the name") as error:
        cluster.get("PriorityClass", "", name)
    assert (error.value.status, sent) == (404, [])
