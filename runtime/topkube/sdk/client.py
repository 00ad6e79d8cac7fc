"""`topkube.TrainingClient`: train a function, and follow, stop and remove its job."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.script_job import IMAGE, make_job_name
from topkube.errors import ClusterError, JobError
from topkube.job import API_VERSION, KIND, TrainingJob
from topkube.sdk.backend import Backend, build_failure, read_phase
from topkube.sdk.function import build_script
from topkube.source.packing import pack_source
from topkube.telemetry.history import History

SCRIPT = "topkube_function.py"
"""The file with the function, in the folder in which the ranks run."""
_NAME_CHARACTERS = 56


class TrainingClient:
    """Trains functions on a Kubernetes cluster, or on this machine, with the same calls.

    ```python
    client = TrainingClient()                       # the cluster of the kubeconfig; backend="local": this machine
    name = client.train(train, arguments={"epochs": 3}, workers=4, slots=8, aggregation="hitopk")
    job = client.wait(name)                         # shows progress; in a notebook also the plot
    ```
    """

    def __init__(
        self,
        backend: Literal["cluster", "local"] = "cluster",
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
        directory: str | Path = "runs",
    ) -> None:
        """Connect to a cluster, as `kubectl` would with these options, or use this machine.

        `directory` is the folder of local jobs; it has no effect on a cluster. Local jobs end with this process. Raises
        ClusterError if there is no cluster.
        """
        self._backend: Backend
        if backend == "local":
            from topkube.sdk.local import LocalBackend

            self._backend = LocalBackend(Path(directory))
        elif backend == "cluster":
            from topkube.sdk.cluster import ClusterBackend

            self._backend = ClusterBackend(
                ClusterLocation(Path(kubeconfig) if kubeconfig else None, context, namespace)
            )
        else:
            raise ClusterError(f"there is no backend {backend!r}", next_step='use "cluster" or "local"')

    def train(
        self,
        function: Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        workers: int = 1,
        slots: int = 1,
        packages: Sequence[str] = (),
        aggregation: str | Mapping[str, Any] | None = None,
        name: str | None = None,
        image: str | None = None,
        source: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        resources: Mapping[str, Any] | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> str:
        """Start a job that calls `function` in `workers` x `slots` ranks, and return the job's name at once.

        Each rank runs the function's source with `arguments`, as JSON. The function imports what it needs; closures,
        lambdas and names of the notebook are refused. `source` is a folder whose files the ranks find in their working
        directory, such as modules of yours. `packages` are pip requirements that the pods install. `aggregation` is the
        name of an algorithm, or fields of `spec.aggregation`; by default "auto", which measures the links and chooses.
        `environment` and `resources` are those of the worker's container, such as {"limits": {"nvidia.com/gpu": 8}}.
        `spec` has other fields of a TrainingJob's spec, with YAML's names: {"checkpoint": {...}, "runPolicy": {...}}.
        The default `name` is the function's, with a random ending.

        Raises SourceError if the function or the folder cannot be sent, JobError if the job is invalid, and
        ClusterError if the cluster refuses it.
        """
        folder = Path(source) if source is not None else None
        script = build_script(function, arguments or {}, folder)
        code = pack_source(folder, {SCRIPT: script.encode()})
        container: dict[str, Any] = {"name": "worker", "image": image or IMAGE, "command": ["python", SCRIPT]}
        if environment:
            container["env"] = [{"name": key, "value": value} for key, value in environment.items()]
        if resources:
            container["resources"] = dict(resources)
        fields: dict[str, Any] = {"workers": workers, "slotsPerWorker": slots, **(spec or {})}
        fields.setdefault("template", {"spec": {"containers": [container]}})
        if aggregation is not None:
            chosen = {"algorithm": aggregation} if isinstance(aggregation, str) else dict(aggregation)
            fields["aggregation"] = chosen
        job = TrainingJob.parse(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"name": name or _make_name(function.__name__)},
                "spec": fields,
            }
        )
        if job.spec.source is not None or job.spec.setup is not None:
            raise JobError(
                "spec.source and spec.setup are written by train()", next_step="use the parameters source and packages"
            )
        self._backend.submit(job, code, tuple(packages))
        return job.name

    def get(self, name: str) -> TrainingJob:
        """Return the job, with `status.phase`, `status.progress` and `status.first_failure`. Raises ClusterError if
        there is no such job, and JobError if the cluster stores an invalid job of this name."""
        return self._backend.get(name)

    def list(self) -> list[TrainingJob]:
        """Return all jobs of the namespace, or, on this machine, those that this client has started. Invalid jobs that
        a cluster stores are left out, with a warning that names them."""
        return self._backend.list()

    def wait(self, name: str, timeout: float | None = None, *, show: bool = True) -> TrainingJob:
        """Wait until the job has ended, and return it. With `show`, show its progress, and in a notebook its plot.

        Raises LaunchError if the job failed, with the reason and the exit code of the rank that failed first, and
        TimeoutError after `timeout` seconds; the job continues then.
        """
        from topkube.sdk import display

        history = History()
        job = self._backend.get(name)
        with display.show_progress(job, history, show) as progress_line:
            phase = ""
            try:
                for job in self._backend.watch(name, timeout, history):
                    if read_phase(job) != phase:
                        phase = read_phase(job)
                        progress_line.note(f"{name} is {phase}")
                    progress_line.update()
            except TimeoutError:
                raise TimeoutError(f"the job {name} is still {phase} after {timeout:g} s and continues") from None
        if show:
            display.show_plot(job, history)
        if phase == "Failed":
            raise build_failure(job)
        return job

    def logs(self, name: str, follow: bool = False) -> Iterator[str]:
        """Yield the lines that ranks print, each after `[worker0.rank1] `. With `follow`, continue to the job's end."""
        return self._backend.logs(name, follow)

    def suspend(self, name: str, timeout: float = 300.0) -> None:
        """Let the ranks save a checkpoint, end them and free their resources. Raises ClusterError if the job has ended,
        or if its ranks do not end within `timeout` seconds."""
        self._backend.suspend(name, timeout)

    def resume(self, name: str) -> None:
        """Continue a suspended job from its newest checkpoint, or from its start if it saves none."""
        self._backend.resume(name)

    def delete(self, name: str, timeout: float = 300.0) -> None:
        """End the job and remove it: its pods and the ConfigMap of its code, or its folder on this machine. Checkpoints
        on a cluster's volume stay."""
        self._backend.delete(name, timeout)


def _make_name(function: str) -> str:
    name = make_job_name(re.sub(r"_+$", "", function))[:_NAME_CHARACTERS].rstrip("-")
    return f"{name}-{secrets.token_hex(3)}"
