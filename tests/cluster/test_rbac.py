"""The operator with the account of manifests/rbac.yaml: every call is allowed, and every right in the roles is used. A
proxy between the operator and the API server records the calls."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from simulated_operator import apply, build_minimal_job, create_job
from target import KUBELET_SECONDS, wait_for

from topkube.cli.cluster.api import Api, build_path, ignore_missing
from topkube.cli.cluster.jobs import build_job_path, list_pods, read_phase
from topkube.errors import ClusterError

MANIFESTS = Path(__file__).parents[2] / "manifests"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
Call = tuple[str, str, str]
"""API group, resource with its subresource, verb."""
# Calls that the roles allow and that this test does not cause, with their caller and their occasion.
RARE: set[Call] = {
    ("topkube.dev", "trainingjobs/finalizers", "update"),  # the API server, if owner references need a right
    ("topkube.dev", "trainingjobs", "get"),  # after a conflict with another writer
    ("", "events", "patch"),  # the same event again
    ("", "pods/log", "get"),  # if neither the failed pod nor the launcher reported a cause
    ("", "persistentvolumeclaims", "get"),  # for a job with a checkpoint, once
    *(
        (group, "podgroups", verb)  # if a gang scheduler is installed
        for group in ("scheduling.volcano.sh", "scheduling.x-k8s.io")
        for verb in ("get", "list", "watch", "create", "patch", "delete")
    ),
    *(("kueue.x-k8s.io", "workloads", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")),
    ("kueue.x-k8s.io", "workloads/status", "patch"),  # if Kueue is installed
    *(("kueue.x-k8s.io", plural, "get") for plural in ("resourceflavors", "workloadpriorityclasses")),
    ("scheduling.k8s.io", "priorityclasses", "get"),  # the priority of a Workload
    *(("apiextensions.k8s.io", "customresourcedefinitions", verb) for verb in ("list", "watch")),  # in all namespaces
    *(("admissionregistration.k8s.io", "validatingwebhookconfigurations", verb) for verb in ("get", "update")),
}
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?$"
)


@dataclass
class CallRecorder:
    """The calls that went through the proxy."""

    calls: set[Call] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    def note(self, method: str, path: str, watch: bool, status: int, text: bytes) -> None:
        match = _PATH.match(path)
        if match is None:
            return  # discovery
        resource = match["resource"] + (f"/{match['sub']}" if match["sub"] else "")
        collection_verb = "watch" if watch else "list"
        read_verb = "get" if match["name"] else collection_verb
        verb = {"GET": read_verb, "POST": "create", "PUT": "update"}.get(method, method.lower())
        self.calls.add((match["group"] or "", resource, verb))
        if status == 403:
            self.refused.append(text.decode(errors="replace"))


@contextmanager
def run_proxy(api: Api, recorder: CallRecorder) -> Iterator[str]:
    """Run an HTTP server that forwards all calls with the caller's own token. Yield its address."""
    ready, stop, address = threading.Event(), threading.Event(), list[str]()
    trust = api._pool.connection_pool_kw["ca_certs"]

    async def run() -> None:
        import ssl

        context = ssl.create_default_context(cafile=trust)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                headers = {
                    name: value
                    for name, value in request.headers.items()
                    if name.lower() in ("authorization", "accept", "content-type", "user-agent")
                }
                body = await request.read()
                async with session.request(
                    request.method, api.server + request.raw_path, headers=headers, data=body or None
                ) as answer:
                    watch = request.query.get("watch", "") in ("1", "true")
                    response = web.StreamResponse(status=answer.status)
                    response.content_type = answer.content_type
                    first = b"" if watch and answer.status < 400 else await answer.read()
                    recorder.note(request.method, request.path, watch, answer.status, first)
                    await response.prepare(request)
                    if first:
                        await response.write(first)
                    else:
                        async for piece in answer.content.iter_any():
                            await response.write(piece)
                    return response

            server = web.Application(client_max_size=16 << 20)
            server.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(server, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            ready.set()
            await asyncio.to_thread(stop.wait)
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield address[0]
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture
def only_operator(admin: Api) -> Iterator[None]:
    """The operator of this test alone: an operator that is installed for all namespaces is stopped."""
    scale = build_path("topkube-system", "deployments", "topkube-operator", "apps/v1") + "/scale"
    pods = build_path("topkube-system", "pods")
    kind = "application/merge-patch+json"
    try:
        before = admin.get(scale)["spec"]["replicas"]
    except ClusterError:  # none is installed
        yield
        return
    admin.request("PATCH", scale, body={"spec": {"replicas": 0}}, content=kind)
    try:
        wait_until("the installed operator to stop", lambda: not admin.get(pods)["items"], KUBELET_SECONDS)
        yield
    finally:
        admin.request("PATCH", scale, body={"spec": {"replicas": before}}, content=kind)


@pytest.fixture
def account(api: Api, admin: Api) -> Iterator[tuple[str, set[Call]]]:
    """A token of an account that has the operator's roles of manifests/, and the calls that these roles allow."""
    name = f"topkube-operator-{api.namespace}"
    allowed: set[Call] = set()
    api.request("POST", build_path(api.namespace, "serviceaccounts"), body={"metadata": {"name": "topkube-operator"}})
    subjects = [{"kind": "ServiceAccount", "name": "topkube-operator", "namespace": api.namespace}]
    for document in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text()):
        if document["metadata"]["name"] != "topkube-operator":
            continue
        for rule in document.get("rules", ()):
            allowed |= {
                (group, resource, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
        if document["kind"].startswith("Cluster"):
            document["metadata"]["name"] = name
        else:
            document["metadata"]["namespace"] = api.namespace
        if "roleRef" in document:
            document["subjects"] = subjects
            if document["roleRef"]["kind"] == "ClusterRole":
                document["roleRef"]["name"] = name
        place = f"/namespaces/{api.namespace}" if "namespace" in document["metadata"] else ""
        apply(admin, f"{RBAC}{place}/{document['kind'].lower()}s", document)
    token_request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    path = build_path(api.namespace, "serviceaccounts", "topkube-operator") + "/token"
    try:
        yield api.request("POST", path, body=token_request).data["status"]["token"], allowed
    finally:
        for kind in ("clusterrolebindings", "clusterroles"):
            with ignore_missing():
                admin.request("DELETE", f"{RBAC}/{kind}/{name}")


def wait_until(what: str, condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Return the first true result of `condition`, which may raise the error of an object that does not exist."""

    def check_existing() -> Any:
        with ignore_missing():
            return condition()
        return None

    return wait_for(check_existing, what, seconds)


@pytest.mark.alone
def test_every_call_is_allowed_and_nothing_more(
    api: Api, account: tuple[str, set[Call]], only_operator: None, tmp_path: Path
) -> None:
    token, allowed = account
    recorder = CallRecorder()
    with run_proxy(api, recorder) as address:
        config = tmp_path / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": address}}
        user = {"name": "u", "user": {"token": token}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [cluster],
                    "users": [user],
                    "contexts": [context],
                    "current-context": "x",
                }
            )
        )
        log = tmp_path / "operator.log"
        command = [sys.executable, "-m", "topkube_operator", "--kubeconfig", str(config), "--namespace", api.namespace]
        command += ["--operator-namespace", api.namespace, "--metrics-port", "0", "--lost-seconds", "5"]
        with log.open("w") as output:
            operator = subprocess.Popen(command, stdout=output, stderr=output)
            try:
                _live_through_everything(api)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{recorder.refused[:3]}\n{log.read_text()[-3000:]}") from None
            finally:
                operator.terminate()
                operator.wait(120)
    assert recorder.refused == []
    assert recorder.calls <= allowed
    assert allowed - recorder.calls <= RARE, "the roles allow what the operator does not do"


def _live_through_everything(api: Api) -> None:
    """Make the operator use all its calls."""
    policies = build_path(api.namespace, "networkpolicies", group="networking.k8s.io/v1")
    job = {"workers": 2, "spread": "None", "runPolicy": {}}
    life = build_minimal_job("life", **job)
    # A command that fails would end the job: a missing script is not tried again.
    life["spec"]["template"]["spec"]["containers"][0]["command"] = ["sleep", "100000"]
    create_job(api, life)
    wait_until("three pods", lambda: len(list_pods(api, "life")) == 3)

    # Another client changes the job's NetworkPolicy. The operator changes it back.
    opened = {"spec": {"ingress": [{}]}}
    api.request("PATCH", f"{policies}/life-worker", body=opened, content="application/merge-patch+json")
    wait_until("the policy to be as it was", lambda: api.get(f"{policies}/life-worker")["spec"]["ingress"] != [{}])

    # A worker dies. Its log is read, its successor gets a token, and the Service selects another launcher.
    worker = wait_until(
        "a worker that runs", lambda: [pod for pod in list_pods(api, "life") if _is_running_worker(pod)]
    )[-1]
    api.request("DELETE", build_path(api.namespace, "pods", worker["metadata"]["name"]))
    wait_until("a second attempt", lambda: api.get(build_job_path(api, "life"))["status"]["attempt"] >= 2)

    suspended = {"spec": {"runPolicy": {"suspend": True}}}
    api.request("PATCH", build_job_path(api, "life"), body=suspended, content="application/merge-patch+json")
    wait_until("all pods to be gone", lambda: not list_pods(api, "life"))
    wait_until("the policies to be gone", lambda: not api.get(policies)["items"])

    # Foreign objects have names that the operator uses.
    metadata = {"metadata": {"name": "taken"}}
    api.request("POST", build_path(api.namespace, "services"), body={**metadata, "spec": {"ports": [{"port": 1}]}})
    api.request("POST", build_path(api.namespace, "secrets"), body={"metadata": {"name": "taken2-credentials"}})
    named = {"metadata": {"name": "taken3-worker"}, "spec": {"podSelector": {}}}
    api.request("POST", policies, body=named)
    held = create_job(api, build_minimal_job("taken4", **{**job, "runPolicy": {"suspend": True}}))
    name = f"taken4-launcher-1-{held['metadata']['uid'][:5]}"
    pod = {"metadata": {"name": name}, "spec": build_minimal_job("taken4")["spec"]["template"]["spec"]}
    pod["spec"]["automountServiceAccountToken"] = False
    api.request("POST", build_path(api.namespace, "pods"), body=pod)
    events = build_path(api.namespace, "events")
    resumed = {"spec": {"runPolicy": {"suspend": False}}}
    api.request("PATCH", build_job_path(api, "taken4"), body=resumed, content="application/merge-patch+json")
    for name in ("taken", "taken2", "taken3"):
        create_job(api, build_minimal_job(name, **job))
    for name in ("taken", "taken2", "taken3", "taken4"):
        query = {"fieldSelector": f"involvedObject.name={name}"}
        wait_until(
            f"the Event that {name} is a foreign object",
            lambda query=query: any("does not belong" in str(event) for event in api.get(events, **query)["items"]),
        )
        api.request("DELETE", build_job_path(api, name))

    # A job fails at once, and its time to live ends soon after.
    create_job(api, build_minimal_job("brief", runPolicy={"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 2}))
    wait_until("the job to fail", lambda: read_phase(api.get(build_job_path(api, "brief"))) == "Failed")

    def is_gone() -> bool:
        try:
            api.get(build_job_path(api, "brief"))
        except ClusterError as error:
            return error.status == 404
        return False

    wait_until("the job to be removed", is_gone)


def _is_running_worker(pod: dict[str, Any]) -> bool:
    return pod["metadata"]["labels"]["topkube.dev/role"] == "worker" and pod["status"].get("phase") == "Running"
