"""The connection to kopf, and the only module that imports it: its event loop, its signals, its watch of TrainingJobs.

kopf writes nothing to users' objects here: no finalizer, no annotation, no progress. Children are removed by their
owner references, and all decisions are stored in the status, so plain event handlers are sufficient.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf

from topkube.job.training_job import GROUP, VERSION
from topkube_operator.control.launcher_poller import LauncherPoller
from topkube_operator.control.operator import Operator
from topkube_operator.http import webhook

_log = logging.getLogger(__name__)
_JOBS_PER_PAGE = 50
"""By default, kopf lists all jobs in one answer. A job may have 1.4 MB, and an object takes many times its JSON in
memory."""


@dataclass(frozen=True)
class WebhookOptions:
    """The settings of the validating webhook. It is not served if `names` is empty."""

    names: tuple[str, ...] = ()
    port: int = webhook.PORT
    configuration: str = webhook.CONFIGURATION
    certificate: Path | None = None


def run(operator: Operator, hook: WebhookOptions) -> None:
    """Run the operator until SIGTERM or SIGINT, then release the Lease."""
    identity: Any = operator.identity  # kopf would look up the user's name, which an arbitrary UID does not have
    kopf.run(
        identity=identity,
        registry=build_registry(operator, hook),
        standalone=True,
        clusterwide=not operator.options.namespaces,
        namespaces=list(operator.options.namespaces),
    )


class NoEssences(kopf.DiffBaseStorage):
    """Stores no earlier state of objects, because no handler needs the difference. By default, kopf copies each object
    at each event, and reads an annotation in which users may write anything."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _EndlessTries:
    """The seconds between two tries of a call of kopf, without an end. By default, kopf gives up after nine tries, and
    the operator ends, if one of its namespaces was deleted and with it the right to watch jobs there."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 5.0), itertools.repeat(30.0))


def configure(settings: kopf.OperatorSettings, *, is_clusterwide: bool) -> None:
    """Change kopf's settings to those of the operator."""
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoEssences()
    # With named namespaces the operator has no right to list namespaces and does not need it. kopf would retry for a
    # minute before it starts.
    settings.scanning.disabled = not is_clusterwide
    if not is_clusterwide:
        settings.networking.error_backoffs = _EndlessTries()
    settings.queueing.idle_timeout = 1.0
    settings.watching.server_timeout = 240
    settings.watching.chunk_size = _JOBS_PER_PAGE
    settings.process.ultimate_exiting_timeout = 20


def build_registry(operator: Operator, hook: WebhookOptions) -> kopf.OperatorRegistry:
    """Return all handlers."""
    handlers = kopf.OperatorRegistry()
    stack = contextlib.AsyncExitStack()

    @kopf.on.login(registry=handlers)
    def login(**_: Any) -> kopf.ConnectionInfo:
        configuration = operator.cluster.configuration
        header = (
            configuration.get_api_key_with_prefix("BearerToken")
            or configuration.get_api_key_with_prefix("authorization")
            or ""
        )
        scheme, token = header.rpartition(" ")[::2]
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )

    @kopf.on.startup(registry=handlers)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, is_clusterwide=not operator.options.namespaces)
        await asyncio.to_thread(operator.start)
        assert operator.controller is not None
        poller = LauncherPoller(operator.cache, operator.controller, operator.policy, operator.is_acting)
        task = asyncio.create_task(poller.run(), name="progress")
        stack.callback(task.cancel)
        if hook.names:

            async def publish(bundle: str) -> None:
                await asyncio.to_thread(operator.cluster.publish_bundle, hook.configuration, bundle)

            port = await stack.enter_async_context(
                webhook.serve(
                    operator.seed,
                    hook.names,
                    publish,
                    port=hook.port,
                    certificate=hook.certificate,
                    observer=operator.metrics,
                )
            )
            _log.info("the webhook serves on port %d as %s", port, ", ".join(hook.names))

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await asyncio.to_thread(operator.stop)
        await stack.aclose()

    @kopf.on.event(GROUP, VERSION, "trainingjobs", registry=handlers)
    def receive_event(event: Any, **_: Any) -> None:
        operator.receive_job(str(event["type"]), dict(event["object"]))

    return handlers
