"""The program of the ranks in these tests: it trains a small network on a folder of files through the data cache. It
creates the files if they do not exist. Usage: FOLDER CACHE"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import topkube


def decode(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, np.float32).copy()


def make_files(folder: Path) -> None:
    """Write 256 small files. Their content and their times are the same in every folder."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    part.mkdir()
    for number, sample in enumerate(np.random.default_rng(0).standard_normal((256, 64), np.float32)):
        (part / f"{number}.bin").write_bytes(sample.tobytes())
        os.utime(part / f"{number}.bin", (0, 0))
    with contextlib.suppress(OSError):  # another rank of this node was faster
        part.rename(folder)


make_files(Path(sys.argv[1]))
topkube.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
topkube.broadcast_parameters(model)
optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
dataset = topkube.data.CachedDataset(sys.argv[1], decode=decode, cache_directory=sys.argv[2], memory_limit=1 << 20)
sampler = topkube.data.DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
with topkube.checkpointing(model, optimizer, sampler) as run:
    for x in run.progress(loader, total=1_000_000):
        time.sleep(0.05)  # two jobs of two ranks would keep all processors of a test machine busy
        run.loss(nn.functional.mse_loss(model(x), x)).backward()
        optimizer.step()
        optimizer.zero_grad()
