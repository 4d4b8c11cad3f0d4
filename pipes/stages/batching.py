"""Elements into batches and back: `.batch`, `.unbatch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from pipes.arguments import whole
from pipes.datapipe import DataChunk, IterDataPipe, Shard, functional_datapipe, length_of
from pipes.run import Run
from pipes.stages.flattening import ExpandingRun
from pipes.stages.wrapping import as_pipe

__all__ = ["Batcher", "UnBatcher"]

T = TypeVar("T")


class _BatcherRun(Run):
    """Holds nothing between two outputs: a batch goes out as soon as it is full."""

    def elements(self) -> Iterator[Any]:
        size, wrapper = self.pipe.batch_size, self.pipe.wrapper_class
        source = iter(self.inputs[0])
        direct = isinstance(wrapper, type) and issubclass(wrapper, list)
        while True:
            chunk = wrapper(islice(source, size)) if direct else list(islice(source, size))
            if len(chunk) < size:
                if chunk and not self.pipe.drop_last:
                    yield chunk if direct else wrapper(chunk)
                return
            yield chunk if direct else wrapper(chunk)

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        # The last batch gone over may be a short one, so it is made and dropped; those before it are full.
        if count == 0:
            return []
        size, full = self.pipe.batch_size, count - 1
        early = [offset for offset in wanted if offset < full]
        inputs = self.inputs[0].replay(
            full * size, [at for offset in early for at in range(offset * size, (offset + 1) * size)]
        )
        kept = [self.pipe.wrapper_class(inputs[at : at + size]) for at in range(0, len(inputs), size)]
        return kept + super().replay(1, [0] if len(early) < len(wanted) else [])


@functional_datapipe("batch")
class Batcher(IterDataPipe[DataChunk[T]]):
    """Gather `batch_size` elements into a `wrapper_class`, a list; the last batch is shorter, or dropped.

    Raises AssertionError for a batch_size below 1.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(5)).batch(2)), list(IterableWrapper(range(5)).batch(2, drop_last=True))
    ([[0, 1], [2, 3], [4]], [[0, 1], [2, 3]])
    """

    run_class = _BatcherRun
    _levels = 2
    forms_batches = True

    def __init__(
        self,
        datapipe: IterDataPipe[T],
        batch_size: int,
        drop_last: bool = False,
        wrapper_class: Callable[..., Any] = DataChunk,
    ) -> None:
        batch_size = whole("batch_size", batch_size)
        assert batch_size > 0, f"batch_size must be at least 1, not {batch_size}"
        self.datapipe = as_pipe(datapipe)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.wrapper_class = wrapper_class

    def _calls_user(self) -> bool:
        return self.wrapper_class is not DataChunk

    def _places(self) -> tuple[str, ...]:
        return (f"batch({self.batch_size}, drop_last={self.drop_last})",)

    def _length(self, shard: Shard) -> int:
        elements = length_of(self.datapipe, shard)
        return elements // self.batch_size if self.drop_last else -(-elements // self.batch_size)


class _UnBatcherRun(ExpandingRun):
    def expand(self, element: Any) -> Iterator[Any]:
        level = self.pipe.unbatch_level
        if level < -1:
            raise ValueError(f"unbatch_level must be -1 (open every level) or more, not {level}")
        return _opened(element, level)


def _opened(element: Any, level: int) -> Iterator[Any]:
    if level == 0 or (level == -1 and not isinstance(element, list)):
        yield element
    elif isinstance(element, list):
        for item in element:
            yield from _opened(item, level if level == -1 else level - 1)
    else:
        raise IndexError(f"unbatch_level exceeds the depth of the element: {type(element).__name__} is no list")


@functional_datapipe("unbatch")
class UnBatcher(IterDataPipe[Any]):
    """Give the items of each batch, `unbatch_level` lists deep; -1 opens every level. Tuples are not opened.

    Raises, while iterating, ValueError for a level below -1 and IndexError for one deeper than the elements.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([[[0, 1], [2]], [[3]]]).unbatch())
    [[0, 1], [2], [3]]
    >>> list(IterableWrapper([[[0, 1], [2]], [[3]]]).unbatch(-1))
    [0, 1, 2, 3]
    """

    run_class = _UnBatcherRun

    def __init__(self, datapipe: IterDataPipe[Any], unbatch_level: int = 1) -> None:
        self.datapipe = as_pipe(datapipe)
        self.unbatch_level = whole("unbatch_level", unbatch_level)
