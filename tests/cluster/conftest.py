"""A real cluster for each test: its kubeconfig, and a fresh namespace."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from topkube.cli.cluster.api import Api, Where, connect, path_of
from topkube.errors import ClusterError
from topkube.job.crd import custom_resource_definition

MANIFESTS = Path(__file__).parents[2] / "manifests"


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    given = os.environ.get("TOPKUBE_TEST_KUBECONFIG")
    if not given:
        pytest.skip("no cluster: set TOPKUBE_TEST_KUBECONFIG")
    return Path(given)


@pytest.fixture(scope="session")
def kubectl() -> Path:
    found = shutil.which("kubectl")
    assert found is not None
    return Path(found)


@pytest.fixture(scope="session")
def admin(kubeconfig: Path) -> Api:
    """The whole cluster; it knows the newest CRD."""
    api = connect(Where(kubeconfig=kubeconfig))
    apply(api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", custom_resource_definition(rules=False))
    return api


def apply(api: Api, path: str, thing: dict[str, object]) -> None:
    metadata = thing["metadata"]
    assert isinstance(metadata, dict)
    query = {"fieldManager": "test", "force": True}
    api.request("PATCH", f"{path}/{metadata['name']}", query, thing, "application/apply-patch+yaml")


@pytest.fixture(scope="session")
def roles(admin: Api) -> None:
    """The cluster roles for people."""
    for thing in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text()):
        if thing["kind"] == "ClusterRole" and thing["metadata"]["name"] != "topkube-operator":
            apply(admin, "/apis/rbac.authorization.k8s.io/v1/clusterroles", thing)


@pytest.fixture
def api(admin: Api, kubeconfig: Path) -> Iterator[Api]:
    """The API server, in a namespace of the test's own."""
    name = f"api-{secrets.token_hex(4)}"
    admin.request("POST", path_of(None, "namespaces"), body={"metadata": {"name": name, "labels": {"test": name}}})
    deadline = time.monotonic() + 30
    accounts = path_of(name, "serviceaccounts")
    while not any(one["metadata"]["name"] == "default" for one in admin.get(accounts).get("items") or ()):
        assert time.monotonic() < deadline, "the namespace has no service account: pods would be refused"
        time.sleep(0.05)
    yield connect(Where(kubeconfig=kubeconfig, namespace=name))
    try:
        admin.request("DELETE", path_of(None, "namespaces", name))
    except ClusterError as error:
        if error.status != 404:
            raise
