"""One element in, any number out: `.flatmap`, `.repeat`, `.shard_expand`, and what every such stage shares."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, product, repeat
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.errors import brief
from pipes.run import Run
from pipes.stages.columns import check_columns, pick_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, Ticks, damaged

__all__ = ["ExpandingRun", "FlatMapper", "Repeater", "ShardExpander"]

R = TypeVar("R")
T = TypeVar("T")

_first = itemgetter(0)


class ExpandingRun(Run):
    """Base of stages that open each input into several outputs, one input at a time.

    The position is the number of inputs taken and of outputs given from the last of them; a restore takes that
    input again (the anchor lies at most 16 inputs before it) and goes past those outputs.
    """

    anchored = True
    count_fields = ("taken", "given")
    #: Inputs between two anchors: so many are taken again by a restore.
    anchor_every: ClassVar[int] = 16
    #: Whether `on_error` counts the outputs as what was taken, instead of the inputs.
    counts_records: ClassVar[bool] = False

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
        # Whether an error that was handled ended the last input: it must not be opened, and counted, again.
        self.over = False
        if position is None:
            self.anchors.note(0)
            return
        self.over = position.get("over") is True
        taken, self.skip, anchor = position["taken"], position["given"], position["anchor"]["taken"]
        self.anchors.note(anchor)
        wanted = [taken - anchor - 1] if taken > anchor and not self.over else []
        self.opened = self.inputs[0].replay(taken - anchor, wanted)
        self.taken = taken

    def elements(self) -> Iterator[Any]:
        source = iter(self.inputs[0])
        if self.tolerant is not None and not self.counts_records:
            source = map(_first, zip(source, self.tolerant.ticks, strict=False))
        for element in self.opened:
            yield from self._open(element, self.skip)
        self.opened.clear()
        for element in source:
            self.taken += 1
            self.skip, self.over = 0, False
            yield from self._open(element, 0)
            # Between two inputs this stage holds nothing, so an anchor here covers all that follows.
            if self.taken % self.anchor_every == 0:
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
            return
        except GeneratorExit:
            raise
        except BaseException as error:
            stand_in = self._handle(error, element)
        if stand_in is not None:
            yield stand_in

    def _handle(self, error: BaseException, subject: Any) -> Any:
        """Return what stands in for the rest of an input; None for nothing. Raises `error` where that ends the run."""
        if self.tolerant is not None:
            stand_in = self.tolerant.handle(error, subject)
            self.over = True
            return stand_in
        self.note(error, subject)
        raise error

    def capture(self) -> Capture:
        return self.taken, self.skip or self.ticks.count, self.anchors.entries, self.over

    def describe(self, captured: Capture) -> Position:
        taken, given, entries, over = captured
        oldest = max(taken - 1, 0)
        position = {"taken": taken, "given": given, "anchor": self.anchors.describe(entries, oldest)}
        return {**position, "over": True} if over else position


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

    With `on_error="skip"`, the rest of an element for which it raises is left out, up to `max_errors` such elements.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([1, 2]).flatmap(lambda x: [x, 10 * x]))
    [1, 10, 2, 20]
    """

    run_class = _FlatMapperRun
    _calls = ("fn",)

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        fn: Callable[..., Iterable[R]] | None = None,
        input_col: Any = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        if fn is not None:
            check_columns(fn, input_col)
        self.datapipe = as_pipe(datapipe)
        self.fn = fn
        self.input_col = input_col
        self.on_error = on_error
        self.max_errors = max_errors


class _RepeaterRun(ExpandingRun):
    def expand(self, element: Any) -> Iterator[Any]:
        return repeat(element, self.pipe.times)


@functional_datapipe("repeat")
class Repeater(IterDataPipe[T]):
    """Give each element `times` times in a row, each time the same object; the whole again is `.cycle(times)`.

    Raises ValueError for fewer than 2 times.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper("ab").repeat(2))
    ['a', 'a', 'b', 'b']
    """

    run_class = _RepeaterRun

    def __init__(self, source_datapipe: IterDataPipe[T], times: int) -> None:
        times = whole("times", times)
        if times < 2:
            raise ValueError(f"times must be 2 or more, not {times}: leave .repeat() out where elements come once")
        self.source_datapipe = as_pipe(source_datapipe)
        self.times = times

    def _places(self) -> tuple[str, ...]:
        return (f"repeat({self.times})",)

    def _length(self, shard: Shard) -> int:
        return self.times * length_of(self.source_datapipe, shard)


_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}", re.ASCII)


def _names_of(spec: Any) -> Iterator[str]:
    if not isinstance(spec, str):
        raise TypeError(f"shard_expand takes names, not a {type(spec).__name__}")
    # Texts, and between each two of them the bounds of a range.
    texts, lows, highs = (_RANGE.split(spec)[first::3] for first in range(3))
    ranges = [_numbers(spec, low, high) for low, high in zip(lows, highs, strict=True)]
    for numbers in product(*ranges):
        yield "".join(chain.from_iterable(zip(texts, (*numbers, ""), strict=True)))


def _numbers(spec: str, low: str, high: str) -> list[str]:
    """Return the numbers from `low` to `high` in digits, as many as `low` has."""
    if len(low) > len(high):
        raise ValueError(f"{brief(spec)}: the low bound {low} must be shorter than the high bound {high}, or as long")
    if low != "0" and low[0] == "0" and len(low) < len(high):
        raise ValueError(f"{brief(spec)}: the low bound {low} must not start with 0, or be as long as {high}")
    if int(low) >= int(high):
        raise ValueError(f"{brief(spec)}: {low} to {high} is a bad range, which ends where it begins or before")
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]


class _ShardExpanderRun(ExpandingRun):
    def expand(self, element: Any) -> Iterator[Any]:
        return _names_of(element)


@functional_datapipe("shard_expand")
class ShardExpander(IterDataPipe[str]):
    """Give all the names that a name with ranges in braces stands for, the leftmost range varying slowest.

    Numbers have as many digits, at least, as the low bound. What else stands in braces stays as it is.
    With `on_error="skip"`, names with bad ranges are left out, up to `max_errors`. Raises, while iterating, ValueError
    for a low bound that is not below the high one, has more digits, or begins with 0 and has fewer; TypeError for what
    is no str. The form of the ranges is that of WebDataset's shard specifications.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(["ds-{08..10}.tar", "{a,b}-{0..1}"]).shard_expand())
    ['ds-08.tar', 'ds-09.tar', 'ds-10.tar', '{a,b}-0', '{a,b}-1']
    """

    run_class = _ShardExpanderRun

    def __init__(
        self, source_datapipe: IterDataPipe[str], *, on_error: OnError = "raise", max_errors: MaxErrors = BUDGET
    ) -> None:
        check_policy(on_error, max_errors)
        self.source_datapipe = as_pipe(source_datapipe)
        self.on_error = on_error
        self.max_errors = max_errors
