"""Arrow columns to tensors, without a copy where the type allows, and to hashes that are the same everywhere.

Source: https://arrow.apache.org/docs/format/Columnar.html for the memory of a column.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from pipes.errors import DataError

__all__ = ["as_tensor", "hash_categories"]

# Arrow's names of the types whose memory a tensor can share.
_DTYPES = {
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64")},
    **{name: getattr(torch, name) for name in ("uint8", "uint16", "uint32", "uint64")},
    **{"halffloat": torch.float16, "float": torch.float32, "double": torch.float64},
}


def as_tensor(column: Any) -> torch.Tensor:
    """Return the values of an Arrow array as a tensor, which shares its memory where that is possible.

    Integers and floats are shared. So are dates, times, timestamps and durations (as integers of the column's unit) and
    fixed-size lists of all these, which get one more dimension, or those of a fixed-shape tensor. Booleans, which are
    bits, dictionaries of numbers, memory that must not be written, and an array of several chunks are copied.
    A tensor that shares memory must not be changed in place while the array is in use elsewhere.

    Raises DataError for nulls and for types without a tensor, such as strings.

    >>> import pyarrow
    >>> as_tensor(pyarrow.array([1.5, 2.5])), as_tensor(pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.int8(), 2)))
    (tensor([1.5000, 2.5000], dtype=torch.float64), tensor([[1, 2]], dtype=torch.int8))
    """
    import pyarrow as pa
    from pyarrow import types

    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [_empty(column.type)])
    if column.null_count:
        raise DataError(f"{column.null_count} of {len(column)} values are null; fill them (pyarrow.compute.fill_null)")
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType) and (kind.permutation or []) == sorted(kind.permutation or []):
        return as_tensor(column.storage).reshape(len(column), *kind.shape)
    if types.is_fixed_size_list(kind):
        values = as_tensor(column.flatten())
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if types.is_boolean(kind):
        return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)))
    if types.is_dictionary(kind) and str(kind.value_type) in _DTYPES:
        return as_tensor(column.dictionary_decode())
    if types.is_temporal(kind) and not types.is_interval(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    dtype = _DTYPES.get(str(column.type))
    if dtype is None:
        raise DataError(f"a column of {kind} has no tensor; cast, hash or encode it, or leave it out (columns=...)")
    return _shared(column, dtype)


def _empty(kind: Any) -> Any:
    import pyarrow as pa

    return pa.array([], kind)


def _shared(column: Any, dtype: torch.dtype) -> torch.Tensor:
    data = column.buffers()[1]
    if not len(column) or data is None:
        return torch.empty(0, dtype=dtype)
    size = dtype.itemsize
    if not data.is_mutable:  # torch has no tensors that refuse to be written
        data = bytearray(data.slice(column.offset * size, len(column) * size))
        return torch.frombuffer(data, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=len(column), offset=column.offset * size)


def hash_categories(column: Any, buckets: int, *, seed: int = 0) -> Any:
    """Return the bucket of each value of an Arrow array, an int64 below `buckets`: the same in all processes, always.

    A text's is its CRC-32 (zlib's, of its UTF-8, begun with `seed`) modulo `buckets`; an integer is hashed by its
    decimal text, a null stays null. Only distinct values are hashed, so a column of few categories costs little.

    Raises ValueError for buckets below 1, TypeError for a column of anything but texts, bytes or integers.

    >>> import pyarrow
    >>> hash_categories(pyarrow.array(["red", "green", None, "red"]), 1000).to_pylist()
    [455, 433, None, 455]
    """
    import pyarrow as pa

    if buckets < 1:
        raise ValueError(f"buckets={buckets}: at least 1 is needed")
    encoded = pa.types.is_dictionary(column.type)
    kind = column.type.value_type if encoded else column.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not (pa.types.is_integer(kind) or any(is_text(kind) for is_text in texts)):
        raise TypeError(f"categories are texts, bytes or integers, not {kind}: cast the column")
    if not encoded:
        column = column.dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    values = column.dictionary.cast(pa.string()) if pa.types.is_integer(kind) else column.dictionary
    hashes = [None if value is None else zlib.crc32(value, seed) % buckets for value in _as_bytes(values)]
    return pa.array(hashes, pa.int64()).take(column.indices)


def _as_bytes(values: Any) -> list[bytes | None]:
    import pyarrow as pa

    return values.cast(pa.large_binary()).to_pylist()  # type: ignore[no-any-return]
