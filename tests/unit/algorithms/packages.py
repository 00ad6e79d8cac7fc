"""Packages outside the repository, installed without pip and without a network: their files and metadata are written
into a folder of `sys.path`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/new-algorithm.md"


def install_page(directory: Path) -> None:
    """Install the package of docs/new-algorithm.md, exactly as it is printed there, into `directory`."""
    files = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE.read_text(), re.M | re.S)
    assert {name for name, _ in files} == {"pyproject.toml", "acme_topkube/__init__.py", "acme_topkube/stride_k.py"}
    for name, text in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    install(directory, project["name"], project["version"], project["entry-points"]["topkube.algorithms"])


def install(directory: Path, name: str, version: str, algorithms: dict[str, str]) -> None:
    """Write the metadata of an installed package that declares `algorithms`: name -> module:attribute."""
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{algorithm} = {place}\n" for algorithm, place in algorithms.items())
    (metadata / "entry_points.txt").write_text(f"[topkube.algorithms]\n{lines}")
