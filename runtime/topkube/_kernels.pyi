"""The compiled extension (csrc/). Arrays are 1-D contiguous uint8 views; the code of their dtype is a separate
argument (`arrays.DTYPE_CODES`). Tensors and their bases are float32. Indices are uint32."""

from collections.abc import Callable, Sequence

from topkube.arrays import Array

def finalize_on_success(finalize: int, is_finalized: int) -> bool:
    """Finalize MPI at the end of the process if its exit status is 0. The arguments are the addresses of MPI_Finalize
    and MPI_Finalized. Returns False if the C library has no such hook: then nothing changes."""

def finalize_in_any_case() -> None:
    """After `finalize_on_success`: finalize MPI also if the exit status is not 0."""

def simd_paths() -> list[str]: ...
def use_simd(name: str) -> bool: ...
def simd() -> str: ...
def read_all(data: Array) -> int: ...
def sum(out: Array, out_dtype: int, inputs: Sequence[Array], in_dtype: int, scale: float) -> None: ...
def scale(data: Array, dtype: int, factor: float) -> None: ...
def is_finite(data: Array, dtype: int) -> bool: ...
def are_finite(addresses: Sequence[int], lengths: Sequence[int], dtype: int) -> bool: ...
def copy_each(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None: ...
def copy(out: Array, input: Array) -> None: ...
def topk(data: Array, dtype: int, threads: int, indices: Array, values: Array) -> tuple[int, int]:
    """Return (passes over memory, candidates)."""

def compress(
    gradient: Array, dtype: int, residual: Array, acc: Array, threads: int, indices: Array, values: Array
) -> tuple[int, int]:
    """Return (passes over memory, candidates)."""

def mstopk(
    data: Array, dtype: int, iterations: int, seed: int, threads: int, indices: Array, values: Array
) -> tuple[int, int, float, int, float, int]:
    """Return (passes over memory, candidates), then `selection.Thresholds`."""

def encoded_size(length: int, entries: int, wire: int) -> int: ...
def encode(
    indices: Array, values: Array, dtype: int, length: int, wire: int, residual: Array | None, out: Array
) -> int:
    """Return the position of the first index that is out of order, or the number of indices."""

def check_wire(buffer: Array) -> tuple[int, int, int, int]:
    """Return (fault, length, entries, wire code). Fault 0 is none."""

def decode(buffer: Array, indices: Array, values: Array) -> None: ...
def decode_add(buffer: Array, dense: Array, dtype: int, scale: float) -> bool: ...
def scatter_add(dense: Array, dtype: int, indices: Array, values: Array, value_dtype: int) -> int:
    """Return the position of the first index beyond `dense`, or the number of indices."""

class NodeTimeout(Exception):
    """`args`: the local ranks that did not enter the call."""

class NodeMismatch(Exception):
    """`args`: the local ranks whose signature differs."""

class Node:
    """Collectives of one node's ranks through `window`, which all of them map; see csrc/cpu/node/shared_memory.hpp."""

    def __init__(
        self, window: Array, rank: int, ranks: int, shards: int, cells: int, crowded: bool, poll: Callable[[], None]
    ) -> None: ...
    @staticmethod
    def window_bytes(ranks: int, cells: int) -> int: ...
    def all_reduce(self, x: Array, dtype: int, scale: float, signature: int, deadline_seconds: float) -> bool: ...
    def reduce_scatter(
        self,
        x: Array,
        dtype: int,
        scale: float,
        out: Array | None,
        add: Array | None,
        signature: int,
        deadline_seconds: float,
    ) -> bool: ...
    def check(self, signature: int, deadline_seconds: float) -> None: ...
    def all_gather(
        self, x: Array, item: int, bounds: Array | None, signature: int, deadline_seconds: float
    ) -> None: ...

class TcpMessage:
    """A message that is on its way; see csrc/cpu/links/message.hpp."""

class TcpMessages:
    """Messages that somebody waits for together."""

    @property
    def are_complete(self) -> bool: ...

class TcpReduction(TcpMessages):
    """An exchange with all ranks that compiled code carries out as a whole."""

    @property
    def is_finite(self) -> bool: ...

class TcpDenseSum(TcpReduction):
    """An all-reduce or a reduce-scatter."""

class TcpGreeting(TcpDenseSum):
    """The greetings of a call, with the sum of the values that they carry."""

    @property
    def differs(self) -> bool: ...
    @property
    def all_greeted(self) -> TcpMessages:
        """Complete when `differs` is known; sums may still follow."""

class TcpIntegerSum(TcpReduction):
    """A sum of values of which the ranks send integers. `sent_bytes` is what this rank sends in both stages."""

    def take_computations(self) -> list[tuple[int, int, int]]:
        """Return the computations that have ended since the last call, without those in the threads of lanes: start,
        duration and processor time, in nanoseconds."""

    @property
    def sent_bytes(self) -> int: ...

class TcpLinks:
    """TCP connections between ranks; see csrc/cpu/links/tcp_links.hpp. `listeners` are the file descriptors of sockets
    that listen, one for each lane; the object owns them."""

    def __init__(self, rank: int, ranks: int, listeners: Sequence[int], own: bytes, answer: bytes) -> None: ...
    @property
    def lanes(self) -> int: ...
    def set_peer(self, peer: int, address: str, ports: Sequence[int], own: bytes, answer: bytes) -> bool:
        """Return False if the address is not numeric."""

    def send(self, array: Array, peer: int, key: int, lane: int = -1) -> TcpMessage:
        """Send through one lane, or cut the message into parts for all lanes (-1)."""

    def receive(self, array: Array, peer: int, key: int, lane: int = -1) -> TcpMessage: ...
    def reduce(self, x: Array, buffer: Array, dtype: int, scale: float, key: int, is_gathered: bool) -> TcpDenseSum: ...
    def prepare_integers(
        self, change: Array, total: Array, bounds: Sequence[int], bits: int, key: int
    ) -> TcpIntegerSum: ...
    def begin_integers(self, sum: TcpIntegerSum) -> None: ...
    def greet(self, partners: Sequence[int], signature: int, key: int, room: int) -> TcpGreeting: ...
    def greet_and_reduce(
        self,
        partners: Sequence[int],
        signature: int,
        key: int,
        room: int,
        x: Array,
        dtype: int,
        scale: float,
        sums_key: int,
        is_in_one_round: bool,
    ) -> TcpGreeting: ...
    def abandon(self, greeting: TcpGreeting) -> None: ...
    def gather(self, messages: Sequence[TcpMessage]) -> TcpMessages: ...
    def advance(self) -> None: ...
    def wait(self, seconds: float, spinning: float = 0) -> None: ...
    def wake(self) -> None: ...
    def has_sent_all(self) -> bool: ...
    def list_unawaited(self) -> list[int]: ...
    def list_broken(self) -> list[tuple[int, str]]: ...
    def close(self) -> None: ...

def sum_sparse(out: Array, dtype: int, parts: Sequence[tuple[Array, Array]]) -> None: ...
def low_rank_product(
    out: Array, dtype: int, residual: Array, left: Array, right: Array, rank: int, weight: float
) -> None: ...
def gather_memory(source: Array, offsets: Array, lengths: Array, out: Array) -> None:
    """Copy the records source[offset : offset + length] to `out`, one after the other. offsets, lengths: int64."""

def gather_rows(source: Array, length: int, rows: Array, out: Array) -> None:
    """Copy the records source[row * length : (row + 1) * length] to `out`, one after the other. rows: int64."""

def gather_set_rows(flags: Array, source: Array, length: int, rows: Array, out: Array) -> bool:
    """Copy records as `gather_rows` does, if flags[row] (uint8) is 1 for every row. Otherwise return False and write
    nothing."""

def gather_files(files: Array, offsets: Array, lengths: Array, out: Array) -> tuple[int, int]:
    """Read records by pread from open files (int32) to `out`, one after the other. Returns the number of records read
    and, if a record could not be read, its errno (0 at the end of a file)."""

def gather_samples(
    starts: Array, files: Array, offsets: Array, lengths: Array, samples: Array, length: int, out: Array
) -> bool:
    """Read samples of `length` bytes by pread from the shards that have them. Shard k has the samples starts[k] to
    starts[k + 1] - 1 and is open as files[k] (int32; negative if it is not open). Sample s has lengths[s] bytes at
    offsets[s] of its shard. Returns False, with `out` undefined, if a shard is not open or if a sample has another
    length or cannot be read."""

def write_rows(file: int, length: int, rows: Array, source: Array) -> tuple[int, int]:
    """Write records of `length` bytes each from `source` to a file, at the bytes row * length, by pwrite. rows: int64.
    Returns the number of records written and, if a record could not be written, its errno."""

def map_file(file: int, size: int, alignment: int) -> Array:
    """Return the first `size` bytes of an open file, mapped read-only at a multiple of `alignment` (bytes, a power of
    two). Raises OSError."""

def collapse_pages(mapped: Array, start: int, size: int) -> int:
    """Move the pages of mapped[start : start + size] into huge pages. Returns 0, or the errno of the kernel."""

def scan_tar(file: int, size: int, at: int, header: Array, lengths: Array, names: Array) -> tuple[int, int]:
    """Find the consecutive members of a tar from byte `at` on. The scan ends at a member whose header is invalid, or
    differs from `header` (512 bytes) in more than name, owner, length, time and checksum, and after as many members as
    `lengths` (int64) has elements. Writes the lengths of the members, and their names with a zero after each (`names`:
    101 bytes for each length). Returns the number of members and the bytes of the names."""

def quantised_bytes(length: int, bits: int) -> int: ...
def quantised_pack(values: Array, bits: int, message: Array) -> bool: ...
def quantised_unpack_add(
    values: Array, bits: int, messages: Sequence[Array], weights: Sequence[float], replaces: bool
) -> None: ...
def sign_pack(values: Array, scales: Array, bits: Array) -> bool: ...
def sign_pack_differences(tensors: Sequence[Array], bases: Sequence[Array], message: Array) -> bool: ...
def sign_unpack_add_tensors(tensors: Sequence[Array], messages: Sequence[Array], weights: Sequence[float]) -> None: ...
def sign_unpack_add(
    values: Array, scales: Sequence[Array], bits: Sequence[Array], weights: Sequence[float]
) -> None: ...
def top_sign_bytes(length: int, count: int) -> int: ...
def top_sign_pack(values: Array, count: int, threads: int, message: Array) -> bool: ...
def top_sign_unpack_add(values: Array, count: int, message: Array, weight: float) -> bool: ...
