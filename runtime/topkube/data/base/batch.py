"""The samples of a batch, stored in columns. A batch is also a sequence of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.errors import DatasetError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Leaf:
    """One part of a sample.

    `kind`: array, scalar (of NumPy), tensor (of torch), bytes, text, int, float or bool. `shape` is None if it differs
    between samples.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None

    @property
    def has_fixed_shape(self) -> bool:
        """True if all samples have the same shape."""
        return self.shape is not None

    @cached_property
    def record_bytes(self) -> int:
        """The bytes of the leaf in one sample. Its shape must be fixed."""
        assert self.shape is not None
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Schema:
    """The leaves of every sample, and the container that holds them. `form`: single, tuple, list or mapping."""

    form: str
    leaves: tuple[Leaf, ...]

    def to_data(self) -> dict[str, Any]:
        """Return the schema as data for JSON."""
        return {"form": self.form, "leaves": [[leaf.name, leaf.kind, leaf.dtype, leaf.shape] for leaf in self.leaves]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Schema:
        """Return the schema from the data that `to_data` returned."""
        return cls(
            data["form"],
            tuple(
                Leaf(name, kind, dtype, None if shape is None else tuple(shape))
                for name, kind, dtype, shape in data["leaves"]
            ),
        )

    @property
    def has_fixed_shape(self) -> bool:
        """True if all leaves have a fixed shape."""
        return all(leaf.has_fixed_shape for leaf in self.leaves)

    @cached_property
    def is_one_array(self) -> bool:
        """True if a sample is a single leaf of fixed shape, and not in a container."""
        return self.form == "single" and self.has_fixed_shape

    @cached_property
    def record_bytes(self) -> int:
        """The bytes of one sample. All leaves must have a fixed shape."""
        return sum(leaf.record_bytes for leaf in self.leaves)


_SCALARS = {bool: "bool", int: "int64", float: "float64"}


def split_sample(sample: Any) -> tuple[str, list[str], list[Any]]:
    """Return the form of the sample (see `Schema`), and the names and values of its leaves. Raises DatasetError for a
    dict whose keys are not text."""
    if isinstance(sample, Mapping):
        for key in sample:
            if type(key) is not str:
                raise DatasetError(f"decode returned a dict with the key {key!r}", next_step="use text as keys")
        return "mapping", list(sample), list(sample.values())
    if type(sample) in (tuple, list):
        return type(sample).__name__, [str(index) for index in range(len(sample))], list(sample)
    return "single", [""], [sample]


def describe_leaf(name: str, value: Any) -> Leaf:
    """Return the leaf that describes `value`. Raises DatasetError for a type that cannot be cached."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Leaf(name, "bytes", "uint8", None)
    if isinstance(value, str):
        return Leaf(name, "text", "uint8", None)
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise DatasetError(
            f"decode returned the integer {value}" + (f" in {name!r}" if name else ""),
            cause="integers are cached in 64 bits with a sign",
            next_step="return it as text, or as numpy.uint64(...)",
        )
    if type(value) in _SCALARS:
        return Leaf(name, type(value).__name__, _SCALARS[type(value)], ())
    if _is_tensor(value):
        array = _read_tensor(value)
        return Leaf(name, "tensor", array.dtype.str, array.shape)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or value.dtype.kind == "V":  # `dtype.str` does not describe these types
            raise DatasetError(f"a sample holds an array of {value.dtype}", next_step="return arrays of numbers")
        return Leaf(name, "array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, value.shape)
    raise DatasetError(
        f"decode returned a {type(value).__name__}" + (f" in {name!r}" if name else ""),
        cause="only arrays, tensors, numbers, bytes and text can be cached",
        next_step="return one of these types, alone or in a tuple, list or dict",
    )


def infer_schema(samples: Sequence[Any]) -> Schema:
    """Return the schema of these samples; the shape of a leaf is None if it differs between them. Raises
    DatasetError."""
    form, names, values = split_sample(samples[0])
    leaves = [describe_leaf(name, value) for name, value in zip(names, values, strict=True)]
    for sample in samples[1:]:
        other_form, other_names, other_values = split_sample(sample)
        if (other_form, other_names) != (form, names):
            raise DatasetError(
                "decode returned samples of different structure",
                cause=f"{form} {names} and {other_form} {other_names}",
                next_step="return the same keys or the same length every time",
            )
        for index, value in enumerate(other_values):
            leaf, other = leaves[index], describe_leaf(names[index], value)
            if leaf == other:
                continue
            if (leaf.kind, leaf.dtype) != (other.kind, other.dtype) or len(leaf.shape or other.shape or ()) != len(
                other.shape or ()
            ):
                raise DatasetError(
                    f"decode returned {leaf.kind} {leaf.dtype} and {other.kind} {other.dtype} for one part of a sample",
                    next_step="return the same type and number of dimensions every time",
                )
            leaves[index] = Leaf(leaf.name, leaf.kind, leaf.dtype, None)
    return Schema(form, tuple(leaves))


def fits_schema(schema: Schema, sample: Any) -> bool:
    """Return True if the sample can be stored with `schema`."""
    form, names, values = split_sample(sample)
    if form != schema.form or names != [leaf.name for leaf in schema.leaves]:
        return False
    for leaf, value in zip(schema.leaves, values, strict=True):
        try:
            described = describe_leaf(leaf.name, value)
        except DatasetError:
            return False
        if (described.kind, described.dtype) != (leaf.kind, leaf.dtype):
            return False
        if leaf.has_fixed_shape and described.shape != leaf.shape:
            return False
    return True


def to_array(value: Any) -> Array:
    """Return the value of a leaf as an array (C-contiguous; uint8 for bytes and text)."""
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    return np.ascontiguousarray(_read_tensor(value) if _is_tensor(value) else value)


def restore_value(leaf: Leaf, stored: Any) -> Any:
    """Return the leaf's value from its stored array, or from a NumPy scalar if the leaf has no dimensions."""
    if leaf.kind == "bytes":
        return stored.tobytes()
    if leaf.kind == "text":
        return stored.tobytes().decode()
    if leaf.kind == "tensor":
        return _build_tensor(np.asarray(stored))
    if leaf.kind == "array":
        return np.asarray(stored)
    return stored if leaf.kind == "scalar" else stored.item()


def assemble_sample(schema: Schema, values: Sequence[Any]) -> Any:
    """Return the sample that has these leaf values."""
    if schema.form == "mapping":
        return dict(zip((leaf.name for leaf in schema.leaves), values, strict=True))
    if schema.form == "single":
        return values[0]
    return list(values) if schema.form == "list" else tuple(values)


class Batch(Sequence[Any]):
    """`count` samples in columns.

    Column i belongs to leaf i of the schema: an array with one row per sample if the leaf has a fixed shape, else a
    list of arrays.
    """

    def __init__(self, schema: Schema, columns: Sequence[Array | list[Array]], count: int) -> None:
        self.schema, self.columns, self._count = schema, list(columns), count

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves of all samples."""
        return sum(
            column.nbytes if isinstance(column, np.ndarray) else sum(array.nbytes for array in column)
            for column in self.columns
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        values = [
            restore_value(leaf, column[index]) for leaf, column in zip(self.schema.leaves, self.columns, strict=True)
        ]
        return assemble_sample(self.schema, values)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._count))


def merge_batches(from_first: npt.NDArray[np.bool_], first: Batch, second: Batch) -> Batch:
    """Return one batch: the next sample of `first` at every position where `from_first` is true, else the next sample
    of `second`. Both batches have the same schema, and all its leaves have a fixed shape."""
    columns = []
    for leaf, first_column, second_column in zip(first.schema.leaves, first.columns, second.columns, strict=True):
        assert leaf.shape is not None
        column = np.empty((from_first.size, *leaf.shape), leaf.dtype)
        column[from_first], column[~from_first] = first_column, second_column
        columns.append(column)
    return Batch(first.schema, columns, from_first.size)


def collate(samples: Any) -> Any:
    """Collate samples as torch's default function does. It is the `collate_fn` for a DataLoader over a CachedDataset.

    Samples that are stored in columns become tensors without building each sample. Bytes and text become lists.
    """
    if not isinstance(samples, Batch):
        return _collate_default(samples)
    if samples.schema.is_one_array and type(samples.columns[0]) is np.ndarray:  # the fastest path, for small batches
        return _build_tensor(samples.columns[0])
    values = []
    for leaf, column in zip(samples.schema.leaves, samples.columns, strict=True):
        if leaf.has_fixed_shape and isinstance(column, np.ndarray):
            values.append(_build_tensor(column))
        elif leaf.kind in ("bytes", "text"):
            values.append([restore_value(leaf, stored) for stored in column])
        else:
            values.append(_collate_default([restore_value(leaf, stored) for stored in column]))
    form = samples.schema.form
    return assemble_sample(samples.schema, values) if form != "tuple" else list(values)


def _collate_default(samples: Any) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


class ArrayOf:
    """A `decode` function for samples that are one array each; it decodes a whole batch at once.

    The array is the content of a file, or the content of one `field` of each sample in a tar. It has the type `dtype`
    and the shape `shape`.
    """

    def __init__(self, dtype: Any, shape: Sequence[int], field: str | None = None) -> None:
        self.dtype, self.shape, self.field = np.dtype(dtype), tuple(shape), field
        self.fingerprint = f"ArrayOf {self.dtype.str} {self.shape} {field}"
        self.schema = Schema("single", (Leaf("", "array", self.dtype.str, self.shape),))
        self.record_bytes = self.schema.record_bytes

    def __call__(self, raw: Any) -> Array:
        data = raw if self.field is None else raw[self.field]
        if len(data) != self.record_bytes:
            raise self.size_error(len(data))
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def size_error(self, length: int) -> DatasetError:
        """Return the error for a sample of `length` bytes."""
        return DatasetError(
            f"a sample has {length:,} bytes; {self.dtype} in {self.shape} has {self.record_bytes:,}",
            next_step="pass the dtype and shape of the arrays in the files",
        )

    def decode_many(self, data: npt.NDArray[np.uint8], count: int) -> Batch:
        """Return the batch of `count` samples whose bytes follow each other in `data`."""
        return Batch(self.schema, [data.view(self.dtype).reshape(count, *self.shape)], count)


Decode = Callable[[Any], Any]


def _is_tensor(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")


def _read_tensor(tensor: Any) -> Array:
    """Return the tensor's values. Raises DatasetError if NumPy cannot store them."""
    try:
        return np.asarray(tensor.detach())
    except (TypeError, RuntimeError) as error:
        raise DatasetError(
            f"decode returned a tensor of {tensor.dtype} on {tensor.device}, which cannot be cached",
            cause=str(error),
            next_step="return a dense tensor on the CPU, bfloat16 as float32 or float16",
        ) from None


def _build_tensor(array: Array) -> Any:
    return _load_from_numpy()(array if array.flags.writeable else array.copy())


@cache
def _load_from_numpy() -> Callable[[Array], Any]:
    """Return torch.from_numpy, imported once. An import statement in `_build_tensor` would run for every batch."""
    import torch

    return torch.from_numpy
