"""Samples of one batch in columns, and as a sequence of samples where somebody wants them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from topkube.errors import DatasetError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Leaf:
    """One part of a sample. `kind`: array, scalar (NumPy's), tensor (torch's), bytes, text, int, float or bool. `shape`
    is None where it differs from sample to sample."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None

    @property
    def fixed(self) -> bool:
        return self.shape is not None

    @cached_property
    def record_bytes(self) -> int:
        assert self.shape is not None
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Schema:
    """How samples are built of leaves. `form`: single, tuple, list or mapping."""

    form: str
    leaves: tuple[Leaf, ...]

    def to_data(self) -> dict[str, Any]:
        return {"form": self.form, "leaves": [[one.name, one.kind, one.dtype, one.shape] for one in self.leaves]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Schema:
        return cls(
            data["form"],
            tuple(
                Leaf(name, kind, dtype, None if shape is None else tuple(shape))
                for name, kind, dtype, shape in data["leaves"]
            ),
        )

    @property
    def fixed(self) -> bool:
        return all(leaf.fixed for leaf in self.leaves)

    @cached_property
    def record_bytes(self) -> int:
        """Of one sample; only where all leaves are fixed."""
        return sum(leaf.record_bytes for leaf in self.leaves)


_SCALARS = {bool: "bool", int: "int64", float: "float64"}


def parts(sample: Any) -> tuple[str, list[str], list[Any]]:
    """A sample taken apart: its form, the names and the values of its leaves. Raises DatasetError for what cannot be
    kept without pickle."""
    if isinstance(sample, Mapping):
        for key in sample:
            if type(key) is not str:
                raise DatasetError(f"decode returned a dict with the key {key!r}", next_step="use text as keys")
        return "mapping", list(sample), list(sample.values())
    if type(sample) in (tuple, list):
        return type(sample).__name__, [str(index) for index in range(len(sample))], list(sample)
    return "single", [""], [sample]


def leaf_of(name: str, value: Any) -> Leaf:
    """The leaf that fits `value`. Raises DatasetError."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Leaf(name, "bytes", "uint8", None)
    if isinstance(value, str):
        return Leaf(name, "text", "uint8", None)
    if type(value) in _SCALARS:
        return Leaf(name, type(value).__name__, _SCALARS[type(value)], ())
    if _is_tensor(value):
        return Leaf(name, "tensor", (array := _numbers(value)).dtype.str, array.shape)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or value.dtype.kind == "V":  # what its `str` does not name would come back as bytes
            raise DatasetError(f"a sample holds an array of {value.dtype}", next_step="return arrays of numbers")
        return Leaf(name, "array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, value.shape)
    raise DatasetError(
        f"decode returned a {type(value).__name__}" + (f" in {name!r}" if name else ""),
        cause="only arrays, tensors, numbers, bytes and text can be cached",
        next_step="return those, alone or in a tuple, list or dict",
    )


def schema_of(samples: Sequence[Any]) -> Schema:
    """The schema of these samples: shapes that differ among them are left open. Raises DatasetError."""
    form, names, values = parts(samples[0])
    leaves = [leaf_of(name, value) for name, value in zip(names, values, strict=True)]
    for sample in samples[1:]:
        other_form, other_names, other_values = parts(sample)
        if (other_form, other_names) != (form, names):
            raise DatasetError(
                "decode returned samples of different structure",
                cause=f"{form} {names} and {other_form} {other_names}",
                next_step="return the same keys or the same length every time",
            )
        for index, value in enumerate(other_values):
            one, other = leaves[index], leaf_of(names[index], value)
            if one == other:
                continue
            if (one.kind, one.dtype) != (other.kind, other.dtype) or len(one.shape or other.shape or ()) != len(
                other.shape or ()
            ):
                raise DatasetError(
                    f"decode returned {one.kind} {one.dtype} and {other.kind} {other.dtype} in one place",
                    next_step="return the same type and number of dimensions every time",
                )
            leaves[index] = Leaf(one.name, one.kind, one.dtype, None)
    return Schema(form, tuple(leaves))


def fits(schema: Schema, sample: Any) -> bool:
    """Whether the sample can be kept under `schema`."""
    form, names, values = parts(sample)
    if form != schema.form or names != [leaf.name for leaf in schema.leaves]:
        return False
    for leaf, value in zip(schema.leaves, values, strict=True):
        try:
            own = leaf_of(leaf.name, value)
        except DatasetError:
            return False
        if (own.kind, own.dtype) != (leaf.kind, leaf.dtype) or (leaf.fixed and own.shape != leaf.shape):
            return False
    return True


def as_array(value: Any) -> Array:
    """The bytes of a leaf, as an array."""
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    return np.ascontiguousarray(_numbers(value) if _is_tensor(value) else value)


def restore(leaf: Leaf, stored: Any) -> Any:
    """The leaf's value from its array, or, where that has no dimensions, from NumPy's scalar."""
    if leaf.kind == "bytes":
        return stored.tobytes()
    if leaf.kind == "text":
        return stored.tobytes().decode()
    if leaf.kind == "tensor":
        return _tensor(np.asarray(stored))
    if leaf.kind == "array":
        return np.asarray(stored)
    return stored if leaf.kind == "scalar" else stored.item()


def assemble(schema: Schema, values: Sequence[Any]) -> Any:
    """A sample from the values of its leaves."""
    if schema.form == "mapping":
        return dict(zip((leaf.name for leaf in schema.leaves), values, strict=True))
    if schema.form == "single":
        return values[0]
    return list(values) if schema.form == "list" else tuple(values)


class Batch(Sequence[Any]):
    """`count` samples. Column i belongs to leaf i of the schema: an array with one row per sample where the leaf is
    fixed, else a list of arrays."""

    def __init__(self, schema: Schema, columns: Sequence[Array | list[Array]], count: int) -> None:
        self.schema, self.columns, self._count = schema, list(columns), count

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves of all samples."""
        return sum(c.nbytes if isinstance(c, np.ndarray) else sum(one.nbytes for one in c) for c in self.columns)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        values = [restore(leaf, column[index]) for leaf, column in zip(self.schema.leaves, self.columns, strict=True)]
        return assemble(self.schema, values)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._count))


def merged(first: npt.NDArray[np.bool_], yes: Batch, no: Batch) -> Batch:
    """One batch of two with the same schema, all leaves fixed: the samples of `yes` where `first` is true, else those
    of `no`, each in their order."""
    columns = []
    for leaf, some, others in zip(yes.schema.leaves, yes.columns, no.columns, strict=True):
        assert leaf.shape is not None
        column = np.empty((first.size, *leaf.shape), leaf.dtype)
        column[first], column[~first] = some, others
        columns.append(column)
    return Batch(yes.schema, columns, first.size)


def collate(samples: Any) -> Any:
    """A `collate_fn` for torch's DataLoader: what its default makes of the samples, without building them one by one
    where they come in columns. bytes and text stay lists."""
    from torch.utils.data import default_collate

    if not isinstance(samples, Batch):
        return default_collate(samples)
    values = []
    for leaf, column in zip(samples.schema.leaves, samples.columns, strict=True):
        if leaf.fixed and isinstance(column, np.ndarray):
            values.append(_tensor(column))
        elif leaf.kind in ("bytes", "text"):
            values.append([restore(leaf, one) for one in column])
        else:
            values.append(default_collate([restore(leaf, one) for one in column]))
    form = samples.schema.form
    return assemble(samples.schema, values) if form != "tuple" else list(values)


class ArrayOf:
    """A `decode` for samples that are one array each: the bytes of a file, or of one `field` of a tar's samples, as
    `dtype` in `shape`. Whole batches are decoded at once."""

    def __init__(self, dtype: Any, shape: Sequence[int], field: str | None = None) -> None:
        self.dtype, self.shape, self.field = np.dtype(dtype), tuple(shape), field
        self.fingerprint = f"ArrayOf {self.dtype.str} {self.shape} {field}"
        self.schema = Schema("single", (Leaf("", "array", self.dtype.str, self.shape),))
        self.record_bytes = self.schema.record_bytes

    def __call__(self, raw: Any) -> Array:
        data = raw if self.field is None else raw[self.field]
        if len(data) != self.record_bytes:
            raise self.wrong(len(data))
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def wrong(self, length: int) -> DatasetError:
        return DatasetError(
            f"a sample has {length:,} bytes; {self.dtype} in {self.shape} has {self.record_bytes:,}",
            next_step="give the dtype and shape that the files hold",
        )

    def many(self, data: npt.NDArray[np.uint8], count: int) -> Batch:
        """`data`: the bytes of `count` samples, one after the other."""
        return Batch(self.schema, [data.view(self.dtype).reshape(count, *self.shape)], count)


Decode = Callable[[Any], Any]


def _is_tensor(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")


def _numbers(tensor: Any) -> Array:
    """The tensor's values. Raises DatasetError for what NumPy cannot hold."""
    try:
        return np.asarray(tensor.detach())
    except (TypeError, RuntimeError) as error:
        raise DatasetError(
            f"decode returned a tensor of {tensor.dtype} on {tensor.device}, which cannot be cached",
            cause=str(error),
            next_step="return a dense tensor on the CPU, bfloat16 as float32 or float16",
        ) from None


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())
