"""One element in, one out: `.map`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of, refuse_length
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.run import Run
from pipes.seeds import KeyedGenerator
from pipes.stages.columns import apply_to_columns, check_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Position
from pipes.tallies import Tally

__all__ = ["AppliedPipe", "AppliedRun", "Mapper", "MapperRun"]

R = TypeVar("R")


class AppliedRun(Run):
    """Base of stages that call one function on each input; a restore calls it only for elements still wanted.

    With `on_error` outputs no longer tell inputs, so then a restore calls it for all that it re-reads.
    """

    def function(self) -> Callable[..., Any]:
        """Return the function of one whole element."""
        return self.pipe.function()  # type: ignore[no-any-return]

    def subject(self, element: Any) -> Any:
        """Return what an error is told to be about."""
        return element

    def elements(self) -> Iterator[Any]:
        return self._strict() if self.tolerant is None else self._going_on(self.tolerant)

    def _strict(self) -> Iterator[Any]:
        function = self.function()
        for element in self.inputs[0]:
            try:
                result = function(element)
            except BaseException as error:
                self.note(error, self.subject(element))
                raise
            yield result

    def _going_on(self, tally: Tally) -> Iterator[Any]:
        function = self.function()
        for element, _ in zip(self.inputs[0], tally.ticks, strict=False):
            try:
                result = function(element)
            except BaseException as error:
                result = tally.handle(error, self.subject(element))
                if result is None:
                    continue
            yield result

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if self.tolerant is not None:
            return super().replay(count, wanted)
        function = self.function()
        return [self.applied(function, element) for element in self.inputs[0].replay(count, wanted)]

    def applied(self, function: Callable[..., Any], element: Any, **named: Any) -> Any:
        """Return `function(element)`; an error gets the note that names stage and element."""
        try:
            return function(element, **named)
        except BaseException as error:
            self.note(error, self.subject(element))
            raise


class MapperRun(AppliedRun):
    """Of all stages the one that is named by its function."""


class AppliedPipe(IterDataPipe[R]):
    """Base of stages that make one output of each of their inputs, or none where `on_error` leaves it out."""

    run_class = AppliedRun
    #: What torchdata calls the first parameter, which is kept under that name.
    _input: ClassVar[str] = "datapipe"

    def __init__(self, datapipe: Any, on_error: OnError, max_errors: MaxErrors) -> None:
        check_policy(on_error, max_errors)
        setattr(self, self._input, as_pipe(datapipe))
        self.on_error = on_error
        self.max_errors = max_errors

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        refuse_length(self)
        return length_of(getattr(self, self._input), shard)


class _KeyedMapperRun(MapperRun):
    """As MapperRun, with a generator keyed by the element's number; its position is that number."""

    stateful = True
    count_fields = ("taken",)

    def restore(self, position: Position) -> None:
        self.taken = 0 if position is None else position["taken"]
        self.generators = KeyedGenerator(self.context.key(self.stage, self.pipe))

    def _strict(self) -> Iterator[Any]:
        function, generators = self.pipe.function(), self.generators
        for element in self.inputs[0]:
            ordinal = self.taken
            self.taken = ordinal + 1
            try:
                result = function(element, rng=generators.at(ordinal))
            except BaseException as error:
                self.note(error, element)
                raise
            yield result

    def _going_on(self, tally: Tally) -> Iterator[Any]:
        function, generators = self.pipe.function(), self.generators
        for element, _ in zip(self.inputs[0], tally.ticks, strict=False):
            ordinal = self.taken
            self.taken = ordinal + 1
            try:
                result = function(element, rng=generators.at(ordinal))
            except BaseException as error:
                result = tally.handle(error, element)
                if result is None:
                    continue
            yield result

    def capture(self) -> Capture:
        return self.taken

    def describe(self, captured: Capture) -> Position:
        return {"taken": captured}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if self.tolerant is not None:
            return Run.replay(self, count, wanted)
        function, start = self.pipe.function(), self.taken
        elements = self.inputs[0].replay(count, wanted)
        self.taken = start + count
        return [
            self.applied(function, element, rng=self.generators.at(start + offset))
            for offset, element in zip(wanted, elements, strict=True)
        ]


@functional_datapipe("map")
class Mapper(AppliedPipe[R]):
    """Give `fn(x)` for each element x, or `fn` of some columns of x, put where `output_col` says.

    With `rng=True`, `fn` gets a `numpy.random.Generator` as the keyword `rng`, keyed by (seed, epoch, stage,
    stream, number of the element): random augmentation that a resume repeats exactly, wherever it stands.
    With `on_error="skip"`, elements for which `fn` raises are left out, up to `max_errors`; see the page on errors.
    Raises TypeError if `fn` is not callable, ValueError if it cannot take the columns.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([(1, 2), (3, 4)]).map(lambda a, b: a + b, input_col=[0, 1]))
    [(3,), (7,)]
    >>> list(IterableWrapper([{"x": 1}]).map(str, input_col="x", output_col="text"))
    [{'x': 1, 'text': '1'}]
    """

    run_class = MapperRun
    _calls: ClassVar[tuple[str, ...]] = ("fn",)
    _chained_overloads: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "fn: Callable[..., R], *, rng: bool = False, on_error: OnError = 'raise', max_errors: MaxErrors = 0.1",
            "Mapper[R]",
        ),
        (
            "fn: Callable[..., Any], input_col: Any, output_col: Any = None, *, rng: bool = False, "
            "on_error: OnError = 'raise', max_errors: MaxErrors = 0.1",
            "Mapper[Any]",
        ),
    )

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        fn: Callable[..., R],
        input_col: Any = None,
        output_col: Any = None,
        *,
        rng: bool = False,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_columns(fn, input_col, output_col, rng=rng)
        super().__init__(datapipe, on_error, max_errors)
        self.fn = fn
        self.input_col = input_col
        self.output_col = output_col
        self.rng = rng

    def function(self) -> Callable[..., Any]:
        """Return the function of one whole element that this stage applies."""
        return apply_to_columns(self.fn, self.input_col, self.output_col)

    def _make_run(self, context: Any, stage: str) -> Run:
        own = self._run_class()
        return _KeyedMapperRun(self, context, stage) if self.rng and own is MapperRun else own(self, context, stage)
