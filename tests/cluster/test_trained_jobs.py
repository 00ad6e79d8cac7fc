"""Jobs that train: the sample char_gpt up to a checkpoint with trained weights, onebit, both MPIs, and SIGTERM."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
import yaml
from jobs import build_job, build_steps
from localkube.cluster import LocalCluster
from localkube.images import RUNTIME_OPENMPI
from target import Namespace, create_shared_claim, wait_for

from conftest import MANIFESTS

# A small GPT. The first attempt trains without end; later attempts make 12 steps from their checkpoint. At the end each
# rank prints a hash of the agreed weights and a hash of its node's own weights.
TRAINS_NODE_WEIGHTS = """
import hashlib, os, torch, topkube
from topkube.examples.char_gpt import GPT, CharacterWindows

def digest(model):
    tensors = model.state_dict()
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()

topkube.init()
torch.manual_seed(0)
model, dataset = GPT(layers=1, width=32, heads=2, context=32), CharacterWindows(32, characters=200_000)
optimizer = topkube.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters())
sampler = topkube.data.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
with topkube.checkpointing(model, optimizer, sampler) as run:
    total = run.step + 12 if int(os.environ["TOPKUBE_ATTEMPT"]) > 1 else 1_000_000
    for codes, targets in run.progress(loader, total=total):
        model(codes, targets).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
own = digest(model)
with optimizer.consensus():
    print(f"rank {topkube.rank()} of {topkube.size()} agrees on {digest(model)} and trains {own}", flush=True)
"""


@pytest.fixture
def checkpoints(namespace: Namespace, breakable_cluster: LocalCluster) -> Iterator[Path]:
    """The folder of a ReadWriteMany claim called `checkpoints`, which all nodes of this machine share."""
    folder = breakable_cluster.layout.state / "volumes" / namespace.name
    create_shared_claim(namespace, folder, "checkpoints")
    yield folder
    namespace.target.core.delete_persistent_volume(namespace.name)


def build_sample_job(arguments: list[str], **spec: Any) -> dict[str, Any]:
    """Return manifests/samples/char-gpt-checkpoints.yaml with other arguments."""
    written: dict[str, Any] = yaml.safe_load((MANIFESTS / "samples/char-gpt-checkpoints.yaml").read_text())
    written["spec"]["template"]["spec"]["containers"][0]["args"] = arguments
    written["spec"] |= spec
    return written


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    shared = torch.load(checkpoint / "shared.pt", map_location="cpu", weights_only=False)
    tensors: dict[str, torch.Tensor] = shared["model"]
    return tensors


def list_published(folder: Path) -> list[Path]:
    """Return the published checkpoints in a folder, oldest first. Names of unfinished checkpoints begin with a dot."""
    folders = (Path(parent) for parent, _, files in os.walk(folder) if "checkpoint.json" in files)
    return sorted(path for path in folders if path.name.startswith("step-"))


def test_the_sample_trains_and_its_checkpoint_holds_the_weights(namespace: Namespace, checkpoints: Path) -> None:
    """The job passes all phases and reports progress. A worker is killed, and the run continues from its checkpoint."""
    arguments = ["--steps", "200", "--layers", "2", "--width", "64", "--batch-size", "4"]
    checkpoint = {"claimName": "checkpoints", "path": "gpt", "everySteps": 10, "keep": 2}
    name = namespace.create(build_sample_job(arguments, checkpoint=checkpoint))
    seen = namespace.watch_phases(name)
    wait_for(lambda: list_published(checkpoints), "a first checkpoint", 120)
    at = int(list_published(checkpoints)[-1].name[5:13])
    namespace.target.kill_container(namespace.list_pods("worker")[1], "worker")

    def read_resumed_step() -> int:
        status = namespace.read_status(name)
        assert status["phase"] != "Failed", json.dumps(status, indent=1)
        runs = status["attempt"] == 2 and status["phase"] in ("Running", "Succeeded")
        return int((status.get("progress") or {}).get("step") or 0) if runs else 0

    wait_for(read_resumed_step, "a step of the second attempt", 60)

    status = namespace.wait_phase(name, "Succeeded", seconds=120)
    assert status["restarts"] == 1
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 200
    assert status["progress"]["percent"] == 100
    wait_for(lambda: seen[-1:] == ["Succeeded"], "the watcher", 10)
    assert seen[:4] == ["Pending", "Starting", "Running", "Restarting"], seen
    logs = "".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods())
    assert "held-out loss" in logs
    resumed_at = int(re.search(r"resumed at step (\d+) from step-", logs)[1])
    assert resumed_at >= at, "what was saved before the kill was lost"
    final = load_weights(list_published(checkpoints)[-1])
    assert list_published(checkpoints)[-1].name.startswith("step-00000200")
    assert len(list_published(checkpoints)) == 2  # keep
    torch.manual_seed(0)
    assert sum(tensor.numel() for tensor in final.values()) > 100_000
    assert all(torch.isfinite(tensor).all() for tensor in final.values())
    assert at >= 10


def test_onebit_survives_a_killed_worker_with_equal_weights(namespace: Namespace, checkpoints: Path) -> None:
    """Every node trains its own weights. After a worker was killed, the run continues from its checkpoint. At the end
    all ranks agree on the weights of the last checkpoint, and the nodes' own weights differ."""
    spec = build_job("onebit", ["python", "-c", TRAINS_NODE_WEIGHTS], workers=2, slots=2)
    spec["spec"] |= {
        "aggregation": {"algorithm": "onebit", "period": 2},
        "checkpoint": {"claimName": "checkpoints", "path": "onebit", "everySteps": 5, "keep": 2},
    }
    name = namespace.create(spec)
    wait_for(lambda: list_published(checkpoints), "a first checkpoint", 120)
    at = int(list_published(checkpoints)[-1].name[5:13])
    namespace.target.kill_container(namespace.list_pods("worker")[1], "worker")
    status = namespace.wait_phase(name, "Succeeded", seconds=180)
    assert (status["attempt"], status["restarts"]) == (2, 1)
    logs = "".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods())
    resumed_at = int(re.search(r"resumed at step (\d+) from step-", logs)[1])
    assert resumed_at >= at >= 5, "what was saved before the kill was lost"
    printed = re.findall(r"rank (\d) of 4 agrees on (\w{64}) and trains (\w{64})", logs)
    agreed = {rank: digest for rank, digest, _ in printed}
    own = {rank: digest for rank, _, digest in printed}
    assert sorted(agreed) == ["0", "1", "2", "3"], logs
    assert len(set(agreed.values())) == 1, agreed
    assert own["0"] == own["1"] != own["2"] == own["3"], own
    last = list_published(checkpoints)[-1]
    assert int(last.name[5:13]) == resumed_at + 12
    saved = load_weights(last)
    content = b"".join(saved[parameter].numpy().tobytes() for parameter in sorted(saved))
    assert hashlib.sha256(content).hexdigest() == agreed["0"]


def test_a_job_runs_with_open_mpi(namespace: Namespace) -> None:
    needs.require_image(namespace.target, RUNTIME_OPENMPI.name)
    spec = build_job("open", build_steps(3), workers=2, slots=2, mpiImplementation="OpenMPI")
    spec["spec"]["template"]["spec"]["containers"][0]["image"] = RUNTIME_OPENMPI.name
    name = namespace.create(spec)
    namespace.wait_phase(name, "Succeeded", seconds=120)
    logs = "".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods("worker"))
    assert all(f"rank {rank} of 4 runs" in logs for rank in range(4)), logs


def test_a_checkpoint_is_taken_on_sigterm(namespace: Namespace, checkpoints: Path) -> None:
    """Suspending a job sends SIGTERM: the last step is saved in a checkpoint, and the resumed job continues from it."""
    arguments = ["--steps", "100000", "--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "2"]
    checkpoint = {"claimName": "checkpoints", "path": "gpt", "everySteps": 50_000}
    name = namespace.create(build_sample_job(arguments, workers=1, checkpoint=checkpoint))
    wait_for(lambda: (namespace.read_status(name).get("progress") or {}).get("step", 0) > 0, "steps", 90)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": True}}})
    namespace.wait_phase(name, "Suspended")
    wait_for(lambda: list_published(checkpoints), "a checkpoint", 40)
    reached = int(list_published(checkpoints)[-1].name[5:13])
    assert 0 < reached < 50_000
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": False}}})
    namespace.wait_log(f"resumed at step {reached} from step-", seconds=90)
    wait_for(lambda: namespace.read_status(name)["progress"]["step"] > reached, f"steps after {reached}", 90)
