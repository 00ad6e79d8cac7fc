"""The source and the packages that the init container of a worker fetches, and its reports of failures."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from topkube.data.remote.retry import Patience
from topkube.errors import SourceError
from topkube.job import ArchiveSource, ConfigMapSource, GitSource, Setup, Source
from topkube.job.fields.failure_policy import SCRIPT_ERRORS
from topkube.launch import contract
from topkube.launch.host.environment import list_source_variables, read_source_digest
from topkube.settings import Settings
from topkube.source import download, fetch, packages, repository
from topkube.source.archive import compute_folder_digest

QUICK = Patience(retries=1, pause_seconds=0.01, stall_seconds=20)


def _build_archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


CODE = _build_archive({"train.py": b"print('hello')\n"})
SHA = hashlib.sha256(CODE).hexdigest()


class _WorkerFolders:
    """The folders of a worker's pod."""

    def __init__(self, root: Path) -> None:
        self.volume, self.files, self.secret = root / "volume", root / "files", root / "secret"
        for folder in (self.volume, self.files, self.secret):
            folder.mkdir()
        self.source, self.packages = self.volume / "source", self.volume / "packages"

    def write_config_map(self, data: dict[str, bytes], version: str = "..1") -> None:
        """Write the keys as a kubelet does: a folder for this version, and links."""
        (self.files / version).mkdir()
        for key, value in data.items():
            (self.files / version / key).parent.mkdir(parents=True, exist_ok=True)
            (self.files / version / key).write_bytes(value)
            if not (self.files / key).is_symlink() and "/" not in key:
                (self.files / key).symlink_to(f"..data/{key}")
        link = self.files / "..data_tmp"
        link.symlink_to(version)
        link.rename(self.files / "..data")

    def fetch(self, source: Source | None = None, setup: Setup | None = None) -> None:
        plan = contract.SourcePlan(pod="train-worker-0-1", attempt=1, index=0, source=source, setup=setup)
        plan = contract.SourcePlan.read(plan.to_json())
        fetch.fetch_and_install(plan, self.source, self.packages, self.files, self.secret)


@pytest.fixture
def pod(tmp_path: Path) -> _WorkerFolders:
    return _WorkerFolders(tmp_path)


def test_every_key_of_a_config_map_becomes_a_file(pod: _WorkerFolders) -> None:
    pod.write_config_map({"train.py": b"1", "model.py": b"2"})
    pod.fetch(Source(config_map=ConfigMapSource(name="code")))
    assert {path.name: path.read_bytes() for path in pod.source.iterdir()} == {"train.py": b"1", "model.py": b"2"}
    assert not any(path.is_symlink() for path in pod.source.iterdir())
    assert read_source_digest(pod.source) == compute_folder_digest(pod.source)
    assert sorted(path.name for path in pod.volume.iterdir()) == ["source", "source.sha256"], "nothing else is left"


def test_items_become_files_in_folders(pod: _WorkerFolders) -> None:
    pod.write_config_map({"pkg/train.py": b"1"})
    pod.fetch(Source(config_map=ConfigMapSource(name="code")))
    assert (pod.source / "pkg/train.py").read_bytes() == b"1"


def test_a_second_run_of_the_container_replaces_the_first(pod: _WorkerFolders) -> None:
    pod.write_config_map({"train.py": b"1"})
    source = Source(config_map=ConfigMapSource(name="code"))
    pod.fetch(source)
    (pod.source / "half.py").write_bytes(b"")
    pod.write_config_map({"train.py": b"2"}, "..2")
    pod.fetch(source)
    assert {path.name: path.read_bytes() for path in pod.source.iterdir()} == {"train.py": b"2"}


def test_an_archive_in_a_config_map_is_checked_and_unpacked(pod: _WorkerFolders) -> None:
    pod.write_config_map({"code.tar.gz": CODE})
    pod.fetch(Source(config_map=ConfigMapSource(name="code", archive="code.tar.gz", sha256=SHA)))
    assert (pod.source / "train.py").read_bytes() == b"print('hello')\n"
    with pytest.raises(SourceError, match=f"has the checksum {SHA}, and spec.source.configMap.sha256 is 000"):
        pod.fetch(Source(config_map=ConfigMapSource(name="code", archive="code.tar.gz", sha256="0" * 64)))
    with pytest.raises(SourceError, match=r"has no key other\.tar"):
        pod.fetch(Source(config_map=ConfigMapSource(name="code", archive="other.tar")))


class _ArchiveServer(http.server.BaseHTTPRequestHandler):
    """Answers /code.tar.gz, /busy.tar.gz after one 503, /moved.tar.gz by a redirect, /loop.tar.gz by endless redirects,
    /endless.tar.gz with bytes that do not end."""

    requested_paths: list[str]

    def do_GET(self) -> None:
        type(self).requested_paths.append(self.path)
        if self.path == "/moved.tar.gz":
            return self._redirect("/code.tar.gz")
        if self.path == "/loop.tar.gz":
            return self._redirect("/loop.tar.gz")
        if self.path == "/busy.tar.gz" and self.requested_paths.count(self.path) == 1:
            self.send_error(503)
            return None
        if self.path == "/endless.tar.gz":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 16))
            except OSError:
                return None
        if self.path not in ("/code.tar.gz", "/busy.tar.gz"):
            self.send_error(404)
            return None
        self.send_response(200)
        self.send_header("Content-Length", str(len(CODE)))
        self.end_headers()
        self.wfile.write(CODE)
        return None

    do_HEAD = do_GET

    def _redirect(self, path: str) -> None:
        self.send_response(302)
        self.send_header("Location", path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _ArchiveServer.requested_paths = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _ArchiveServer) as http_server:
        http_server.daemon_threads = True
        thread = threading.Thread(target=http_server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


@pytest.mark.parametrize("name", ["code", "busy", "moved"])
def test_an_archive_is_fetched_over_http(pod: _WorkerFolders, server: str, name: str) -> None:
    pod.fetch(Source(archive=ArchiveSource(uri=f"{server}/{name}.tar.gz", sha256=SHA)))
    assert (pod.source / "train.py").exists()


def test_an_archive_is_fetched_from_a_volume(pod: _WorkerFolders, tmp_path: Path) -> None:
    (tmp_path / "code.tar.gz").write_bytes(CODE)
    pod.fetch(Source(archive=ArchiveSource(uri=f"file://{tmp_path}/code.tar.gz", sha256=SHA)))
    assert (pod.source / "train.py").exists()


def test_an_archive_that_does_not_come_is_unavailable(tmp_path: Path, server: str) -> None:
    source = ArchiveSource(uri=f"{server}/absent.tar.gz", sha256=SHA)
    with pytest.raises(SourceError, match=r"absent.tar.gz does not exist.*check spec.source.archive.uri") as raised:
        download.download_archive(source, tmp_path / "archive", QUICK)
    assert raised.value.reason == "SourceUnavailable"
    assert "SourceUnavailable" not in SCRIPT_ERRORS, "another attempt may succeed"
    source = ArchiveSource(uri=f"{server}/loop.tar.gz", sha256=SHA)
    with pytest.raises(SourceError, match="loop"):
        download.download_archive(source, tmp_path / "archive", QUICK)
    assert _ArchiveServer.requested_paths.count("/loop.tar.gz") < 100, "redirects are limited"
    source = ArchiveSource(uri="http://127.0.0.1:9/code.tar.gz", sha256=SHA)
    with pytest.raises(SourceError, match="could not be read in 2 tries"):
        download.download_archive(source, tmp_path / "archive", QUICK)


def test_another_archive_and_an_endless_one_are_refused(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ArchiveSource(uri=f"{server}/code.tar.gz", sha256="0" * 64)
    with pytest.raises(SourceError, match=f"has the checksum {SHA}") as raised:
        download.download_archive(source, tmp_path / "archive", QUICK)
    assert raised.value.reason in SCRIPT_ERRORS, "another attempt would fetch the same bytes"
    monkeypatch.setattr(download, "MOST_BYTES", 4 << 20)
    source = ArchiveSource(uri=f"{server}/endless.tar.gz", sha256=SHA)
    with pytest.raises(SourceError, match="more than 4 MiB"):
        download.download_archive(source, tmp_path / "archive", QUICK)
    assert (tmp_path / "archive").stat().st_size <= 6 << 20


def _run_git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A repository with two commits, which git may read as a file in this test."""
    origin, hashes = tmp_path / "origin", []
    origin.mkdir()
    _run_git(origin, "init", "--quiet")
    for number in (1, 2):
        (origin / "train.py").write_text(f"print({number})\n")
        _run_git(origin, "add", ".")
        _run_git(origin, "commit", "--quiet", "-m", str(number))
        hashes.append(_run_git(origin, "rev-parse", "HEAD"))
    options = (*repository._OPTIONS, "-c", "protocol.file.allow=always")
    monkeypatch.setattr(repository, "_OPTIONS", options)
    return origin, hashes


def _build_git_source(url: Path, commit: str, ref: str = "main") -> Source:
    git = GitSource(url="https://host/repository", commit=commit, ref=ref).model_copy(update={"url": str(url)})
    return Source(git=GitSource(url="https://host/repository", commit=commit)).model_copy(update={"git": git})


def _fetch_git(pod: _WorkerFolders, source: Source, secret: Path | None = None) -> None:
    assert source.git is not None
    scratch = pod.volume / "scratch"
    scratch.mkdir()
    repository.fetch_commit(source.git, pod.source, secret, scratch)


def test_a_commit_is_checked_out_without_its_history(pod: _WorkerFolders, commits: tuple[Path, list[str]]) -> None:
    origin, hashes = commits
    _fetch_git(pod, _build_git_source(origin, hashes[0]))
    assert {path.name: path.read_text() for path in pod.source.iterdir()} == {"train.py": "print(1)\n"}


def test_a_commit_that_nobody_pushed_is_named(pod: _WorkerFolders, commits: tuple[Path, list[str]]) -> None:
    with pytest.raises(SourceError, match="does not contain the commit " + "0" * 40) as raised:
        _fetch_git(pod, _build_git_source(commits[0], "0" * 40))
    assert raised.value.reason == "SourceInvalid"


def test_git_runs_no_program_and_reads_no_file_for_an_address(pod: _WorkerFolders, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for address in (f"ext::touch {mark}", str(tmp_path)):
        source = GitSource(url="https://host/repository", commit="0" * 40).model_copy(update={"url": address})
        folder = pod.volume / hashlib.sha256(address.encode()).hexdigest()
        with pytest.raises(SourceError, match="cannot be fetched") as raised:
            repository.fetch_commit(source, folder, None, tmp_path)
        assert raised.value.reason == "SourceUnavailable"
    assert not mark.exists()


def test_an_image_without_git_is_named(pod: _WorkerFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository.shutil, "which", lambda _: None)
    source = Source(git=GitSource(url="https://host/repository", commit="0" * 40))
    with pytest.raises(SourceError, match="image has no git"):
        pod.fetch(source)


def test_credentials_of_git_come_from_the_secret(pod: _WorkerFolders, tmp_path: Path) -> None:
    (pod.secret / "password").write_text("t0ken")
    program = repository._write_credentials(pod.secret, tmp_path)["GIT_ASKPASS"]
    answers = [
        subprocess.run([program, words], capture_output=True, text=True, check=True).stdout.strip()
        for words in ("Username for 'https://host': ", "Password for 'https://token@host': ")
    ]
    assert answers == ["token", "t0ken"]
    (pod.secret / "ssh-privatekey").write_text("key")
    with pytest.raises(SourceError, match="no known_hosts"):
        repository._write_credentials(pod.secret, tmp_path)
    (pod.secret / "known_hosts").write_text("host key")
    command = repository._write_credentials(pod.secret, tmp_path)["GIT_SSH_COMMAND"]
    assert "StrictHostKeyChecking=yes" in command
    assert (tmp_path / "ssh-key").stat().st_mode & 0o777 == 0o600


def test_ssh_with_a_user_that_the_image_does_not_know_is_refused(
    pod: _WorkerFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh would end with "No user exists for uid", and the fetch would be tried again up to the limit."""
    (pod.secret / "ssh-privatekey").write_text("key")
    (pod.secret / "known_hosts").write_text("host key")
    monkeypatch.setattr(repository.os, "getuid", lambda: 1_234_567)
    with pytest.raises(SourceError, match=r"user 1234567, who is not in the image's /etc/passwd.*https") as raised:
        repository._write_credentials(pod.secret, tmp_path)
    assert raised.value.reason in SCRIPT_ERRORS
    (pod.secret / "ssh-privatekey").unlink()
    assert "GIT_ASKPASS" in repository._write_credentials(pod.secret, tmp_path)


def _build_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    import zipfile

    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def test_only_packages_that_the_image_lacks_are_installed_from_wheels(pod: _WorkerFolders, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    _build_wheel(wheels, "topkubetest", "1.2", "numpy>=1")
    pod.fetch(setup=Setup(requirements=["topkubetest>=1", "numpy"], wheels=str(wheels)))
    assert (pod.packages / "topkubetest.py").exists()
    assert not (pod.packages / "numpy").exists(), "the image has numpy already"


def test_wheels_may_be_part_of_the_source(pod: _WorkerFolders, tmp_path: Path) -> None:
    _build_wheel(tmp_path / "made", "topkubetest", "1.2")
    wheel = next((tmp_path / "made").iterdir())
    pod.write_config_map({f"wheels/{wheel.name}": wheel.read_bytes()})
    pod.fetch(Source(config_map=ConfigMapSource(name="code")), Setup(requirements=["topkubetest"], wheels="wheels"))
    assert (pod.packages / "topkubetest.py").exists()


def test_a_package_that_cannot_be_installed_is_named(pod: _WorkerFolders, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(SourceError, match="nowhere-at-all") as raised:
        pod.fetch(setup=Setup(requirements=["nowhere-at-all"], wheels=str(tmp_path / "wheels")))
    assert raised.value.reason == "SetupFailed"
    with pytest.raises(SourceError, match="there is no folder"):
        pod.fetch(setup=Setup(requirements=["numpy"], wheels="absent"))


def test_packages_of_the_image_that_must_stay_are_not_replaced(
    pod: _WorkerFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "KEPT", ("pytest",))
    _build_wheel(tmp_path / "wheels", "topkubetest", "1.2", "pytest==99.0")
    _build_wheel(tmp_path / "wheels", "pytest", "99.0")
    with pytest.raises(SourceError, match=f"would replace pytest {pytest.__version__} of the image with 99.0"):
        pod.fetch(setup=Setup(requirements=["topkubetest"], wheels=str(tmp_path / "wheels")))
    assert not list(pod.packages.iterdir())


def test_a_failure_becomes_the_termination_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = contract.SourcePlan(pod="train-worker-1-3", attempt=3, index=1, setup=Setup(requirements=["x"], wheels="no"))
    log = tmp_path / "log"
    monkeypatch.setenv("TOPKUBE_SOURCE", plan.to_json())
    monkeypatch.setenv("TOPKUBE_TERMINATION_LOG", str(log))
    monkeypatch.setattr(contract, "SOURCE_DIRECTORY", str(tmp_path / "source"))
    run = fetch.fetch_and_install
    monkeypatch.setattr(fetch, "fetch_and_install", lambda plan: run(plan, tmp_path / "source", tmp_path / "packages"))
    assert fetch.fetch_source() == fetch.EXIT_CODE
    ending = contract.Ending.read(log.read_text())
    assert (ending.attempt, ending.index, ending.state) == (3, 1, "Failed")
    assert ending.first_failure is not None
    assert ending.first_failure.reason == "SetupFailed"
    assert "there is no folder" in (ending.first_failure.message or "")


def test_only_commands_of_ranks_import_from_the_source() -> None:
    settings = Settings(source_directory="/s", packages_directory="/p")
    variables = list_source_variables(settings, {"PYTHONPATH": "/image", "PATH": "/bin"})
    assert variables == {"PYTHONPATH": "/s:/p:/image", "PATH": "/p/bin:/bin"}
    assert list_source_variables(Settings(), {"PYTHONPATH": "/image"}) == {}
    assert list_source_variables(Settings(source_directory="/s"), {}) == {"PYTHONPATH": "/s"}


def test_plans_of_other_versions_are_read() -> None:
    source = Source(config_map=ConfigMapSource(name="code"))
    plan = json.loads(contract.SourcePlan(pod="p", attempt=1, index=0, source=source).to_json())
    plan |= {"newer": 1}
    plan["source"]["configMap"]["newer"] = 2
    assert contract.SourcePlan.read(json.dumps(plan)).source == source
