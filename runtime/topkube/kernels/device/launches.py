"""Launches of the library's kernels: their stream, their outputs and their workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topkube.errors import ArgumentError, DeviceError
from topkube.kernels.cuda_library import VERDICT_WORDS, CudaLibrary
from topkube.kernels.device.tensor_arguments import TensorArguments

if TYPE_CHECKING:
    import torch


class Launches(TensorArguments):
    """The launches of kernels on torch's current stream, and the memory that the kernels write."""

    def __init__(self, library: CudaLibrary) -> None:
        super().__init__()
        self.library = library

    def find_stream(self, x: Any) -> tuple[int, int]:
        """Return the number of x's device and the address of torch's current stream there; (0, 0) for a CPU tensor."""
        if not x.is_cuda:
            return 0, 0
        index = x.device.index
        return index, self.torch._C._cuda_getCurrentRawStream(index)  # current_stream() takes ten times as long

    def allocate(self, like: Any, length: int, dtype: Any) -> Any:
        """Return a new tensor of `length` elements on the device of `like`. Raises DeviceError if it does not fit."""
        try:
            return self.torch.empty(length, dtype=dtype, device=like.device)
        except self.torch.cuda.OutOfMemoryError as error:
            free, total = self.torch.cuda.mem_get_info(like.device)
            raise DeviceError(
                f"{like.device} has no room for {length * dtype.itemsize:,} bytes ({free:,} of {total:,} are free);"
                " nothing was written",
                cause="the model, the batch or the selected entries fill the device",
                next_step="lower the batch size, or select from smaller buckets (bucket_bytes)",
            ) from error

    def allocate_verdict(self, like: Any) -> Any:
        """Return a new verdict that states no fault: all of its words are ~0."""
        return self.allocate(like, VERDICT_WORDS, self.torch.int32).fill_(-1)

    def allocate_entries(self, like: Any, k: int, dtype: Any) -> tuple[Any, Any]:
        """Return new tensors for the indices and the values of k entries."""
        return self.allocate(like, k, self.torch.uint32), self.allocate(like, k, dtype)

    def launch(self, name: str, like: Any, *arguments: Any) -> None:
        """Allocate the workspace of the library's function `name`, and launch it on the stream of `like`."""
        workspace = self.allocate(like, self.library.count_workspace_bytes(name, *arguments), self.torch.uint8)
        self.library.call(name, *self.find_stream(like), *arguments, workspace.data_ptr(), None)

    def read_flag(self, flag: torch.Tensor, wait: bool) -> Any:
        """Return True if a flag, (1,) int32, is not 0. Waits for the device. With wait=False, return a bool tensor of
        shape () on the device instead."""
        return self.read_words(flag)[0] != 0 if wait else (flag != 0).reshape(())

    def read_words(self, words: torch.Tensor) -> list[int]:
        """Return a flag or the words of a verdict (int32) as unsigned numbers. Waits for the device. Raises
        ArgumentError during the capture of a CUDA graph, which must not wait."""
        if words.is_cuda and self.torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "this call waits for a verdict of the device, which a CUDA graph's capture forbids",
                next_step="pass wait=False while capturing",
            )
        return [word & 0xFFFFFFFF for word in words.tolist()]
