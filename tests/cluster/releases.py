"""Run the commands of the docs as they are written: `helm …` by Helm's own SDK, kubectl and topkube as programs."""

from __future__ import annotations

import argparse
import copy
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helm_python as helm

REPOSITORY = Path(__file__).resolve().parents[2]


def read_commands(page: str, begin: str, end: str = "\n## ") -> list[str]:
    """Return the commands in the `sh` blocks of docs/PAGE between the text `begin` and the next `end`."""
    text = (REPOSITORY / "docs" / page).read_text()
    start = text.index(begin)
    stop = text.find(end, start + len(begin))
    blocks = re.findall(r"^```sh\n(.*?)^```", text[start : stop if stop >= 0 else None], re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines, f"docs/{page} has no commands after {begin!r}"
    return lines


class Commands:
    """A shell for the commands helm, kubectl and topkube. Every install and upgrade gets `values`, in addition to the
    values that the command sets."""

    def __init__(self, kubeconfig: Path, kubectl: Path, values: dict[str, Any]) -> None:
        self.kubeconfig, self.kubectl, self.values = kubeconfig, kubectl, values

    def run(self, line: str, chart: Path | None = None, **values: Any) -> dict[str, Any]:
        """Run a line. Return the result of Helm's SDK, or the output of a program as "output". `chart` replaces the
        chart that the line names, and `values` are further values. Raises HelmError, or AssertionError if kubectl or
        topkube fails."""
        program, *words = shlex.split(line, comments=True)
        if program in ("kubectl", "topkube"):
            return {"output": self._call(program, words)}
        assert program == "helm", line
        parser = argparse.ArgumentParser(prog="helm", exit_on_error=False)
        parser.add_argument("action", choices=["install", "upgrade", "rollback", "test", "uninstall"])
        parser.add_argument("name")
        parser.add_argument("chart", nargs="?")
        parser.add_argument("-n", "--namespace", default="default")
        parser.add_argument("--create-namespace", action="store_true")
        parser.add_argument("--set", action="append", default=[])
        arguments = parser.parse_args(words)
        source = str(chart or REPOSITORY / str(arguments.chart))
        merged = merge_values(self.values, values, *(helm.parse_set_string(text) for text in arguments.set))
        with self.open_helm(arguments.namespace) as config:
            match arguments.action:
                case "install":
                    return config.install(
                        source, arguments.name, merged, namespace=arguments.namespace,
                        create_namespace=arguments.create_namespace,
                        wait="watcher", timeout=400,
                    )  # fmt: skip
                case "upgrade":
                    return config.upgrade(
                        source, arguments.name, merged, namespace=arguments.namespace, wait="watcher", timeout=400
                    )
                case "rollback":
                    config.rollback(arguments.name, wait="watcher", timeout=400)
                    return config.status(arguments.name)
                case "test":
                    return config.test(arguments.name, timeout=400, logs=True)
        with self.open_helm(arguments.namespace) as config:
            return config.uninstall(arguments.name, wait="watcher", timeout=400)

    @contextmanager
    def open_helm(self, namespace: str) -> Iterator[helm.Config]:
        config = helm.Config(kubeconfig_path=self.kubeconfig, namespace=namespace)
        try:
            yield config
        finally:
            config.close()

    def _call(self, program: str, words: list[str]) -> str:
        called = [str(self.kubectl)] if program == "kubectl" else [sys.executable, "-m", "topkube.cli"]
        ended = subprocess.run(
            [*called, *words],
            cwd=REPOSITORY,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert ended.returncode == 0, f"{program} {' '.join(words)}: {ended.stdout}{ended.stderr}"
        return ended.stdout


def merge_values(*values: dict[str, Any]) -> dict[str, Any]:
    """Return merged values, as Helm merges them: later values win, and maps are merged."""
    result: dict[str, Any] = {}
    for source in values:
        for name, value in source.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = merge_values(result[name], value) if both else copy.deepcopy(value)
    return result
