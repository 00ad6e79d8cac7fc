"""The pods of a job: the user's template with its wrapped container and the operator's fields."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from child_builders import POLICY, SEED, build_launcher, build_worker, parse_job, read_environment, selects
from hypothesis import example, given
from hypothesis import strategies as st
from simulated_job import build_job

from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.launch import contract
from topkube_operator.children import datasets, objects, placement, pod_sets, pods
from topkube_operator.model import names
from topkube_operator.model.observed import Policy


def test_pods_have_the_wrapped_command_and_a_plan_with_the_services_address() -> None:
    job = parse_job()
    pod, container = build_worker(job, 1)
    assert container["command"] == ["topkube", "worker", "--", "python", "train.py"]
    plan = contract.WorkerPlan.read(read_environment(container)[contract.WORKER_VARIABLE])
    assert (plan.index, plan.attempt, plan.pod, plan.slots) == (1, 1, "train-worker-1-1-uid-1", 2)
    assert plan.launcher == "10.0.0.9:7077"
    pod, container = build_launcher(job)
    assert (container["command"], container["image"]) == (["topkube", "launch"], "image:1")
    plan = contract.LaunchPlan.read(read_environment(container)[contract.PLAN_VARIABLE])
    expected = [(planned.index, planned.attempt, planned.pod) for planned in plan.workers]
    assert expected == [(0, 1, "train-worker-0-1-uid-1"), (1, 2, "train-worker-1-2-uid-1")]
    assert plan.environment["TOPKUBE_EXPECTED_RANKS"] == "4"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pods.format_endpoint("fd00::1") == "[fd00::1]:7077"


def _check_restricted(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Check a pod against the restricted level of Pod Security, as its documentation lists it."""
    security, pod_security = container["securityContext"], pod["spec"].get("securityContext", {})
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security.get("runAsNonRoot", pod_security.get("runAsNonRoot")) is True
    assert security.get("runAsUser", pod_security.get("runAsUser")) != 0
    assert security.get("seccompProfile", pod_security.get("seccompProfile"))["type"] in ("RuntimeDefault", "Localhost")
    kinds = {next(key for key in volume if key != "name") for volume in pod["spec"]["volumes"]}
    assert kinds <= {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}


def test_pods_are_restricted_and_can_write_to_the_folders_that_programs_need() -> None:
    for pod, container in (build_worker(parse_job()), build_launcher(parse_job())):
        _check_restricted(pod, container)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", read_environment(container)["HOME"], contract.CREDENTIALS_DIRECTORY} <= mounts
    assert build_launcher(parse_job())[1]["securityContext"]["readOnlyRootFilesystem"] is True
    pod, container = build_worker(parse_job(slotsPerWorker=8))
    shared = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "topkube-shm")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "3072Mi"}


def test_fields_of_the_template_are_kept() -> None:
    sidecar = {"name": "sidecar", "image": "proxy:1", "securityContext": {"runAsUser": 0}}
    trainer = {
        "name": "worker",
        "image": "image:1",
        "command": ["python"],
        "env": [{"name": "HOME", "value": "/root"}, {"name": "TOPKUBE_WORKER", "value": "mine"}],
        "securityContext": {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}],
        "ports": [{"containerPort": 9477}],
    }
    spec = {
        "containers": [sidecar, trainer],
        "initContainers": [{"name": "init", "image": "init:1"}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "runtimeClassName": "nvidia",
        "tolerations": [{"key": "gpu"}],
        "terminationGracePeriodSeconds": 60,
        "serviceAccountName": "trainer",
        "affinity": {"nodeAffinity": {"x": 1}, "podAntiAffinity": {}},
        "priorityClassName": "high",
    }
    metadata = {"labels": {"a": "b", names.ROLE: "thief"}, "annotations": {"c": "d"}}
    template = {"metadata": metadata, "spec": spec}
    before = copy.deepcopy(template)
    pod, container = build_worker(parse_job(template=template))
    assert template == before
    pod_spec = pod["spec"]
    assert pod_spec["containers"][0] == sidecar
    assert pod_spec["initContainers"] == spec["initContainers"]
    for field in ("runtimeClassName", "tolerations", "terminationGracePeriodSeconds", "priorityClassName"):
        assert pod_spec[field] == spec[field]
    assert "automountServiceAccountToken" not in pod_spec
    assert pod_spec["affinity"]["nodeAffinity"] == {"x": 1}
    assert container["securityContext"]["runAsUser"] == 0
    assert "runAsNonRoot" not in container["securityContext"]
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert "/dev/shm" not in [mount["mountPath"] for mount in container["volumeMounts"]], "the template has /dev/shm/"
    assert read_environment(container)["HOME"] == "/root"
    assert read_environment(container)["TOPKUBE_WORKER"] != "mine"
    assert pod["metadata"]["labels"]["a"] == "b"
    assert pod["metadata"]["labels"][names.ROLE] == "worker"
    assert contract.WorkerPlan.read(read_environment(container)["TOPKUBE_WORKER"]).grace_seconds == 55


def test_a_template_cannot_set_the_marks_by_which_the_operator_recognizes_pods() -> None:
    """A worker with the mark of a launcher was taken for a launcher that expects a hundred billion workers. The
    operator ran out of memory when it counted them."""
    forged = dict.fromkeys(names.MARKERS, "100000000000")
    template = {"labels": {"team": "a", **forged}, "annotations": {"note": "b", **forged}}
    container = {"name": "worker", "image": "image:1", "command": ["python", "train.py"]}
    job = parse_job(
        template={"metadata": template, "spec": {"containers": [container]}},
        launcher={"template": {"metadata": template}},
    )
    for pod, _ in (build_worker(job), build_launcher(job)):
        metadata = pod["metadata"]
        assert (metadata["labels"]["team"], metadata["annotations"]["note"]) == ("a", "b")
        assert "100000000000" not in {*metadata["labels"].values(), *metadata["annotations"].values()}


def test_workers_are_on_different_nodes_unless_spread_is_none() -> None:
    pod, _ = build_worker(parse_job())
    (rule,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert selects(rule["labelSelector"], pod["metadata"]["labels"])
    assert not selects(rule["labelSelector"], build_launcher(parse_job())[0]["metadata"]["labels"])
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert "affinity" not in build_worker(parse_job(spread="None"))[0]["spec"]


def test_the_launchers_template_is_kept_and_completed() -> None:
    inherits = {"imagePullSecrets": [{"name": "registry"}], "tolerations": [{"key": "gpu"}]}
    template = build_job()["spec"]["template"]["spec"] | inherits
    pod, container = build_launcher(parse_job(template={"spec": template}))
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    own = {
        "spec": {"tolerations": [], "serviceAccountName": "boss", "containers": [{"resources": {"limits": {"cpu": 1}}}]}
    }
    pod, container = build_launcher(parse_job(template={"spec": template}, launcher={"template": own}))
    assert pod["spec"]["tolerations"] == []
    assert pod["spec"]["serviceAccountName"] == "boss"
    assert container["resources"] == {"limits": {"cpu": 1}}
    assert container["image"] == "image:1"


def _read_visible_gpus(container: dict[str, Any]) -> str | None:
    return read_environment(container).get("NVIDIA_VISIBLE_DEVICES")


def test_a_launcher_sees_no_gpu_unless_its_template_asks_for_one() -> None:
    """Images for CUDA ask for all GPUs of the node, and a container that requests none would get them."""
    assert _read_visible_gpus(build_worker(parse_job())[1]) is None
    assert _read_visible_gpus(build_launcher(parse_job())[1]) == "void"
    pod = pods.build_colocated_worker(parse_job(launcher={"colocate": True}), "uid", 1, [(0, 1), (1, 1)], POLICY)
    visible_gpus = {container["name"]: _read_visible_gpus(container) for container in pod["spec"]["containers"]}
    assert visible_gpus == {"worker": None, "launcher": "void"}
    for part, expected in (
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, None),
        ({"resources": {"limits": {"nvidia.com/gpu": "0"}}}, "void"),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}, "all"),
    ):
        template = {"spec": {"containers": [{"name": "launcher", **part}]}}
        assert _read_visible_gpus(build_launcher(parse_job(launcher={"template": template}))[1]) == expected


def test_worker_0_reaches_a_colocated_launcher_by_the_address_of_its_own_pod() -> None:
    job = parse_job(launcher={"colocate": True})
    pod = pods.build_colocated_worker(job, "uid-1", 1, [(0, 1), (1, 1)], POLICY)
    trainer, launcher = pod["spec"]["containers"]
    assert contract.WorkerPlan.read(read_environment(trainer)["TOPKUBE_WORKER"]).launcher == "$(TOPKUBE_POD_IP):7077"
    order = [entry["name"] for entry in trainer["env"]]
    assert order.index("TOPKUBE_POD_IP") < order.index("TOPKUBE_WORKER")
    shared_mounts = {mount["name"] for mount in trainer["volumeMounts"]} & {
        mount["name"] for mount in launcher["volumeMounts"]
    }
    assert not shared_mounts  # the key is in the launcher's mounts alone
    assert len({volume["name"] for volume in pod["spec"]["volumes"]}) == len(pod["spec"]["volumes"])


def test_a_checkpoint_claim_is_mounted_and_writable_for_any_user() -> None:
    job = parse_job(checkpoint={"claimName": "claim", "path": "gpt", "everySteps": 7})
    pod, container = build_worker(job)
    assert "/checkpoint" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert pod["spec"]["securityContext"]["fsGroup"] == 1000
    plan = contract.LaunchPlan.read(read_environment(build_launcher(job)[1])[contract.PLAN_VARIABLE])
    assert plan.environment["TOPKUBE_CHECKPOINT_DIRECTORY"] == "/checkpoint/gpt"
    assert plan.environment["TOPKUBE_CHECKPOINT_EVERY"] == "7"


DATASET: dict[str, Any] = {"uri": "s3://bucket/imagenet", "mountPath": "/data", "secretName": "bucket-keys"}


def _find_dataset_volume(pod: dict[str, Any]) -> dict[str, Any]:
    (dataset_volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == datasets.VOLUME]
    return {key: value for key, value in dataset_volume.items() if key != "name"}


def test_a_pod_with_a_dataset_has_its_own_volume_and_mounts_the_files_read_only() -> None:
    cache = {"sizeLimit": "100Gi", "memoryLimit": "2Gi"}
    pod, container = build_worker(parse_job(dataset={**DATASET, "cache": cache}))
    _check_restricted(pod, container)
    size = int(_find_dataset_volume(pod)["emptyDir"]["sizeLimit"])
    assert 100 << 30 < size < 110 << 30, "room for more than the shards: a pod that writes more is evicted"
    writable, read_only_mount = (mount for mount in container["volumeMounts"] if mount["name"] == datasets.VOLUME)
    settings = read_environment(container)
    assert settings["TOPKUBE_DATASET_URI"] == "s3://bucket/imagenet"
    assert settings["TOPKUBE_CACHE_SIZE_LIMIT"] == str(100 << 30)
    assert settings["TOPKUBE_CACHE_DIRECTORY"] == f"{writable['mountPath']}/cache"
    assert settings["TOPKUBE_DATASET_VIEW"] == f"{writable['mountPath']}/{read_only_mount['subPath']}"
    assert (read_only_mount["mountPath"], read_only_mount["readOnly"]) == ("/data", True)
    shared = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "topkube-shm")
    assert shared["emptyDir"]["sizeLimit"] == "3584Mi", "samples in memory lie in /dev/shm too"
    plan = contract.LaunchPlan.read(
        read_environment(build_launcher(parse_job(dataset=DATASET))[1])[contract.PLAN_VARIABLE]
    )
    assert plan.environment["TOPKUBE_CACHE_DIRECTORY"] == settings["TOPKUBE_CACHE_DIRECTORY"]
    assert contract.WorkerPlan.read(settings[contract.WORKER_VARIABLE]).workers == 2


def test_credentials_come_from_the_secret_and_reach_the_workers_alone() -> None:
    job = parse_job(dataset=DATASET)
    _, container = build_worker(job)
    assert container["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
    assert "bucket-keys" not in str(build_launcher(job))
    assert "envFrom" not in build_worker(parse_job(dataset={"uri": "s3://bucket/x"}))[1]


def test_each_medium_has_its_volume(tmp_path: Path) -> None:
    memory = {**DATASET, "cache": {"medium": "Memory", "sizeLimit": "1Gi"}}
    volume = _find_dataset_volume(build_worker(parse_job(dataset=memory))[0])
    assert volume["emptyDir"]["medium"] == "Memory"
    assert _find_dataset_volume(build_worker(parse_job(dataset=DATASET))[0]) == {"emptyDir": {}}
    pod, container = build_worker(parse_job(dataset={**DATASET, "cache": {"medium": "Node"}}))
    assert _find_dataset_volume(pod) == {"persistentVolumeClaim": {"claimName": "topkube-node-cache"}}
    _check_restricted(pod, container)  # no right to host directories
    settings = read_environment(container)
    assert settings["TOPKUBE_CACHE_FREE_PERCENT"] == "15"
    own = DiskTier(tmp_path).open_folder(DATASET["uri"]).path.relative_to(tmp_path)
    assert settings["TOPKUBE_DATASET_VIEW"] == f"{settings['TOPKUBE_CACHE_DIRECTORY']}/{own}/view", (
        "the view lies in the dataset's folder, and goes with it"
    )


def test_mounts_of_the_template_replace_those_of_the_dataset() -> None:
    template = build_job()["spec"]["template"]["spec"]
    own = {"name": "own", "mountPath": "/data"}
    template["containers"][0]["volumeMounts"] = [own]
    _, container = build_worker(parse_job(dataset=DATASET, template={"spec": template}))
    assert [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/data"] == [own]


def test_warm_nodes_are_preferred_and_never_required() -> None:
    job = parse_job(dataset={**DATASET, "cache": {"medium": "Node"}})
    pod = pods.build_worker(job, "uid-1", 0, 1, "10.0.0.9", POLICY, {"a": 100, "b": 40, "c": 0, "d": 100})
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert set(affinity) == {"preferredDuringSchedulingIgnoredDuringExecution"}
    preferences = [
        (rule["weight"], rule["preference"]["matchExpressions"][0]["values"])
        for rule in affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    ]
    assert preferences == [(100, ["a", "d"]), (40, ["b"])]
    assert "nodeAffinity" not in build_worker(job)[0]["spec"]["affinity"]


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 100), max_size=100))
def test_the_api_server_accepts_every_preference(warm: dict[str, int]) -> None:
    pod: dict[str, Any] = {}
    placement.prefer_warm_nodes(pod, warm)
    node_affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    rules = node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    assert all(1 <= rule["weight"] <= 100 and rule["preference"]["matchExpressions"][0]["values"] for rule in rules)
    preferred_nodes = [name for rule in rules for name in rule["preference"]["matchExpressions"][0]["values"]]
    assert len(preferred_nodes) == len(set(preferred_nodes)) <= 64
    assert min((warm[name] for name in preferred_nodes), default=1) >= 1


def test_queues_find_their_labels_on_the_pods() -> None:
    data = build_job(workers=3)
    data["metadata"] |= {
        "labels": {"kueue.x-k8s.io/queue-name": "team", "app": "mine"},
        "annotations": {"scheduling.volcano.sh/x": "y"},
    }
    pod, _ = build_worker(TrainingJob.from_cluster(data))
    labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team"
    assert labels["kueue.x-k8s.io/pod-group-name"] == "train-uid-1"
    assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "4"
    assert annotations["scheduling.volcano.sh/x"] == "y"
    assert "app" not in labels
    data["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] = "mine"
    pod, _ = build_worker(TrainingJob.from_cluster(data))
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "mine"
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "4", (
        "Kueue refuses the pod without it"
    )


@pytest.mark.parametrize("gang", ["volcano", "scheduler-plugins"])
def test_a_gang_has_a_pod_group_of_the_installed_scheduler(gang: Any) -> None:
    policy = {"schedulingPolicy": {"queue": "team", "priorityClass": "high", "minAvailable": 2}}
    job = parse_job(runPolicy=policy)
    group = objects.build_pod_group(job, "uid-1", gang, {"cpu": "1050m"})
    assert group["spec"]["minResources"] == {"cpu": "1050m"}
    assert group["spec"]["minMember"] == 2
    pod, _ = build_worker(job, policy=Policy(seed=SEED, gang=gang))
    assert pod["spec"]["priorityClassName"] == "high"
    if gang == "volcano":
        assert group["spec"]["priorityClassName"] == "high"
        assert (group["apiVersion"], group["spec"]["queue"]) == ("scheduling.volcano.sh/v1beta1", "team")
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
        assert pod["spec"]["schedulerName"] == "volcano"
    else:
        assert group["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
        assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == group["metadata"]["name"]
    assert "schedulerName" not in build_worker(parse_job(), policy=Policy(seed=SEED, gang=gang))[0]["spec"]


def test_a_template_that_makes_no_valid_pod_raises_a_job_error() -> None:
    template = build_job()["spec"]["template"]["spec"] | {"volumes": "text"}
    with pytest.raises(JobError, match="volumes"):
        build_worker(parse_job(template={"spec": template}))


@given(
    st.dictionaries(
        st.sampled_from(
            ["volumes", "securityContext", "affinity", "terminationGracePeriodSeconds", "hostname", "initContainers"]
        ),
        st.none() | st.text(max_size=3) | st.integers() | st.lists(st.integers(), max_size=2) | st.just({}),
    ),
    st.dictionaries(
        st.sampled_from(["env", "volumeMounts", "ports", "securityContext", "resources", "name"]),
        st.none() | st.text(max_size=3) | st.integers() | st.lists(st.text(max_size=2), max_size=2) | st.just({}),
    ),
)
@example({"initContainers": 5}, {})
def test_every_template_makes_a_pod_or_raises_a_job_error(pod: Any, container: Any) -> None:
    trainer = {**build_job()["spec"]["template"]["spec"]["containers"][0], **container}
    try:
        stored_job = parse_job(template={"spec": {"containers": [trainer], **pod}})
        pods.build_worker(stored_job, "uid-1", 0, 1, "10.0.0.9", POLICY)
        pods.build_launcher(stored_job, "uid-1", 1, [(0, 1)], POLICY)
        pods.build_colocated_worker(stored_job, "uid-1", 1, [(0, 1)], POLICY)
        pod_sets.sum_member_requests(stored_job, "uid-1", POLICY)
    except JobError:
        pass


@pytest.mark.parametrize("grace", [None, 300])
def test_ranks_and_launcher_have_the_grace_period_of_the_workers_pods(grace: int | None) -> None:
    container = {"name": "worker", "image": "image:1", "command": ["python", "train.py"]}
    spec = {"containers": [container], **({"terminationGracePeriodSeconds": grace} if grace else {})}
    job = parse_job(template={"spec": spec})
    pod, container = build_worker(job)
    launcher_pod, launcher_container = build_launcher(job)
    seconds = grace or 30
    assert (
        pod["spec"]["terminationGracePeriodSeconds"] == launcher_pod["spec"]["terminationGracePeriodSeconds"] == seconds
    )
    plan = contract.WorkerPlan.read(read_environment(container)[contract.WORKER_VARIABLE])
    assert plan.grace_seconds == seconds - 5
    assert (
        contract.LaunchPlan.read(read_environment(launcher_container)[contract.PLAN_VARIABLE]).grace_seconds
        == seconds - 5
    )


def test_no_kubelet_starts_a_launcher_or_a_worker_again() -> None:
    """Kubernetes 1.34 has a restartPolicy of each container. A launcher that was started again in its pod hid how its
    attempt had ended, and a job that had succeeded ran again."""
    restarts = {"restartPolicy": "Always", "restartPolicyRules": [{"action": "Restart"}]}
    worker = {"name": "worker", "image": "image:1", "command": ["python", "train.py"], **restarts}
    sidecar = {"name": "logs", "image": "logs:1", "restartPolicy": "Always"}
    launcher_template = {"spec": {"containers": [{"name": "launcher", **restarts}]}}
    job = parse_job(template={"spec": {"containers": [worker, sidecar]}}, launcher={"template": launcher_template})
    for _, container in (build_worker(job), build_launcher(job)):
        assert not restarts.keys() & container.keys()
    pod, _ = build_worker(job)
    assert next(entry for entry in pod["spec"]["containers"] if entry["name"] == "logs") == sidecar
