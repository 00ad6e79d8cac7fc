"""The children of a job, object by object: names, credentials, and the allowed connections."""

from __future__ import annotations

import base64
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from child_builders import POLICY, SEED, build_launcher, build_worker, parse_job, selects
from hypothesis import given
from hypothesis import strategies as st

from topkube.job import TrainingJob
from topkube.launch import contract
from topkube_operator.children import credentials, objects
from topkube_operator.model import names

UID, OTHER_UID = "0c4d8f3e-9a55-4c1b-8d2e-3f6a1b7c9d10", "7be21a90-1f0e-4c57-b3c2-95d8e6f4a321"
PORTS = (22, contract.LAUNCHER_PORT, contract.METRICS_PORT, 50000)


# Names.


@given(st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), st.integers(0, 9999), st.integers(1, 99999))
def test_every_name_is_a_label_and_no_two_are_equal(name: str, index: int, attempt: int) -> None:
    all_names = [names.name_launcher_pod(name, UID, attempt), names.name_worker_pod(name, UID, index, attempt)]
    all_names += [
        names.name_worker_pod(name, UID, index + 1, attempt),
        names.name_worker_pod(name, UID, index, attempt + 1),
    ]
    all_names += [
        names.name_launcher_pod(name, OTHER_UID, attempt),
        names.name_worker_pod(name, OTHER_UID, index, attempt),
    ]
    all_names += [names.name_pod_group(name, UID), names.name_pod_group(name, OTHER_UID), names.name_secret(name)]
    assert all(len(label) <= 63 and label[-1].isalnum() for label in all_names), all_names
    assert len(set(all_names)) == len(all_names)


# Credentials.


def test_credentials_are_the_same_in_every_process_and_of_no_use_to_another_job() -> None:
    script = (
        "from topkube_operator.children.credentials import derive_credentials; import hashlib;"
        "data = derive_credentials(b's' * 32, 'uid-1').build_secret_data([(0, 1)]);"
        "print(hashlib.sha256(repr(data).encode()).hexdigest())"
    )
    runs = {subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(runs) == 1
    own, foreign = credentials.derive_credentials(SEED, "uid-1"), credentials.derive_credentials(SEED, "uid-2")
    other_seed = credentials.derive_credentials(b"t" * 32, "uid-1")
    for other in (foreign, other_seed):
        assert not {own.key, own.token_key, own.operator_token} & {other.key, other.token_key, other.operator_token}


def test_each_worker_gets_only_its_own_token() -> None:
    job = parse_job()
    secret = objects.build_secret(job, "uid-1", [(0, 1), (1, 2)], POLICY)
    plain = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert plain["worker-1-2"] == contract.compute_worker_token(plain[contract.TOKEN_KEY_FILE], "uid-1", 1, 2)
    assert plain["worker-0-1"] != plain["worker-1-2"]
    pod, _ = build_worker(job, 1)
    items = [item["key"] for volume in pod["spec"]["volumes"] for item in volume.get("secret", {}).get("items", [])]
    assert items == ["tls.crt", "worker-1-1"]
    pod, _ = build_launcher(job)
    items = [item["key"] for volume in pod["spec"]["volumes"] for item in volume.get("secret", {}).get("items", [])]
    assert items == ["tls.crt", "tls.key", "launcher.key", "operator.token"]


# The port matrix.


def _policies_admit(policies: list[dict[str, Any]], target: dict[str, str], source: dict[str, Any], port: int) -> bool:
    """Return True if the policies admit traffic to a pod with labels `target`, as NetworkPolicies are documented."""
    selecting = [item["spec"] for item in policies if selects(item["spec"]["podSelector"], target)]
    if not selecting:
        return True
    for rule in (rule for spec in selecting for rule in spec["ingress"]):
        ports = [item["port"] for item in rule.get("ports", [])]
        for peer in rule["from"]:
            space = peer.get("namespaceSelector")
            in_namespace = source["namespace"] == "team" if space is None else selects(space, source["namespaceLabels"])
            if in_namespace and selects(peer["podSelector"], source["labels"]) and (not ports or port in ports):
                return True
    return False


def _build_source(namespace: str, **labels: str) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "namespaceLabels": {objects.NAMESPACE_NAME: namespace},
        "labels": labels,
    }


@pytest.mark.parametrize("colocate", [False, True])
def test_only_the_connections_of_the_table_are_admitted(colocate: bool) -> None:
    job = parse_job(launcher={"colocate": colocate})
    policies = objects.build_network_policies(job, "uid-1", POLICY)
    first, _ = build_worker(job, 0)
    second, _ = build_worker(job, 1)
    launcher = first if colocate else build_launcher(job)[0]
    peer = {"namespace": "team", "namespaceLabels": {}, "labels": second["metadata"]["labels"]}
    other_job = {**peer, "labels": {**second["metadata"]["labels"], names.JOB_NAME: "other"}}
    operator = {**_build_source("topkube-system"), "labels": objects.OPERATOR_LABELS}
    impostor = {**_build_source("team"), "labels": objects.OPERATOR_LABELS}
    prometheus = {**_build_source("monitoring"), "labels": {"app.kubernetes.io/name": "prometheus"}}
    stranger = _build_source("team", app="web")

    def list_open_ports(pod: dict[str, Any], source: dict[str, Any]) -> set[int]:
        return {port for port in PORTS if _policies_admit(policies, pod["metadata"]["labels"], source, port)}

    assert list_open_ports(second, peer) == set(PORTS)
    assert list_open_ports(second, prometheus) == {contract.METRICS_PORT}
    assert list_open_ports(launcher, operator) == {contract.LAUNCHER_PORT}
    assert list_open_ports(launcher, peer) == (set(PORTS) if colocate else {contract.LAUNCHER_PORT})
    for source in (stranger, other_job, impostor):
        assert list_open_ports(launcher, source) == list_open_ports(second, source) == set(), source
    assert list_open_ports(second, operator) == set()


@pytest.mark.parametrize("colocate", [False, True])
def test_workers_of_a_job_reach_each_other_on_the_ports_that_mpi_nccl_and_gloo_choose(colocate: bool) -> None:
    """These ports are not known in advance, and UCX may use UDP: the rule for peers names neither ports nor protocols.
    Connections that a worker opens are not restricted."""
    job = parse_job(launcher={"colocate": colocate})
    policies = objects.build_network_policies(job, "uid-1", POLICY)
    labels = [build_worker(job, index)[0]["metadata"]["labels"] for index in (0, 1)]
    for target, source in (labels, labels[::-1]):
        (spec,) = [
            policy["spec"]
            for policy in policies
            if selects(policy["spec"]["podSelector"], target) and policy["metadata"]["name"].endswith("worker")
        ]
        rules = [rule for rule in spec["ingress"] if any(selects(peer["podSelector"], source) for peer in rule["from"])]
        assert [rule for rule in rules if "ports" not in rule]
    assert all(policy["spec"]["policyTypes"] == ["Ingress"] for policy in policies)


def test_only_the_peers_that_the_admin_names_may_scrape_workers() -> None:
    job = parse_job()
    peer = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "vmagent"}}}
    policies = objects.build_network_policies(job, "uid-1", replace(POLICY, metrics_from=(peer,)))
    labels = build_worker(job, 0)[0]["metadata"]["labels"]
    agent, prometheus = (
        {**_build_source("monitoring"), "labels": {"app.kubernetes.io/name": name}}
        for name in ("vmagent", "prometheus")
    )
    assert _policies_admit(policies, labels, agent, contract.METRICS_PORT)
    assert not _policies_admit(policies, labels, agent, contract.METRICS_PORT + 1)
    assert not _policies_admit(policies, labels, prometheus, contract.METRICS_PORT)


def test_jobs_with_similar_names_share_no_child() -> None:
    first = parse_job()
    jobs = [first, *(_build_job_named(f"{first.name}-{suffix}") for suffix in ("launcher", "worker", "credentials"))]
    children = [
        {
            (manifest["kind"], manifest["metadata"]["name"])
            for manifest in (
                objects.build_secret(job, "uid", [], POLICY),
                objects.build_service(job, "uid", 1),
                *objects.build_network_policies(job, "uid", POLICY),
            )
        }
        for job in jobs
    ]
    assert len(set().union(*children)) == sum(len(job) for job in children)


def _build_job_named(name: str) -> TrainingJob:
    return parse_job().model_copy(update={"metadata": parse_job().metadata.model_copy(update={"name": name})})
