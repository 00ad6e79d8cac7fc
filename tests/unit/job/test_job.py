"""The TrainingJob: what is accepted, what it means, and how every mistake is named."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube.settings import Settings

SAMPLES = Path(__file__).parents[3] / "manifests" / "samples"
SMALLEST: dict[str, Any] = {
    "apiVersion": "topkube.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {"template": {"spec": {"containers": [{"image": "i", "command": ["python", "train.py"]}]}}},
}
WHOLE = """
apiVersion: topkube.dev/v1alpha1
kind: TrainingJob
metadata: {name: gpt-stdlib, labels: {team: research}}
spec:
  workers: 2
  slotsPerWorker: 2
  spread: Node
  mpiImplementation: MPICH
  template:
    metadata: {annotations: {anything: goes}}
    spec:
      nodeSelector: {disk: fast}
      containers:
      - name: sidecar
        image: other
      - name: worker
        image: topkube/runtime:0.1.0
        command: [python, -m, topkube.examples.char_gpt]
        args: [--steps, "200"]
        env: [{name: LEVEL, value: "3"}, {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}]
        resources: {limits: {nvidia.com/gpu: 2}}
  launcher: {colocate: false, template: {spec: {tolerations: [{key: a}]}}}
  aggregation: {algorithm: hitopk, density: 1e-2, warmupSteps: 20, wire: fp16, selection: mstopk}
  dataset:
    uri: s3://bucket/imagenet
    mountPath: /data
    cache: {medium: Ephemeral, sizeLimit: 500Gi, memoryLimit: 64Gi, prefetch: true}
    secretName: bucket-keys
  checkpoint: {claimName: checkpoints, path: gpt, everySteps: 50, keep: 2}
  runPolicy:
    suspend: false
    backoffLimit: 3
    activeDeadlineSeconds: 86400
    ttlSecondsAfterFinished: 3600
    cleanPodPolicy: Running
    managedBy: topkube.dev/operator
    schedulingPolicy: {queue: q, priorityClass: high, minAvailable: 3}
status:
  phase: Running
  conditions: [{type: Running, status: "True", lastTransitionTime: 2025-01-01T00:00:00Z}]
  replicaStatuses: {workers: {active: 2, ready: 2}}
  progress: {step: 120, totalSteps: 200, loss: "1.83", samplesPerSecond: 5120}
  firstFailure: {rank: 3, reason: OOMKilled, exitCode: 137}
"""


def build_job(**changes: Any) -> dict[str, Any]:
    """Return the smallest job with fields of its spec replaced."""
    data = copy.deepcopy(SMALLEST)
    data["spec"].update(changes)
    return data


def build_job_with_container(**changes: Any) -> dict[str, Any]:
    data = build_job()
    data["spec"]["template"]["spec"]["containers"][0].update(changes)
    return data


def find_problems(data: Any) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        TrainingJob.parse(data)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_the_whole_job_is_read() -> None:
    job = TrainingJob.from_yaml(WHOLE)
    assert job.name == "gpt-stdlib"
    assert job.ranks == 4
    assert job.command == ["python", "-m", "topkube.examples.char_gpt", "--steps", "200"]
    assert job.plain_environment == {"LEVEL": "3"}
    assert job.spec.aggregation.warmup_steps == 20
    assert job.spec.dataset is not None
    assert job.spec.dataset.cache.memory_limit == "64Gi"
    assert job.spec.run_policy.scheduling_policy.min_available == 3
    assert job.spec.template["spec"]["nodeSelector"] == {"disk": "fast"}  # type: ignore[index, call-overload]
    assert job.status is not None
    assert job.status.progress is not None
    assert job.status.progress.total_steps == 200
    assert job.status.conditions[0].last_transition_time == "2025-01-01T00:00:00Z"


def test_the_smallest_job_has_the_documented_defaults() -> None:
    spec = TrainingJob.parse(SMALLEST).spec
    assert (spec.workers, spec.slots_per_worker, spec.spread, spec.mpi_implementation) == (1, 1, "Node", "MPICH")
    assert (spec.aggregation.algorithm, spec.aggregation.density, spec.aggregation.wire) == ("auto", 0.01, "bf16")
    assert (spec.run_policy.backoff_limit, spec.run_policy.clean_pod_policy) == (3, "Running")
    assert (spec.dataset, spec.checkpoint) == (None, None)


def test_null_takes_the_default_as_in_kubernetes() -> None:
    job = TrainingJob.parse(build_job(aggregation=None, dataset=None, workers=None))
    assert job.spec.aggregation.density == 0.01
    assert job.spec.workers == 1


def test_a_job_is_written_back_as_it_was_read() -> None:
    job = TrainingJob.from_yaml(WHOLE)
    assert TrainingJob.from_yaml(job.to_yaml()) == job
    assert TrainingJob.parse(SMALLEST).to_dict() == SMALLEST
    assert json.loads(json.dumps(job.to_dict())) == job.to_dict()


def test_ranks_get_the_settings() -> None:
    environment = TrainingJob.from_yaml(WHOLE).environment(ranks_per_node="2,2")
    settings = Settings.from_environment(environment)
    assert settings.expected_ranks == 4
    assert settings.ranks_per_node == "2,2"
    assert (settings.algorithm, settings.density, settings.warmup_steps) == ("hitopk", 0.01, 20)
    assert (settings.wire, settings.selection) == ("fp16", "mstopk")
    corrected = TrainingJob.parse(build_job(aggregation={"momentumCorrection": True}))
    assert not settings.momentum_correction
    assert corrected.settings().momentum_correction
    assert (settings.job_name, settings.checkpoint_every, settings.checkpoint_keep) == ("gpt-stdlib", 50, 2)


def test_a_job_is_scaled_with_its_gpus() -> None:
    scaled = TrainingJob.from_yaml(WHOLE).scaled(workers=3, slots_per_worker=1)
    assert scaled.ranks == 3
    assert scaled.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    with pytest.raises(JobError, match=r"spec\.workers: 0 is not a whole number of at least 1"):
        TrainingJob.parse(SMALLEST).scaled(workers=0)


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_samples_are_valid(sample: Path) -> None:
    assert TrainingJob.from_yaml(sample).command[0] == "python"


def test_importing_the_job_loads_neither_torch_nor_mpi_nor_numpy() -> None:
    code = "import sys, topkube.job; print(sorted({'torch', 'mpi4py', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_caches_in_memory_count_against_the_workers_limit() -> None:
    container = {"image": "i", "command": ["x"], "resources": {"limits": {"memory": "10Gi"}}}

    def build_with_cache(**cache: Any) -> dict[str, Any]:
        return build_job(template={"spec": {"containers": [container]}}, dataset={"uri": "s3://b/x", "cache": cache})

    TrainingJob.parse(build_with_cache(medium="Memory", sizeLimit="6Gi", memoryLimit="4Gi"))
    TrainingJob.parse(build_with_cache(sizeLimit="500Gi", memoryLimit="10Gi"))
    words = r"spec\.dataset\.cache\.sizeLimit: 7Gi and 4Gi in memory are more than .* limit of 10,737,418,240 bytes"
    with pytest.raises(JobError, match=words):
        TrainingJob.parse(build_with_cache(medium="Memory", sizeLimit="7Gi", memoryLimit="4Gi"))
    with pytest.raises(JobError, match=r"cache\.memoryLimit: 11Gi in memory are more"):
        TrainingJob.parse(build_with_cache(memoryLimit="11Gi"))


# Mistakes in fields


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (build_job(workers="2"), ["spec.workers: '2' is not a whole number of at least 1 and at most 10000"]),
        (build_job(workers=0), ["spec.workers: 0 is not a whole number of at least 1"]),
        (build_job(workers=2.5), ["spec.workers: 2.5 is not a whole number"]),
        (build_job(workers=True), ["spec.workers: the truth value true is not a whole number"]),
        (build_job(slotsPerWorker=[2]), ["spec.slotsPerWorker: a list is not a whole number"]),
        (build_job(spread="node"), ["spec.spread: 'node' is not one of Node, None; did you mean Node?"]),
        (build_job(mpiImplementation="Intel"), ["spec.mpiImplementation: 'Intel' is not one of MPICH, OpenMPI"]),
        (build_job(aggregation={"density": 0}), ["spec.aggregation.density: 0 is not a number above 0 and at most 1"]),
        (
            build_job(aggregation={"algorithm": "diloco"}),
            ["spec.aggregation: the period of diloco is 1, but it must be at least 2; set a period, such as 32"],
        ),
        (
            build_job(aggregation={"algorithm": "onebit", "schedule": [{"fromStep": 9, "algorithm": "dense"}]}),
            ["spec.aggregation: stage 1 of the schedule (from step 9) changes from onebit to dense; change only"],
        ),
        (
            build_job(aggregation={"schedule": [{"fromStep": 0, "density": 2}]}),
            ["spec.aggregation.schedule[0].fromStep", "spec.aggregation.schedule[0].density"],
        ),
        (build_job(aggregation={"density": 1.01}), ["spec.aggregation.density: 1.01 is not a number above 0"]),
        (build_job(aggregation={"density": float("nan")}), ["spec.aggregation.density: nan is not a number above 0"]),
        (
            build_job(aggregation={"densty": 0.1}),
            ["spec.aggregation.densty: unknown field; did you mean density?; allowed: algorithm, "],
        ),
        (
            build_job(aggregation={"warmup_steps": 1}),
            ["spec.aggregation.warmup_steps: unknown field; did you mean warmupSteps?"],
        ),
        (build_job(warmupSteps=1), ["spec.warmupSteps: unknown field; it belongs to spec.aggregation.warmupSteps; "]),
        (
            build_job(aggregation={"algorithm": "hitop"}),
            ["of a package that the workers' image has; did you mean hitopk?"],
        ),
        (build_job(aggregation="hitopk"), ["spec.aggregation: 'hitopk' is not a mapping"]),
        (
            build_job(aggregation={"selection": "random"}),
            ["spec.aggregation.selection: 'random' is not one of topk, mstopk"],
        ),
        (build_job(dataset={}), ["spec.dataset.uri: is required: address of the data"]),
        (build_job(dataset={"uri": "bucket"}), ["spec.dataset.uri: 'bucket' is not a URI with its scheme"]),
        (
            build_job(dataset={"uri": "s3://b", "mountPath": "data"}),
            ["spec.dataset.mountPath: 'data' is not an absolute path"],
        ),
        (
            build_job(dataset={"uri": "s3://b", "mountPath": "/"}),
            ["spec.dataset.mountPath: '/' is not an absolute path below /"],
        ),
        (
            build_job(dataset={"uri": "s3://b", "cache": {"sizeLimit": "500GB"}}),
            ["spec.dataset.cache.sizeLimit: '500GB' is not a Kubernetes quantity"],
        ),
        (
            build_job(dataset={"uri": "s3://b", "cache": {"sizeLimit": "1Gi", "memoryLimit": "2G"}}),
            ["spec.dataset.cache.memoryLimit: 2G is more than sizeLimit (1Gi)"],
        ),
        (build_job(source={}), ["spec.source: needs one of configMap, archive and git"]),
        (
            build_job(source={"git": {"url": "https://h/r"}}),
            ["spec.source.git.commit: is required: the commit that all"],
        ),
        (
            build_job(source={"git": {"url": "ext::touch /x", "commit": "main"}}),
            ["url: 'ext::touch /x' is not the address of a repository", "commit: 'main' is not the full hash"],
        ),
        (
            build_job(source={"git": {"url": "https://h/r", "commit": "0" * 40, "ref": "--upload-pack=x"}}),
            ["spec.source.git.ref: '--upload-pack=x' is not a branch or tag"],
        ),
        (
            build_job(source={"archive": {"uri": "s3://b/code.zip", "sha256": "0" * 64}}),
            ["spec.source.archive.uri: 's3://b/code.zip' is not an archive: it must end in .tar, .tar.gz"],
        ),
        (build_job(source={"archive": {"uri": "s3://b/c.tar"}}), ["spec.source.archive.sha256: is required"]),
        (build_job(setup={}), ["spec.setup.requirements: is required"]),
        (
            build_job(setup={"requirements": ["-r x", "a --pre", "b\nc", "ok==1"]}),
            ["requirements[0]: '-r x'", "requirements[2]: 'b"],
        ),
        (build_job(setup={"requirements": ["a --pre"]}), ["requirements[0]: 'a --pre' contains an option of pip"]),
        (
            build_job(aggregation={"algorithm": "hitopk", "denseWire": "bf16"}),
            ["spec.aggregation.denseWire: 'bf16' has no effect: hitopk does not read it"],
        ),
        (
            build_job(
                aggregation={
                    "algorithm": "dense",
                    "overlap": "dear",
                    "schedule": [{"fromStep": 9, "algorithm": "oktopk"}],
                }
            ),
            ["spec.aggregation.overlap: 'dear' does not work: oktopk cannot divide its exchange"],
        ),
        (
            build_job(aggregation={"algorithm": "hitopk", "overlap": "dear", "momentumCorrection": True}),
            ["spec.aggregation.overlap: 'dear' does not work: with hitopk, momentum correction changes"],
        ),
        (build_job(checkpoint={"path": "../x", "claimName": "c"}), ["spec.checkpoint.path: '../x' leaves the claim"]),
        (
            build_job(checkpoint={"claimName": "c", "everySteps": 0}),
            ["spec.checkpoint.everySteps: 0 is not a whole number of at least 1"],
        ),
        (
            build_job(launcher={"colocate": True, "template": {"spec": {}}}),
            ["spec.launcher.template: has no effect when colocate is true"],
        ),
        (
            build_job(runPolicy={"schedulingPolicy": {"minAvailable": 3}}),
            ["spec.runPolicy.schedulingPolicy.minAvailable: 3 is more than the job's 2 pods"],
        ),
        (build_job(runPolicy={"managedBy": "me"}), ["spec.runPolicy.managedBy: 'me' is not a domain, '/' and a name"]),
        (build_job(template=[]), ["spec.template: a list is not a mapping"]),
        (build_job(template={}), ["spec.template.spec.containers: is required"]),
        (
            build_job(template={"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}),
            ["none of a, b is called 'worker'"],
        ),
        (
            build_job(template={"spec": {"containers": [{"image": "i", "command": ["x"]}], "initContainers": 5}}),
            ["spec.template.spec.initContainers: is not a list"],
        ),
        (
            build_job(launcher={"template": {"spec": {"initContainers": ["init"]}}}),
            ["spec.launcher.template.spec.initContainers[0]: is not a mapping"],
        ),
        (
            build_job_with_container(image=None, command=[]),
            ["containers[0].image: is required", "containers[0].command: is required: what each rank runs"],
        ),
        (build_job_with_container(args=["--steps", 200]), ['containers[0].args[1]: 200 is not text: quote it, "200"']),
        (build_job_with_container(command="python train.py"), ["containers[0].command: is not a list"]),
        (
            build_job_with_container(env=[{"name": "A", "value": 1}]),
            ['containers[0].env[0].value: 1 is not text: quote it, "1"'],
        ),
        (build_job_with_container(env=[{"value": "1"}]), ["containers[0].env[0]: is not a mapping with a name"]),
        (
            build_job_with_container(resources={"limits": {"nvidia.com/gpu": 4}}),
            ['containers[0].resources.limits["nvidia.com/gpu"]: 4 GPUs for 1 ranks'],
        ),
        ({**SMALLEST, "kind": "Trainingjob"}, ["kind: 'Trainingjob' is not one of TrainingJob; did you mean"]),
        (
            {**SMALLEST, "apiVersion": "topkube.dev/v1"},
            ["apiVersion: 'topkube.dev/v1' is not one of topkube.dev/v1alpha1"],
        ),
        ({**SMALLEST, "metadata": {"name": "Big_Name"}}, ["metadata.name: 'Big_Name' is not lower-case letters"]),
        ({**SMALLEST, "metadata": {"name": "a" * 64}}, ["at most 63 characters (the job's Service"]),
        ({**SMALLEST, "metadata": {"name": "a", "labels": {"v": 1}}}, ["metadata.labels.v: 1"]),
        ({**SMALLEST, "metadata": {}}, ["metadata.name: is required: name of the job"]),
        ({"kind": "TrainingJob"}, ["apiVersion: is required", "metadata: is required", "spec: is required"]),
        (
            {**SMALLEST, "sepc": {}},
            ["sepc: unknown field; did you mean spec?; allowed: apiVersion, kind, metadata, spec"],
        ),
        (
            build_job(
                setup={"requirements": ["einops", "-r base.txt"]},
                runPolicy={
                    "failurePolicy": {
                        "rules": [
                            {"action": "Fail", "onReasons": ["out of memory"]},
                            {"action": "Fail", "onExitCodes": {"operator": "In", "values": [300]}},
                        ]
                    }
                },
            ),
            [
                "requirements[1]: '-r base.txt' is not a requirement of pip, such as einops==0.8.0",
                "onReasons[0]: 'out of memory' is not a reason of status.firstFailure, such as OOMKilled",
                "values[0]: 300 is not a whole number of at least 0 and at most 255",
            ],
        ),
    ],
)
def test_a_mistake_names_its_path_its_value_and_the_allowed_values(data: Any, expected: list[str]) -> None:
    messages = find_problems(data)
    assert len(messages) == len(expected), messages
    for text, problem in zip(expected, messages, strict=True):
        assert text in problem


def test_all_mistakes_are_named_at_once_with_their_lines() -> None:
    text = (
        WHOLE.replace("workers: 2", "workers: two", 1)
        .replace("density", "densty")
        .replace("keep: 2", "keep: 2, keep: 3")
    )
    text = text.replace("        image: topkube", "        imagine: topkube").replace("suspend: false", "suspend: 'no'")
    with pytest.raises(JobError) as caught:
        TrainingJob.from_yaml(text)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "spec.checkpoint.keep (line 30)",
        "spec.workers (line 6)",
        "spec.template.spec.containers[1].image (line 17)",
        "spec.aggregation.densty (line 24)",
        "spec.runPolicy.suspend (line 32)",
    ]


# Mistakes in YAML

BILLION_LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n---\n", "is empty"),
        ("a: [1, 2\nb: 3", "is not YAML: line 2"),
        ("\tkind: x", "is not YAML: line 1"),
        ("a: 1\n---\nb: 2", "holds 2 documents; the second starts at line 3"),
        ("- a\n- b", "holds a list, not a TrainingJob"),
        ("just text", "holds 'just text', not a TrainingJob"),
        ("apiVersion: v1\nkind: Pod", r"is of kind 'Pod' \('v1'\), not a TrainingJob"),
        ("apiVersion: kubeflow.org/v2beta1\nkind: MPIJob", "is of kind 'MPIJob'"),
        ("a: &x [*x]", "levels deep"),
        (BILLION_LAUGHS, "more than 100000 values"),
        ("[" * 5000, "nested too deeply|not YAML"),
        ("a: !!python/object/apply:os.system [echo]", "the tag tag:yaml.org,2002:python"),
        ("a: 1\na: 2", "occurs twice, at lines 1 and 2"),
        ("1: a", 'this key is not text: quote it, "1"'),
        ("a: .inf", "not a finite number"),
        ("a: !!int b", "b is not a valid int"),
        ("\x00", "is not readable as YAML"),
        (b"\xff\xfe\x00", "is not readable as YAML"),
        ("missing/job.yaml", "'missing/job.yaml' cannot be read: No such file"),
    ],
)
def test_bad_yaml_is_a_job_error(text: str | bytes, message: str) -> None:
    with pytest.raises(JobError, match=message):
        TrainingJob.from_yaml(text)


def test_yaml_is_read_as_kubernetes_reads_it() -> None:
    data = build_job(dataset={"uri": "s3://b", "cache": {"sizeLimit": 1e3}}, aggregation={"density": 1})
    job = TrainingJob.parse(data)
    assert job.spec.dataset is not None
    assert job.spec.dataset.cache.size_limit == "1000"
    text = yaml.safe_dump(SMALLEST) + "---\n"  # an empty document at the end is no second job
    assert TrainingJob.from_yaml(text) == TrainingJob.parse(SMALLEST)
    merged = yaml.safe_dump(SMALLEST).replace("- command", "- &w\n        command")
    assert TrainingJob.from_yaml(merged.encode()).command == ["python", "train.py"]


# Read back from a cluster


def test_unknown_fields_of_a_stored_job_are_kept() -> None:
    stored = build_job(workers=2, futureField={"a": 1}, aggregation={"density": 0.5, "newKnob": [1]})
    stored["status"] = {"phase": "Running", "newThing": 1}
    job = TrainingJob.from_cluster(stored)
    assert job.spec.aggregation.density == 0.5
    assert job.to_dict() == stored
    assert len(find_problems(stored)) == 3
    with pytest.raises(JobError, match=r"spec\.workers: 'x'"):
        TrainingJob.from_cluster(build_job(workers="x"))


@pytest.mark.parametrize("algorithm", ["auto", "dense", "hierarchical", "acme.not-installed-here"])
def test_a_dense_wire_is_accepted_if_the_algorithm_may_read_it(algorithm: str) -> None:
    job = TrainingJob.parse(build_job(aggregation={"algorithm": algorithm, "denseWire": "bf16"}))
    assert job.spec.aggregation.dense_wire == "bf16"
