"""`python -m topkube_operator` and `topkube-operator`: the command line of the operator."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topkube.errors import TopKubeError
from topkube_operator.children.objects import PROMETHEUS
from topkube_operator.control.operator import Operator, OperatorOptions
from topkube_operator.http.scrape_access import add_scrape_options, read_scrape_options
from topkube_operator.model import names
from topkube_operator.model.observed import Policy

_MOST_LEVELS = 12_000
"""How deep the JSON may be that the operator reads. The API server accepts objects of 10,000 levels."""
_STACK_BYTES = 16 << 20
"""The stack of each thread. Python's reader of JSON takes about 2 MiB for 10,000 levels."""
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until a signal stops it. Return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    allow_deep_objects()
    scrape = read_scrape_options(parser, options)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("kopf", "urllib3", "kubernetes", "aiohttp"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    in_cluster = not options.kubeconfig and _OWN_NAMESPACE.exists()
    namespace = options.operator_namespace or (_OWN_NAMESPACE.read_text().strip() if in_cluster else "topkube-system")
    policy = Policy(
        gang_scheduler=options.gang_scheduler,
        rendezvous_seconds=options.rendezvous_seconds,
        stall_seconds=options.stall_seconds,
        startup_seconds=options.startup_seconds,
        lost_seconds=options.lost_seconds,
        backoff_seconds=options.backoff_seconds,
        check_address=options.check_address,
        cache_free_percent=options.cache_free_percent,
        metrics_from=tuple(options.metrics_from),
    )
    from topkube_operator import handlers  # loaded late, because kopf takes long to load and --help should not

    try:
        operator = Operator(
            OperatorOptions(
                namespaces=tuple(dict.fromkeys(options.namespace)),
                namespace=namespace,
                kubeconfig=options.kubeconfig,
                metrics_port=options.metrics_port,
                lease_name=options.lease_name,
                secret_name=options.secret_name,
                release=options.release,
                scrape=scrape,
                leader_election=options.leader_election,
                in_cluster=in_cluster,
                fault_conditions=tuple(dict.fromkeys(options.fault_condition)),
                policy=policy,
            )
        )
        hook = handlers.WebhookOptions(
            tuple(options.webhook), options.webhook_port, options.webhook_configuration, options.webhook_certificate
        )
        handlers.run(operator, hook)
    except TopKubeError as error:
        print(f"topkube-operator: {error}", file=sys.stderr)
        return 1
    return 0


def allow_deep_objects() -> None:
    """Let all threads that start from now on read every object that the API server stores.

    A pod template may be as deep as its author likes. With Python's usual limit of 1,000 levels, one such job ended
    the watch of the jobs of all users, and the operator with it. `check_extent` refuses deep jobs as invalid."""
    sys.setrecursionlimit(_MOST_LEVELS)
    threading.stack_size(_STACK_BYTES)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    parser = argparse.ArgumentParser(prog="topkube-operator", description="Turns TrainingJobs into pods.")
    add, default = parser.add_argument, Policy()
    add("--namespace", action="append", default=[], help="reconcile jobs of this namespace only; repeat for more")
    add(
        "--operator-namespace",
        default="",
        help="namespace of the Lease and of the secret (default: the operator's own)",
    )
    add("--kubeconfig", default="", help="outside a cluster: the kubeconfig to use (default: KUBECONFIG)")
    add("--metrics-port", type=int, default=8080, help="port of /metrics, /healthz and /readyz (default: 8080)")
    add_scrape_options(parser)
    add(
        "--metrics-from",
        type=_parse_peers,
        default=[PROMETHEUS],
        metavar="JSON",
        help="who may scrape workers, as a list of NetworkPolicy peers (default: pods with the label "
        "app.kubernetes.io/name: prometheus)",
    )
    add("--lease-name", default="topkube-operator", help="name of the Lease by which replicas elect a leader")
    add("--secret-name", default="topkube-operator", help="name of the operator's own secret, created if it is missing")
    add("--release", default="topkube", help="name of this installation in metrics (default: topkube)")
    add(
        "--no-leader-election",
        dest="leader_election",
        action="store_false",
        help="act without a Lease, for a single replica",
    )
    add(
        "--webhook",
        action="append",
        default=[],
        metavar="NAME",
        help="serve the validating webhook under this DNS name or address; repeat for more",
    )
    add("--webhook-port", type=int, default=9443, help="port of the webhook (default: 9443)")
    add(
        "--webhook-configuration",
        default="topkube",
        metavar="NAME",
        help="the ValidatingWebhookConfiguration that gets the caBundle (default: topkube)",
    )
    add(
        "--webhook-certificate",
        type=Path,
        metavar="FOLDER",
        help="serve the webhook with tls.crt and tls.key of this folder, maintained by cert-manager; write no caBundle",
    )
    add(
        "--gang-scheduler",
        default="",
        help="scheduler of gangs (default: the PodGroup's usual scheduler)",
    )
    for name, text in (
        ("rendezvous", "how long a running worker may take to call its launcher"),
        ("stall", "how long all ranks may go without finishing a step; 0: forever"),
        ("startup", "the same for the first step of an attempt"),
        ("lost", "how long a worker may be silent before its attempt ends"),
        ("backoff", "pause before the second of several quick restarts; it doubles each time"),
    ):
        value = getattr(default, f"{name}_seconds")
        add(f"--{name}-seconds", type=float, default=value, help=f"{text} (default: {value:g})")
    add(
        "--no-check-address",
        dest="check_address",
        action="store_false",
        help="accept workers whose calls arrive from another address than their pod's, because a service mesh or the "
        f"network rewrites addresses; a job's annotation {names.CHECK_ADDRESS} overrides this",
    )
    add(
        "--cache-free-percent",
        type=int,
        default=default.cache_free_percent,
        metavar="PERCENT",
        help=f"share of a node's disk that the caches of jobs leave free (default: {default.cache_free_percent})",
    )
    add(
        "--fault-condition",
        action="append",
        default=[],
        metavar="TYPE",
        help="a condition of nodes that reports a fault if it is True: new pods avoid the node; repeat for more",
    )
    levels = ("debug", "info", "warning", "error")
    add("--log-level", choices=levels, default="info", help="lowest level that is logged (default: info)")
    return parser


_SELECTOR_FIELDS = {"matchLabels", "matchExpressions"}
_PEER_FIELDS = {
    "namespaceSelector": _SELECTOR_FIELDS,
    "podSelector": _SELECTOR_FIELDS,
    "ipBlock": {"cidr", "except"},
}
"""The fields of a peer, and of what is in them. The API server drops other fields: a selector with a misspelt field
would admit all pods."""


def _parse_peers(text: str) -> list[dict[str, Any]]:
    """Return a list of NetworkPolicy peers from JSON."""
    try:
        peers = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(peers, list) or not all(map(_is_peer, peers)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of peers, such as "
            '[{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "vmagent"}}, "namespaceSelector": {}}]'
        )
    return [{field: _remove_empty(value) for field, value in peer.items()} for peer in peers]


def _is_peer(peer: Any) -> bool:
    """Return True if a value has only fields that a peer of a NetworkPolicy has."""
    if not isinstance(peer, dict) or not peer or not peer.keys() <= _PEER_FIELDS.keys():
        return False
    return all(isinstance(value, dict) and value.keys() <= _PEER_FIELDS[field] for field, value in peer.items())


def _remove_empty(value: Any) -> Any:
    """Return the content of a selector or of an ipBlock without empty lists and mappings. The API server does not store
    them, so the stored policies would always differ from the wanted policies."""
    if isinstance(value, dict):
        return {key: _remove_empty(below) for key, below in value.items() if below not in ([], {})}
    return [_remove_empty(below) for below in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
