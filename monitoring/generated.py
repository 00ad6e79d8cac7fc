"""The generated files: their paths in the repository and what they hold."""

from __future__ import annotations

from pathlib import Path

from monitoring import alerts, reference, values
from monitoring.dashboards import DASHBOARDS

ROOT = Path(__file__).parents[1]


def files() -> dict[str, str]:
    """Path from the repository's root to content."""
    dashboards = {f"charts/topkube/dashboards/{one.uid}.json": one.json() for one in DASHBOARDS}
    return {
        "docs/metrics.md": reference.markdown(),
        "docs/chart-values.md": values.markdown(ROOT / "charts/topkube/values.yaml"),
        **dashboards,
        "charts/topkube/files/alerts.yaml": alerts.rules(),
    }


def write() -> None:
    """Writes them all."""
    for name, content in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def stale() -> list[str]:
    """Files that hold something else than they should."""
    return [name for name, content in files().items() if _read(ROOT / name) != content]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
