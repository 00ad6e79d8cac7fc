"""What a test needs of a cluster: nodes, GPUs, images, a folder on each node. If something is missing, the test skips,
with the reason and the next step."""

from __future__ import annotations

import os
from typing import Any

import pytest
from target import Target

GPU = "nvidia.com/gpu"
_LISTED_IMAGES = 50
"""Kubelets list no more images than this."""
NODE_CACHE_VARIABLE = "TOPKUBE_TEST_NODE_CACHE"


def require_nodes(target: Target, count: int, purpose: str) -> None:
    """Skip unless `count` nodes are Ready."""
    ready = len(target.list_nodes())
    if ready < count:
        pytest.skip(
            f"needs {count} nodes that are Ready, {purpose}; there are {ready}. Next: make cluster NODES={count}"
        )


def require_gpus(target: Target, count: int) -> None:
    """Skip unless `count` nodes have a GPU."""
    able = [node.metadata.name for node in target.core.list_node().items if _count_gpus(node) > 0]
    if len(able) < count:
        pytest.skip(f"needs a GPU ({GPU}) on each of {count} nodes; {len(able)} nodes have one")


def require_image(target: Target, name: str) -> None:
    """Skip if a node that could run pods does not have the image, as far as its kubelet lists images."""
    if target.local is not None:
        return  # the fixture `target` has loaded all images
    lacking = [node.metadata.name for node in target.core.list_node().items if not _may_have_image(node, name)]
    if lacking:
        pytest.skip(
            f"needs the image {name} on every node; {', '.join(lacking)} lacks it. Next: load or push the image"
        )


def require_cache_folder(target: Target) -> None:
    """Skip on a cluster whose nodes are not known to have the folder of the node cache."""
    if target.local is None and not os.environ.get(NODE_CACHE_VARIABLE):
        pytest.skip(
            "needs the folder of the node cache (manifests/node-cache) on each node. "
            f"Next: create it, and set {NODE_CACHE_VARIABLE}=1"
        )


def _count_gpus(node: Any) -> int:
    amount = (node.status.allocatable or {}).get(GPU, "0")
    return int(amount) if str(amount).isdigit() else 0


def _may_have_image(node: Any, name: str) -> bool:
    listed = node.status.images or []
    known = {text for entry in listed for text in entry.names or ()}
    return len(listed) >= _LISTED_IMAGES or any(text == name or text.endswith(f"/{name}") for text in known)
