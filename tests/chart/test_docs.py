"""The docs build, their links work, and what they show exists and is valid: commands, options, jobs, values."""

from __future__ import annotations

import fnmatch
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import typer
import yaml

import topkube
import topkube.data
import topkube.kernels
from monitoring.alerts import ALERTS
from monitoring.generated import ROOT
from topkube.algorithms import reference as algorithms_page
from topkube.cli import reference
from topkube.cli.app import app
from topkube.cli.run import summary
from topkube.job import TrainingJob
from topkube_operator.model.names import JOB_NAME

DOCS = ROOT / "docs"
OUTSIDE_THE_SITE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md")]
PAGES = sorted([*DOCS.rglob("*.md"), *OUTSIDE_THE_SITE])
COMMANDS = typer.main.get_command(app)


def read_blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks in one of these languages."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for language, text in fenced if language in languages]


def read_commands(page: Path) -> list[str]:
    """Return the commands that a page shows."""
    lines = [line for block in read_blocks(page, "sh", "console", "") for line in block.splitlines()]
    return [line.strip().removeprefix("$ ") for line in lines]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link or a name without a docstring is an error."""
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_the_site_builds_and_every_link_works(site: Path) -> None:
    assert (site / "quickstart/index.html").exists()


@pytest.mark.parametrize("module", [topkube, topkube.kernels, topkube.data], ids=lambda module: module.__name__)
def test_the_reference_shows_every_public_name(site: Path, module: Any) -> None:
    """The reference also shows the names that a module loads on first use."""
    name = module.__name__
    page = (site / "api" / name.removeprefix("topkube.") / "index.html").read_text()
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert f'id="{name}.{public}"' in page, public
            assert inspect.getdoc(value), public


def test_paths_in_the_architecture_exist() -> None:
    """Paths may begin at any folder: `training/run.py` is in runtime/topkube."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`([\w./-]+/[\w.*-]*|[\w/-]+\.(?:py|cpp|hpp|cu|yaml))`", text)) - {"kernels.encode/decode"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    present = {f"/{folder}/" for file in tracked for folder in [Path(file), *Path(file).parents]}
    assert len(paths) > 80
    for path in paths:
        assert fnmatch.filter(present, f"*/{path.rstrip('/')}/"), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_picture_exists(page: Path) -> None:
    """For pages outside the site, also check the files that they link to."""
    text = page.read_text()
    pictures = re.findall(r"!\[[^][]*\]\(([^)\s]+)\)", text)
    assert len(pictures) == text.count("!["), "a picture without a file"
    linked = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) if page in OUTSIDE_THE_SITE else pictures
    for path in linked:
        assert "://" in path or (page.parent / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in read_commands(page):
        if not line.startswith("topkube "):
            continue
        words = [word for word in shlex.split(line, comments=True)[1:] if word not in ("…", "...")]
        command: Any = COMMANDS
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            name = words.pop(0)
            subcommand = command.get_command(None, name)
            assert subcommand is not None, line
            command = subcommand
        options = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in words[: words.index("--")] if "--" in words else words:
            if word.startswith("-"):
                assert word.partition("=")[0] in options | {"--help", "-h"}, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_jobs_in_the_docs_are_valid_and_files_in_commands_exist(page: Path) -> None:
    for text in read_blocks(page, "yaml"):
        if "kind: TrainingJob" in text and "…" not in text:
            TrainingJob.from_yaml(text)
    for line in read_commands(page):
        for path in re.findall(r"(?<!--json )\b(?:manifests|charts|benchmarks)/[\w./-]+", line):
            assert (ROOT / path).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_docs_compiles(page: Path) -> None:
    for text in read_blocks(page, "python"):
        compile(text, str(page), "exec")


def test_the_page_of_the_summary_is_fresh() -> None:
    assert (DOCS / "run-summary.md").read_text() == summary.build_page(), (
        "python -m topkube.cli.run.summary > docs/run-summary.md"
    )


def test_the_reference_of_commands_is_fresh() -> None:
    page = (DOCS / "cli-reference.md").read_text()
    assert page == reference.build_page() + "\n", "python -m topkube.cli.reference > docs/cli-reference.md"


def test_the_guide_describes_every_command() -> None:
    """Each command has a section of its own in docs/cli.md, beside the generated reference."""
    guide = (DOCS / "cli.md").read_text()
    for name in re.findall(r"^## topkube (\w+)", reference.build_page(), re.M):
        assert re.search(rf"^## topkube {name}\b", guide, re.M), name


def test_values_that_the_docs_set_are_valid() -> None:
    text = "".join(page.read_text() for page in PAGES)
    messages = "".join(path.read_text() for path in (ROOT / "charts/topkube/templates").rglob("*.*"))
    assert not re.search(r"--set [\w.]+=\{", text + messages), "a shell makes several words of {a,b}: quote it"
    settings = [setting.replace("'", "") for setting in re.findall(r"--set ([\w.]+=[^\s`]+)", text)]
    assert len(settings) >= 4
    with helm.Chart.load(ROOT / "charts/topkube") as chart:
        for setting in settings:
            chart.validate_schema(helm.parse_set_string(setting))
        for name in re.findall(r"`((?:metrics|webhook|crds|rbac|image|networkPolicy)\.[\w.]+)(?:=\w+)?`", text):
            value: Any = chart.values
            for part in name.split("."):
                assert part in value, name
                value = value[part]


def test_errors_in_the_troubleshooting_page_exist_in_the_code() -> None:
    code = "".join(
        path.read_text()
        for root in ("runtime", "operator", "charts")
        for path in (ROOT / root).rglob("*.*")
        if path.suffix in (".py", ".tpl")
    )
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)  # strings over several lines
    code = re.sub(r"\{[^{}]*\}", "", code)
    page = (DOCS / "troubleshooting.md").read_text()
    section = page[page.index("## On your machine") : page.index("## On a cluster")]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    texts = [text for cell in first_cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(texts) >= 10
    for text in texts:
        assert text in code, text


def test_the_alerts_page_lists_every_alert_with_its_severity() -> None:
    page = (DOCS / "alerts.md").read_text()
    rows = dict(re.findall(r"^\| (TopKube\w+) \| (\w+) \|", page, re.M))
    assert rows == {alert.name: alert.severity for alert in ALERTS}


def test_the_first_command_of_the_quickstart_runs() -> None:
    """Run `topkube doctor`, which takes seconds. `make demo` and tests/unit/cli/test_run.py run the training itself."""
    commands = [
        shlex.split(line, comments=True) for line in read_commands(DOCS / "quickstart.md") if line == "topkube doctor"
    ]
    assert commands
    for command in commands:
        run = subprocess.run(
            [sys.executable, "-m", "topkube.cli", *command[1:]], capture_output=True, text=True, timeout=280
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_function_in_the_page_of_the_client_trains(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(read_blocks(DOCS / "sdk.md", "python")[0])
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert 0 < float(run.stdout.split()[-1]) < 2.3, "less than the loss of a guess"


def test_the_plan_in_the_docs_is_the_output_of_the_command() -> None:
    plans = [block for block in read_blocks(DOCS / "cli.md", "console") if block.startswith("$ topkube plan ")]
    assert plans
    for block in plans:
        command, _, output = block.removeprefix("$ ").partition("\n")
        run = subprocess.run(
            [sys.executable, "-m", "topkube.cli", *shlex.split(command)[1:]],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert [line.rstrip() for line in run.stdout.splitlines()] == output.splitlines()


def is_scraped(configuration: dict[str, Any], pod: dict[str, str]) -> bool:
    """Return True if the rules of a scrape configuration keep a port of a pod. `pod` has the ends of the names of the
    labels __meta_kubernetes_pod_…"""
    for rule in configuration["relabel_configs"]:
        if rule.get("action") in ("keep", "drop"):
            values = [pod[label.removeprefix("__meta_kubernetes_pod_")] for label in rule["source_labels"]]
            matches = re.fullmatch(rule["regex"], ";".join(values)) is not None
            if matches != (rule["action"] == "keep"):
                return False
    return True


def test_the_scrape_configuration_is_valid(tmp_path: Path) -> None:
    (text,) = [text for text in read_blocks(DOCS / "monitoring.md", "yaml") if "scrape_configs" in text]
    configurations = {job["job_name"]: job for job in yaml.safe_load(text)["scrape_configs"]}
    assert list(configurations) == ["topkube-operator", "topkube-workers"]
    for name, port in (("topkube-operator", "metrics"), ("topkube-workers", "topkube-metrics")):
        for phase, port_name, expected in (
            ("Running", port, True),
            ("Running", "http", False),
            ("Pending", port, True),
            # The address of a pod that has ended may belong to a worker of another job.
            ("Succeeded", port, False),
            ("Failed", port, False),
        ):
            pod = {"container_port_name": port_name, "phase": phase}
            assert is_scraped(configurations[name], pod) == expected, (name, pod)


def test_the_values_of_the_monitoring_pages_are_valid() -> None:
    with helm.Chart.load(ROOT / "charts/topkube") as chart:
        for page in ("alerts.md", "monitoring.md"):
            examples = [text for text in read_blocks(DOCS / page, "yaml") if "scrape_configs" not in text]
            assert examples, page
            for text in examples:
                chart.validate_schema(yaml.safe_load(text))
                chart.render(yaml.safe_load(text), name="topkube", namespace="topkube-system")


def test_the_policy_for_namespaces_that_deny_outgoing_connections_is_valid() -> None:
    (text,) = [text for text in read_blocks(DOCS / "platforms.md", "yaml") if "kind: NetworkPolicy" in text]
    policy = yaml.safe_load(text)
    kubernetes_validate.validate(policy, "1.33", strict=True)
    pods = {"matchExpressions": [{"key": JOB_NAME, "operator": "Exists"}]}
    assert (policy["spec"]["podSelector"], policy["spec"]["egress"]) == (pods, [{"to": [{"podSelector": pods}]}])


def test_every_row_of_the_conformance_table_has_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \| ([●◐○]) \| (.*?) \|$", (DOCS / "conformance.md").read_text(), re.M)
    assert len(rows) > 40
    for behaviour, _, mark, proof in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", proof)
        scripts = re.findall(r"`(benchmarks/[\w/]+\.py)`", proof)
        for file, name in tests:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.M), f"{behaviour}: {name}"
        assert all((ROOT / script).exists() for script in scripts)
        words = re.sub(r"`[^`]*`", "", proof).split()
        assert tests or scripts or mark == "○", f"{behaviour}: no test"
        assert mark == "●" or len(words) > 4, f"{behaviour}: no reason"


def test_the_tests_that_the_page_on_gpus_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "gpu.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}: {name}"


def test_the_reference_of_algorithms_is_fresh() -> None:
    page = (DOCS / "algorithms.md").read_text()
    assert page == algorithms_page.build_markdown(), "python -m topkube.algorithms.reference > docs/algorithms.md"
