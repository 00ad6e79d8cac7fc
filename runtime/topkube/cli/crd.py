"""`topkube crd`: the CustomResourceDefinitions as manifests."""

from __future__ import annotations

import re

from topkube.errors import ArgumentError
from topkube.job.crd import RULES_SINCE, format_cached_dataset_crd, format_crd


def show_crd(kubernetes: str, cached_datasets: bool = False) -> None:
    """Print a definition for a cluster of this version, such as '1.25' or 'v1.20.2'."""
    match = re.fullmatch(r"v?([0-9]{1,4})\.([0-9]{1,4})([.+-].*)?", kubernetes)
    if match is None:
        raise ArgumentError(
            f"{kubernetes!r} is not a version of Kubernetes",
            next_step="give a version such as 1.25; `kubectl version` prints it",
        )
    if cached_datasets:
        print(format_cached_dataset_crd(), end="")
        return
    print(format_crd(rules=(int(match[1]), int(match[2])) >= RULES_SINCE), end="")
