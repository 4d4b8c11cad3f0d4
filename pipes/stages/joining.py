"""Several pipes into one: `.concat`, `.zip`, `.zip_longest`, `.mux`, `.mux_longest`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, lengths_of
from pipes.run import Node, Run
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, damaged

__all__ = ["Concater", "Multiplexer", "MultiplexerLongest", "Zipper", "ZipperLongest"]

_ANCHOR_EVERY = 16
_END = object()


class _JoiningRun(Run):
    """Base of stages with several inputs; one that stands there twice is opened, and refused, twice."""

    def input_pipes(self) -> Sequence[Node]:
        return self.pipe.datapipes  # type: ignore[no-any-return]


def _checked(name: str, datapipes: tuple[Any, ...]) -> tuple[Any, ...]:
    if not datapipes:
        raise ValueError(f"{name} needs at least one pipe")
    for place, datapipe in enumerate(datapipes):
        if datapipe is None:
            raise ValueError(f"input {place} of {name} is None")
        if not isinstance(datapipe, Node):
            raise TypeError(
                f"input {place} of {name} is a {type(datapipe).__name__}, not a pipe; wrap it in IterableWrapper(...)"
            )
    return datapipes


class _ConcaterRun(_JoiningRun):
    stateful = True
    count_fields = ("input",)

    def check(self, position: Position) -> None:
        super().check(position)
        if position["input"] > len(self.inputs):
            raise damaged(f"stage {self.stage} has no input {position['input']}")

    def restore(self, position: Position) -> None:
        self.place = 0 if position is None else position["input"]

    def elements(self) -> Iterator[Any]:
        while self.place < len(self.inputs):
            yield from self.inputs[self.place]
            self.place += 1

    def capture(self) -> Capture:
        return self.place

    def describe(self, captured: Capture) -> Position:
        return {"input": captured}


@functional_datapipe("concat")
class Concater(IterDataPipe[Any]):
    """Give the elements of each pipe, one pipe after the other.

    Raises ValueError without pipes or for None, TypeError for what is no pipe.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper("ab").concat(IterableWrapper("c")))
    ['a', 'b', 'c']
    """

    run_class = _ConcaterRun

    def __init__(self, *datapipes: IterDataPipe[Any]) -> None:
        self.datapipes = _checked("Concater", datapipes)

    def _length(self, shard: Shard) -> int:
        return sum(lengths_of(self.datapipes, shard))


class _ZipperRun(_JoiningRun):
    """Holds nothing: where its inputs stand says all."""

    def elements(self) -> Iterator[Any]:
        return zip(*self.inputs, strict=False)

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        return list(zip(*[source.replay(count, wanted) for source in self.inputs], strict=True))


@functional_datapipe("zip")
class Zipper(IterDataPipe[tuple[Any, ...]]):
    """Give tuples of one element of each pipe, to the end of the shortest.

    Raises ValueError without pipes or for None, TypeError for what is no pipe.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper("abc").zip(IterableWrapper(range(2))))
    [('a', 0), ('b', 1)]
    """

    run_class = _ZipperRun
    _pairs = True
    _chained_overloads: ClassVar[tuple[tuple[str, str], ...]] = (
        ("second: IterDataPipe[A], /", "IterDataPipe[tuple[T, A]]"),
        ("second: IterDataPipe[A], third: IterDataPipe[B], /", "IterDataPipe[tuple[T, A, B]]"),
        ("*datapipes: IterDataPipe[Any]", "IterDataPipe[tuple[Any, ...]]"),
    )

    def __init__(self, *datapipes: IterDataPipe[Any]) -> None:
        self.datapipes = _checked("Zipper", datapipes)

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return min(lengths_of(self.datapipes, shard))


class _ZipperLongestRun(_JoiningRun):
    """Holds nothing: where its inputs stand says all; after a restore, those that ended end again."""

    def elements(self) -> Iterator[Any]:
        return zip_longest(*self.inputs, fillvalue=self.pipe.fill_value)


@functional_datapipe("zip_longest")
class ZipperLongest(IterDataPipe[tuple[Any, ...]]):
    """Give tuples of one element of each pipe, to the end of the longest; `fill_value` stands for those that ended.

    Raises ValueError without pipes or for None, TypeError for what is no pipe.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper("abc").zip_longest(IterableWrapper(range(2)), fill_value=-1))
    [('a', 0), ('b', 1), ('c', -1)]
    """

    run_class = _ZipperLongestRun
    _pairs = True

    def __init__(self, *datapipes: IterDataPipe[Any], fill_value: Any = None) -> None:
        self.datapipes = _checked("ZipperLongest", datapipes)
        self.fill_value = fill_value

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return max(lengths_of(self.datapipes, shard))


class _MultiplexerRun(_JoiningRun):
    """Takes a whole round before it gives the first of it; a restore takes the open round again."""

    anchored = True
    count_fields = ("rounds", "given")

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] > position["rounds"] or position["given"] > len(self.inputs):
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.anchors = Anchors(self.upstream, 2)
        self.rounds, self.given = 0, 0
        self.opened: list[Any] = []
        if position is None:
            self.anchors.note(0)
            return
        rounds, self.given, anchor = position["rounds"], position["given"], position["anchor"]["taken"]
        self.anchors.note(anchor)
        again = rounds - anchor
        if again > 0:
            self.opened = [source.replay(again, [again - 1])[0] for source in self.inputs]
        self.rounds = rounds

    def elements(self) -> Iterator[Any]:
        while self.given < len(self.opened):
            self.given += 1
            yield self.opened[self.given - 1]
        for round_ in zip(*self.inputs, strict=False):
            self.rounds += 1
            for self.given, element in enumerate(round_, 1):
                yield element
            if self.rounds % _ANCHOR_EVERY == 0:
                self.anchors.note(self.rounds)

    def capture(self) -> Capture:
        return self.rounds, self.given, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        rounds, given, entries = captured
        return {"rounds": rounds, "given": given, "anchor": self.anchors.describe(entries, max(rounds - 1, 0))}


@functional_datapipe("mux")
class Multiplexer(IterDataPipe[Any]):
    """Give one element of each pipe in turn, in whole rounds: it stops when the shortest has no more.

    Plain iterables are taken too.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(3)).mux(IterableWrapper(range(10, 12))))
    [0, 10, 1, 11]
    """

    run_class = _MultiplexerRun

    def __init__(self, *datapipes: IterDataPipe[Any]) -> None:
        self.datapipes = _checked("Multiplexer", tuple(as_pipe(source) for source in datapipes))

    def _length(self, shard: Shard) -> int:
        return min(lengths_of(self.datapipes, shard)) * len(self.datapipes)


class _MultiplexerLongestRun(_JoiningRun):
    """Holds nothing: where its inputs stand, and whose turn it is, say all; those that ended end again."""

    stateful = True
    count_fields = ("turn",)

    def check(self, position: Position) -> None:
        super().check(position)
        if position["turn"] >= len(self.inputs):
            raise damaged(f"stage {self.stage} has no input {position['turn']}")

    def restore(self, position: Position) -> None:
        self.turn = 0 if position is None else position["turn"]

    def elements(self) -> Iterator[Any]:
        sources, count = [iter(source) for source in self.inputs], len(self.inputs)
        waiting = deque([*range(self.turn, count), *range(self.turn)])
        while waiting:
            place = waiting.popleft()
            element = next(sources[place], _END)
            if element is not _END:
                waiting.append(place)
                self.turn = (place + 1) % count
                yield element

    def capture(self) -> Capture:
        return self.turn

    def describe(self, captured: Capture) -> Position:
        return {"turn": captured}


@functional_datapipe("mux_longest")
class MultiplexerLongest(IterDataPipe[Any]):
    """Give one element of each pipe in turn, to the end of the longest: those that ended are passed over.

    Plain iterables are taken too. Raises ValueError without pipes, TypeError for what cannot be iterated.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(3)).mux_longest(IterableWrapper(range(10, 12))))
    [0, 10, 1, 11, 2]
    """

    run_class = _MultiplexerLongestRun

    def __init__(self, *datapipes: IterDataPipe[Any]) -> None:
        self.datapipes = _checked("MultiplexerLongest", tuple(as_pipe(source) for source in datapipes))

    def _length(self, shard: Shard) -> int:
        return sum(lengths_of(self.datapipes, shard))
