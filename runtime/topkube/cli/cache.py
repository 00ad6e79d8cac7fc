"""`topkube cache`: fill, list, check and empty the data cache of this node."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topkube.cli.columns import align_columns
from topkube.cli.options import OutputFormat, OutputOption
from topkube.errors import DatasetError
from topkube.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from topkube.data.cache.disk.dataset_folder import DatasetFolder
    from topkube.data.cache.disk.disk_tier import DiskTier

cache = typer.Typer(help="Fill, list, check and empty the data cache of this node.", no_args_is_help=True)
DirectoryOption = Annotated[
    Path | None, typer.Option("--directory", "-d", metavar="DIR", help="The cache [default: TOPKUBE_CACHE_DIRECTORY].")
]
Uri = Annotated[str, typer.Argument(metavar="URI", help="A dataset: file://, http(s)://, s3://…, a path, a manifest.")]
DatasetNames = Annotated[list[str] | None, typer.Argument(metavar="[DATASET…]", help="URIs or IDs as ls shows them.")]


@cache.command()
def warm(
    uri: Uri,
    directory: DirectoryOption = None,
    share: Annotated[str, typer.Option(metavar="I/N", help="Only every N-th shard from I on (0-based).")] = "0/1",
    view: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also show the files of the dataset in this directory, read-only."),
    ] = None,
    size_limit: Annotated[int | None, typer.Option(metavar="BYTES", help="Largest size on disk.")] = None,
    output: OutputOption = OutputFormat.text,
) -> None:
    """Fetch a dataset into the cache, before or while a job trains."""
    from topkube.data.base.rank_place import RankPlace
    from topkube.data.fill.warm import warm as warm_cache
    from topkube.data.opening import open_cache, resolve_address

    first, _, count = share.partition("/")
    if not re.fullmatch("[0-9]{1,9}/[0-9]{1,9}", share) or int(first) >= int(count):
        raise DatasetError(f"--share {share} is not I/N with I below N", next_step="write for example --share 0/4")
    settings = Settings.from_environment()
    opened = open_cache(
        resolve_address(uri, settings),
        settings,
        RankPlace(),
        cache_directory=directory,
        size_limit=size_limit,
        for_samples=view is None,
    )
    total = int(opened.shards.sizes[int(first) :: int(count)].sum())
    try:
        with _show_progress("fetching", total, output) as advance:
            done = warm_cache(opened, share=(int(first), int(count)), view=view, progress=advance)
    finally:
        opened.close()
    if output is OutputFormat.json:
        _print_json({"shards": done.total, "cached": done.shards, "remoteBytes": done.remote_bytes})
    else:
        print(f"{done.shards} of {done.total} shards are cached; {_format_size(done.remote_bytes)} were fetched")
    raise typer.Exit(0 if done.is_complete else 1)


@cache.command()
def ls(directory: DirectoryOption = None, output: OutputOption = OutputFormat.text) -> None:
    """List the datasets in the cache."""
    rows = [describe_dataset(folder) for folder in _open_tier(directory).list_folders()]
    if output is OutputFormat.json:
        _print_json(rows)
        return
    if not rows:
        print("the cache is empty")
        return
    lines = [["ID", "DATASET", "SHARDS", "SIZE", "LAST USED", ""]]
    for row in rows:
        marks = ", ".join(name for name, key in (("pinned", "pinned"), ("in use", "inUse")) if row[key])
        used = datetime.fromisoformat(row["lastUsed"]).astimezone().strftime("%Y-%m-%d %H:%M")
        lines.append([row["id"], row["uri"], f"{row['shards']:,}", _format_size(row["bytes"]), used, marks])
    print("\n".join(align_columns(lines, "")))


def describe_dataset(folder: DatasetFolder) -> dict[str, Any]:
    """Return the row of a dataset for `ls`."""
    from topkube.data.remote.addresses import redact

    entries = folder.list_records()
    return {
        "id": folder.name,
        "uri": redact(folder.uri),
        "shards": int(entries.size),
        "bytes": int(entries["size"].sum()),
        "lastUsed": datetime.fromtimestamp(folder.last_used, UTC).isoformat(timespec="seconds"),
        "pinned": folder.is_pinned,
        "inUse": folder.is_in_use,
    }


@cache.command()
def check(
    datasets: DatasetNames = None, directory: DirectoryOption = None, output: OutputOption = OutputFormat.text
) -> None:
    """Read every shard and compare its checksum. Take damaged shards out of use, and exit with code 1."""
    folders = _choose_datasets(_open_tier(directory), datasets, all_by_default=True)
    damaged: dict[str, list[str]] = {}
    with _show_progress(
        "checking", sum(int(folder.list_records()["size"].sum()) for folder in folders), output
    ) as advance:
        for folder in folders:
            if damaged_shards := folder.check(advance):
                damaged[folder.uri] = damaged_shards
    if output is OutputFormat.json:
        _print_json({"checked": [folder.uri for folder in folders], "damaged": damaged})
    else:
        for uri, keys in damaged.items():
            print(f"{uri}: {len(keys)} damaged and taken out of use: {', '.join(keys)}")
        if not damaged:
            print(f"{len(folders)} {'dataset is' if len(folders) == 1 else 'datasets are'} undamaged")
    raise typer.Exit(1 if damaged else 0)


@cache.command()
def evict(
    datasets: DatasetNames = None,
    everything: Annotated[bool, typer.Option("--all", help="Evict all datasets that are not pinned.")] = False,
    idle: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0.0, help="Evict datasets that were not used for this many days."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also evict datasets that are pinned or in use.")] = False,
    directory: DirectoryOption = None,
    output: OutputOption = OutputFormat.text,
) -> None:
    """Remove datasets from the cache."""
    if not datasets and not everything and idle is None:
        raise DatasetError("nothing to evict", next_step="name datasets, or give --all or --idle DAYS")
    folders = _choose_datasets(_open_tier(directory), datasets, all_by_default=True)
    if idle is not None:
        folders = [folder for folder in folders if folder.last_used < time.time() - idle * 86400]
    removed, kept = [], []
    for folder in folders:
        row = describe_dataset(folder)
        if (folder.is_pinned and not force) or not folder.remove(force=force):
            kept.append({**row, "reason": "pinned" if folder.is_pinned else "in use"})
        else:
            removed.append(row)
    if output is OutputFormat.json:
        _print_json({"evicted": removed, "kept": kept})
    else:
        for row in removed:
            print(f"evicted {row['uri']} ({_format_size(row['bytes'])})")
        for row in kept:
            print(f"kept {row['uri']}: {row['reason']}; --force removes it anyway")
    raise typer.Exit(1 if kept and datasets else 0)


@cache.command()
def pin(
    datasets: Annotated[list[str], typer.Argument(metavar="DATASET…", help="URIs or IDs as ls shows them.")],
    off: Annotated[bool, typer.Option("--off", help="Unpin the datasets.")] = False,
    directory: DirectoryOption = None,
) -> None:
    """Keep datasets in the cache when others need room."""
    for folder in _choose_datasets(_open_tier(directory), datasets):
        folder.pin(not off)


@cache.command()
def manifest(
    uri: Uri,
    samples: Annotated[
        bool, typer.Option("--samples", help="Count the samples of tar shards (reads all shards).")
    ] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Add the checksum of every object (reads all objects).")
    ] = False,
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the index of all samples of tar shards to this file; store it beside the manifest as "
            "manifest.index (reads all shards).",
        ),
    ] = None,
) -> None:
    """Print a manifest of a dataset. Store it beside the data as manifest.jsonl: then opening the dataset lists
    nothing."""
    from topkube.data.manifest import generate_manifest

    for line in generate_manifest(uri, samples, checksums, index):
        sys.stdout.write(line)


def _open_tier(directory: Path | None) -> DiskTier:
    from topkube.data.cache.disk.disk_tier import DiskTier
    from topkube.data.opening import choose_cache_folder

    settings = Settings.from_environment()
    path = choose_cache_folder(directory, settings)
    if not path.is_dir():
        raise DatasetError(f"there is no cache in {path}", next_step="give --directory, or warm a dataset first")
    return DiskTier(path, sharing=settings.cache_sharing)


def _choose_datasets(tier: DiskTier, names: list[str] | None, *, all_by_default: bool = False) -> list[DatasetFolder]:
    folders = tier.list_folders()
    if not names and all_by_default:
        return folders
    from topkube.data.opening import resolve_address

    chosen, settings = [], Settings.from_environment()
    for name in names or []:
        uris = (name, resolve_address(name, settings))
        matching = [folder for folder in folders if folder.name == name or folder.uri in uris]
        if not matching:
            raise DatasetError(f"{name} is not in the cache", next_step="`topkube cache ls` lists the datasets")
        chosen += matching
    return chosen


@contextmanager
def _show_progress(what: str, total: int, output: OutputFormat) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if output is OutputFormat.json or not console.is_terminal:
        yield lambda size: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _format_size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
