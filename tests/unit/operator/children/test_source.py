"""The init container that fetches a job's code, and the folders and variables that the worker gets from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from child_builders import build_launcher, build_worker, parse_job, read_environment

from topkube.job.changes import find_refused_changes
from topkube.launch import contract
from topkube_operator.children import inheritance, pods
from topkube_operator.children.pod_sets import sum_pod_requests

CONFIG_MAP = {"configMap": {"name": "code", "archive": "source.tar.gz", "sha256": "0" * 64}}
GIT = {"git": {"url": "https://host/repository", "commit": "0" * 40, "ref": "main", "secretName": "git-keys"}}
ARCHIVE = {"archive": {"uri": "s3://bucket/code.tar.gz", "sha256": "0" * 64, "secretName": "store-keys"}}


def _find_fetcher(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = [entry for entry in pod["spec"]["initContainers"] if entry["name"] == contract.SOURCE_CONTAINER]
    return dict(container)


def _list_mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def _build_template(**container: Any) -> dict[str, Any]:
    return {
        "spec": {"containers": [{"name": "worker", "image": "image:1", "command": ["python", "t.py"], **container}]}
    }


def test_a_job_without_a_source_has_no_init_container() -> None:
    pod, container = build_worker(parse_job())
    assert "initContainers" not in pod["spec"]
    assert "workingDir" not in container
    assert "TOPKUBE_SOURCE_DIRECTORY" not in read_environment(container)


@pytest.mark.parametrize("source", [CONFIG_MAP, GIT, ARCHIVE])
def test_the_ranks_run_in_the_folder_that_the_init_container_fills(source: dict[str, Any]) -> None:
    pod, container = build_worker(parse_job(source=source, setup={"requirements": ["einops"]}), 1)
    fetcher = _find_fetcher(pod)
    assert (fetcher["image"], fetcher["command"]) == ("image:1", ["topkube", "fetch-source"])
    assert container["workingDir"] == contract.SOURCE_DIRECTORY
    assert container["command"] == ["topkube", "worker", "--", "python", "train.py"]
    variables = read_environment(container)
    assert variables["TOPKUBE_SOURCE_DIRECTORY"] == contract.SOURCE_DIRECTORY
    assert variables["TOPKUBE_PACKAGES_DIRECTORY"] == contract.PACKAGES_DIRECTORY
    plan = contract.SourcePlan.read(read_environment(fetcher)[contract.SOURCE_VARIABLE])
    assert (plan.index, plan.attempt, plan.pod) == (1, 1, pod["metadata"]["name"])
    assert json.loads(plan.to_json())["source"] == source
    assert _list_mounts(fetcher)[contract.CODE_DIRECTORY] == _list_mounts(container)[contract.CODE_DIRECTORY]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes[_list_mounts(container)[contract.CODE_DIRECTORY]]["emptyDir"] == {}
    assert set(_list_mounts(fetcher).values()) | set(_list_mounts(container).values()) == set(volumes)
    assert "initContainers" not in build_launcher(parse_job(source=source))[0]["spec"], (
        "a launcher runs no code of the job"
    )


def test_only_the_init_container_gets_the_credentials() -> None:
    pod, container = build_worker(parse_job(source=GIT))
    [secret] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "topkube-source-credentials"]
    assert secret["secret"]["secretName"] == "git-keys"
    assert contract.SOURCE_SECRET_DIRECTORY in _list_mounts(_find_fetcher(pod))
    assert contract.SOURCE_SECRET_DIRECTORY not in _list_mounts(container)
    pod, container = build_worker(parse_job(source=ARCHIVE))
    assert _find_fetcher(pod)["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    assert "envFrom" not in container


def test_a_config_map_is_mounted_with_its_keys() -> None:
    pod, container = build_worker(parse_job(source=CONFIG_MAP))
    [volume] = [volume for volume in pod["spec"]["volumes"] if "configMap" in volume]
    assert volume["configMap"]["items"] == [{"key": "source.tar.gz", "path": "source.tar.gz"}]
    items = [{"key": "train", "path": "pkg/train.py"}]
    pod, _ = build_worker(parse_job(source={"configMap": {"name": "code", "items": items}}))
    [volume] = [volume for volume in pod["spec"]["volumes"] if "configMap" in volume]
    assert volume["configMap"] == {"name": "code", "items": items}
    assert volume["name"] not in _list_mounts(container).values()


def test_the_init_container_is_restricted_and_has_the_workers_user() -> None:
    security = {"runAsUser": 4321, "privileged": True, "capabilities": {"add": ["IPC_LOCK"]}}
    pod, _ = build_worker(parse_job(source=CONFIG_MAP, template=_build_template(securityContext=security)))
    restricted = _find_fetcher(pod)["securityContext"]
    assert restricted["runAsUser"] == 4321
    assert restricted["readOnlyRootFilesystem"] is True
    assert restricted["allowPrivilegeEscalation"] is False
    assert restricted["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in restricted
    assert {"/tmp", pods.HOME} <= set(_list_mounts(_find_fetcher(pod)))


def test_the_init_container_sees_the_workers_variables_and_volumes_but_no_gpu() -> None:
    container = {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "TOPKUBE_SOURCE", "value": "mine"}],
        "volumeMounts": [{"name": "wheels", "mountPath": "/wheels"}],
        "resources": {"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": 2}, "requests": {"cpu": "4"}},
    }
    job = parse_job(source=CONFIG_MAP, template=_build_template(**container))
    pod, _ = build_worker(job)
    fetcher = _find_fetcher(pod)
    assert read_environment(fetcher)["HTTPS_PROXY"] == "http://proxy:3128"
    assert read_environment(fetcher)["TOPKUBE_SOURCE"] != "mine"
    assert _list_mounts(fetcher)["/wheels"] == "wheels"
    assert fetcher["resources"] == {"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "4"}}
    without = build_worker(parse_job(template=_build_template(**container)))[0]
    assert sum_pod_requests(pod["spec"]) == sum_pod_requests(without["spec"]), (
        "the scheduler counts no more than before"
    )


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    amounts = {"cpu": "4", "memory": "8Gi"}
    resources = {"requests": amounts, "limits": amounts}
    job = parse_job(source=CONFIG_MAP, launcher={"colocate": True}, template=_build_template(resources=resources))
    pod = pods.build_colocated_worker(job, "uid-1", 1, [(0, 1), (1, 1)], pods.Policy())
    assert inheritance.is_guaranteed(pod)


def test_the_working_directory_of_the_template_is_kept() -> None:
    _, container = build_worker(parse_job(source=CONFIG_MAP, template=_build_template(workingDir="/work")))
    assert container["workingDir"] == "/work"


def test_dollars_in_a_plan_are_not_expanded() -> None:
    requirement = "einops @ https://host/$(HOME)/einops-1-py3-none-any.whl"
    pod, _ = build_worker(parse_job(setup={"requirements": [requirement]}))
    text = read_environment(_find_fetcher(pod))[contract.SOURCE_VARIABLE]
    assert "$$(HOME)" in text
    plan = contract.SourcePlan.read(text.replace("$$", "$"))
    assert plan.setup is not None
    assert plan.setup.requirements == [requirement]


def test_pods_of_another_source_are_replaced_and_old_jobs_keep_their_shape() -> None:
    changed = {"configMap": {**CONFIG_MAP["configMap"], "sha256": "1" * 64}}
    jobs = [
        parse_job(),
        parse_job(source=CONFIG_MAP),
        parse_job(source=changed),
        parse_job(setup={"requirements": ["a"]}),
    ]
    assert len({pods.hash_worker(job) for job in jobs}) == 4
    assert pods.hash_worker(parse_job()) == pods.hash_worker(parse_job(source=None))
    problems = find_refused_changes(parse_job(source=CONFIG_MAP).spec, parse_job(source=changed).spec)
    assert "spec.source" in problems[0]
