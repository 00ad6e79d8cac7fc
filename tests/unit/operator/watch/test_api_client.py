"""The API client without an API server: the answers that it reads, and the patches that it sends."""

from __future__ import annotations

import json
import types
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import urllib3

from topkube_operator.model import names
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiConnection, ApiError, _read_error


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        (None, 0, 0),
        ("", 0, 0),
        ("7", 7, 7),
        ("1.5", 1.5, 1.5),
        ("-3", 0, 0),
        ("nan", 0, 0),
        ("inf", 0, 0),
        ("soon", 0, 0),
        ("86400", 300, 300),
        (timedelta(seconds=250), 100, 250),
        (timedelta(days=-1), 0, 0),
    ],
)
def test_retry_after_is_read_and_bounded(header: str | timedelta | None, least: float, most: float) -> None:
    if isinstance(header, timedelta):
        header = format_datetime(datetime.now(UTC) + header, usegmt=True)
    body = json.dumps({"message": "too many requests", "reason": "TooManyRequests"}).encode()
    headers = {} if header is None else {"Retry-After": header}
    error = _read_error(urllib3.HTTPResponse(body, status=429, headers=headers), "POST", "/api/v1/pods")
    assert (error.status, error.reason) == (429, "TooManyRequests")
    assert least <= error.wait <= most


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> tuple[ApiClient, dict[str, Any]]:
    """A client that sends nothing, and its last call."""
    last: dict[str, Any] = {}

    def call(method: str, path: str, body: Any, **more: Any) -> dict[str, Any]:
        last.update(method=method, path=path, body=body, **more)
        return {}

    cluster = ApiClient.__new__(ApiClient)
    monkeypatch.setattr(cluster, "is_acting", lambda: True, raising=False)
    monkeypatch.setattr(cluster, "call", call)
    resources = {"Pod": ("v1", "pods"), "Service": ("v1", "services")}
    monkeypatch.setattr(cluster, "_resources", resources, raising=False)
    return cluster, last


def test_our_finalizer_is_removed_and_no_other(sent: tuple[ApiClient, dict[str, Any]]) -> None:
    """One call removes it. The call names no resource version, because other controllers write the pod too."""
    cluster, last = sent
    cluster.remove_finalizer("team", "train-launcher-1", "uid-1")
    assert (last["method"], last["path"]) == ("PATCH", "/api/v1/namespaces/team/pods/train-launcher-1")
    assert last["content"] == "application/strategic-merge-patch+json"
    assert last["body"]["metadata"] == {"uid": "uid-1", "$deleteFromPrimitiveList/finalizers": [names.ENDING]}


def test_a_misspelt_field_in_a_template_is_refused_and_not_dropped(sent: tuple[ApiClient, dict[str, Any]]) -> None:
    """Objects of other kinds come from the operator. Their schema may be older, such as that of a PodGroup."""
    cluster, last = sent
    validations = {}
    for kind in ("Pod", "Service"):
        cluster.create({"kind": kind, "metadata": {"namespace": "team", "name": "a"}})
        validations[kind] = last["query"].get("fieldValidation")
    assert validations == {"Pod": "Strict", "Service": None}


def test_a_list_that_may_lag_is_answered_from_memory(
    sent: tuple[ApiClient, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = sent
    queries: list[dict[str, str]] = []

    def call(method: str, path: str, *, query: dict[str, str], accept: str) -> dict[str, Any]:
        queries.append(dict(query))
        return {"metadata": {"resourceVersion": "7"}, "items": [{}]}

    monkeypatch.setattr(cluster, "call", call)
    assert cluster.list("Pod", "team-a", may_lag=True) == ([{}], "7")
    assert cluster.list("Pod", "team-a") == ([{}], "7")
    assert queries == [{"resourceVersion": "0"}, {"limit": "500"}]


@pytest.mark.parametrize("body", [b"", b"<html>maintenance</html>", b'{"items": ['])
def test_an_answer_that_is_not_json_is_an_error_of_the_api_server(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """A proxy answers with status 200 and its own page, or cuts an answer off. A node agent ended because of it."""
    connection = ApiConnection.__new__(ApiConnection)
    monkeypatch.setattr(connection, "send", lambda *_, **__: types.SimpleNamespace(data=body))
    with pytest.raises(ApiError, match="GET /api/v1/pods: the answer is not JSON") as error:
        connection.call("GET", "/api/v1/pods")
    assert error.value.status == 0, "the call may have been carried out"
