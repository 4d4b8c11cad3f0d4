"""A long list in one block of shared memory, which any number of processes read without a copy of their own.

Contract
- Success. `Block.write` packs the elements in chunks, each pickled and, where that helps, compressed; whoever maps the
  block unpickles one chunk at a time, so an element is always a fresh copy. A block never changes.
- Failure. Elements that cannot be packed so (of classes or functions that another process could not import) give None:
  they travel with the graph. No room for the block is an OSError.
- Stop. The memory has no name and goes with the last process that maps it. Each process holds no descriptor beyond the
  main process's one, which `close` closes; a block that is mapped stays readable.

Layout: int64 number of chunks, (chunks + 1) int64 first elements, (chunks + 1) int64 offsets, the chunks. The first
byte of a chunk tells whether it is compressed.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, overload

import numpy as np

from pipes.errors import GraphError
from pipes.loader2.segments import create_segment, map_segment, view_bytes
from pipes.loader2.shipping import can_be_imported, reduced_tensor

__all__ = ["Block", "SharedList"]

#: Lists whose elements take less than this many bytes travel with the graph.
LONG = 1 << 20
#: Bytes of a chunk before compression: of a list that is read in order, and of one that is read by position.
IN_ORDER, BY_POSITION = 1 << 16, 1 << 11
_SAMPLE = 256
_INT = np.dtype("<i8")


class _NotPlainError(Exception):
    """An element needs what only the main process has."""


class _Pickler(pickle.Pickler):
    """Refuses classes and functions that another process could not import."""

    def __init__(self, file: io.BytesIO, importable: dict[str, bool]) -> None:
        super().__init__(file, protocol=5)
        self._importable = importable

    def reducer_override(self, obj: Any) -> Any:
        kind = obj if isinstance(obj, type) else type(obj)
        module = kind.__module__
        if module not in self._importable:
            self._importable[module] = can_be_imported(module)
        if not self._importable[module]:
            raise _NotPlainError
        return reduced_tensor(obj) or NotImplemented


class Block(Sequence[Any]):
    """A sequence in shared memory; a slice is a list.

    >>> block = Block.write([f"s3://bucket/{i:09}.tar" for i in range(100_000)])
    >>> len(block), block[99_999], next(block.from_position(7)), block.take([1, 2])[1]
    (100000, 's3://bucket/000099999.tar', 's3://bucket/000000007.tar', 's3://bucket/000000002.tar')
    >>> block.nbytes < 1_000_000
    True
    >>> block.close()
    """

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._fd = fd
        self._memory = view_bytes(map_segment(fd, size), size).data
        ends = int(np.frombuffer(self._memory[:8], _INT)[0]) + 1
        self._firsts: list[int] = np.frombuffer(self._memory, _INT, ends, 8).tolist()
        self._offsets: list[int] = np.frombuffer(self._memory, _INT, ends, 8 + 8 * ends).tolist()

    @classmethod
    def write(cls, elements: Sequence[Any], chunk_bytes: int = IN_ORDER) -> Block | None:
        """Return a block of `elements`, or None when another process could not unpickle them."""
        chunks: list[bytes] = []
        firsts, count = [0], _SAMPLE
        importable: dict[str, bool] = {}
        try:
            while firsts[-1] < len(elements):
                part = elements[firsts[-1] : firsts[-1] + count]
                packed = _pickled(part, importable)
                if len(packed) > 4 * chunk_bytes and len(part) > 1:
                    count = max(1, len(part) * chunk_bytes // len(packed))
                    continue
                chunks.append(_pressed(packed))
                firsts.append(firsts[-1] + len(part))
                count = max(1, len(part) * chunk_bytes // len(packed))
        except Exception:
            return None
        fd = _segment(chunks, firsts)
        try:
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Block:
        """Return the block behind a descriptor that another process sent, and close the descriptor."""
        try:
            return cls(fd)
        finally:
            os.close(fd)

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory it takes."""
        return self._memory.nbytes

    def descriptor(self) -> int:
        """Return a new descriptor, for another process to attach."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Close the descriptor that `write` opened; the block can still be read."""
        os.close(self._fd)

    def _chunk(self, number: int) -> list[Any]:
        start, end = self._offsets[number : number + 2]
        packed = self._memory[start + 1 : end]
        return pickle.loads(zlib.decompress(packed) if self._memory[start] else packed)  # type: ignore[no-any-return]

    def from_position(self, start: int) -> Iterator[Any]:
        """Return an iterator of the elements from number `start` on."""
        if start >= len(self):
            return iter(())
        first = bisect_right(self._firsts, start) - 1
        chunks = chain.from_iterable(map(self._chunk, range(first, len(self._offsets) - 1)))
        return islice(chunks, start - self._firsts[first], None)

    def take(self, positions: Sequence[int]) -> list[Any]:
        """Return the elements at `positions`, which ascend; each chunk is unpickled once."""
        taken: list[Any] = []
        at, chunk = -1, []
        for position in positions:
            number = bisect_right(self._firsts, position) - 1
            if number != at:
                at, chunk = number, self._chunk(number)
            taken.append(chunk[position - self._firsts[number]])
        return taken

    def __len__(self) -> int:
        return self._firsts[-1]

    def __iter__(self) -> Iterator[Any]:
        return self.from_position(0)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self.take([places])[0]
        ordered = self.take(sorted(places))
        return ordered if places.step > 0 else ordered[::-1]


class SharedList(Sequence[Any]):
    """Stands in a worker's graph for a list that the main process keeps in a block.

    `attached` holds the blocks of this process, by key.
    """

    attached: dict[str, Block] = {}  # noqa: RUF012

    def __init__(self, key: str, length: int) -> None:
        self.key, self.length = key, length

    @property
    def block(self) -> Block:
        if self.key not in self.attached:
            raise GraphError(
                f"a list of {self.length} elements of this graph lies in memory that the workers of its DataLoader2 "
                "share, and this process is none of them: use the graph that the loader was made from"
            )
        return self.attached[self.key]

    def __reduce__(self) -> tuple[Any, ...]:
        # What a worker sends on takes the elements along: the block stays with the worker.
        return (list, (list(self.block),)) if self.key in self.attached else (SharedList, (self.key, self.length))

    def from_position(self, start: int) -> Iterator[Any]:
        return self.block.from_position(start)

    def take(self, positions: Sequence[int]) -> list[Any]:
        return self.block.take(positions)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return self.block.from_position(0)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.block[index]


def is_long(elements: Sequence[Any]) -> bool:
    """Return whether `elements` are worth a block, judged by the first of them.

    >>> is_long(["a", "b"]), is_long([str(number) for number in range(200_000)])
    (False, True)
    """
    sample = list(islice(elements, _SAMPLE))
    try:
        return len(elements) > 1 and len(_pickled(sample, {})) * len(elements) // len(sample) >= LONG
    except Exception:
        return False


def _pickled(part: Sequence[Any], importable: dict[str, bool]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, importable).dump(list(part))
    return file.getvalue()


def _pressed(packed: bytes) -> bytes:
    small = zlib.compress(packed, 1)
    return b"\1" + small if len(small) < 0.9 * len(packed) else b"\0" + packed


def _segment(chunks: list[bytes], firsts: list[int]) -> int:
    offsets = 8 + 16 * len(firsts) + np.cumsum([0, *map(len, chunks)])
    index = np.concatenate([[len(chunks)], firsts, offsets]).astype(_INT)
    size = int(offsets[-1])
    fd = create_segment(size)
    try:
        memory = view_bytes(map_segment(fd, size), size)
        memory[: index.nbytes] = index.view(np.uint8)
        for start, chunk in zip(offsets.tolist(), chunks, strict=False):
            memory[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
    except BaseException:
        os.close(fd)
        raise
    return fd
