"""Fetch one commit of a git repository. The image must have git."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from pathlib import Path

from topkube.environment import copy_environment
from topkube.errors import SourceError
from topkube.job import GitSource
from topkube.job.fields.failure_policy import SOURCE_UNAVAILABLE
from topkube.source.archive import MOST_BYTES, MOST_FILES

FETCH_SECONDS = 1800.0
"""The limit of one git command."""
_TAIL_CHARACTERS = 600
_OPTIONS = (
    *("-c", "protocol.allow=never"),
    *("-c", "protocol.https.allow=always"),
    *("-c", "protocol.ssh.allow=always"),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "http.followRedirects=initial"),
    *("-c", "advice.detachedHead=false"),
)
"""git's options that allow only https and ssh. With other protocols, an address could run a program or read a file of
the pod."""


def fetch_commit(source: GitSource, folder: Path, secret: Path | None, scratch: Path) -> None:
    """Check the commit out into the new folder `folder`, without its history. `secret` is the folder of the mounted
    Secret. Private files are written to `scratch`.

    Raises SourceError if git is missing, if the repository cannot be read, or if it does not contain the commit.
    """
    git = shutil.which("git")
    if git is None:
        raise SourceError(
            "the worker's image has no git, which spec.source.git needs",
            cause="TopKube's runtime image does not contain git, to stay small",
            next_step="use an image with git, or spec.source.archive: git archive --format=tar.gz -o code.tar.gz "
            f"{source.commit[:12]}",
        )
    environment = {
        **copy_environment(),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        **_write_credentials(secret, scratch),
    }
    folder.mkdir()

    def run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [git, *_OPTIONS, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FETCH_SECONDS,
        )

    try:
        read_git_output(run_git("init", "--quiet"), source)
        # Most servers send a single commit. Others send branches and tags only.
        if run_git("fetch", "--quiet", "--depth=1", "--no-tags", "--", source.url, source.commit).returncode:
            read_git_output(run_git("fetch", "--quiet", "--no-tags", "--", source.url, source.ref), source)
        if run_git("cat-file", "-e", f"{source.commit}^{{commit}}").returncode:
            raise SourceError(
                f"{source.ref} of {source.url} does not contain the commit {source.commit}",
                cause="the commit was never pushed, or it is on another branch",
                next_step="push it (git push), or set spec.source.git.ref to the branch that contains it",
            )
        read_git_output(run_git("checkout", "--quiet", "--detach", source.commit), source)
        head = read_git_output(run_git("rev-parse", "HEAD"), source).strip()
    except subprocess.TimeoutExpired:
        raise _build_fetch_error(source, f"git needed more than {FETCH_SECONDS:g} s") from None
    if head != source.commit:
        raise SourceError(f"git checked out {head} instead of {source.commit}", next_step="report this as a bug")
    shutil.rmtree(folder / ".git")
    _check_size(folder, source)


def read_git_output(result: subprocess.CompletedProcess[str], source: GitSource) -> str:
    """Return the output of a git command. Raises SourceError if it failed."""
    if result.returncode:
        raise _build_fetch_error(source, " ".join(result.stderr.split())[-_TAIL_CHARACTERS:])
    return result.stdout


def _build_fetch_error(source: GitSource, text: str) -> SourceError:
    return SourceError(
        f"the repository {source.url} cannot be fetched: {text}",
        reason=SOURCE_UNAVAILABLE,
        cause="the address is wrong, the repository is private, or the pod's network does not reach it",
        next_step="try git fetch from a pod of this namespace; set spec.source.git.secretName for a private repository",
    )


def _check_size(folder: Path, source: GitSource) -> None:
    sizes = [path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    if len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES:
        raise SourceError(
            f"{source.url} has {len(sizes):,} files of {sum(sizes):,} bytes, more than {MOST_FILES:,} files or "
            f"{MOST_BYTES >> 20:,} MiB",
            cause="the repository contains data besides the code",
            next_step="pack the code only: git archive, and spec.source.archive",
        )


def _check_user() -> None:
    """Raise SourceError if the image does not know the user of this process: ssh then ends before it connects."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise SourceError(
            f"ssh cannot run as the user {os.getuid()}, who is not in the image's /etc/passwd",
            cause="the pod runs with a user ID that the cluster or the template chose",
            next_step="use an https address and a token, or an image with that user",
        ) from None


def _write_credentials(secret: Path | None, scratch: Path) -> dict[str, str]:
    """Return the variables by which git finds the credentials in the Secret. git needs a program and, for ssh, a key
    that nobody else can read."""
    if secret is None:
        return {}
    key = secret / "ssh-privatekey"
    if key.exists():
        known_hosts = secret / "known_hosts"
        if not known_hosts.exists():
            raise SourceError(
                "the Secret of spec.source.git has ssh-privatekey but no known_hosts",
                cause="without the host's key, anybody on the network could send other code",
                next_step="add known_hosts to the Secret: ssh-keyscan HOST, compared with the keys that HOST publishes",
            )
        _check_user()
        private = scratch / "ssh-key"
        private.touch(mode=0o600)
        private.write_bytes(key.read_bytes())
        command = ["ssh", "-i", str(private), "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes"]
        return {"GIT_SSH_COMMAND": shlex.join([*command, "-o", f"UserKnownHostsFile={known_hosts}"])}
    program = scratch / "askpass"
    program.touch(mode=0o700)
    folder = shlex.quote(str(secret))
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in Username*) cat {folder}/username 2>/dev/null || echo token ;;\n'
        f"*) cat {folder}/password ;; esac\n",
        encoding="utf-8",
    )
    return {"GIT_ASKPASS": str(program)}
