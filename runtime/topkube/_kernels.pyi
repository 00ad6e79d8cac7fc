"""The compiled extension (csrc/). Arrays are 1-D contiguous uint8 views with a dtype code beside; indices uint32."""

from collections.abc import Callable, Sequence

from topkube.arrays import Array

def finalize_on_success(finalize: int, is_finalized: int) -> bool:
    """Addresses of MPI_Finalize and MPI_Finalized; whether the process will end MPI where its exit status is 0."""

def finalize_in_any_case() -> None: ...
def simd_paths() -> list[str]: ...
def use_simd(name: str) -> bool: ...
def simd() -> str: ...
def read_all(data: Array) -> int: ...
def sum(out: Array, out_dtype: int, inputs: Sequence[Array], in_dtype: int, scale: float) -> None: ...
def scale(data: Array, dtype: int, factor: float) -> None: ...
def is_finite(data: Array, dtype: int) -> bool: ...
def copy(out: Array, input: Array) -> None: ...
def topk(data: Array, dtype: int, threads: int, indices: Array, values: Array) -> tuple[int, int]: ...
def compress(
    gradient: Array, dtype: int, residual: Array, acc: Array, threads: int, indices: Array, values: Array
) -> tuple[int, int]: ...
def mstopk(
    data: Array, dtype: int, iterations: int, seed: int, threads: int, indices: Array, values: Array
) -> tuple[int, int, float, int, float, int]: ...
def encoded_size(length: int, entries: int, wire: int) -> int: ...
def encode(
    indices: Array, values: Array, dtype: int, length: int, wire: int, residual: Array | None, out: Array
) -> int: ...
def check_wire(buffer: Array) -> tuple[int, int, int, int]: ...
def decode(buffer: Array, indices: Array, values: Array) -> None: ...
def decode_add(buffer: Array, dense: Array, dtype: int, scale: float) -> bool: ...
def scatter_add(dense: Array, dtype: int, indices: Array, values: Array, value_dtype: int) -> int: ...

class NodeTimeout(Exception):
    """`args`: the local ranks that did not enter the call."""

class NodeMismatch(Exception):
    """`args`: the local ranks whose signature differs."""

class Node:
    """Collectives of one node's ranks through `window`, which all of them map; see cpu/shared_memory.hpp."""

    def __init__(
        self, window: Array, rank: int, ranks: int, shards: int, cells: int, crowded: bool, poll: Callable[[], None]
    ) -> None: ...
    @staticmethod
    def window_bytes(ranks: int, cells: int) -> int: ...
    def all_reduce(self, x: Array, dtype: int, scale: float, signature: int, deadline: float) -> bool: ...
    def reduce_scatter(
        self,
        x: Array,
        dtype: int,
        scale: float,
        out: Array | None,
        add: Array | None,
        signature: int,
        deadline: float,
    ) -> bool: ...
    def check(self, signature: int, deadline: float) -> None: ...
    def all_gather(self, x: Array, item: int, bounds: Array | None, signature: int, deadline: float) -> None: ...

def sum_sparse(out: Array, dtype: int, parts: Sequence[tuple[Array, Array]]) -> None: ...
def gather_memory(source: Array, offsets: Array, lengths: Array, out: Array) -> None:
    """Records source[offset : offset + length], one after the other. offsets, lengths: int64."""

def gather_rows(source: Array, length: int, rows: Array, out: Array) -> None:
    """Records source[row * length : (row + 1) * length], one after the other. rows: int64."""

def gather_set_rows(flags: Array, source: Array, length: int, rows: Array, out: Array) -> bool:
    """Does the same if flags[row] (uint8) is 1 for every row. Returns False otherwise, and writes nothing."""

def gather_files(files: Array, offsets: Array, lengths: Array, out: Array) -> tuple[int, int]:
    """The same by pread from open files (int32). Returns the records read and, where one failed, its errno (0 at the
    end of a file)."""

def gather_samples(
    starts: Array, files: Array, offsets: Array, lengths: Array, samples: Array, length: int, out: Array
) -> bool:
    """Samples of `length` bytes, by pread from the shards that have them. Shard k has the samples starts[k] to
    starts[k + 1] - 1 and is open as files[k] (int32; negative if it is not open). Sample s has lengths[s] bytes at
    offsets[s] of its shard. Returns False, with `out` undefined, if a shard is not open or a sample has another length
    or cannot be read."""

def write_rows(file: int, length: int, rows: Array, source: Array) -> tuple[int, int]:
    """Records of `length` bytes each, from `source`, to a file at row * length, by pwrite. rows: int64. Returns the
    records written and, where one failed, its errno."""

def map_file(file: int, size: int, alignment: int) -> Array:
    """The first `size` bytes of an open file, mapped read-only at a multiple of `alignment` (bytes, a power of two).
    Raises OSError."""

def collapse_pages(mapped: Array, start: int, size: int) -> int:
    """Moves the pages of mapped[start : start + size] into huge pages. Returns 0, or the errno of the kernel."""

def scan_tar(file: int, size: int, at: int, header: Array, lengths: Array, names: Array) -> tuple[int, int]:
    """The consecutive members of a tar from byte `at` on whose headers are valid and differ from `header` (512 bytes)
    in nothing but name, owner, length, time and checksum; at most as many as `lengths` (int64) has elements. Writes
    their lengths, and their names with a zero after each (`names`: 101 bytes for each length). Returns the number of
    members and the bytes of the names."""

def quantised_bytes(length: int, bits: int) -> int: ...
def quantised_pack(values: Array, bits: int, message: Array) -> bool: ...
def quantised_unpack_add(values: Array, bits: int, messages: Sequence[Array], weights: Sequence[float]) -> None: ...
def sign_pack(values: Array, scales: Array, bits: Array) -> bool: ...
def sign_unpack_add(
    values: Array, scales: Sequence[Array], bits: Sequence[Array], weights: Sequence[float]
) -> None: ...
def top_sign_bytes(length: int, count: int) -> int: ...
def top_sign_pack(values: Array, count: int, threads: int, message: Array) -> bool: ...
def top_sign_unpack_add(values: Array, count: int, message: Array, weight: float) -> bool: ...
