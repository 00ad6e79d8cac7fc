"""Tests skip, with a reason, if a cluster lacks what they need. These tests need no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import needs
import pytest


def _node(name: str, gpus: str = "", images: tuple[str, ...] = ()) -> Any:
    allocatable = {needs.GPU: gpus} if gpus else {}
    listed = [SimpleNamespace(names=[image]) for image in images]
    status = SimpleNamespace(allocatable=allocatable, images=listed)
    return SimpleNamespace(metadata=SimpleNamespace(name=name), status=status)


def _target(*nodes: Any, local: object | None = None) -> Any:
    core = SimpleNamespace(list_node=lambda: SimpleNamespace(items=list(nodes)))
    return SimpleNamespace(core=core, local=local, nodes=lambda: [node.metadata.name for node in nodes])


def test_a_third_node_is_missed() -> None:
    needs.nodes(_target(_node("a"), _node("b")), 2, "one for each worker")
    with pytest.raises(pytest.skip.Exception, match=r"needs 3 nodes.*NODES=3"):
        needs.nodes(_target(_node("a"), _node("b")), 3, "to replace a lost one")


def test_gpus_are_missed() -> None:
    needs.gpus(_target(_node("a", "4"), _node("b", "1")), 2)
    with pytest.raises(pytest.skip.Exception, match="1 nodes have one"):
        needs.gpus(_target(_node("a", "4"), _node("b", "0"), _node("c")), 2)


def test_an_image_is_missed_where_its_node_lists_all_images() -> None:
    there = ("docker.io/topkube/runtime:1",)
    needs.image(_target(_node("a", images=there)), "topkube/runtime:1")
    needs.image(_target(_node("a", images=("x",) * 50)), "topkube/runtime:1")
    needs.image(_target(_node("a"), local=object()), "topkube/runtime:1")
    with pytest.raises(pytest.skip.Exception, match="b lacks it"):
        needs.image(_target(_node("a", images=there), _node("b")), "topkube/runtime:1")


def test_the_folder_of_the_node_cache_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(needs.NODE_CACHE_VARIABLE, raising=False)
    needs.folder_on_each_node(_target(local=object()))
    with pytest.raises(pytest.skip.Exception, match="node-cache"):
        needs.folder_on_each_node(_target())
    monkeypatch.setenv(needs.NODE_CACHE_VARIABLE, "1")
    needs.folder_on_each_node(_target())
