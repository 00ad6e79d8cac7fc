"""Tests on a cluster skip, with a reason, if the cluster lacks what they need. These tests need no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import needs
import pytest


def _build_node(name: str, gpus: str = "", images: tuple[str, ...] = ()) -> Any:
    allocatable = {needs.GPU: gpus} if gpus else {}
    listed = [SimpleNamespace(names=[image]) for image in images]
    status = SimpleNamespace(allocatable=allocatable, images=listed)
    return SimpleNamespace(metadata=SimpleNamespace(name=name), status=status)


def _build_target(*nodes: Any, local: object | None = None) -> Any:
    core = SimpleNamespace(list_node=lambda: SimpleNamespace(items=list(nodes)))
    return SimpleNamespace(core=core, local=local, list_nodes=lambda: [node.metadata.name for node in nodes])


def test_a_test_skips_if_nodes_are_missing() -> None:
    needs.require_nodes(_build_target(_build_node("a"), _build_node("b")), 2, "one for each worker")
    with pytest.raises(pytest.skip.Exception, match=r"needs 3 nodes.*NODES=3"):
        needs.require_nodes(_build_target(_build_node("a"), _build_node("b")), 3, "to replace a lost one")


def test_a_test_skips_if_gpus_are_missing() -> None:
    needs.require_gpus(_build_target(_build_node("a", "4"), _build_node("b", "1")), 2)
    with pytest.raises(pytest.skip.Exception, match="1 nodes have one"):
        needs.require_gpus(_build_target(_build_node("a", "4"), _build_node("b", "0"), _build_node("c")), 2)


def test_a_test_skips_if_a_node_that_lists_all_images_lacks_one_of_them() -> None:
    images = ("docker.io/topkube/runtime:1",)
    needs.require_image(_build_target(_build_node("a", images=images)), "topkube/runtime:1")
    needs.require_image(_build_target(_build_node("a", images=("x",) * 50)), "topkube/runtime:1")
    needs.require_image(_build_target(_build_node("a"), local=object()), "topkube/runtime:1")
    with pytest.raises(pytest.skip.Exception, match="b lacks it"):
        needs.require_image(_build_target(_build_node("a", images=images), _build_node("b")), "topkube/runtime:1")


def test_a_test_skips_if_the_folder_of_the_node_cache_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(needs.NODE_CACHE_VARIABLE, raising=False)
    needs.require_cache_folder(_build_target(local=object()))
    with pytest.raises(pytest.skip.Exception, match="node-cache"):
        needs.require_cache_folder(_build_target())
    monkeypatch.setenv(needs.NODE_CACHE_VARIABLE, "1")
    needs.require_cache_folder(_build_target())
