"""The samples as a user applies them: char_gpt up to a checkpoint with trained weights, on both MPIs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
import yaml
from jobs import job, steps
from localkube.cluster import Cluster
from localkube.images import RUNTIME_OPENMPI
from target import Namespace, shared_claim, wait_for

from conftest import MANIFESTS

# A small GPT. The first attempt trains without end; later ones make 12 steps from their checkpoint. At the end each
# rank says which weights it agrees on with all others, and which its node trains.
TRAINS_NODE_WEIGHTS = """
import hashlib, os, torch, topkube
from topkube.examples.char_gpt import GPT, Source

def digest(model):
    tensors = model.state_dict()
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()

topkube.init()
torch.manual_seed(0)
model, source = GPT(layers=1, width=32, heads=2, context=32), Source(32, characters=200_000)
optimizer = topkube.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters())
sampler = topkube.data.DistributedSampler(source)
loader = torch.utils.data.DataLoader(source, batch_size=2, sampler=sampler)
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
def checkpoints(namespace: Namespace, breakable: Cluster) -> Iterator[Path]:
    """A ReadWriteMany claim called `checkpoints`, on a folder that all nodes of this machine share; the folder."""
    folder = breakable.layout.state / "volumes" / namespace.name
    shared_claim(namespace, folder, "checkpoints")
    yield folder
    namespace.target.core.delete_persistent_volume(namespace.name)


def sample(arguments: list[str], **spec: Any) -> dict[str, Any]:
    """manifests/samples/char-gpt-checkpoints.yaml with other arguments."""
    written: dict[str, Any] = yaml.safe_load((MANIFESTS / "samples/char-gpt-checkpoints.yaml").read_text())
    written["spec"]["template"]["spec"]["containers"][0]["args"] = arguments
    written["spec"] |= spec
    return written


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    shared = torch.load(checkpoint / "shared.pt", map_location="cpu", weights_only=False)
    tensors: dict[str, torch.Tensor] = shared["model"]
    return tensors


def list_published(folder: Path) -> list[Path]:
    """Return the published checkpoints in a folder, oldest first. Those with a leading dot are unfinished."""
    folders = (Path(parent) for parent, _, files in os.walk(folder) if "checkpoint.json" in files)
    return sorted(path for path in folders if path.name.startswith("step-"))


def test_the_sample_trains_and_its_checkpoint_holds_the_weights(namespace: Namespace, checkpoints: Path) -> None:
    """The job passes all phases and reports progress. A worker is killed, and the run continues from its checkpoint."""
    small = ["--steps", "200", "--layers", "2", "--width", "64", "--batch-size", "4"]
    checkpoint = {"claimName": "checkpoints", "path": "gpt", "everySteps": 10, "keep": 2}
    name = namespace.create(sample(small, checkpoint=checkpoint))
    seen = namespace.phases(name)
    wait_for(lambda: list_published(checkpoints), "a first checkpoint", 120)
    at = int(list_published(checkpoints)[-1].name[5:13])
    victim = namespace.pods("worker")[1]
    namespace.target.kill_container(victim, "worker")
    began = time.monotonic()

    def read_resumed_step() -> int:
        status = namespace.status(name)
        assert status["phase"] != "Failed", json.dumps(status, indent=1)
        runs = status["attempt"] == 2 and status["phase"] in ("Running", "Succeeded")
        return int((status.get("progress") or {}).get("step") or 0) if runs else 0

    wait_for(read_resumed_step, "a step of the second attempt", 60)
    took = time.monotonic() - began
    status = namespace.wait_phase(name, "Succeeded", seconds=120)
    assert status["restarts"] == 1
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 200
    assert status["progress"]["percent"] == 100
    wait_for(lambda: seen[-1:] == ["Succeeded"], "the watcher", 10)
    assert seen[:4] == ["Pending", "Starting", "Running", "Restarting"], seen
    logs = "".join(namespace.logs(pod.metadata.name) for pod in namespace.pods())
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
    print(f"the second attempt's first step was reported {took:.1f} s after the kill")


def test_onebit_survives_a_killed_worker_with_equal_weights(namespace: Namespace, checkpoints: Path) -> None:
    """Every node trains weights of its own. After a worker was killed, the run continues from its checkpoint; at the
    end all ranks agree on the same weights, those of the last checkpoint, and the nodes' own weights differ."""
    spec = job("onebit", ["python", "-c", TRAINS_NODE_WEIGHTS], workers=2, slots=2)
    spec["spec"] |= {
        "aggregation": {"algorithm": "onebit", "period": 2},
        "checkpoint": {"claimName": "checkpoints", "path": "onebit", "everySteps": 5, "keep": 2},
    }
    name = namespace.create(spec)
    wait_for(lambda: list_published(checkpoints), "a first checkpoint", 120)
    at = int(list_published(checkpoints)[-1].name[5:13])
    namespace.target.kill_container(namespace.pods("worker")[1], "worker")
    status = namespace.wait_phase(name, "Succeeded", seconds=180)
    assert (status["attempt"], status["restarts"]) == (2, 1)
    logs = "".join(namespace.logs(pod.metadata.name) for pod in namespace.pods())
    resumed_at = int(re.search(r"resumed at step (\d+) from step-", logs)[1])
    assert resumed_at >= at >= 5, "what was saved before the kill was lost"
    said = re.findall(r"rank (\d) of 4 agrees on (\w{64}) and trains (\w{64})", logs)
    agreed = {rank: digest for rank, digest, _ in said}
    own = {rank: digest for rank, _, digest in said}
    assert sorted(agreed) == ["0", "1", "2", "3"], logs
    assert len(set(agreed.values())) == 1, agreed
    assert own["0"] == own["1"] != own["2"] == own["3"], own
    last = list_published(checkpoints)[-1]
    assert int(last.name[5:13]) == resumed_at + 12
    saved = load_weights(last)
    content = b"".join(saved[parameter].numpy().tobytes() for parameter in sorted(saved))
    assert hashlib.sha256(content).hexdigest() == agreed["0"]


def test_a_job_runs_with_open_mpi(namespace: Namespace) -> None:
    needs.image(namespace.target, RUNTIME_OPENMPI.name)
    spec = job("open", steps(3), workers=2, slots=2, mpiImplementation="OpenMPI")
    spec["spec"]["template"]["spec"]["containers"][0]["image"] = RUNTIME_OPENMPI.name
    name = namespace.create(spec)
    namespace.wait_phase(name, "Succeeded", seconds=120)
    logs = "".join(namespace.logs(pod.metadata.name) for pod in namespace.pods("worker"))
    assert all(f"rank {rank} of 4 runs" in logs for rank in range(4)), logs


def test_a_checkpoint_is_taken_on_sigterm(namespace: Namespace, checkpoints: Path) -> None:
    """Suspending a job sends SIGTERM: the last step is saved in a checkpoint, and the resumed job continues from it."""
    small = ["--steps", "100000", "--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "2"]
    checkpoint = {"claimName": "checkpoints", "path": "gpt", "everySteps": 50_000}
    patient = sample(small, workers=1, checkpoint=checkpoint)
    name = namespace.create(patient)
    wait_for(lambda: (namespace.status(name).get("progress") or {}).get("step", 0) > 0, "steps", 90)
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": True}}})
    namespace.wait_phase(name, "Suspended")
    wait_for(lambda: list_published(checkpoints), "a checkpoint", 40)
    reached = int(list_published(checkpoints)[-1].name[5:13])
    assert 0 < reached < 50_000
    namespace.patch(name, {"spec": {"runPolicy": {"suspend": False}}})
    namespace.wait_log(f"resumed at step {reached} from step-", seconds=90)
    wait_for(lambda: namespace.status(name)["progress"]["step"] > reached, f"steps after {reached}", 90)
