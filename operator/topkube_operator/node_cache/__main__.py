"""`python -m topkube_operator.node_cache`: the command line of the node agent."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from topkube.errors import TopKubeError
from topkube.job.base.part import QUANTITY
from topkube.job.base.quantity import parse_bytes
from topkube_operator.http.scrape_access import add_scrape_options, read_scrape_options
from topkube_operator.node_cache.agent import POLL_SECONDS, Agent
from topkube_operator.node_cache.decisions import CacheLimits
from topkube_operator.node_cache.metrics import AgentMetrics
from topkube_operator.node_cache.metrics_server import MetricsServer
from topkube_operator.node_cache.volume import Volume
from topkube_operator.watch.api_client import ApiClient

_DAY = 86400.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until a signal stops it. Return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    read_scrape_options(parser, options)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        volume = Volume(options.directory)
        limits = CacheLimits(
            parse_bytes(options.size_limit) if options.size_limit else None,
            volume.measure_total_bytes() * options.free_percent // 100,
            options.idle_days * _DAY,
        )
        metrics = AgentMetrics(options.release, options.node)
        cluster = ApiClient(options.kubeconfig, observe=metrics.observe_call)
        agent = Agent(cluster, volume, options.node, limits, metrics)
    except (TopKubeError, OSError) as error:
        print(f"topkube node cache: {error}", file=sys.stderr)
        return 1
    log = logging.getLogger(__name__)
    log.info(
        "the node cache of %s is in %s; %d%% of its disk stay free", options.node, volume.root, options.free_percent
    )
    file = Path(tempfile.mkdtemp()) / "metrics"
    server = (
        MetricsServer(file, options.metrics_port, _build_server_arguments(options)) if options.metrics_port else None
    )
    while not stop.is_set():
        try:
            agent.run_once()
            metrics.write(file)
            if server is not None:
                server.keep_running()
        except OSError as error:
            log.warning("the cache directory cannot be used: %s", error)
        stop.wait(POLL_SECONDS)
    if server is not None:
        server.stop()
    return 0


def _build_server_arguments(options: argparse.Namespace) -> list[str]:
    """Return the options that the process that serves the metrics shares with this process."""
    shared = [f"--metrics-authentication={options.metrics_authentication}"]
    if options.kubeconfig:
        shared.append(f"--kubeconfig={options.kubeconfig}")
    if options.metrics_tls:
        shared.append("--metrics-tls")
    if options.metrics_certificate is not None:
        shared.append(f"--metrics-certificate={options.metrics_certificate}")
    return shared


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    parser = argparse.ArgumentParser(prog="topkube-node-cache", description="Owns the cache directory of a node.")
    add = parser.add_argument
    add("--node", required=True, help="name of this node")
    add("--directory", type=Path, required=True, help="the cache directory, as this container sees it")
    add(
        "--size-limit",
        type=_parse_quantity,
        default="",
        metavar="QUANTITY",
        help="maximum bytes of all datasets together",
    )
    add("--free-percent", type=int, default=20, help="share of the disk to leave free (default: 20)")
    add(
        "--idle-days",
        type=float,
        default=0.0,
        help="evict datasets that nobody has used for this many days; 0: evict only to make room",
    )
    add("--metrics-port", type=int, default=8080, help="port of /metrics and /readyz; 0: none (default: 8080)")
    add("--release", default="topkube", help="name of this installation in metrics (default: topkube)")
    add_scrape_options(parser)
    add("--kubeconfig", default="", help="outside a cluster: the kubeconfig to use")
    add(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="lowest level that is logged"
    )
    return parser


def _parse_quantity(text: str) -> str:
    if text and not re.fullmatch(QUANTITY, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity such as 500Gi")
    return text


if __name__ == "__main__":
    sys.exit(main())
