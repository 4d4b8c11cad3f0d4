"""Some elements, numbered elements, the whole again: `.header`, `.skip`, `.enumerate`, `.add_index`, `.set_length`,
`.cycle`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of, no_length
from pipes.errors import GraphError
from pipes.run import Node, Run, walk
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Position, Table, Ticks, anchor_of, count_from, damaged

__all__ = ["Cycler", "Enumerator", "Header", "IndexAdder", "LengthSetter", "Skipper"]

T = TypeVar("T")

_first = itemgetter(0)


class _CountingRun(Run):
    """Base of 1:1 stages that count their elements."""

    stateful = True
    count_fields = ("given",)

    def restore(self, position: Position) -> None:
        self.ticks = Ticks(0 if position is None else position["given"])

    def capture(self) -> Capture:
        return self.ticks.count

    def describe(self, captured: Capture) -> Position:
        return {"given": captured}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        kept = self.inputs[0].replay(count, wanted)
        self.ticks = Ticks(self.ticks.count + count)
        return kept


class _HeaderRun(_CountingRun):
    def elements(self) -> Iterator[Any]:
        source, limit = iter(self.inputs[0]), self.pipe.limit
        if limit is not None:
            source = islice(source, max(0, limit - self.ticks.count))
        return map(_first, zip(source, self.ticks, strict=False))


@functional_datapipe("header")
class Header(IterDataPipe[T]):
    """Give the first `limit` elements (None: all), and take no more than those from the source.

    `len` is the smaller of the two, and unknown when the source's is: `limit` may be more than there are.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(9)).header(3))
    [0, 1, 2]
    """

    run_class = _HeaderRun
    _numbers = True

    def __init__(self, source_datapipe: IterDataPipe[T], limit: int | None = 10) -> None:
        limit = whole_or_none("limit", limit)
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be 0 or more, or None for all, not {limit}")
        self.source_datapipe = as_pipe(source_datapipe)
        self.limit = limit

    def _places(self) -> tuple[str, ...]:
        return (f"header({self.limit})",)

    def _length(self, shard: Shard) -> int:
        length = length_of(self.source_datapipe, shard)
        return length if self.limit is None else min(length, self.limit)


class _SkipperRun(_CountingRun):
    def elements(self) -> Iterator[Any]:
        first = self.pipe.count if self.ticks.count == 0 else 0
        return map(_first, zip(islice(iter(self.inputs[0]), first, None), self.ticks, strict=False))

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        first = self.pipe.count if self.ticks.count == 0 and count else 0
        self.ticks = Ticks(self.ticks.count + count)
        return self.inputs[0].replay(first + count, [first + offset for offset in wanted])


@functional_datapipe("skip")
class Skipper(IterDataPipe[T]):
    """Leave out the first `count` elements.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(5)).skip(3))
    [3, 4]
    """

    run_class = _SkipperRun
    _numbers = True

    def __init__(self, datapipe: IterDataPipe[T], count: int) -> None:
        count = whole("count", count)
        if count < 0:
            raise ValueError(f"count must be 0 or more, not {count}")
        self.datapipe = as_pipe(datapipe)
        self.count = count

    def _places(self) -> tuple[str, ...]:
        return (f"skip({self.count})",)

    def _length(self, shard: Shard) -> int:
        return max(0, length_of(self.datapipe, shard) - self.count)


class _EnumeratorRun(_CountingRun):
    def elements(self) -> Iterator[Any]:
        start = self.pipe.starting_index
        return ((start + number, element) for element, number in zip(self.inputs[0], self.ticks, strict=False))

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        start = self.pipe.starting_index + self.ticks.count
        kept = super().replay(count, wanted)
        return [(start + offset, element) for offset, element in zip(wanted, kept, strict=True)]


@functional_datapipe("enumerate")
class Enumerator(IterDataPipe[tuple[int, T]]):
    """Give `(number, element)`, numbers from `starting_index`; below a `sharding_filter` each stream counts its own.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper("ab").enumerate(1))
    [(1, 'a'), (2, 'b')]
    """

    run_class = _EnumeratorRun
    _numbers = True

    def __init__(self, source_datapipe: IterDataPipe[T], starting_index: int = 0) -> None:
        self.source_datapipe = as_pipe(source_datapipe)
        self.starting_index = whole("starting_index", starting_index)

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return length_of(self.source_datapipe, shard)


class _IndexAdderRun(_CountingRun):
    def elements(self) -> Iterator[Any]:
        return map(self._marked, self.inputs[0], self.ticks)

    def _marked(self, element: Any, number: int) -> Any:
        if not isinstance(element, dict):
            error = NotImplementedError(
                f"add_index writes into dicts, not into a {type(element).__name__}: use .enumerate(), or make dicts "
                "of the elements with .map() before"
            )
            self.note(error, element)
            raise error
        # A copy: after .repeat() or .fork() one dict is several elements.
        marked = copy.copy(element)
        marked[self.pipe.index_name] = number
        return marked

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        start = self.ticks.count
        kept = super().replay(count, wanted)
        return [self._marked(element, start + offset) for offset, element in zip(wanted, kept, strict=True)]


@functional_datapipe("add_index")
class IndexAdder(IterDataPipe[Any]):
    """Give each dict with its number under `index_name`; below a `sharding_filter` each stream counts its own.

    The dicts of the input stay as they are. Raises NotImplementedError, while iterating, for what is no dict.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([{"x": 7}, {"x": 8}]).add_index())
    [{'x': 7, 'index': 0}, {'x': 8, 'index': 1}]
    """

    run_class = _IndexAdderRun
    _numbers = True

    def __init__(self, source_datapipe: IterDataPipe[Any], index_name: str = "index") -> None:
        self.source_datapipe = as_pipe(source_datapipe)
        self.index_name = index_name

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return length_of(self.source_datapipe, shard)


class _PassingRun(Run):
    """Holds nothing: where its input stands says all."""

    def elements(self) -> Iterator[Any]:
        return iter(self.inputs[0])

    def every(self, first: int, step: int) -> Iterator[Any]:
        return self.inputs[0].every(first, step)

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        return self.inputs[0].replay(count, wanted)


@functional_datapipe("set_length")
class LengthSetter(IterDataPipe[T]):
    """Pass on all elements, and let `len` tell `length`, also where that is not so.

    Below a `sharding_filter` it is the length of all streams together. Raises AssertionError for a negative length.

    >>> from pipes.iter import IterableWrapper
    >>> evens = IterableWrapper(range(5)).filter(lambda x: x % 2 == 0).set_length(3)
    >>> len(evens), list(evens)
    (3, [0, 2, 4])
    """

    run_class = _PassingRun

    def __init__(self, source_datapipe: IterDataPipe[T], length: int) -> None:
        length = whole("length", length)
        assert length >= 0, f"length must be 0 or more, not {length}"
        self.source_datapipe = as_pipe(source_datapipe)
        self.length = length

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        number, streams = shard
        split = any(type(node)._shards for node in walk(self))
        return len(range(number, self.length, streams)) if split else self.length


class _CyclerRun(Run):
    """Every round is a context of its own within the epoch, so shuffles differ from round to round."""

    anchored = True

    def input_pipes(self) -> Sequence[Node]:
        return ()

    def check(self, position: Position) -> None:
        round_ = count_from(position, "round", self.stage)
        if self.pipe.count is not None and round_ > self.pipe.count:
            raise damaged(f"stage {self.stage} has no round {round_}")
        anchor_of(position, self.stage)

    def check_upstream(self, position: Position) -> None:
        with self._asked(position["round"]) as run:
            run.check_table(position["anchor"]["table"], f"the anchor of {self.stage}")

    def open(self, position: Position, table: Table | None) -> None:
        if position is not None:
            self.check(position)
        self.round = 0 if position is None else position["round"]
        self._begin(self.anchor_table(position))

    def _begin(self, table: Table | None) -> None:
        self.inputs = [self.context.again(self.pipe.datapipe, self.round).start(table)]
        self.link()

    def elements(self) -> Iterator[Any]:
        rounds, fresh = self.pipe.count, False
        while rounds is None or self.round < rounds:
            empty = True
            for element in self.inputs[0]:
                empty = False
                yield element
            # The round that a restore went on with may rightly be at its end; a whole round that is empty never ends.
            if empty and fresh and rounds is None:
                raise GraphError(
                    f"stage {self.stage} repeats an empty source for ever; check what feeds it, or give .cycle() a "
                    "count"
                )
            self.context.leave(self.inputs[0].context)
            self.round, fresh = self.round + 1, True
            self._begin(None)

    def capture(self) -> Capture:
        return self.round, self.inputs[0].captures()

    def describe(self, captured: Capture) -> Position:
        round_, captures = captured
        with self._asked(round_) as run:
            return {"round": round_, "anchor": {"table": run.table(captures)}}

    @contextmanager
    def _asked(self, round_: int) -> Iterator[Run]:
        """Give a run of that round, to ask it about positions: its draws are the round's."""
        context = self.context.again(self.pipe.datapipe, round_)
        try:
            yield context.start()
        finally:
            self.context.leave(context)


@functional_datapipe("cycle")
class Cycler(IterDataPipe[T]):
    """Give the whole source `count` times, or for ever; a shuffle in it draws anew each round.

    An endless cycle of an empty source raises GraphError. Raises ValueError for a negative count.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper("ab").cycle(2))
    ['a', 'b', 'a', 'b']
    """

    run_class = _CyclerRun

    def __init__(self, source_datapipe: IterDataPipe[T], count: int | None = None) -> None:
        count = whole_or_none("count", count)
        if count is not None and count < 0:
            raise ValueError(f"count must be 0 or more, or None for endless rounds, not {count}")
        self.source_datapipe = as_pipe(source_datapipe)
        self.count = count

    @property
    def datapipe(self) -> IterDataPipe[T]:
        return self.source_datapipe

    def _length(self, shard: Shard) -> int:
        if self.count is None:
            raise no_length(self, "it cycles forever; give .cycle() a count")
        return self.count * length_of(self.source_datapipe, shard)
