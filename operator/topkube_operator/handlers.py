"""The wiring to kopf, and the only module that imports it: its loop, its signals, and its watch of TrainingJobs.

kopf writes nothing to people's objects here: no finalizer, no annotation, no progress. Children go by owner reference,
and what was decided is in the status. Handlers of plain events need none of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf

from topkube.job.training_job import GROUP, VERSION
from topkube_operator import webhook
from topkube_operator.operator import Operator
from topkube_operator.progress import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WebhookOptions:
    """How the validating webhook is served. `names` empty: it is not."""

    names: tuple[str, ...] = ()
    port: int = webhook.PORT
    configuration: str = webhook.CONFIGURATION
    certificate: Path | None = None


def run(operator: Operator, hook: WebhookOptions) -> None:
    """Runs until SIGTERM or SIGINT, then hands over."""
    identity: Any = operator.identity  # kopf would look up the user's name, which an arbitrary UID lacks
    kopf.run(
        identity=identity,
        registry=registry(operator, hook),
        standalone=True,
        clusterwide=not operator.options.namespaces,
        namespaces=list(operator.options.namespaces),
    )


def registry(operator: Operator, hook: WebhookOptions) -> kopf.OperatorRegistry:
    """All handlers."""
    handlers = kopf.OperatorRegistry()
    stack = contextlib.AsyncExitStack()

    @kopf.on.login(registry=handlers)
    def login(**_: Any) -> kopf.ConnectionInfo:
        known = operator.cluster.configuration
        header = known.get_api_key_with_prefix("BearerToken") or known.get_api_key_with_prefix("authorization") or ""
        scheme, token = header.rpartition(" ")[::2]
        return kopf.ConnectionInfo(
            server=known.host,
            ca_path=known.ssl_ca_cert,
            insecure=not known.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=known.cert_file,
            private_key_path=known.key_file,
        )

    @kopf.on.startup(registry=handlers)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        # With named namespaces there is no right to list namespaces, and nothing to learn from it: kopf would try for a
        # minute before it starts.
        settings.scanning.disabled = bool(operator.options.namespaces)
        settings.queueing.idle_timeout = 1.0
        settings.watching.server_timeout = 240
        settings.process.ultimate_exiting_timeout = 20
        await asyncio.to_thread(operator.start)
        assert operator.controller is not None
        polling = Progress(operator.store, operator.controller, operator.policy, operator.acting)
        task = asyncio.create_task(polling.run(), name="progress")
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
                    claim=operator.cluster.claim,
                )
            )
            _log.info("the webhook serves on port %d as %s", port, ", ".join(hook.names))

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await asyncio.to_thread(operator.stop)
        await stack.aclose()

    @kopf.on.event(GROUP, VERSION, "trainingjobs", registry=handlers)
    def seen(event: Any, **_: Any) -> None:
        operator.jobs_seen(str(event["type"]), dict(event["object"]))

    return handlers
