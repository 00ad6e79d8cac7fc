"""The code of a job from real servers on loopback: git over ssh (sshd) and https (git's own http-backend), and an
archive on S3 (moto, which checks signatures). Each server is called with the credentials of the Secret, with wrong
credentials and without credentials."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from topkube.data.remote.retry import Patience
from topkube.errors import SourceError
from topkube.job import ArchiveSource, GitSource
from topkube.source import download, repository

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")
QUICK = Patience(retries=1, pause_seconds=0.01, stall_seconds=60)


def run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the bare repository team/train.git, and the first of its two commits."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    folder = tmp_path_factory.mktemp("origin")
    work, hashes = folder / "work", []
    run("git", "-c", "init.defaultBranch=main", "init", "--quiet", str(work))
    for number in (1, 2):
        (work / "train.py").write_text(f"print({number})\n")
        run("git", "add", ".", cwd=work)
        run("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", str(number), cwd=work)
        hashes.append(run("git", "rev-parse", "HEAD", cwd=work))
    run("git", "clone", "--quiet", "--bare", str(work), str(folder / "team/train.git"))
    return folder, hashes[0]


class FetchingPod:
    """The folders of a worker's pod, which fetches commits."""

    def __init__(self, root: Path) -> None:
        self.root, self.secret = root, root / "secret"
        self.secret.mkdir()
        self.fetches = 0

    def write_secret(self, **values: str) -> Path:
        """Replace the keys of the Secret. An underscore stands for a dash, except in known_hosts."""
        for path in self.secret.iterdir():
            path.unlink()
        for name, value in values.items():
            (self.secret / (name if name == "known_hosts" else name.replace("_", "-"))).write_text(value)
        return self.secret

    def fetch(self, url: str, commit: str, secret: Path | None) -> dict[str, str]:
        """Fetch a commit. Return the files and their contents."""
        self.fetches += 1
        scratch, folder = self.root / f"scratch{self.fetches}", self.root / f"source{self.fetches}"
        scratch.mkdir()
        repository.fetch_commit(GitSource(url=url, commit=commit, ref="main"), folder, secret, scratch)
        return {path.name: path.read_text() for path in folder.iterdir()}

    def refuse(self, url: str, commit: str, secret: Path | None, words: str) -> None:
        """Check that the fetch fails with these words, and that another attempt may succeed."""
        with pytest.raises(SourceError, match=words) as raised:
            self.fetch(url, commit, secret)
        assert raised.value.reason == "SourceUnavailable"
        assert "secretName" in raised.value.next_step


@pytest.fixture
def pod(tmp_path: Path) -> FetchingPod:
    return FetchingPod(tmp_path)


# ---- git over ssh


def write_key(path: Path) -> str:
    """Make a key pair. Return the public key."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path))
    return path.with_suffix(".pub").read_text().strip()


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server has ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.02)
    pytest.fail("the server does not answer")


@pytest.fixture
def ssh(tmp_path: Path, origin: tuple[Path, str]) -> Iterator[tuple[str, str, Path]]:
    """An sshd on loopback that lets one key in: the address of the repository, the line for known_hosts, and the
    private key."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd here (Debian: openssh-server)")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it if root starts it
    folder = tmp_path / "sshd"
    folder.mkdir()
    host_key, key = write_key(folder / "host"), folder / "key"
    (folder / "authorized").write_text(write_key(key) + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", folder / "log"])
    try:
        wait_for(port, server)
        user = run("id", "--user", "--name")
        url = f"ssh://{user}@127.0.0.1:{port}{origin[0]}/team/train.git"
        yield url, f"[127.0.0.1]:{port} {host_key}\n", key
    finally:
        server.terminate()
        server.wait(60)


def test_git_over_ssh_takes_the_key_of_the_secret_and_only_a_known_host(
    pod: FetchingPod, origin: tuple[Path, str], ssh: tuple[str, str, Path], tmp_path: Path
) -> None:
    url, known_hosts, key = ssh
    commit = origin[1]
    secret = pod.write_secret(ssh_privatekey=key.read_text(), known_hosts=known_hosts)
    assert pod.fetch(url, commit, secret) == {"train.py": "print(1)\n"}
    other = tmp_path / "other"
    public = write_key(other)
    pod.write_secret(ssh_privatekey=other.read_text(), known_hosts=known_hosts)
    pod.refuse(url, commit, secret, "Permission denied")
    pod.write_secret(ssh_privatekey=key.read_text(), known_hosts=f"{known_hosts.split()[0]} {public}\n")
    pod.refuse(url, commit, secret, "Host key verification failed")
    pod.write_secret(ssh_privatekey=key.read_text(), known_hosts="")
    pod.refuse(url, commit, secret, "Host key verification failed")


# ---- git over https


class GitServer(http.server.BaseHTTPRequestHandler):
    """Runs git's http-backend for requests with the right name and password."""

    root: Path
    expected = "Basic " + base64.b64encode(b"robot:t0ken").decode()

    def answer(self) -> None:
        if self.headers.get("Authorization") != self.expected:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="team"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "REMOTE_USER": "robot",
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        ended = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        head, _, content = ended.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def https(tmp_path: Path, origin: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the repository on a server with TLS, whose certificate the pod's git trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    run(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
        *subject,
        *files,
    )
    monkeypatch.setenv("GIT_SSL_CAINFO", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    GitServer.root = origin[0]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), GitServer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}/team/train.git"
        server.shutdown()


def test_git_over_https_takes_the_name_and_password_of_the_secret(
    pod: FetchingPod, origin: tuple[Path, str], https: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = origin[1]
    assert pod.fetch(https, commit, pod.write_secret(username="robot", password="t0ken")) == {"train.py": "print(1)\n"}
    pod.refuse(https, commit, pod.write_secret(username="robot", password="wrong"), "Authentication failed")
    pod.refuse(https, commit, pod.write_secret(password="t0ken"), "Authentication failed")
    pod.refuse(https, commit, None, "could not read Username")
    monkeypatch.delenv("GIT_SSL_CAINFO")
    secret = pod.write_secret(username="robot", password="t0ken")
    pod.refuse(https, commit, secret, "certificate")


# ---- an archive on S3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """The checksum of s3://bucket/code.tar.gz, and the keys of a user who may read the bucket. The server refuses
    requests that are not signed with them."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install -e '.[dev]'")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[s3]'")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("train.py")
        info.size = len(b"print(1)\n")
        tar.addfile(info, io.BytesIO(b"print(1)\n"))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    owner: dict[str, Any] = {"aws_access_key_id": "owner", "aws_secret_access_key": "owner", "endpoint_url": endpoint}
    store, users = boto3.client("s3", **owner), boto3.client("iam", **owner)
    store.create_bucket(Bucket="bucket")
    store.put_object(Bucket="bucket", Key="code.tar.gz", Body=buffer.getvalue())
    users.create_user(UserName="trainer")
    statement = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    users.put_user_policy(UserName="trainer", PolicyName="read", PolicyDocument=policy)
    key = users.create_access_key(UserName="trainer")["AccessKey"]

    def check_signatures(after: str) -> None:
        address, plain = f"{endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        with urllib.request.urlopen(urllib.request.Request(address, after.encode(), plain), timeout=60):
            pass

    check_signatures("0")
    keys = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    yield hashlib.sha256(buffer.getvalue()).hexdigest(), keys
    check_signatures("inf")
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_archive_on_s3_takes_the_keys_of_the_secret(
    bucket: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator makes environment variables of the keys of the Secret."""
    import s3fs

    checksum, keys = bucket
    source, archive = ArchiveSource(uri="s3://bucket/code.tar.gz", sha256=checksum), tmp_path / "archive"

    def download_with(**changes: str | None) -> None:
        for name, value in {**keys, **changes}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        download.download_archive(source, archive, QUICK)

    download_with()
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["train.py"]
    for changes in (
        {"AWS_SECRET_ACCESS_KEY": "wrong"},
        {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE"},
        dict.fromkeys(keys),
    ):
        with pytest.raises(SourceError, match=r"s3://bucket/code\.tar\.gz") as raised:
            download_with(**changes)
        assert raised.value.reason == "SourceUnavailable"
        assert "credentials" in f"{raised.value.cause} {raised.value.next_step}", raised.value
