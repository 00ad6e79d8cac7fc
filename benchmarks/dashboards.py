"""Draw the pictures of the dashboards in docs/images from a real Prometheus that scrapes jobs on a real Kubernetes:

    sudo make cluster && sudo .venv/bin/python benchmarks/dashboards.py

TopKube must be installed (by the chart, or by kubectl apply -f manifests/) and the cluster one of `make cluster`.
In two namespaces, a small GPT trains with checkpoints, a network reads images through the data cache, the sample
digits-cnn runs to its end, and a job waits for a node that does not exist. After half of the time a worker of the GPT
is killed: the job continues from its checkpoint, and the dashboards show it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from kubernetes.client.exceptions import ApiException

from on_cluster import find_running_cluster  # finds the modules of tests/cluster

from jobs import build_job  # isort: skip
from localkube import images  # isort: skip
from localkube.cluster import LocalCluster  # isort: skip
from monitored import ScrapeTargets  # isort: skip
from target import Namespace, Target, wait_for  # isort: skip

from monitoring.dashboards import DASHBOARDS
from monitoring.pictures import draw_dashboard
from monitoring.server import BINARY, run_prometheus

ROOT = Path(__file__).resolve().parents[1]
LANGUAGE, VISION = "language", "vision"
GPT = [
    *("python", "-m", "topkube.examples.char_gpt", "--steps", "2000", "--batch-size", "4", "--learning-rate", "0.002"),
    *("--optimizer", "adamw"),
]
# 3,000 images of 3 x 32 x 32. Decoding a batch takes a tenth of a second. The memory tier has room for half of them.
IMAGES = """
import os, sys, time
from pathlib import Path
import numpy as np, torch, topkube
from torch import nn
from torch.utils.data import DataLoader

folder = Path("/tmp/images")
folder.mkdir(exist_ok=True)  # an attempt may run in the pods of the last one
for number, image in enumerate(np.random.default_rng(0).integers(0, 255, (3000, 3072), np.uint8)):
    (folder / f"{number:04}.bin").write_bytes(image.tobytes())
    os.utime(folder / f"{number:04}.bin", (0, 0))

def decode(raw):
    time.sleep(0.001)
    return np.frombuffer(raw, np.uint8).astype(np.float32) / 255

topkube.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 3072))
topkube.broadcast_parameters(model)
optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
dataset = topkube.data.CachedDataset(
    folder, decode=decode, cache_directory="/tmp/cache", memory_limit=20 << 20, group_bytes=256 << 10
)
sampler = topkube.data.DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
with topkube.checkpointing(model, optimizer, sampler) as run:
    for x in run.progress(loader, total=6000):
        run.loss(nn.functional.mse_loss(model(x), x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
"""


@contextmanager
def create_namespaces(target: Target) -> Iterator[dict[str, Namespace]]:
    """Create two namespaces, and delete them at the end of the block."""
    for name in (LANGUAGE, VISION):
        try:
            target.core.create_namespace({"metadata": {"name": name}})
        except ApiException as error:
            sys.exit(f"namespace {name} cannot be made: {error.reason}. Next: kubectl delete namespace {name}")
    try:
        for name in (LANGUAGE, VISION):
            wait_for(lambda name=name: target.core.list_namespaced_service_account(name).items, "an account")
        yield {name: Namespace(target, name) for name in (LANGUAGE, VISION)}
    finally:
        for name in (LANGUAGE, VISION):
            target.core.delete_namespace(name)


@contextmanager
def create_checkpoint_claim(target: Target, cluster: LocalCluster) -> Iterator[None]:
    """Create the volume claim `checkpoints` in LANGUAGE, on a folder that all nodes of this machine share."""
    folder = cluster.layout.state / "volumes" / LANGUAGE
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    size, modes, name = {"storage": "1Gi"}, ["ReadWriteMany"], "topkube-dashboards"
    volume = {
        "capacity": size,
        "accessModes": modes,
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": LANGUAGE, "name": "checkpoints"},
    }
    claim = {"accessModes": modes, "resources": {"requests": size}, "storageClassName": ""}
    target.core.create_persistent_volume({"metadata": {"name": name}, "spec": volume})
    try:
        target.core.create_namespaced_persistent_volume_claim(
            LANGUAGE, {"metadata": {"name": "checkpoints"}, "spec": claim}
        )
        yield
    finally:
        target.core.delete_persistent_volume(name)
        shutil.rmtree(folder, ignore_errors=True)


def submit_jobs(namespaces: dict[str, Namespace]) -> None:
    sparse = {"algorithm": "hitopk", "density": 0.01, "warmupSteps": 40}
    gpt = build_job("gpt-stdlib", GPT, slots=2, aggregation={**sparse, "wire": "bf16"})
    gpt["spec"]["checkpoint"] = {"claimName": "checkpoints", "everySteps": 20}
    namespaces[LANGUAGE].create(gpt)
    namespaces[VISION].create(build_job("autoencoder", ["python", "-c", IMAGES], aggregation=sparse))
    sample: dict[str, Any] = yaml.safe_load((ROOT / "manifests/samples/digits-cnn.yaml").read_text())
    sample["spec"]["template"]["spec"]["containers"][0]["image"] = images.RUNTIME.name
    namespaces[VISION].create(sample)
    waits = build_job("waits-for-a-node", ["true"])
    waits["spec"]["template"]["spec"]["nodeSelector"] = {"accelerator": "h200"}
    namespaces[VISION].create(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="how long to watch (%(default)s)")
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "docs/images", help="(%(default)s)")
    args = parser.parse_args()
    if BINARY is None:
        sys.exit("prometheus is not installed. Next: apt-get install prometheus")
    target, cluster = find_running_cluster()
    with (
        tempfile.TemporaryDirectory() as folder,
        create_namespaces(target) as namespaces,
        create_checkpoint_claim(target, cluster),
    ):
        targets = ScrapeTargets(target, Path(folder), list(namespaces))
        with run_prometheus(Path(folder), targets.jobs) as server:
            submit_jobs(namespaces)
            began, killed = time.monotonic(), False
            while (passed := time.monotonic() - began) < args.seconds:
                targets.refresh()
                if not killed and passed > args.seconds / 2:
                    killed_pod = namespaces[LANGUAGE].list_pods("worker", "gpt-stdlib")[1]
                    target.kill_container(killed_pod, "worker")
                    killed = True
                time.sleep(1)
            variables = {"topkube-job": {"namespace": LANGUAGE, "training_job": "gpt-stdlib"}}
            for dashboard in DASHBOARDS:
                path = args.directory / f"{dashboard.uid.replace('topkube-', 'dashboards-')}.png"
                draw_dashboard(server, dashboard, path, args.seconds, "20s", **variables.get(dashboard.uid, {}))
                print(path)
        for namespace in namespaces.values():
            print(*namespace.describe(), sep="\n")


if __name__ == "__main__":
    main()
