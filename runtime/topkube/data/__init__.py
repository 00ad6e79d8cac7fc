"""Training data: how samples are split over ranks."""

from __future__ import annotations

from topkube.data.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
