"""The contenders: TopKube, torch's DataLoader over fsspec's filecache, litdata, MosaicML Streaming, and references.

Every contender yields (n, size) uint8 batches of at most 256 samples. Each sample of an epoch is read by one rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import topkube
from datacache.problem import CacheProblem
from topkube import _kernels
from topkube.data import ArrayOf, DistributedSampler
from topkube.data.dataset import CachedDataset

BATCH = 256


class CacheContender(Protocol):
    """A contender. `read_epoch` is called once for each of the epochs 0, 1, 2, ..."""

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]: ...

    def close(self) -> None: ...


class OurCache:
    """CachedDataset. With `memory`, decoded samples are cached in memory too; without it, only shards on disk."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path, root: Path, *, memory: bool) -> None:
        self.dataset = CachedDataset(
            f"{uri}/{problem.name}",
            decode=ArrayOf("uint8", (problem.size,), field="bin"),
            cache_directory=folder / "cache",
            memory_limit=2 * problem.samples * problem.size if memory else 0,
            free_bytes=0,
        )
        self.sampler = DistributedSampler(self.dataset, seed=1)

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]:
        self.sampler.set_epoch(number)
        return iter(self.dataset.batches(BATCH, self.sampler))

    def close(self) -> None:
        self.dataset.close()


def import_libraries(kind: str) -> None:
    """Import what a contender of this class imports when it is opened, so that no first epoch includes imports."""
    if kind in ("OurCache", "FileCache"):
        importlib.import_module("fsspec.implementations.http")
        importlib.import_module("topkube.data.batch_stream")
    elif kind == "LitData":
        importlib.import_module("litdata.streaming.downloader")
    elif kind == "Mosaic":
        import_mosaic()


class FileCacheDataset(Dataset[torch.Tensor]):
    """Samples through fsspec's filecache, which caches whole objects in a folder. The positions of samples in shards
    are given. If two processes fetch the same object into the same folder, they read partial files. So every rank has
    its own folder for shards, which all ranks read."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path) -> None:
        self._problem, self._uri = problem, f"{uri}/{problem.name}"
        self._folder = folder / ("filecache" if problem.form == "files" else f"filecache-{topkube.rank()}")
        self._names, self._object, self._offset = problem.find_places()
        self._files: dict[int, Any] = {}
        self._system: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self._problem.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        number = int(self._object[index])
        if self._problem.form == "files":
            with self._open(number) as file:
                return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        if number not in self._files:
            self._files[number] = self._open(number)
        file = self._files[number]
        file.seek(int(self._offset[index]))
        return torch.frombuffer(bytearray(file.read(self._problem.size)), dtype=torch.uint8)

    def _open(self, number: int) -> Any:
        import fsspec

        if self._system is None or self._system[0] != os.getpid():
            system = fsspec.filesystem("filecache", target_protocol="http", cache_storage=str(self._folder))
            self._system = (os.getpid(), system)
        return self._system[1].open(f"{self._uri}/{self._names[number]}", "rb")


class FileCache:
    """torch's DataLoader and DistributedSampler over `FileCacheDataset`, with `workers` worker processes."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path, root: Path, *, workers: int) -> None:
        dataset = FileCacheDataset(problem, uri, folder)
        self._sampler: Any = TorchSampler(dataset, topkube.size(), topkube.rank())
        self._loader: Any = DataLoader(
            dataset, BATCH, sampler=self._sampler, num_workers=workers, persistent_workers=workers > 0
        )

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]:
        self._sampler.set_epoch(number)
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None


class LitData:
    """litdata's StreamingDataset and loader over its own chunks, with `workers` worker processes. litdata does not
    support plain HTTP; the downloader below adds it through litdata's interface."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path, root: Path, *, workers: int) -> None:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming.downloader import register_downloader
        from litdata.streaming.resolver import Dir

        os.environ["WORLD_SIZE"], os.environ["GLOBAL_RANK"] = str(topkube.size()), str(topkube.rank())
        os.environ["NNODES"] = "2"
        register_downloader("http://", _build_downloader(), overwrite=True)
        dataset = StreamingDataset(
            Dir(path=None, url=f"{uri}/{problem.name}.litdata"),
            cache_dir=str(folder / "litdata"),
            shuffle=True,
            drop_last=False,
            max_cache_size="20GB",
        )
        self._loader: Any = StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0, collate_fn=_stack_samples
        )

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None


def _stack_samples(samples: list[bytes]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(sample), dtype=torch.uint8) for sample in samples])


def _build_downloader() -> type[Any]:
    from litdata.streaming.downloader import Downloader

    class Http(Downloader):  # type: ignore[misc]
        def download_file(self, remote_filepath: str, local_filepath: str) -> None:
            if os.path.exists(local_filepath):
                return
            part = self._temp_download_path(local_filepath)
            with urllib.request.urlopen(remote_filepath) as answer, open(part, "wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
            self._publish_file(part, local_filepath)

        async def adownload_fileobj(self, remote_filepath: str) -> bytes:
            with urllib.request.urlopen(remote_filepath) as answer:
                body: bytes = answer.read()
            return body

    return Http


class Mosaic:
    """MosaicML's StreamingDataset over its own shards (MDS), with `workers` worker processes of torch's DataLoader. It
    does not support plain HTTP; the downloader below adds it. Its ranks agree through torch.distributed."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path, root: Path, *, workers: int) -> None:
        from torch import distributed

        world = topkube.init()
        os.environ |= {"WORLD_SIZE": str(world.size), "LOCAL_WORLD_SIZE": str(world.local_size)}
        os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.local_rank), "GLOO_SOCKET_IFNAME": "eth0"}
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(folder)  # its locks are files there; every node needs its own
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder.parent}/ranks", rank=world.rank, world_size=world.size
        )
        mosaic = import_mosaic()
        mosaic.downloaders["http"] = _build_mosaic_downloader(mosaic.Downloader)
        dataset = mosaic.Dataset(
            remote=f"{uri}/{problem.name}.mosaic", local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH
        )
        self._loader: Any = DataLoader(
            dataset, BATCH, num_workers=workers, persistent_workers=workers > 0, collate_fn=_stack_fields
        )

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]:
        return iter(self._loader)

    def close(self) -> None:
        from torch import distributed

        self._loader = None
        distributed.destroy_process_group()
        tempfile.tempdir = None


def import_mosaic() -> SimpleNamespace:
    """Return MosaicML's writer, dataset, downloader and downloaders. Its package imports torchvision and transformers
    for ready-made datasets, which this benchmark does not need, so only `streaming.base` is imported."""
    if "streaming" not in sys.modules:
        spec = importlib.util.find_spec("streaming")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("mosaicml-streaming is not installed")
        package = ModuleType("streaming")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["streaming"] = package
    base = importlib.import_module("streaming.base")
    download = importlib.import_module("streaming.base.storage.download")
    return SimpleNamespace(
        Writer=base.MDSWriter,
        Dataset=base.StreamingDataset,
        Downloader=download.CloudDownloader,
        downloaders=download.DOWNLOADER_MAPPINGS,
    )


def _build_mosaic_downloader(base: Any) -> type[Any]:
    class Http(base):  # type: ignore[misc]
        @staticmethod
        def _client_identifier() -> str:
            return "http"

        def clean_up(self) -> None:
            pass

        def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
            part = f"{local}.part"
            with urllib.request.urlopen(remote, timeout=timeout) as answer, open(part, "wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
            os.replace(part, local)

    return Http


def _stack_fields(samples: list[dict[str, bytes]]) -> torch.Tensor:
    return _stack_samples([sample["bin"] for sample in samples])


class InMemory:
    """The reference of the second epoch: the same batches gathered from a NumPy array of this rank."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path, root: Path, sampler: DistributedSampler) -> None:
        self._data, self._sampler = problem.read_array(root), sampler

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]:
        self._sampler.set_epoch(number)
        order = self._sampler.indices()
        return (torch.from_numpy(self._data[order[first : first + BATCH]]) for first in range(0, order.size, BATCH))

    def close(self) -> None:
        self._data = np.empty((0, 0), np.uint8)


class PageCache:
    """The reference of the disk tier: the same samples from one file, with one pread per sample into a buffer."""

    def __init__(self, problem: CacheProblem, uri: str, folder: Path, root: Path, sampler: DistributedSampler) -> None:
        self._problem, self._sampler = problem, sampler
        self._file = os.open(root / f"{problem.name}.flat", os.O_RDONLY)
        self._buffer = np.empty(BATCH * problem.size, np.uint8)

    def read_epoch(self, number: int) -> Iterator[torch.Tensor]:
        self._sampler.set_epoch(number)
        order, size = self._sampler.indices(), self._problem.size
        for first in range(0, order.size, BATCH):
            batch = order[first : first + BATCH]
            out = self._buffer[: batch.size * size]
            lengths = np.full(batch.size, size, np.int64)
            _kernels.gather_files(np.full(batch.size, self._file, np.int32), batch * size, lengths, out)
            yield torch.from_numpy(out.reshape(batch.size, size))

    def close(self) -> None:
        os.close(self._file)
