"""The API client without an API server: the answers that it reads, and the patches that it sends."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import urllib3

from topkube_operator.model import names
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import _read_error


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


def test_our_finalizer_is_removed_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call removes it. The call names no resource version, because other controllers write the pod too."""
    sent: dict[str, Any] = {}

    def call(method: str, path: str, body: Any, **more: Any) -> dict[str, Any]:
        sent.update(method=method, path=path, body=body, **more)
        return {}

    cluster = ApiClient.__new__(ApiClient)
    monkeypatch.setattr(cluster, "is_acting", lambda: True, raising=False)
    monkeypatch.setattr(cluster, "call", call)
    monkeypatch.setattr(cluster, "_resources", {"Pod": ("v1", "pods")}, raising=False)
    cluster.remove_finalizer("team", "train-launcher-1", "uid-1")
    assert (sent["method"], sent["path"]) == ("PATCH", "/api/v1/namespaces/team/pods/train-launcher-1")
    assert sent["content"] == "application/strategic-merge-patch+json"
    assert sent["body"]["metadata"] == {"uid": "uid-1", "$deleteFromPrimitiveList/finalizers": [names.ENDING]}
