"""The node cache on a disk: the folders of namespaces, and the actions that are possible for their users."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from stored_datasets import store_dataset

from topkube_operator.node_cache.decisions import LocalDataset
from topkube_operator.node_cache.volume import _MEMORY_BYTES, UnusableFolder, Volume

ROOT = Path(__file__).parents[4]


def test_any_user_of_a_namespace_writes_in_its_folder_and_other_namespaces_cannot(volume: Volume) -> None:
    if os.geteuid():
        pytest.skip("needs root to be several users")
    volume.create_folder("team-a")
    assert volume.list_namespaces() == {"team-a"}
    assert stat.S_IMODE(volume.root.stat().st_mode) == 0o711
    script = (
        "import os, sys; from pathlib import Path; from topkube.data.cache.disk.disk_tier import DiskTier\n"
        "uid, key = int(sys.argv[2]), sys.argv[3]\n"
        "os.chroot(sys.argv[1]); os.chdir('/'); os.setgroups([]); os.setgid(uid); os.setuid(uid); os.umask(0o077)\n"
        "folder = DiskTier(Path('/')).open_folder('s3://bucket/x')\n"
        "use = folder.begin_use(); os.close(folder.publish(key, 7, lambda file: os.truncate(file, 7)))\n"
        "print(len(folder.list_records()), folder.evict('a' * 32) if uid == 2000 else '')\n"
    )
    # As in a pod, the process sees only the namespace's folder, so it loads all modules before.
    load_modules = (
        "import numpy, xxhash, json, mmap, uuid, tempfile, encodings.idna\n"
        "import topkube_operator.node_cache.volume as v; v._load_modules()\n"
    )
    for uid, key in ((1000, "a" * 32), (2000, "b" * 32)):
        command = [sys.executable, "-c", load_modules + script, str(volume.root / "team-a"), str(uid), key]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2", "7"], "another user's shard is seen, and can be evicted"


def test_datasets_are_found_pinned_and_evicted(volume: Volume) -> None:
    volume.create_folder("team-a")
    kept = store_dataset(volume.root, "team-a", "s3://bucket/kept")
    old = store_dataset(volume.root, "team-a", "s3://bucket/old", used=5.0)
    use = kept.begin_use()
    state = {dataset.uri: dataset for dataset in volume.read_datasets("team-a")}
    assert state["s3://bucket/kept"].in_use
    assert state["s3://bucket/old"] == LocalDataset(
        "team-a", old.name, "s3://bucket/old", 1000, 1, 1000, last_used=5.0, in_use=False, pinned=False
    )
    assert volume.apply("team-a", [kept.name, old.name], [], []) == {old.name}, "a dataset that is in use stays"
    use.release()
    volume.apply("team-a", [], [kept.name], [])
    assert volume.read_datasets("team-a")[0].pinned
    volume.apply("team-a", [], [], [kept.name])
    assert not volume.read_datasets("team-a")[0].pinned


def test_a_dataset_counts_as_used_until_its_job_ends(volume: Volume) -> None:
    volume.create_folder("team-a")
    folder = store_dataset(volume.root, "team-a", "s3://bucket/long", used=5.0)
    use = folder.begin_use()
    os.utime(folder.path / "dataset.json", (5.0, 5.0))  # the job has run for years
    volume.read_datasets("team-a")
    use.release()
    (dataset,) = volume.read_datasets("team-a")
    assert dataset.last_used > time.time() - 3600
    os.utime(folder.path / "dataset.json", (5.0, 5.0))
    assert volume.read_datasets("team-a")[0].last_used == 5.0, "nobody uses it"


def test_links_and_forged_files_do_not_lead_the_agent_to_another_namespace(volume: Volume, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to confine")
    for name in ("team-a", "team-b"):
        volume.create_folder(name)
    secret = store_dataset(volume.root, "team-b", "s3://bucket/secret")
    store_dataset(volume.root, "team-a", "s3://bucket/own")
    datasets = volume.root / "team-a/datasets"
    (datasets / secret.name).symlink_to(secret.path)
    (datasets / "0123456789abcdef").mkdir()
    (datasets / "0123456789abcdef/dataset.json").write_text(json.dumps({"uri": "s3://bucket/forged"}))
    assert [dataset.uri for dataset in volume.read_datasets("team-a")] == ["s3://bucket/own"]
    assert volume.apply("team-a", [secret.name], [], []) == set()
    assert secret.get_shard_path(f"{1000:032x}").exists()


def test_a_folder_that_never_answers_is_reported_after_a_deadline(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    from topkube_operator.node_cache import volume as module

    monkeypatch.setattr(module, "_READ_SECONDS", 0.3)
    volume.create_folder("team-a")
    folder = store_dataset(volume.root, "team-a", "s3://bucket/own")
    (folder.path / "dataset.json").unlink()
    os.mkfifo(folder.path / "dataset.json")
    with pytest.raises(UnusableFolder, match="did not answer"):
        volume.read_datasets("team-a")


@pytest.mark.parametrize("name", ["dataset.json", "summary.json", "../../reservations/forged"])
def test_a_large_file_of_a_pod_is_not_read(volume: Volume, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("topkube_operator.node_cache.volume._MEMORY_BYTES", 64 << 20)
    volume.create_folder("team-a")
    store_dataset(volume.root, "team-a", "s3://bucket/other")
    path = store_dataset(volume.root, "team-a", "s3://bucket/x").path / name
    path.touch()
    os.truncate(path, 128 << 20)
    expected = {"s3://bucket/other"} if name == "dataset.json" else {"s3://bucket/other", "s3://bucket/x"}
    assert {dataset.uri for dataset in volume.read_datasets("team-a")} == expected


def test_a_folder_with_a_large_mark_is_unusable(volume: Volume) -> None:
    volume.create_folder("team-a")
    os.truncate(volume.root / "team-a/topkube-cache.json", 128 << 20)
    with pytest.raises(UnusableFolder, match="File too large"):
        volume.read_datasets("team-a")


def test_records_that_exceed_the_memory_make_a_folder_unusable(volume: Volume) -> None:
    volume.create_folder("team-a")
    os.truncate(store_dataset(volume.root, "team-a", "s3://bucket/x").path / "records", 2 * _MEMORY_BYTES)
    with pytest.raises(UnusableFolder, match="Cannot allocate memory"):
        volume.read_datasets("team-a")


def test_the_processes_of_an_agent_fit_into_the_memory_of_its_container() -> None:
    """The agent and the process for its metrics have less than 64 MiB each of their own, as has the child's copy."""
    agent = next(
        item
        for item in yaml.safe_load_all((ROOT / "manifests/node-cache/agent.yaml").read_text())
        if item["kind"] == "DaemonSet"
    )
    values = yaml.safe_load((ROOT / "charts/topkube/values.yaml").read_text())
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    for resources in (container["resources"], values["cache"]["node"]["resources"]):
        mebibytes = int(resources["limits"]["memory"].removesuffix("Mi"))
        assert (mebibytes << 20) * 3 // 4 >= 3 * (64 << 20) + _MEMORY_BYTES
