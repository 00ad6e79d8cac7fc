"""The TrainingClient on this machine, with real ranks: the same calls as on a cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from topkube import TrainingClient
from topkube.errors import ClusterError, JobError, LaunchError, SourceError
from topkube.job import TrainingJob
from topkube.launch.host.processes import ProcessIdentity
from topkube.sdk import local

PATIENCE_SECONDS = 300.0


def add_up(value: float) -> None:
    import numpy as np

    import topkube

    topkube.init()
    array = np.full(4, value, np.float32)
    topkube.allreduce_(array, op="sum", algorithm="flat")
    print(f"rank {topkube.rank()} of {topkube.size()} has {array.tolist()}", flush=True)


def fail() -> None:
    import sys

    import topkube

    topkube.init()
    if topkube.rank() == 1:
        print("this is why", flush=True)
        sys.exit(7)
    topkube.barrier()


def train(folder: str) -> None:
    """Train a line, with checkpoints: without end, or for three steps if the file `go` exists."""
    import pathlib

    import torch

    import topkube

    topkube.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 4
    is_last = pathlib.Path(folder, "go").exists()
    with topkube.checkpointing(model, optimizer) as run:
        print(f"begins at {run.step}", flush=True)
        for inputs, targets in run.progress(batches, total=run.step + 3 if is_last else 1_000_000):
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step > 3:
                pathlib.Path(folder, "trains").touch()


def print_without_end() -> None:
    import itertools
    import os
    import time

    for number in itertools.count():
        print(os.getpid(), number, flush=True)
        time.sleep(0.01)


def print_file() -> None:
    import pathlib

    from words import WORD

    print(WORD, pathlib.Path("data.txt").read_text(), flush=True)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TrainingClient]:
    client = TrainingClient(backend="local", directory=tmp_path / "runs")
    yield client
    for job in client.list():
        client.delete(job.name)


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_function_trains_on_all_ranks(client: TrainingClient, tmp_path: Path) -> None:
    name = client.train(add_up, arguments={"value": 1.5}, workers=2, slots=1, aggregation="dense")
    assert name.startswith("add-up-")
    assert isinstance(client.get(name), TrainingJob)
    assert client.get(name).spec.aggregation.algorithm == "dense"
    followed = list(client.logs(name, follow=True))
    job = client.wait(name, PATIENCE_SECONDS, show=False)
    assert job.status is not None
    assert job.status.phase == "Succeeded"
    expected = [f"[worker{rank}.rank{rank}] rank {rank} of 2 has [3.0, 3.0, 3.0, 3.0]" for rank in range(2)]
    assert sorted(followed) == sorted(client.logs(name)) == expected
    assert [job.name for job in client.list()] == [name]
    client.delete(name)
    assert client.list() == []
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(ClusterError, match=f"there is no job {name}"):
        client.get(name)


def test_a_failure_is_raised_with_the_last_output_of_the_rank(client: TrainingClient) -> None:
    name = client.train(fail, workers=2)
    with pytest.raises(LaunchError, match="this is why") as raised:
        client.wait(name, PATIENCE_SECONDS, show=False)
    assert raised.value.exit_code == 7
    status = client.get(name).status
    assert status is not None
    assert status.first_failure is not None
    assert (status.phase, status.first_failure.rank, status.first_failure.exit_code) == ("Failed", 1, 7)
    with pytest.raises(ClusterError, match="a finished job cannot be suspended"):
        client.suspend(name)


def test_a_folder_is_sent_with_the_function(client: TrainingClient, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "words.py").write_text("WORD = 'hello'\n")
    (folder / "data.txt").write_text("world")
    name = client.train(print_file, source=folder)
    (folder / "data.txt").write_text("changed later")
    client.wait(name, PATIENCE_SECONDS, show=False)
    assert list(client.logs(name)) == ["[worker0.rank0] hello world"]


def test_a_suspended_job_continues_from_its_checkpoint(
    client: TrainingClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"checkpoint": {"claimName": "unused", "everySteps": 1000}}
    name = client.train(train, arguments={"folder": str(tmp_path)}, workers=2, spec=spec)
    _wait_for((tmp_path / "trains").exists, "the ranks to train")
    client.suspend(name, PATIENCE_SECONDS)
    status = client.get(name).status
    assert status is not None
    assert status.phase == "Suspended"
    with pytest.raises(TimeoutError, match=f"{name} is still Suspended after 0 s"):
        client.wait(name, 0)
    (tmp_path / "go").touch()
    client.resume(name)
    job = client.wait(name, PATIENCE_SECONDS)
    [first, second] = sorted(line for line in client.logs(name) if "begins at" in line)
    begun = int(first.rpartition(" ")[2])
    assert begun >= 3, "SIGTERM saved a checkpoint"
    assert first.rpartition(" ")[2] == second.rpartition(" ")[2]
    assert job.status is not None
    assert job.status.progress is not None
    assert (job.status.progress.step, job.status.progress.percent) == (begun + 3, 100)
    assert f"step {begun + 3}/{begun + 3}" in capsys.readouterr().err


def test_logs_that_are_followed_go_on_after_a_suspension(client: TrainingClient, tmp_path: Path) -> None:
    name = client.train(print_without_end)
    lines = (line.split()[1:] for line in client.logs(name, follow=True))
    first = [next(lines) for _ in range(20)]
    client.suspend(name, PATIENCE_SECONDS)
    client.resume(name)
    second = next(line for line in lines if line[0] != first[0][0])
    assert second[1] == "0", "the second run is shown from its first line"


def test_a_job_is_not_resumed_while_its_suspended_ranks_still_end(
    client: TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        """Start a process. The first ignores one SIGTERM, as ranks do that save a large checkpoint."""
        assert all(process.poll() is not None for process in started), "two runs share a folder"
        script = f"trap 'trap - TERM; touch {folder}/asked' TERM; touch {folder}/starts; while :; do sleep 0.1; done"
        started.append(subprocess.Popen(["sleep", "60"] if started else ["sh", "-c", script]))
        return started[-1]

    monkeypatch.setattr(local, "_start_run", start)
    name = client.train(add_up, arguments={"value": 1.0})
    _wait_for((tmp_path / "runs" / name / "starts").exists, "the first run")
    with pytest.raises(ClusterError, match="the ranks did not end within 0 s"):
        client.suspend(name, 0)
    _wait_for((tmp_path / "runs" / name / "asked").exists, "its first SIGTERM")
    client.resume(name)
    assert len(started) == 2


def test_a_job_that_cannot_be_trained_is_refused_before_anything_is_created(
    client: TrainingClient, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"spec\.workers: 0 is not a whole number"):
        client.train(add_up, arguments={"value": 1.0}, workers=0)
    with pytest.raises(JobError, match="did you mean hitopk"):
        client.train(add_up, arguments={"value": 1.0}, aggregation="hitop")
    with pytest.raises(SourceError, match="missing a required argument"):
        client.train(add_up)
    with pytest.raises(JobError, match=r"spec\.source and spec\.setup are written by train"):
        client.train(add_up, arguments={"value": 1.0}, spec={"setup": {"requirements": ["x"]}})
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ClusterError, match="there is no backend 'laptop'"):
        TrainingClient(backend="laptop")  # type: ignore[arg-type]


def test_packages_that_are_missing_here_are_named(client: TrainingClient) -> None:
    with pytest.warns(UserWarning, match=r"topkube-nowhere>=1: not installed here"):
        name = client.train(add_up, arguments={"value": 1.0}, packages=["numpy>=1", "topkube-nowhere>=1"])
    client.wait(name, PATIENCE_SECONDS, show=False)


def test_the_name_of_an_existing_job_is_refused(client: TrainingClient) -> None:
    client.train(add_up, arguments={"value": 1.0}, name="same")
    with pytest.raises(ClusterError, match="there is a job same already"):
        client.train(add_up, arguments={"value": 1.0}, name="same")


def test_the_folder_of_a_job_of_an_earlier_process_is_refused(client: TrainingClient) -> None:
    """`client.delete` knows only jobs of this process, so the error must not send the user there."""
    folder = client._backend.directory / "same"  # type: ignore[attr-defined]
    folder.mkdir(parents=True)
    with pytest.raises(ClusterError, match="Next: remove the folder, or choose another name"):
        client.train(add_up, arguments={"value": 1.0}, name="same")


def test_a_folder_that_somebody_has_removed_does_not_break_the_list(client: TrainingClient, tmp_path: Path) -> None:
    name = client.train(fail, slots=2)
    with pytest.raises(LaunchError):
        client.wait(name, timeout=PATIENCE_SECONDS, show=False)
    shutil.rmtree(client._backend.directory / name)  # type: ignore[attr-defined]
    [job] = client.list()
    assert job.status is not None
    assert job.status.first_failure is not None
    assert "No such file or directory" in (job.status.first_failure.message or "")
    client.delete(name)
    assert client.list() == []


@pytest.mark.parametrize(
    "end", ["pass", "os.kill(os.getpid(), signal.SIGTERM)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_local_jobs_end_with_their_process(tmp_path: Path, end: str) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "from topkube import TrainingClient\n"
        "def sleeps():\n"
        "    import pathlib, time\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(10_000)\n"
        "client = TrainingClient(backend='local', directory='runs')\n"
        "name = client.train(sleeps, name='sleeps')\n"
        "while not pathlib.Path('runs/sleeps/source/begun').exists(): time.sleep(0.02)\n"
        "print(client._backend._jobs[name].process.pid, flush=True)\n"
        f"{end}\n"
    )
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if end == "pass":
        assert not _is_alive(int(ended.stdout))
    _wait_for(lambda: not _is_alive(int(ended.stdout)), "the end of topkube run")


def _is_alive(pid: int) -> bool:
    try:
        return ProcessIdentity.find(pid).is_alive()
    except OSError:
        return False


def test_importing_the_client_loads_no_torch() -> None:
    code = "import sys, topkube; topkube.TrainingClient; assert not {'torch', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
