"""The docs: they build, links hold, and what stands in them is true: commands exist, files are valid."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import typer
import yaml

from monitoring.alerts import ALERTS
from monitoring.generated import ROOT
from topkube.cli import reference
from topkube.cli.app import app
from topkube.job import TrainingJob

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
COMMANDS = typer.main.get_command(app)


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for language, text in found if language in languages]


def lines_of(page: Path) -> list[str]:
    """Commands that a page tells to type."""
    lines = [line for block in blocks(page, "sh", "console", "") for line in block.splitlines()]
    return [line.strip().removeprefix("$ ") for line in lines]


def test_the_site_builds_and_every_link_holds(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "site/quickstart/index.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_picture_is_there(page: Path) -> None:
    """Of the README also the files that it links to: the site's builder does not see it."""
    text = page.read_text()
    pictures = re.findall(r"!\[[^][]*\]\(([^)\s]+)\)", text)
    assert len(pictures) == text.count("!["), "a picture without a file"
    linked = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) if page.name == "README.md" else pictures
    for path in linked:
        assert "://" in path or (page.parent / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in lines_of(page):
        if not line.startswith("topkube "):
            continue
        words = [word for word in shlex.split(line, comments=True)[1:] if word not in ("…", "...")]
        command: Any = COMMANDS
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            name = words.pop(0)
            found = command.get_command(None, name)
            assert found is not None, line
            command = found
        options = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in words[: words.index("--")] if "--" in words else words:
            if word.startswith("-"):
                assert word.partition("=")[0] in options | {"--help", "-h"}, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_jobs_in_the_docs_are_valid_and_files_that_commands_name_are_there(page: Path) -> None:
    for text in blocks(page, "yaml"):
        if "kind: TrainingJob" in text and "…" not in text:
            TrainingJob.from_yaml(text)
    for line in lines_of(page):
        for path in re.findall(r"(?<!--json )\b(?:manifests|charts|benchmarks)/[\w./-]+", line):
            assert (ROOT / path).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_docs_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_the_reference_of_commands_is_fresh() -> None:
    page = (DOCS / "cli-reference.md").read_text()
    assert page == reference.markdown() + "\n", "python -m topkube.cli.reference > docs/cli-reference.md"


def test_every_command_is_told_of() -> None:
    """In the guide too, not just in the reference."""
    guide = (DOCS / "cli.md").read_text()
    for name in re.findall(r"^## topkube (\w+)", reference.markdown(), re.M):
        assert re.search(rf"^## topkube {name}\b", guide, re.M), name


def test_values_that_the_docs_set_are_valid() -> None:
    text = "".join(page.read_text() for page in PAGES)
    sets = [one.replace("'", "") for one in re.findall(r"--set ([\w.]+=[^\s`]+)", text)]
    assert len(sets) >= 4
    with helm.Chart.load(ROOT / "charts/topkube") as chart:
        for one in sets:
            chart.validate_schema(helm.parse_set_string(one))
        for name in re.findall(r"`((?:metrics|webhook|crds|rbac|image|networkPolicy)\.[\w.]+)(?:=\w+)?`", text):
            value: Any = chart.values
            for part in name.split("."):
                assert part in value, name
                value = value[part]


def test_errors_in_the_troubleshooting_page_are_said_somewhere() -> None:
    said = "".join(
        path.read_text()
        for root in ("runtime", "operator", "charts")
        for path in (ROOT / root).rglob("*.*")
        if path.suffix in (".py", ".tpl")
    )
    said = re.sub(r"\"\s*\n\s*f?\"", "", said)  # strings over several lines
    said = re.sub(r"\{[^{}]*\}", "", said)
    page = (DOCS / "troubleshooting.md").read_text()
    here = page[page.index("## On your machine") : page.index("## On a cluster")]
    first_cells = [line.split("|")[1] for line in here.splitlines() if line.startswith("| `")]
    texts = [text for cell in first_cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(texts) >= 10
    for text in texts:
        assert text in said, text


def test_the_alerts_page_lists_every_alert_with_its_severity() -> None:
    page = (DOCS / "monitoring.md").read_text()
    rows = dict(re.findall(r"^\| (TopKube\w+) \| (\w+) \|", page, re.M))
    assert rows == {alert.name: alert.severity for alert in ALERTS}


def test_the_quickstart_runs() -> None:
    """What takes no minutes of it; the training itself is `make demo`, and tests/unit/test_run.py."""
    quick = [shlex.split(line, comments=True) for line in lines_of(DOCS / "quickstart.md") if line == "topkube doctor"]
    assert quick
    for command in quick:
        ended = subprocess.run(
            [sys.executable, "-m", "topkube.cli", *command[1:]], capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_the_docs_show_of_a_plan_is_what_it_prints() -> None:
    shown = [block for block in blocks(DOCS / "cli.md", "console") if block.startswith("$ topkube plan ")]
    assert shown
    for block in shown:
        command, _, said = block.removeprefix("$ ").partition("\n")
        ended = subprocess.run(
            [sys.executable, "-m", "topkube.cli", *shlex.split(command)[1:]], capture_output=True, text=True, timeout=60
        )
        assert [line.rstrip() for line in ended.stdout.splitlines()] == said.splitlines()


def test_the_scrape_configuration_is_one(tmp_path: Path) -> None:
    (text,) = blocks(DOCS / "monitoring.md", "yaml")
    assert [job["job_name"] for job in yaml.safe_load(text)["scrape_configs"]] == [
        "topkube-operator",
        "topkube-workers",
    ]
