"""One cluster for all tests, with the operator installed as a user would install it, and a separate namespace for each
test.

`make test-cluster` uses the cluster that `make cluster` started. If there is none, it starts a cluster and stops it at
the end. TOPKUBE_TEST_KUBECONFIG names another cluster instead, which must have the images; tests that break nodes are
skipped there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import kubernetes
import needs
import pytest
import yaml
from filelock import FileLock
from kubernetes.client.exceptions import ApiException
from localkube import images
from localkube.cluster import LocalCluster
from localkube.layout import Layout
from operating import Jobs, is_gone
from simulated_operator import apply
from target import KUBELET_SECONDS, OPERATOR_NAMESPACE, PATIENCE, Namespace, Target, wait_for

from topkube.cli.cluster.api import Api, ClusterLocation, build_path, connect
from topkube.errors import ClusterError
from topkube.job.crd import build_cached_dataset_crd, build_crd
from topkube_operator.watch.api_client import ApiClient

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFESTS = REPOSITORY / "manifests"
NODES = 3  # two for a job, one to replace a node that vanished
SharedStep = Callable[[str], AbstractContextManager[bool]]


@pytest.fixture(scope="session")
def shared_step(tmp_path_factory: pytest.TempPathFactory) -> SharedStep:
    """A step that the processes of this run share. `with shared_step(NAME)` yields True in the first process only; the
    other processes wait until the first has left the block."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @contextmanager
    def enter(name: str) -> Iterator[bool]:
        done = folder / f"{name}.done"
        with FileLock(folder / f"{name}.lock"):
            yield not done.exists()
            done.touch()

    return enter


@pytest.fixture(scope="session")
def target(shared_step: SharedStep) -> Iterator[Target]:
    """The cluster, with TopKube's images on every node."""
    other = os.environ.get("TOPKUBE_TEST_KUBECONFIG")
    if other:
        yield Target(Path(other), None)
        return
    if os.geteuid() != 0:
        pytest.skip("needs root to start a cluster here, or TOPKUBE_TEST_KUBECONFIG for another cluster")
    layout, required = Layout.from_environment(), [images.RUNTIME, images.RUNTIME_OPENMPI, images.OPERATOR]
    running = LocalCluster.find_running(layout)
    if running is not None:
        with shared_step("images") as first:
            if first:
                running.load_images(required)
        yield Target(layout.kubeconfig, running)
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("several processes share a cluster that is up. Next: make cluster NODES=3, or make test-cluster")
    cluster = LocalCluster.start(layout, NODES, required)
    try:
        yield Target(layout.kubeconfig, cluster)
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def kubeconfig(target: Target) -> Path:
    return target.kubeconfig


@pytest.fixture(scope="session")
def kubectl(target: Target) -> Path:
    program = target.local.kubectl_program if target.local else shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl on PATH")
    return Path(program)


@pytest.fixture(scope="session")
def installation(target: Target, shared_step: SharedStep) -> Target:
    """The cluster, with the operator of manifests/ running."""
    for image in (images.OPERATOR, images.RUNTIME):
        needs.require_image(target, image.name)
    with shared_step("operator") as first:
        if first:
            _install_operator(target)
    return target


def apply_manifests(target: Target) -> None:
    """Install the operator as a user would."""
    for file in ("namespace", "crd", "crd-cached-datasets", "rbac", "operator", "webhook"):
        target.apply(read_manifest(file))


def _install_operator(target: Target) -> None:
    apply_manifests(target)
    replaced: set[str] = set()
    if target.local is not None:  # the image may be newer than the pods that run
        replaced = {pod.metadata.uid for pod in target.list_operator_pods()}
        target.core.delete_collection_namespaced_pod(OPERATOR_NAMESPACE, grace_period_seconds=1)
    try:
        wait_for(lambda: target.is_rolled_out(replaced), "both replicas of the operator to be ready", KUBELET_SECONDS)
        # The webhook must answer several times, because the rules of a node may still lead to a pod that is gone.
        wait_for(lambda: all(target.has_webhook() for _ in range(4)), "the webhook to answer", 60)
    except AssertionError as error:
        for pod in target.list_operator_pods():
            print(pod.metadata.name, pod.status.phase, pod.status.container_statuses)
            print(target.core.read_namespaced_pod_log(pod.metadata.name, OPERATOR_NAMESPACE, tail_lines=40))
        raise AssertionError(str(error)) from None


def read_manifest(name: str) -> str:
    """Return a file of manifests/ with the images of this run. The caches may fill the machine's disk to 99%."""
    text = (MANIFESTS / f"{name}.yaml").read_text().replace(f":{images.VERSION}", f":{images.TAG}")
    return text.replace("args: [--webhook", "args: [--cache-free-percent=1, --webhook").replace(
        "args: [--node", "args: [--free-percent=1, --node"
    )


@pytest.fixture
def namespace(installation: Target, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A new namespace. If the test fails, the state of the namespace is printed."""
    yield from _provide_namespace(installation, request)


@pytest.fixture
def second_namespace(installation: Target, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    yield from _provide_namespace(installation, request)


def _provide_namespace(target: Target, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    target.core.create_namespace(kubernetes.client.V1Namespace(metadata=kubernetes.client.V1ObjectMeta(name=name)))
    namespace = Namespace(target, name)
    wait_for(lambda: _has_account(target, name), "the namespace's service account", 30)
    try:
        yield namespace
        if getattr(request.node, "failed", False):
            print(*namespace.describe(), sep="\n")
    finally:
        target.core.delete_namespace(name)


def _has_account(target: Target, name: str) -> bool:
    """Return True if pods may be created. Before Kubernetes 1.24, an account can be used only after it has a token."""
    try:
        account = target.core.read_namespaced_service_account("default", name)
    except ApiException:
        return False
    return bool(account.secrets) or target.version >= (1, 24)


@pytest.fixture(scope="module")
def resting_cluster(installation: Target) -> Iterator[Target]:
    """The cluster while its installed operator is scaled to zero."""
    installation.scale_operator(0)
    yield installation
    installation.scale_operator(2)


@pytest.fixture
def jobs(resting_cluster: Target, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """A new namespace without an operator."""
    cluster, name = ApiClient(str(resting_cluster.kubeconfig)), f"process-{secrets.token_hex(3)}"
    cluster.register_kind("ServiceAccount", "v1", "serviceaccounts")
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    wait_for(lambda: not is_gone(cluster, "ServiceAccount", name, "default"), "the service account")
    yield Jobs(cluster, name)
    if getattr(request.node, "failed", False):
        print(*Namespace(resting_cluster, name).describe(), sep="\n")
    cluster.call("DELETE", f"/api/v1/namespaces/{name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the chart's tests first. They install and uninstall the operator, before the session installs its own."""
    items.sort(key=lambda item: not item.path.name.startswith("test_chart_"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.failed = report.failed  # type: ignore[attr-defined]
    return report


@pytest.fixture
def breakable_cluster(installation: Target) -> LocalCluster:
    """The machine's own cluster, for tests that break nodes, links or the control plane."""
    if installation.local is None:
        pytest.skip("breaks nodes: needs a cluster of this machine's own, not TOPKUBE_TEST_KUBECONFIG")
    return installation.local


@pytest.fixture(scope="session")
def admin(kubeconfig: Path) -> Api:
    """The API of the whole cluster, with the newest CRDs."""
    api = connect(ClusterLocation(kubeconfig=kubeconfig))
    for definition in (build_crd(rules=False), build_cached_dataset_crd()):
        apply(api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    return api


@pytest.fixture(scope="session")
def roles(admin: Api) -> None:
    """The cluster roles for users."""
    for document in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text()):
        if document["kind"] == "ClusterRole" and document["metadata"]["name"] != "topkube-operator":
            apply(admin, "/apis/rbac.authorization.k8s.io/v1/clusterroles", document)


@pytest.fixture
def api(admin: Api, kubeconfig: Path) -> Iterator[Api]:
    """The API server, with a separate namespace for the test."""
    name = f"api-{secrets.token_hex(4)}"
    admin.request("POST", build_path(None, "namespaces"), body={"metadata": {"name": name, "labels": {"test": name}}})
    deadline = time.monotonic() + 30 * PATIENCE
    accounts = build_path(name, "serviceaccounts")
    while not any(account["metadata"]["name"] == "default" for account in admin.get(accounts).get("items") or ()):
        assert time.monotonic() < deadline, "the namespace has no service account: pods would be refused"
        time.sleep(0.05)
    yield connect(ClusterLocation(kubeconfig=kubeconfig, namespace=name))
    try:
        admin.request("DELETE", build_path(None, "namespaces", name))
    except ClusterError as error:
        if error.status != 404:
            raise
