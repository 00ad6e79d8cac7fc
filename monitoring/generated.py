"""The generated files: their paths in the repository and their contents."""

from __future__ import annotations

from pathlib import Path

from monitoring import alert_files, reference, values
from monitoring.dashboards import DASHBOARDS

ROOT = Path(__file__).parents[1]


def build_files() -> dict[str, str]:
    """Return the contents by path from the repository's root."""
    dashboards = {f"charts/topkube/dashboards/{dashboard.uid}.json": dashboard.to_json() for dashboard in DASHBOARDS}
    return {
        "docs/metrics.md": reference.build_markdown(),
        "docs/chart-values.md": values.build_markdown(ROOT / "charts/topkube/values.yaml"),
        **dashboards,
        "charts/topkube/files/alerts.yaml": alert_files.build_rules(),
        "charts/topkube/files/alert-templates.yaml": alert_files.build_templates(),
        "docs/alerts.md": alert_files.build_markdown(),
    }


def write_files() -> None:
    """Write all generated files."""
    for name, content in build_files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def list_stale_files() -> list[str]:
    """Return the files whose contents are not up to date."""
    return [name for name, content in build_files().items() if _read_file(ROOT / name) != content]


def _read_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
