"""Pack a folder of code into one archive that a ConfigMap can hold.

The same files give the same bytes on every machine, so that a job that is submitted again with the same code is
unchanged. What git ignores is left out; `.topkubeignore` has the same form and comes last.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube.errors import SourceError
from topkube.installation import build_install_command

ARCHIVE_KEY = "source.tar.gz"
"""The key of the ConfigMap that holds the archive."""
MOST_PACKED_BYTES = 1_000_000
"""The largest archive. A ConfigMap holds at most 1 MiB in all."""
IGNORE_FILES = (".gitignore", ".topkubeignore")
USUALLY_IGNORED = (
    *(".git/", ".hg/", ".svn/", ".gitignore", ".topkubeignore", ".DS_Store"),
    *("__pycache__/", "*.py[co]", ".venv/", "venv/", "*.egg-info/", "node_modules/", ".ipynb_checkpoints/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".idea/", ".vscode/"),
    *("runs/", "wandb/", "mlruns/", "lightning_logs/"),
    *(".env", ".env.*", ".netrc", "*.pem", "*.key", ".ssh/", ".aws/", ".kube/"),
)
"""Patterns of files that are not code, or that may hold credentials, which everybody who can read the ConfigMap would
see. `!PATTERN` in .topkubeignore packs such files."""
_GIT_FOLDER = ".git"
"""The folder, or in a worktree the file, that git never tracks. Its configuration may hold credentials."""
_MOST_FILES, _MOST_BYTES = 20_000, 64 << 20
_LARGEST_SHOWN = 5


@dataclass(frozen=True)
class PackedSource:
    """An archive of code: its bytes, their checksum, and the number of its files."""

    data: bytes
    sha256: str
    files: int


def pack_source(folder: Path | None, extra_files: Mapping[str, bytes] | None = None) -> PackedSource:
    """Return an archive of the files in `folder` and of `extra_files` (bytes by path), which replace files in it.

    Raises SourceError if the folder cannot be read, is empty, contains a link that leaves it, or becomes larger than
    MOST_PACKED_BYTES.
    """
    files: dict[str, tuple[Path | None, int]] = {}
    if folder is not None:
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder", next_step="pass the folder of your code: --sync .")
        for path, name in _list_files(folder.resolve()):
            files[name] = (path, path.stat().st_size)
            if len(files) > _MOST_FILES or sum(size for _, size in files.values()) > _MOST_BYTES:
                raise _build_size_error(folder, files, f"more than {_MOST_FILES:,} files or {_MOST_BYTES >> 20} MiB")
    for name, data in (extra_files or {}).items():
        files[name] = (None, len(data))
    if not files:
        raise SourceError(
            f"{folder} contains no files to send",
            cause="all of them are ignored by .gitignore or .topkubeignore",
            next_step="add lines such as !train.py to .topkubeignore",
        )
    data = _build_archive(files, extra_files or {})
    if len(data) > MOST_PACKED_BYTES:
        raise _build_size_error(folder, files, f"{len(data):,} bytes when compressed, more than {MOST_PACKED_BYTES:,}")
    return PackedSource(data, hashlib.sha256(data).hexdigest(), len(files))


def _build_archive(files: Mapping[str, tuple[Path | None, int]], extra_files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 9, buffer, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, (path, _) in sorted(files.items()):
            try:
                content = extra_files[name] if path is None else path.read_bytes()
                executable = path is not None and path.stat().st_mode & stat.S_IXUSR
            except OSError as error:
                raise SourceError(
                    f"{name} cannot be read: {error.strerror}", next_step="correct its rights, or ignore the file"
                ) from None
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if executable else 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@dataclass(frozen=True)
class _Patterns:
    """The patterns of one file for `root`, the folder that is packed. `folder` is the path of the file's folder below
    the root. If the file is above the root, `prefix` is the path of the root below the file's folder, with a slash."""

    spec: Any
    folder: str = "."
    prefix: str = ""
    is_of_git: bool = False
    """True for the patterns of a .gitignore."""

    def is_ignored(self, name: str) -> bool | None:
        """Return the decision of the last pattern that matches the path `name` below the root; None if none matches."""
        below_folder = name if self.folder == "." else name.removeprefix(f"{self.folder}/")
        decision: bool | None = self.spec.check_file(self.prefix + below_folder).include
        return decision


def _list_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files to pack and their paths below `root`, in order."""
    patterns = [_Patterns(_parse_patterns(list(USUALLY_IGNORED)))]
    folders = [root, *root.parents]
    repository = next((index for index, parent in enumerate(folders) if (parent / ".git").exists()), 0)
    for parent in reversed(folders[1 : repository + 1]):
        prefix = f"{root.relative_to(parent).as_posix()}/"
        patterns += [_Patterns(spec, prefix=prefix, is_of_git=of_git) for spec, of_git in _read_specs(parent)]
    yield from _walk_folder(root, root, patterns)


def _walk_folder(root: Path, folder: Path, patterns: list[_Patterns]) -> Iterator[tuple[Path, str]]:
    """Yield the files of `folder` and their paths below `root`. `patterns` holds the patterns of the folders above."""
    below = folder.relative_to(root).as_posix()
    own_patterns = [_Patterns(spec, folder=below, is_of_git=of_git) for spec, of_git in _read_specs(folder)]
    patterns = [*patterns, *own_patterns]
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(
            f"{folder} cannot be read: {error.strerror}", next_step="correct its rights, or ignore it in .topkubeignore"
        ) from None
    for entry in entries:
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name == _GIT_FOLDER or _is_ignored(name + ("/" if is_folder else ""), patterns):
            continue
        if is_folder:
            yield from _walk_folder(root, path, patterns)
        elif path.is_file() and path.resolve().is_relative_to(root):
            yield path, name
        else:
            kind = "a link that leaves the folder or leads to a folder" if path.is_symlink() else "no regular file"
            raise SourceError(
                f"{name} is {kind}",
                cause="pods get copies of files, without what is elsewhere on this machine",
                next_step=f"copy the file into the folder, or add the line /{name} to .topkubeignore",
            )


def _is_ignored(name: str, patterns: list[_Patterns]) -> bool:
    """Return the decision of the last pattern that matches `name`, as in git. A .gitignore takes in what another
    .gitignore leaves out, but not what is usually ignored: `!*/` stands in many of them."""
    git_takes_in = False
    for file_patterns in reversed(patterns):
        if file_patterns.is_of_git and git_takes_in:
            continue
        decision = file_patterns.is_ignored(name)
        if decision is False and file_patterns.is_of_git:
            git_takes_in = True
        elif decision is not None:
            return decision
    return False


def _read_specs(folder: Path) -> list[tuple[Any, bool]]:
    """Return the patterns of the folder's files, and True for those of .gitignore."""
    specs = []
    for name in IGNORE_FILES:
        try:
            lines = (folder / name).read_text(encoding="utf-8-sig", errors="replace").split("\n")
        except OSError:
            continue
        specs.append((_parse_patterns([line.removesuffix("\r") for line in lines]), name == ".gitignore"))
    return specs


def _parse_patterns(lines: list[str]) -> Any:
    """Return the patterns in `lines`. Lines that are no patterns, such as a lone `!`, have no effect, as in git."""
    try:
        import pathspec
    except ImportError:
        raise SourceError(
            "the library pathspec, which reads .gitignore, is not installed here",
            cause="topkube was installed for local runs only",
            next_step=build_install_command("cluster"),
        ) from None
    patterns: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            patterns += pathspec.GitIgnoreSpec.from_lines([line]).patterns
    return pathspec.GitIgnoreSpec(patterns)


def _build_size_error(folder: Path | None, files: Mapping[str, tuple[Path | None, int]], excess: str) -> SourceError:
    largest = sorted(files.items(), key=lambda entry: -entry[1][1])[:_LARGEST_SHOWN]
    shown = ", ".join(f"{name} ({size:,} bytes)" for name, (_, size) in largest)
    return SourceError(
        f"the code in {folder} has {excess}; the largest files are {shown}",
        cause="the folder contains data or results besides the code",
        next_step="name them in .topkubeignore, or upload an archive and set spec.source.archive (docs/code.md)",
    )
