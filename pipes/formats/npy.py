"""Numpy arrays out of `.npy` bytes, from a stream that need not seek, without ever running code.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, versions 1.0 to 3.0. The header is
parsed as a literal; arrays of objects, which are pickles, are refused.
"""

from __future__ import annotations

import ast
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from pipes.errors import DataError, PipesError, StateError, TruncatedError
from pipes.formats.chunks import go_to, reader_of
from pipes.formats.zip import ReadsInFull
from pipes.state import Ticks

__all__ = ["NpyHeader", "NpyReader", "map_npy", "read_header", "read_npy", "read_npz"]

_MAGIC = b"\x93NUMPY"
# As in numpy: parsing a long literal may take the interpreter's memory.
_LONGEST_HEADER = 10_000
_CHUNK = 1 << 20
# What evaluating a literal and making a dtype of it raise; warnings where a filter makes errors of them.
_BAD_HEADER = (
    ValueError,
    SyntaxError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
    Warning,
)
# What zipfile and its decompressors raise for damaged archives; RuntimeError for encrypted ones.
_BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ValueError,
    OverflowError,
    RuntimeError,
    EOFError,
)
_first = itemgetter(0)
_Read = Callable[[int], bytes]


@dataclass(frozen=True)
class NpyHeader:
    """What stands before an array's bytes; `size` is its own length in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    size: int

    @property
    def nbytes(self) -> int:
        """Of the array's data."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one entry of the first axis."""
        return prod(self.shape[1:]) * self.dtype.itemsize


def _exactly(read: _Read, count: int, name: str, what: str) -> bytearray:
    # It grows with what arrives, so that a header that promises too much takes no memory.
    data = bytearray()
    while len(data) < count:
        part = read(min(count - len(data), _CHUNK))
        if not part:
            raise TruncatedError(f"{name}: {what} has {count} bytes, and only {len(data)} are there; fetch it again")
        data += part
    return data


def read_header(read: _Read, name: str) -> NpyHeader:
    """Read the header of an `.npy` file, up to the array's first byte.

    >>> import io
    >>> file = io.BytesIO(); np.save(file, np.zeros((2, 3), "<i2")); _ = file.seek(0)
    >>> read_header(file.read, "a.npy")
    NpyHeader(dtype=dtype('int16'), shape=(2, 3), fortran_order=False, size=128)

    Raises:
        TruncatedError: the file is empty or ends inside the header.
        DataError: it is no `.npy` file, of an unknown version, or an array of objects.
    """
    first = read(1)
    if not first:
        raise TruncatedError(f"{name}: empty file, expected .npy")
    magic = first + bytes(_exactly(read, 7, name, "the .npy magic"))
    if magic[:6] != _MAGIC:
        raise DataError(f"{name}: no .npy file: it begins with {bytes(magic[:6])!r}")
    major, minor = magic[6], magic[7]
    if (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        raise DataError(f"{name}: .npy version {major}.{minor} is unknown; 1.0, 2.0 and 3.0 are read")
    width = 2 if major == 1 else 4
    length = int.from_bytes(_exactly(read, width, name, "the header's length"), "little")
    if length > _LONGEST_HEADER:
        raise DataError(f"{name}: a header of {length} bytes; at most {_LONGEST_HEADER} are read")
    text = _exactly(read, length, name, "the header")
    dtype, shape, fortran_order = _parsed(bytes(text), "utf-8" if major == 3 else "latin-1", name)
    if dtype.hasobject:
        raise DataError(f"{name}: an array of objects is a pickle, which can run code; save it with another dtype")
    return NpyHeader(dtype, shape, fortran_order, 8 + width + length)


def _parsed(text: bytes, encoding: str, name: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    try:
        fields = ast.literal_eval(text.decode(encoding).strip())
        descr, shape, fortran_order = fields["descr"], fields["shape"], fields["fortran_order"]
        right = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if len(fields) != 3 or not right or not isinstance(fortran_order, bool):
            raise ValueError("it does not say descr, fortran_order and shape")
        dtype = np.lib.format.descr_to_dtype(descr)
        if dtype.subdtype is not None:
            raise ValueError(f"{dtype} is no dtype of an array")
        # Numpy refuses more axes than it has, and sizes beyond a machine word even of no bytes.
        np.ndarray(shape if not prod(shape) * dtype.itemsize else (0,) * len(shape), dtype)
        return dtype, shape, fortran_order
    except _BAD_HEADER as error:
        raise DataError(f"{name}: bad .npy header: {type(error).__name__}: {error}") from error


def read_npy(stream: Any, name: str) -> np.ndarray[Any, Any]:
    """Read the next array of a binary stream; its memory is its own and may be written.

    >>> import io
    >>> file = io.BytesIO(); np.save(file, np.arange(3)); _ = file.seek(0)
    >>> read_npy(file, "a.npy")
    array([0, 1, 2])

    Raises:
        As `read_header`; TruncatedError for a stream that ends inside the array.
    """
    read = reader_of(stream, name)
    header = read_header(read, name)
    return _array(header, _exactly(read, header.nbytes, name, "the array"))


def _array(header: NpyHeader, data: bytearray) -> np.ndarray[Any, Any]:
    if not header.nbytes:
        # np.zeros would widen texts of no length.
        return np.ndarray(header.shape, header.dtype, order="F" if header.fortran_order else "C")
    flat: np.ndarray[Any, Any] = np.frombuffer(data, header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran_order else "C")


def map_npy(file: Any, name: str) -> np.ndarray[Any, Any]:
    """Map the array that begins where a local file stands, read-only, and go behind it.

    The array's pages are read when they are looked at.

    Raises:
        As `read_npy`; TypeError for what is no local file.
    """
    try:
        file.fileno()
    except (AttributeError, OSError) as error:
        raise TypeError(f"{name}: only a local file can be mapped; leave out mmap=True") from error
    start = file.tell()
    header = read_header(file.read, name)
    there = file.seek(0, 2) - start - header.size
    if there < header.nbytes:
        raise TruncatedError(f"{name}: the array has {header.nbytes} bytes, and only {there} are there; fetch it again")
    order: Any = "F" if header.fortran_order else "C"
    mapped: np.ndarray[Any, Any] = (
        np.memmap(file, header.dtype, "r", start + header.size, header.shape, order)
        if header.nbytes
        else _array(header, bytearray())
    )
    file.seek(start + header.size + header.nbytes)  # np.memmap leaves it elsewhere
    return mapped


def read_npz(file: Any, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of an `.npz` file, a zip archive of `.npy` files, by their names; `file` has to seek.

    >>> import io
    >>> file = io.BytesIO(); np.savez(file, x=np.arange(2), y=np.int8(7))
    >>> read_npz(file, "a.npz")
    {'x': array([0, 1]), 'y': array(7, dtype=int8)}

    Raises:
        As `read_npy`, about "a.npz/x"; DataError for a damaged archive or a member that is no array.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    try:
        whole: Any = ReadsInFull(file)
        with zipfile.ZipFile(whole) as archive:
            for info in archive.infolist():
                key = info.filename.removesuffix(".npy")
                if key in arrays:
                    raise DataError(f"{name}: two arrays are called {key!r}")
                with archive.open(info) as member:
                    arrays[key] = read_npy(member, f"{name}/{key}")
                    # Only at the end of a member is its checksum compared.
                    if member.read(1):
                        raise DataError(f"{name}/{key}: there are bytes behind the array")
    except PipesError:
        raise
    except (*_BAD_ARCHIVE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file; bz2's have no number
        raise DataError(f"{name}: damaged .npz archive: {error}") from error
    return arrays


class NpyReader:
    """The arrays of a binary stream one after the other (`np.save` may append), or their rows.

    >>> import io
    >>> file = io.BytesIO(); np.save(file, np.arange(6).reshape(3, 2)); _ = file.seek(0)
    >>> for row in NpyReader(file, "a.npy", rows=True, row=1):
    ...     print(row)
    [2 3]
    [4 5]

    Args:
        stream: need not seek; `mmap` needs a local file.
        name: what errors call it.
        rows: give the entries of the first axis. Those of one read share about 1 MiB of memory. In Fortran order rows
            lie apart, so the whole array is read first.
        mmap: map the arrays read-only instead of reading them.
        start, row: where to begin, as an earlier reader told: the rows before are not read.

    Attributes:
        start, row: the byte at which the array that comes next, or is being read, begins, and how many rows of it were
            given.

    Raises:
        As `read_npy`; DataError for the rows of an array without axes, StateError for a `row` beyond the rows.
    """

    def __init__(
        self, stream: Any, name: str, *, rows: bool = False, mmap: bool = False, start: int = 0, row: int = 0
    ) -> None:
        self.start = start
        self._stream, self._name, self._rows, self._mmap = stream, name, rows, mmap
        self._given = Ticks(row)

    @property
    def row(self) -> int:
        return self._given.count

    def __iter__(self) -> Iterator[Any]:
        stream, name = self._stream, self._name
        read = reader_of(stream, name)
        if self.start:
            go_to(stream, name, self.start)
        while first := read(1):
            whole: np.ndarray[Any, Any] | None = None
            if self._mmap:
                stream.seek(self.start)
                whole = map_npy(stream, name)
                shape, end = whole.shape, stream.tell()
            else:
                header = read_header(_after(first, read), name)
                shape, end = header.shape, self.start + header.size + header.nbytes
                if not self._rows or header.fortran_order or not header.row_bytes:
                    whole = _array(header, _exactly(read, header.nbytes, name, "the array"))
            if not self._rows:
                self.start = end
                yield whole
                continue
            self._check(shape)
            rows = self._read_rows(header, read) if whole is None else iter(whole[self.row :])
            yield from map(_first, zip(rows, self._given, strict=False))
            self.start, self._given = end, Ticks(0)
        if not self.start:
            raise TruncatedError(f"{name}: empty file, expected .npy")

    def _check(self, shape: tuple[int, ...]) -> None:
        if not shape:
            raise DataError(f"{self._name}: the array has no axes, so no rows; read it whole")
        if self.row > shape[0]:
            raise StateError(
                f"{self._name}: the state stands at row {self.row}, and there are {shape[0]}; the data changed: start "
                "the epoch afresh"
            )

    def _read_rows(self, header: NpyHeader, read: _Read) -> Iterator[Any]:
        name, start, count, width = self._name, self.row, header.shape[0], header.row_bytes
        if start:
            go_to(self._stream, name, header.size + start * width, header.size)
        step = max(1, _CHUNK // width)
        for first in range(start, count, step):
            rows = min(step, count - first)
            data = _exactly(read, rows * width, name, f"rows {first} to {first + rows}")
            yield from np.frombuffer(data, header.dtype).reshape(rows, *header.shape[1:])


def _after(first: bytes, read: _Read) -> _Read:
    """A `read` that gives the byte `first` before the rest."""
    waiting = [first]
    return lambda size: waiting.pop() if waiting else read(size)
