"""Calls of `topkube plan` for its tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topkube.cli.entry import run_app

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "char-gpt.yaml"
RESNET = ["--model", "resnet50", "--workers", "16", "--slots", "8", "--link", "25Gbit/s", "--memory", "300GB/s"]
RESNET += ["--compute", "30TFLOP/s", "--batch", "64"]
"""The cluster of the paper, and its time of a step."""


def read_plan(*arguments: str, capsys: Any) -> dict[str, Any]:
    assert run_app(["plan", *arguments, "-o", "json"]) == 0
    return dict(json.loads(capsys.readouterr().out))
