"""One element in, any number out: `.flatmap`, and what every such stage shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.run import Run
from pipes.stages.columns import check_columns, pick_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, Ticks, damaged

__all__ = ["ExpandingRun", "FlatMapper"]

R = TypeVar("R")

_ANCHOR_EVERY = 16


class ExpandingRun(Run):
    """Base of stages that open each input into several outputs, one input at a time.

    The position is the number of inputs taken and of outputs given from the last of them; a restore takes that
    input again (the anchor lies at most 16 inputs before it) and goes past those outputs.
    """

    stateful = True
    anchored = True
    count_fields = ("taken", "given")

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] > position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def expand(self, element: Any) -> Iterator[Any]:
        """Return the outputs of one input."""
        raise NotImplementedError(type(self).__name__)

    def restore(self, position: Position) -> None:
        self.anchors = Anchors(self.upstream, 2)
        self.taken, self.skip = 0, 0
        self.ticks = Ticks(0)
        self.opened: list[Any] = []
        if position is None:
            self.anchors.note(0)
            return
        taken, self.skip, anchor = position["taken"], position["given"], position["anchor"]["taken"]
        self.anchors.note(anchor)
        wanted = [taken - anchor - 1] if taken > anchor else []
        self.opened = self.inputs[0].replay(taken - anchor, wanted)
        self.taken = taken

    def elements(self) -> Iterator[Any]:
        source = iter(self.inputs[0])
        for element in self.opened:
            yield from self._open(element, self.skip)
        self.opened.clear()
        for element in source:
            self.taken += 1
            self.skip = 0
            yield from self._open(element, 0)
            # Between two inputs this stage holds nothing, so an anchor here covers all that follows.
            if self.taken % _ANCHOR_EVERY == 0:
                self.anchors.note(self.taken)

    def _open(self, element: Any, skip: int) -> Iterator[Any]:
        self.ticks = Ticks(0)
        try:
            outputs = self.expand(element)
            if skip:
                deque(islice(outputs, skip), maxlen=0)
                self.ticks, self.skip = Ticks(skip), 0
            for output, _ in zip(outputs, self.ticks, strict=False):
                yield output
        except GeneratorExit:
            raise
        except BaseException as error:
            self.note(error, element)
            raise

    def capture(self) -> Capture:
        return self.taken, self.skip or self.ticks.count, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, given, entries = captured
        oldest = max(taken - 1, 0)
        return {"taken": taken, "given": given, "anchor": self.anchors.describe(entries, oldest)}


class _FlatMapperRun(ExpandingRun):
    def expand(self, element: Any) -> Iterator[Any]:
        pipe = self.pipe
        if pipe.fn is not None:
            return iter(pick_columns(pipe.fn, pipe.input_col)(element))
        if isinstance(pipe.input_col, list | tuple):
            return iter(tuple(element[column] for column in pipe.input_col))
        return iter(element if pipe.input_col is None else element[pipe.input_col])


@functional_datapipe("flatmap")
class FlatMapper(IterDataPipe[R]):
    """Give every item of `fn(x)` for each element x; without `fn`, of x itself or of its selected columns.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([1, 2]).flatmap(lambda x: [x, 10 * x]))
    [1, 10, 2, 20]
    """

    run_class = _FlatMapperRun
    calls_user = True

    def __init__(
        self, datapipe: IterDataPipe[Any], fn: Callable[..., Iterable[R]] | None = None, input_col: Any = None
    ) -> None:
        if fn is not None:
            check_columns(fn, input_col)
        self.datapipe = as_pipe(datapipe)
        self.fn = fn
        self.input_col = input_col
