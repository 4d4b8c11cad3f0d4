"""One pipe into several: `.fork`, `.demux`, `.round_robin_demux`.

The children read through one shared stage, which keeps, for each child, the elements that it has not taken yet. A state
holds counts only: the shared stage goes back to an anchor before the oldest waiting element and reads forward again
as its children ask, each child leaving out what it had already given. Meanwhile the buffer limit does not apply.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, cast

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of
from pipes.run import Run
from pipes.stages.columns import check_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, count_from, damaged

__all__ = ["Demultiplexer", "Forker", "RoundRobinDemultiplexer"]

T = TypeVar("T")

_ANCHOR_EVERY = 16
_KEPT_ANCHORS = 256


class _SplitterRun(Run):
    """Run of the shared stage: `queues[i]` holds (number of the input, element) for child i."""

    anchored = True
    count_fields = ("taken",)

    def check(self, position: Position) -> None:
        super().check(position)
        anchor = position["anchor"]
        counts = anchor.get("extra", [0] * self.pipe.num_instances)
        if not isinstance(counts, list) or len(counts) != self.pipe.num_instances:
            raise damaged(f"stage {self.stage} does not say what its {self.pipe.num_instances} children got")
        for count in counts:
            if count_from({"extra": count}, "extra", self.stage) > anchor["taken"]:
                raise damaged(f"the counts of stage {self.stage} contradict each other")
        if anchor["taken"] > position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        count = self.pipe.num_instances
        self.queues: list[deque[tuple[int, Any]]] = [deque() for _ in range(count)]
        # counts[i]: elements that have gone to child i so far; given[i]: those it has passed on, None before it opens.
        self.counts, self.given = [0] * count, [0] * count
        self.taken, self.caught_up_at, self.ended = 0, 0, False
        if position is not None:
            self.caught_up_at, anchor = position["taken"], position["anchor"]
            self.taken, self.counts = anchor["taken"], list(anchor.get("extra", self.counts))
        self.anchors = Anchors(self.upstream, _KEPT_ANCHORS)
        self.anchors.note(self.taken, tuple(self.counts))

    def receivers(self, element: Any) -> range:
        """Return the numbers of the children that get `element`."""
        return range(self.pipe.num_instances)

    def pull(self, asking: int) -> bool:
        """Take one input for child `asking` and queue it for those who get it; False at the end."""
        if self.ended:
            return False
        for element in iter(self.inputs[0]):
            number, self.taken = self.taken, self.taken + 1
            for child in self.receivers(element):
                if self.counts[child] >= self.given[child]:
                    self.queues[child].append((number, element))
                self.counts[child] += 1
            if self.taken % _ANCHOR_EVERY == 0:
                self.anchors.note(self.taken, tuple(self.counts))
            self._check_room(asking)
            return True
        self.ended = True
        return False

    def waiting(self, asking: int) -> int:
        """Return the number that `buffer_size` limits, which child `asking` does not count in: the longest queue."""
        return max(len(queue) for child, queue in enumerate(self.queues) if child != asking)

    def _check_room(self, asking: int) -> None:
        limit = self.pipe.buffer_size
        if limit >= 0 and self.taken > self.caught_up_at and self.waiting(asking) > limit:
            raise BufferError(
                f"{type(self.pipe).__name__.lstrip('_')} buffer overflow in stage {self.stage}: more than {limit} "
                "elements wait for the slowest child; read the children in step, raise buffer_size, or set it to -1 "
                "(unlimited)"
            )

    def finished(self) -> bool:
        return self.ended and not any(self.queues)

    def capture(self) -> Capture:
        oldest = min((queue[0][0] for queue in self.queues if queue), default=self.taken)
        return max(self.taken, self.caught_up_at), oldest, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, oldest, entries = captured
        return {"taken": taken, "anchor": self.anchors.describe(entries, oldest)}


class _DealingRun(_SplitterRun):
    """Each element goes to one child, and `buffer_size` limits those that wait in all others together."""

    def waiting(self, asking: int) -> int:
        return sum(map(len, self.queues)) - len(self.queues[asking])


class _DemultiplexerRun(_DealingRun):
    def receivers(self, element: Any) -> range:
        pipe = self.pipe
        try:
            number = pipe.classifier_fn(element)
            if number is None and pipe.drop_none:
                return range(0)
            if number is None or not 0 <= number < pipe.num_instances:
                raise ValueError(
                    f"the classifier of stage {self.stage} gave {number!r}, but the children are numbered 0 to "
                    f"{pipe.num_instances - 1}" + ("; drop_none=True leaves out None" if number is None else "")
                )
        except BaseException as error:
            self.note(error, element)
            raise
        return range(int(number), int(number) + 1)


class _RoundRobinDemultiplexerRun(_DealingRun):
    def receivers(self, element: Any) -> range:
        child = (self.taken - 1) % self.pipe.num_instances
        return range(child, child + 1)


class _ChildRun(Run):
    """Run of one child: gives what the shared stage queued for it, and counts."""

    stateful = True
    count_fields = ("given",)

    def restore(self, position: Position) -> None:
        self.main = cast(_SplitterRun, self.inputs[0])
        self.number = self.pipe.instance_id
        given = 0 if position is None else position["given"]
        self.main.given[self.number] = given
        queue = self.main.queues[self.number]
        while queue and self.main.counts[self.number] - len(queue) < given:
            queue.popleft()

    def elements(self) -> Iterator[Any]:
        main, number = self.main, self.number
        queue, given, duplicate = main.queues[number], main.given, self.pipe.duplicate
        while True:
            while not queue:
                if not main.pull(number):
                    return
            element = queue.popleft()[1]
            given[number] += 1
            yield element if duplicate is None else duplicate(element)

    def capture(self) -> Capture:
        return self.main.given[self.number]

    def describe(self, captured: Capture) -> Position:
        return {"given": captured}


class _Splitter(IterDataPipe[Any]):
    """What the children of one fork share."""

    run_class: ClassVar[type[Run]] = _SplitterRun
    _shared = True
    #: The chained name of the stage that made it.
    chained_as: ClassVar[str]

    def __init__(self, datapipe: IterDataPipe[Any], num_instances: int, buffer_size: int = 1000) -> None:
        num_instances, buffer_size = whole("num_instances", num_instances), whole("buffer_size", buffer_size)
        if num_instances < 1:
            raise ValueError(f"num_instances must be at least 1, not {num_instances}")
        if buffer_size < -1:
            raise ValueError(f"buffer_size must be 0 or more, or -1 for unlimited, not {buffer_size}")
        if buffer_size == -1:
            warnings.warn("buffer_size=-1 lets a slow child make the buffer grow without limit", stacklevel=4)
        self.datapipe = as_pipe(datapipe)
        self.num_instances = num_instances
        self.buffer_size = buffer_size

    def _length(self, shard: Shard) -> int:
        return length_of(self.datapipe, shard)


class _ForkerSource(_Splitter):
    chained_as = "fork"

    def _places(self) -> tuple[str, ...]:
        return ()


class _DemultiplexerSource(_Splitter):
    run_class = _DemultiplexerRun
    _calls = ("classifier_fn",)
    chained_as = "demux"

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        num_instances: int,
        buffer_size: int,
        classifier_fn: Callable[[Any], int | None],
        drop_none: bool,
    ) -> None:
        check_columns(classifier_fn, None)
        super().__init__(datapipe, num_instances, buffer_size)
        self.classifier_fn = classifier_fn
        self.drop_none = drop_none


class _RoundRobinDemultiplexerSource(_Splitter):
    run_class = _RoundRobinDemultiplexerRun
    chained_as = "round_robin_demux"

    def _places(self) -> tuple[str, ...]:
        return ()


class _Child(IterDataPipe[T]):
    """One of the pipes that a splitter returned."""

    run_class = _ChildRun

    def __init__(self, main: _Splitter, instance_id: int, copy: str | None = None) -> None:
        self.main = main
        self.instance_id = instance_id
        self.copy = copy

    @property
    def duplicate(self) -> Callable[[Any], Any] | None:
        return {None: None, "shallow": copy.copy, "deep": copy.deepcopy}[self.copy]


class _ForkerChild(_Child[T]):
    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return length_of(self.main, shard)


class _DemultiplexerChild(_Child[T]):
    pass


class _RoundRobinDemultiplexerChild(_Child[T]):
    def _places(self) -> tuple[str, ...]:
        return (f"round_robin_demux({self.main.num_instances})[{self.instance_id}]",)

    def _length(self, shard: Shard) -> int:
        return len(range(self.instance_id, length_of(self.main, shard), self.main.num_instances))


@functional_datapipe("fork")
class Forker(IterDataPipe[T]):
    """Return a list of `num_instances` pipes that each give all elements; for 1, the pipe itself, as in torchdata.

    The elements that one child has given and another has not wait in a buffer of `buffer_size` (-1: no limit); a child
    further ahead raises BufferError. `copy` is None (the same objects), "shallow" or "deep".
    Raises ValueError for num_instances below 1 or another `copy`.

    >>> from pipes.iter import IterableWrapper
    >>> a, b = IterableWrapper(range(3)).fork(2)
    >>> list(a.zip(b.map(str)))
    [(0, '0'), (1, '1'), (2, '2')]
    """

    _chained_result: ClassVar[str] = "list[IterDataPipe[T]]"

    def __new__(
        cls, datapipe: IterDataPipe[T], num_instances: int, buffer_size: int = 1000, copy: str | None = None
    ) -> Any:
        if copy not in (None, "shallow", "deep"):
            raise ValueError(f"copy must be None, 'shallow' or 'deep', not {copy!r}")
        if whole("num_instances", num_instances) == 1:
            return datapipe
        main = _ForkerSource(datapipe, num_instances, buffer_size)
        return [_ForkerChild[Any](main, number, copy) for number in range(main.num_instances)]


@functional_datapipe("demux")
class Demultiplexer(IterDataPipe[T]):
    """Return a list of `num_instances` pipes; each element goes to the one whose number `classifier_fn` gives.

    `buffer_size` limits the elements that wait in all children together (-1: no limit; else BufferError).
    `drop_none` leaves out elements classified None. While iterating, raises ValueError for a number out of range.

    >>> from pipes.iter import IterableWrapper
    >>> even, odd = IterableWrapper(range(6)).demux(2, lambda x: x % 2)
    >>> list(even), list(odd)
    ([0, 2, 4], [1, 3, 5])
    """

    _chained_result: ClassVar[str] = "list[IterDataPipe[T]]"

    def __new__(
        cls,
        datapipe: IterDataPipe[T],
        num_instances: int,
        classifier_fn: Callable[[T], int | None],
        drop_none: bool = False,
        buffer_size: int = 1000,
    ) -> Any:
        main = _DemultiplexerSource(datapipe, num_instances, buffer_size, classifier_fn, drop_none)
        return [_DemultiplexerChild[Any](main, number) for number in range(main.num_instances)]


@functional_datapipe("round_robin_demux")
class RoundRobinDemultiplexer(IterDataPipe[T]):
    """Return a list of `num_instances` pipes; element i goes to pipe i modulo their number.

    For 1, the list has the pipe itself. `buffer_size` limits the elements that wait in all children together (-1: no
    limit; else BufferError). Raises ValueError for num_instances below 1.

    >>> from pipes.iter import IterableWrapper
    >>> a, b = IterableWrapper(range(5)).round_robin_demux(2)
    >>> list(a), list(b), len(a)
    ([0, 2, 4], [1, 3], 3)
    """

    _chained_result: ClassVar[str] = "list[IterDataPipe[T]]"

    def __new__(cls, datapipe: IterDataPipe[T], num_instances: int, buffer_size: int = 1000) -> Any:
        main = _RoundRobinDemultiplexerSource(datapipe, num_instances, buffer_size)
        if main.num_instances == 1:
            return [main.datapipe]
        return [_RoundRobinDemultiplexerChild[Any](main, number) for number in range(main.num_instances)]
