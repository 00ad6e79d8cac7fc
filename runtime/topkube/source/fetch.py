"""`topkube fetch-source`: the init container of a worker. It fetches the source and installs its packages.

It runs as the worker's user, with a read-only root file system, and writes only to its volume and to /tmp. If it fails,
the reason is in the termination message, from which the operator writes `status.firstFailure`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from topkube.errors import LaunchError, SourceError
from topkube.files import write_text
from topkube.job import ConfigMapSource, FirstFailure, Source
from topkube.job.fields.failure_policy import SETUP_FAILED
from topkube.launch import contract
from topkube.launch.host.environment import name_digest_file
from topkube.launch.termination_message import build_ending_before_start, write_ending
from topkube.settings import Settings
from topkube.source.archive import check_digest, compute_file_digest, compute_folder_digest, unpack_archive

EXIT_CODE = 65
"""EX_DATAERR of sysexits.h."""
_MESSAGE_CHARACTERS = 2048


def fetch_source() -> int:
    """Carry out the plan in TOPKUBE_SOURCE. Return the exit code. Raises LaunchError if there is no plan."""
    settings = Settings.from_environment()
    termination_log = Path(settings.termination_log)
    try:
        plan = contract.SourcePlan.read(settings.source_plan or "{}")
    except LaunchError as error:
        write_ending(termination_log, build_ending_before_start(error, "BadPlan"))
        raise
    try:
        fetch_and_install(plan)
    except SourceError as error:
        print(f"topkube: {error}", flush=True)
        failure = FirstFailure(reason=error.reason, exit_code=EXIT_CODE, message=str(error)[:_MESSAGE_CHARACTERS])
        ending = contract.Ending(
            attempt=plan.attempt, state="Failed", exit_code=EXIT_CODE, index=plan.index, first_failure=failure
        )
        write_ending(termination_log, ending)
        return EXIT_CODE
    return 0


def fetch_and_install(
    plan: contract.SourcePlan,
    folder: Path = Path(contract.SOURCE_DIRECTORY),
    packages: Path = Path(contract.PACKAGES_DIRECTORY),
    files: Path = Path(contract.SOURCE_FILES_DIRECTORY),
    secret: Path = Path(contract.SOURCE_SECRET_DIRECTORY),
) -> None:
    """Fetch the source into `folder` and install its packages into `packages`. `files` is the mounted ConfigMap, and
    `secret` the mounted Secret of git. What an earlier run of the container left is replaced. Raises SourceError."""
    for path in (folder, packages):
        shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    try:
        if plan.source is not None:
            _fetch_code(plan.source, folder, files, secret, scratch)
            digest = compute_folder_digest(folder)
            write_text(name_digest_file(folder), digest + "\n")
            print(f"topkube: the source is in {folder}, with the digest {digest[:12]}", flush=True)
        else:
            folder.mkdir()
        if plan.setup is not None:
            from topkube.source.packages import install_packages

            packages.mkdir()
            installed = install_packages(plan.setup, packages, folder, scratch)
            print(f"topkube: installed {', '.join(installed) or 'nothing: the image has all packages'}", flush=True)
    except OSError as error:
        raise SourceError(
            f"the code cannot be written to {folder.parent}: {error.strerror or error}",
            reason=SETUP_FAILED,
            cause="the node's disk is full, or the container's ephemeral-storage limit is too low",
            next_step="raise resources.limits.ephemeral-storage, or put packages into the image",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch_code(source: Source, folder: Path, files: Path, secret: Path, scratch: Path) -> None:
    if source.config_map is not None:
        _copy_config_map(source.config_map, folder, files, scratch)
    elif source.archive is not None:
        from topkube.source.download import download_archive  # loads the libraries of stores

        archive = scratch / "archive"
        download_archive(source.archive, archive)
        unpack_archive(archive, folder, source.archive.uri.partition("?")[0].rpartition("/")[2])
    elif source.git is not None:
        from topkube.source.repository import fetch_commit

        fetch_commit(source.git, folder, secret if source.git.secret_name else None, scratch)


def _copy_config_map(source: ConfigMapSource, folder: Path, files: Path, scratch: Path) -> None:
    """Copy the files of a mounted ConfigMap, or unpack its archive. The copy stays the same if the ConfigMap changes.

    The kubelet mounts the keys as links to a folder of its own (`..data`), which it replaces at once after a change:
    all files come from one version."""
    version = (files / "..data").resolve() if (files / "..data").exists() else files
    if source.archive is not None:
        archive = version / source.archive
        if not archive.is_file():
            raise _build_key_error(source, source.archive)
        if source.sha256 is not None:
            check_digest(compute_file_digest(archive), source.sha256, source.archive, "spec.source.configMap.sha256")
        copy = scratch / "archive"
        shutil.copyfile(archive, copy)
        unpack_archive(copy, folder, source.archive)
        return
    folder.mkdir()
    paths = [path for path in version.rglob("*") if path.is_file() and not path.name.startswith("..")]
    if not paths:
        raise SourceError(
            f"the ConfigMap {source.name} is empty", next_step="kubectl describe configmap " + source.name
        )
    for path in paths:
        target = folder / path.relative_to(version)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _build_key_error(source: ConfigMapSource, key: str) -> SourceError:
    return SourceError(
        f"the ConfigMap {source.name} has no key {key}",
        cause="the name of the key is misspelt, or the ConfigMap was replaced",
        next_step=f"kubectl describe configmap {source.name}",
    )
