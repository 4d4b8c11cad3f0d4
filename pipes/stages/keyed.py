"""The stages of map pipes, read by key: `.map`, `.batch`, `.concat`, `.zip`, `.shuffle`, `.in_memory_cache`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from pipes.arguments import whole
from pipes.datapipe import DataChunk, IterDataPipe, MapDataPipe, Shard, functional_datapipe, length_of
from pipes.stages.columns import check_columns
from pipes.stages.shuffling import Reshuffled
from pipes.stages.wrapping import KeysRun

__all__ = ["MapBatcher", "MapConcater", "MapInMemoryCacheHolder", "MapMapper", "MapShuffler", "MapZipper"]

T = TypeVar("T")
R = TypeVar("R")


def _same(element: Any) -> Any:
    return element


@functional_datapipe("map")
class MapMapper(MapDataPipe[R]):
    """Give `fn(datapipe[key])` for a key, when it is asked for; without `fn`, the element itself.

    Raises TypeError if `fn` is not callable, ValueError if it cannot take one argument.

    >>> from pipes.map import SequenceWrapper
    >>> SequenceWrapper([1, 2]).map(str)[1]
    '2'
    """

    _calls = ("fn",)

    def __init__(self, datapipe: MapDataPipe[T], fn: Callable[[T], R] = _same) -> None:
        check_columns(fn, None)
        self.datapipe = datapipe
        self.fn = fn

    def __getitem__(self, index: Any) -> R:
        return self.fn(self.datapipe[index])

    def __len__(self) -> int:
        return length_of(self.datapipe)


@functional_datapipe("batch")
class MapBatcher(MapDataPipe[DataChunk[T]]):
    """Give the i-th batch of `batch_size` consecutive elements as a `wrapper_class`; the last is shorter, or dropped.

    Raises AssertionError for a batch_size below 1, IndexError for a batch that is not there.

    >>> from pipes.map import SequenceWrapper
    >>> batches = SequenceWrapper(range(5)).batch(2)
    >>> batches[1], batches[2], len(batches)
    ([2, 3], [4], 3)
    """

    def __init__(
        self,
        datapipe: MapDataPipe[T],
        batch_size: int,
        drop_last: bool = False,
        wrapper_class: Callable[..., Any] = DataChunk,
    ) -> None:
        batch_size = whole("batch_size", batch_size)
        assert batch_size > 0, f"batch_size must be at least 1, not {batch_size}"
        self.datapipe = datapipe
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.wrapper_class = wrapper_class

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)} batches")
        first = index * self.batch_size
        last = min(first + self.batch_size, length_of(self.datapipe))
        return self.wrapper_class([self.datapipe[place] for place in range(first, last)])

    def __len__(self) -> int:
        elements = length_of(self.datapipe)
        return elements // self.batch_size if self.drop_last else -(-elements // self.batch_size)


def _checked(name: str, datapipes: tuple[Any, ...]) -> tuple[Any, ...]:
    if not datapipes:
        raise ValueError(f"{name} needs at least one pipe")
    for place, datapipe in enumerate(datapipes):
        if not isinstance(datapipe, MapDataPipe):
            raise TypeError(f"input {place} of {name} is a {type(datapipe).__name__}, not a MapDataPipe")
        length_of(datapipe)
    return datapipes


@functional_datapipe("concat")
class MapConcater(MapDataPipe[Any]):
    """Give the elements of several map pipes under consecutive indices, from 0.

    Raises ValueError without pipes, TypeError for what is no map pipe or has no length, IndexError out of range.

    >>> from pipes.map import SequenceWrapper
    >>> SequenceWrapper("ab").concat(SequenceWrapper("cd"))[2]
    'c'
    """

    def __init__(self, *datapipes: MapDataPipe[Any]) -> None:
        self.datapipes = _checked("Concater", datapipes)

    def __getitem__(self, index: int) -> Any:
        ends = list(accumulate(map(length_of, self.datapipes)))
        if not 0 <= index < ends[-1]:
            raise IndexError(f"index {index} of {ends[-1]} elements in all")
        place = bisect_right(ends, index)
        return self.datapipes[place][index - (ends[place - 1] if place else 0)]

    def __len__(self) -> int:
        return sum(map(length_of, self.datapipes))


@functional_datapipe("zip")
class MapZipper(MapDataPipe[tuple[Any, ...]]):
    """Give a tuple of the elements that several map pipes have under one index, as far as the shortest goes.

    Raises ValueError without pipes, TypeError for what is no map pipe or has no length, IndexError naming the pipe.

    >>> from pipes.map import SequenceWrapper
    >>> SequenceWrapper("abc").zip(SequenceWrapper([7, 8]))[1]
    ('b', 8)
    """

    def __init__(self, *datapipes: MapDataPipe[Any]) -> None:
        self.datapipes = _checked("Zipper", datapipes)

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        found = []
        for place, datapipe in enumerate(self.datapipes):
            try:
                found.append(datapipe[index])
            except IndexError as error:
                raise IndexError(
                    f"input {place} of Zipper, a {type(datapipe).__name__}, has no index {index}"
                ) from error
        return tuple(found)

    def __len__(self) -> int:
        return min(map(length_of, self.datapipes))


@functional_datapipe("in_memory_cache")
class MapInMemoryCacheHolder(MapDataPipe[T]):
    """Keep each element in memory when it is first read, and give that one whenever its key is read again.

    Each process keeps its own, all of them in the end; no copy and no state takes any along. What is kept is the
    element itself, so a stage that edits it edits it for all epochs, and what was drawn for it stays as it was.

    >>> from pipes.map import SequenceWrapper
    >>> pipe = SequenceWrapper([1, 2]).map(lambda x: [x]).in_memory_cache()
    >>> pipe[1], pipe[1] is pipe[1], len(pipe)
    ([2], True, 2)
    """

    _opaque = frozenset({"_cache"})

    def __init__(self, source_dp: MapDataPipe[T]) -> None:
        self.source_dp = source_dp
        self._cache: dict[Any, T] = {}

    def __getitem__(self, index: Any) -> T:
        cache = self._cache
        if index not in cache:
            cache[index] = self.source_dp[index]
        return cache[index]

    def __len__(self) -> int:
        return length_of(self.source_dp)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}


class _ShuffledKeysRun(KeysRun):
    """Draws the whole order at once; the position is the number of keys read."""

    def ordered(self) -> Sequence[Any]:
        keys = super().ordered()
        if not self.pipe._enabled:
            return keys
        # Sorting the draws is a fair shuffle as long as no two are equal: 53 bits each, and stable if they are.
        order = np.argsort(self.draws().uniforms(len(keys)), kind="stable").tolist()
        return [keys[place] for place in order]


class MapShuffler(Reshuffled, IterDataPipe[T]):
    """Iterate a map pipe in random order: over `indices`, by default all of `range(len(datapipe))`.

    The order is a function of (seed, epoch, stage, stream) alone; no element is read before its turn.
    Raises TypeError for what is no map pipe.

    >>> from pipes.map import SequenceWrapper
    >>> pipe = SequenceWrapper("abcd").shuffle()
    >>> sorted(pipe), list(pipe.set_shuffle(False)), len(pipe)
    (['a', 'b', 'c', 'd'], ['a', 'b', 'c', 'd'], 4)
    """

    run_class = _ShuffledKeysRun

    def __init__(self, datapipe: MapDataPipe[T], *, indices: Iterable[Any] | None = None) -> None:
        if not isinstance(datapipe, MapDataPipe):
            raise TypeError(f"this Shuffler reads a MapDataPipe, not a {type(datapipe).__name__}")
        self.datapipe = datapipe
        self.indices = None if indices is None else list(indices)

    def _length(self, shard: Shard) -> int:
        return len(self.indices) if self.indices else length_of(self.datapipe)


MapDataPipe.register_datapipe_as_function("shuffle", MapShuffler)
