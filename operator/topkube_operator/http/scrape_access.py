"""Who may read /metrics: TLS for the connection, and Kubernetes' own authentication for the caller.

With authentication, a scraper sends the token of its service account. The API server reports which account owns
the token (TokenReview), and if that account may `get` the non-resource URL /metrics (SubjectAccessReview). The
kubelet's probes need no token.
"""

from __future__ import annotations

import argparse
import hashlib
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube_operator.http.certificates import Authority, load_certificate

Call = Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]
"""Makes a call to the API server: method, path, body. Returns the answer. Raises TopKubeError."""
AUTHENTICATIONS = ("none", "kubernetes")
_REMEMBER_SECONDS = 60.0
"""How long an answer of the API server is valid."""
_REMEMBERED = 256
_UNKNOWN_PER_MINUTE = 30
"""Reviews of tokens that were not valid before. Callers that guess tokens cannot load the API server."""
_LONGEST_TOKEN = 16 << 10


@dataclass(frozen=True)
class ScrapeOptions:
    """The protection of /metrics."""

    tls: bool = False
    """Serve TLS. If `certificate` is None, the certificate is of our own authority."""
    certificate: Path | None = None
    """A folder with tls.crt and tls.key."""
    authentication: str = "none"
    """One of AUTHENTICATIONS."""

    def build_context(self, authority: Authority, names: tuple[str, ...]) -> ssl.SSLContext | None:
        """Return the TLS context of a server with these names; None for plain HTTP. Raises ClusterError."""
        if self.certificate is not None:
            return load_certificate(self.certificate)
        return authority.build_server_context(names) if self.tls else None


def add_scrape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ScrapeOptions."""
    add = parser.add_argument
    add(
        "--metrics-tls",
        action="store_true",
        help="serve the metrics port with TLS and a certificate that the operator creates",
    )
    add(
        "--metrics-certificate",
        type=Path,
        metavar="FOLDER",
        help="serve the metrics port with TLS and with tls.crt and tls.key of this folder",
    )
    add(
        "--metrics-authentication",
        choices=AUTHENTICATIONS,
        default="none",
        help="kubernetes: /metrics needs the token of a service account that may get the URL /metrics; needs TLS "
        "(default: none)",
    )


def read_scrape_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> ScrapeOptions:
    """Return the options. Ends the program if tokens would travel without TLS."""
    scrape = ScrapeOptions(options.metrics_tls, options.metrics_certificate, options.metrics_authentication)
    if scrape.authentication != "none" and not scrape.tls and scrape.certificate is None:
        parser.error("--metrics-authentication needs --metrics-tls or --metrics-certificate: tokens are secrets")
    return scrape


class TokenCheck:
    """Checks the tokens of callers with the API server. Safe for many threads."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._unknown: list[float] = []

    def allows(self, token: str) -> bool:
        """Return True if the owner of `token` may read /metrics. Raises TopKubeError if the API server cannot
        check it."""
        if not token or len(token) > _LONGEST_TOKEN:
            return False
        key, now = hashlib.sha256(token.encode()).digest(), time.monotonic()
        with self._lock:
            asked_at, allowed = self._answers.get(key, (float("-inf"), False))
            if now - asked_at < _REMEMBER_SECONDS:
                return allowed
            if not allowed:
                self._unknown = [at for at in self._unknown if now - at < 60.0]
                if len(self._unknown) >= _UNKNOWN_PER_MINUTE:
                    return False
                self._unknown.append(now)
        allowed = self._review_token(token)
        with self._lock:
            self._answers[key] = (now, allowed)
            self._answers.move_to_end(key)
            while len(self._answers) > _REMEMBERED:
                refused_key = next(
                    (token_key for token_key, (_, is_allowed) in self._answers.items() if not is_allowed), None
                )
                self._answers.pop(refused_key if refused_key is not None else next(iter(self._answers)))
        return allowed

    def _review_token(self, token: str) -> bool:
        group = "authentication.k8s.io/v1"
        review = {"apiVersion": group, "kind": "TokenReview", "spec": {"token": token}}
        status = self._call("POST", f"/apis/{group}/tokenreviews", review).get("status") or {}
        user = status.get("user") or {}
        if not status.get("authenticated") or not user.get("username"):
            return False
        group = "authorization.k8s.io/v1"
        spec: dict[str, Any] = {
            "user": user["username"],
            "groups": user.get("groups") or [],
            "uid": user.get("uid") or "",
            "extra": user.get("extra") or {},
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        }
        review = {"apiVersion": group, "kind": "SubjectAccessReview", "spec": spec}
        answer = self._call("POST", f"/apis/{group}/subjectaccessreviews", review)
        return bool((answer.get("status") or {}).get("allowed"))
