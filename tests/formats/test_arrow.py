from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from pipes.errors import DataError
from pipes.formats.arrow import as_tensor, hash_categories

KINDS = [
    *(getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(pa.float16(), pa.float32(), pa.float64()),
]
DAY = datetime.date(1970, 1, 3)


def shares(tensor: torch.Tensor, column: pa.Array) -> bool:
    buffer = column.buffers()[-1]
    return bool(buffer.address <= tensor.data_ptr() < buffer.address + buffer.size)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_share_memory_also_in_a_slice(kind: pa.DataType) -> None:
    column = pa.array(np.arange(10).astype(kind.to_pandas_dtype())).slice(3, 5)
    tensor = as_tensor(column)
    assert tensor.dtype == torch.from_numpy(np.zeros(1, kind.to_pandas_dtype())).dtype
    assert tensor.tolist() == [3, 4, 5, 6, 7]
    assert shares(tensor, column)
    assert as_tensor(column.slice(0, 0)).shape == (0,)


def test_shared_memory_outlives_the_array() -> None:
    tensors = [as_tensor(pa.array(np.full(100_000, number))) for number in range(20)]
    assert [tensor.unique().tolist() for tensor in tensors] == [[number] for number in range(20)]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([DAY]), torch.tensor([2], dtype=torch.int32)),
        (pa.array([DAY], pa.date64()), torch.tensor([2 * 86_400_000])),
        (pa.array([7], pa.timestamp("ns", "UTC")), torch.tensor([7])),
        (pa.array([7], pa.duration("s")), torch.tensor([7])),
        (pa.array([7], pa.time32("ms")), torch.tensor([7], dtype=torch.int32)),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_times_are_integers_of_their_unit(column: pa.Array, expected: torch.Tensor) -> None:
    assert torch.equal(as_tensor(column), expected)
    assert as_tensor(column).dtype == expected.dtype
    assert shares(as_tensor(column), column)


def test_fixed_size_lists_have_one_more_dimension() -> None:
    column = pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int16(), 2), 1)).slice(1)
    assert as_tensor(column).tolist() == [[[3, 4]], [[5, 6]]]
    assert shares(as_tensor(column), column)
    assert as_tensor(column.slice(0, 0)).shape == (0, 1, 2)
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24).reshape(2, 3, 4))
    assert torch.equal(as_tensor(images), torch.arange(24).reshape(2, 3, 4))


def test_what_cannot_share_is_copied() -> None:
    assert as_tensor(pa.array([True, False, True]).slice(1)).tolist() == [False, True]
    assert as_tensor(pa.array([5, 7, 5]).dictionary_encode()).tolist() == [5, 7, 5]
    assert as_tensor(pa.chunked_array([[1], [2, 3]])).tolist() == [1, 2, 3]
    assert as_tensor(pa.chunked_array([], pa.int8())).tolist() == []
    constant = pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(np.arange(3).tobytes())], offset=1)
    tensor = as_tensor(constant)
    tensor += 1
    assert tensor.tolist() == [2, 3]
    assert constant.to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None, None]), "2 of 3 values are null"),
        (pa.array(["a"]), "a column of string has no tensor"),
        (pa.array(["a"]).dictionary_encode(), "dictionary<.*no tensor"),
        (pa.array([[1, 2]]), "list<.*no tensor"),
        (pa.array([[1, None]], pa.list_(pa.int8(), 2)), "1 of 2 values are null"),
        (pa.array([1], pa.decimal128(5)), "decimal128.*no tensor"),
        (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "interval.*no tensor"),
        (pa.nulls(0), "null has no tensor"),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_what_has_no_tensor_is_refused(column: pa.Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_tensor(column)


def test_hashes_are_known_and_the_same_in_every_layout() -> None:
    texts = ["red", "green", None, "ÿ", "red", ""]
    expected = [455, 433, None, 935, 455, 0]
    column = pa.array(texts)
    for same in (
        column,
        column.dictionary_encode(),
        column.cast(pa.large_string()),
        column.cast(pa.binary()),
        pa.chunked_array([column.slice(0, 2), column.slice(2)]),
        pa.chunked_array([column.slice(0, 2).dictionary_encode(), column.slice(2).dictionary_encode()]),
    ):
        assert hash_categories(same, 1000).to_pylist() == expected
        assert hash_categories(same, 1000).type == pa.int64()
    assert hash_categories(column, 1000, seed=1).to_pylist() != expected
    numbers = pa.array([12, -3])
    assert hash_categories(numbers, 50).equals(hash_categories(pc.cast(numbers, pa.string()), 50))
    assert hash_categories(pa.array([], pa.string()), 5).to_pylist() == []


def test_hashes_spread() -> None:
    hashes = hash_categories(pa.array([f"user {number}" for number in range(20_000)]), 100)
    counts = np.bincount(hashes.to_numpy(), minlength=100)
    assert counts.min() > 140
    assert counts.max() < 260


@pytest.mark.parametrize(
    ("column", "buckets", "error"),
    [(pa.array([0.5]), 9, TypeError), (pa.array([[1]]), 9, TypeError), (pa.array(["a"]), 0, ValueError)],
)
def test_hashing_refuses(column: Any, buckets: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        hash_categories(column, buckets)
