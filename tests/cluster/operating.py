"""An operator in a separate process, restricted to one namespace, and the state of its jobs as a user sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from target import wait_for

from topkube.job import KIND
from topkube_operator.watch.api_client import ApiClient
from topkube_operator.watch.api_connection import ApiError

IMAGE = os.environ.get("TOPKUBE_TEST_RUNTIME") or "topkube/runtime:0.1.0"
TERMINAL = ("Succeeded", "Failed")


def build_shell_job(name: str, script: str = "echo hello", *, slots: int = 1, **spec: Any) -> dict[str, Any]:
    """Return a TrainingJob whose ranks run a shell script. Its pods end soon after SIGTERM."""
    container = {"name": "worker", "image": IMAGE, "command": ["sh", "-c"], "args": [script]}
    template = {"spec": {"terminationGracePeriodSeconds": 6, "containers": [container]}}
    policy = {"backoffLimit": 0, **spec.pop("runPolicy", {})}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"workers": 2, "slotsPerWorker": slots, "template": template, "runPolicy": policy, **spec},
    }


class Jobs:
    """The TrainingJobs of one namespace, and their pods."""

    def __init__(self, cluster: ApiClient, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        metadata = {**job["metadata"], "namespace": self.namespace}
        return self.cluster.create({**job, "metadata": metadata})

    def get(self, name: str) -> dict[str, Any]:
        return self.cluster.get(KIND, self.namespace, name)

    def read_status(self, name: str) -> dict[str, Any]:
        return self.get(name).get("status") or {}

    def list_children(self, kind: str) -> dict[str, dict[str, Any]]:
        children, _ = self.cluster.list(kind, self.namespace, "topkube.dev/job-name")
        return {child["metadata"]["name"]: child for child in children}

    def build_pod_name(self, job: str, part: str) -> str:
        """Return the name of a pod, such as worker-1-2 or launcher-2, of the job that exists now."""
        return f"{job}-{part}-{self.get(job)['metadata']['uid'][:5]}"

    def list_pods(self) -> dict[str, dict[str, Any]]:
        return self.list_children("Pod")

    def wait_phase(self, name: str, *phases: str, seconds: float = 60.0) -> dict[str, Any]:
        """Return the status when the job is in one of the phases. If the job ends in another phase, the test fails at
        once."""

        def read_reached_status() -> dict[str, Any] | None:
            status = self.read_status(name)
            if status.get("phase") in phases:
                return status
            assert status.get("phase") not in TERMINAL, status
            return None

        try:
            job: dict[str, Any] = wait_for(read_reached_status, f"{name} to be {' or '.join(phases)}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.read_status(name)}") from None
        return job

    def wait_failure(self, name: str, seconds: float = 120.0) -> dict[str, Any]:
        """Return why the job failed."""

        def read_failure() -> dict[str, Any] | None:
            status = self.read_status(name)
            assert status.get("phase") != "Succeeded", status
            return status.get("firstFailure") if status.get("phase") == "Failed" else None

        failure: dict[str, Any] = wait_for(read_failure, f"{name} to fail", seconds)
        return failure


class OperatorProcess:
    """`python -m topkube_operator` for one namespace, which also has its Lease and its secret."""

    def __init__(self, kubeconfig: str, namespace: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "topkube_operator", "--kubeconfig", kubeconfig]
        self._command += ["--namespace", namespace, "--operator-namespace", namespace, "--metrics-port", "0", *options]
        self.log = Path(tempfile.mkstemp(prefix="topkube-operator-", suffix=".log")[1])
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.process is not None and self.is_alive():
            self.process.kill()
            self.process.wait(60)

    @contextlib.contextmanager
    def keep_running(self) -> Iterator[OperatorProcess]:
        self.start()
        try:
            yield self
        finally:
            self.kill()
            output = self.log.read_text(errors="replace")
            self.log.unlink()
            print(output)
            assert "Traceback" not in output


class KillingProxy:
    """A proxy between an operator and the API server that kills the operator twice at each of its writes. At the first
    try, the write does not reach the API server. At the second, the API server has done the write, and the operator
    gets no answer. The third try passes."""

    def __init__(self, cluster: ApiClient, folder: Path) -> None:
        self._target = cluster.configuration
        self.kubeconfig = folder / "through.conf"
        self.kills: list[str] = []
        self.operator: OperatorProcess | None = None
        self._tries: dict[str, int] = {}
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> KillingProxy:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        configuration = self._target
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server = f"http://127.0.0.1:{runner.addresses[0][1]}"
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
            self.kubeconfig.write_text(yaml.safe_dump(config))
            self._ready.set()
            await self._stopped.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        turn = self._count_try(request, body)
        if turn == 1:
            self._kill(request, "before")
            return web.Response(status=503)
        token = self._target.get_api_key_with_prefix("BearerToken")
        headers = {
            name: ", ".join(request.headers.getall(name))
            for name in ("Accept", "Content-Type")
            if name in request.headers
        }
        if token:
            headers["Authorization"] = token
        url = self._target.host + request.path_qs
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, timeout=timeout
        ) as answer:
            if turn == 2:
                await answer.read()
                self._kill(request, "after")
                return web.Response(status=503)
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            return response

    def _count_try(self, request: web.Request, body: bytes) -> int:
        """Return the number of the try of this write; 0 for requests that always pass."""
        if request.method == "GET" or "/leases" in request.path or "/events" in request.path:
            return 0
        patch = yaml.safe_load(body) if body else {}
        name = (patch.get("metadata") or {}).get("name", "") if request.method == "POST" else ""
        status = patch.get("status") or {}
        key = f"{request.method} {request.path.rpartition('/namespaces/')[2]} {name} {sorted(status)}"
        if "progress" in status and len(status) <= 3:
            return 0
        self._tries[key] = self._tries.get(key, 0) + 1
        return self._tries[key] if self._tries[key] <= 2 else 0

    def _kill(self, request: web.Request, when: str) -> None:
        assert self.operator is not None
        self.kills.append(f"{when} {request.method} {request.path}")
        self.operator.kill()


def is_gone(cluster: ApiClient, kind: str, namespace: str, name: str) -> bool:
    try:
        cluster.get(kind, namespace, name)
    except ApiError as error:
        return error.status == 404
    return False
