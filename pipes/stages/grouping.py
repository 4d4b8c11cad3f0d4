"""Elements of one key into groups: `.groupby`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar, TypeVar

from pipes.arguments import whole_or_none
from pipes.datapipe import DataChunk, IterDataPipe, functional_datapipe
from pipes.held import Held, HeldAnchors, held_from
from pipes.run import Run
from pipes.stages.columns import check_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Position

__all__ = ["Grouper"]

T = TypeVar("T")

_ANCHOR_EVERY = 64
_SPARE = 1024


class _Groups:
    """Elements by key, with the numbers of their inputs; keys stand in the order of their first elements."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, tuple[list[int], list[Any]]] = {}
        self.size = 0
        # (-length, first number, key) of the groups, and what they were before; made when it is first asked for.
        self._heap: list[tuple[int, int, Hashable]] | None = None

    def add(self, key: Hashable, number: int, element: Any) -> int:
        """Take an element; return how many its group has."""
        numbers, elements = self.by_key.setdefault(key, ([], []))
        numbers.append(number)
        elements.append(element)
        self.size += 1
        if self._heap is not None:
            if len(self._heap) > 2 * len(self.by_key) + _SPARE:
                self._heap = None
            else:
                heappush(self._heap, (-len(numbers), numbers[0], key))
        return len(numbers)

    def pop(self, key: Hashable) -> tuple[list[int], list[Any]]:
        group = self.by_key.pop(key)
        self.size -= len(group[0])
        return group

    def largest(self) -> Hashable:
        """Return the key of the largest group, of several the one that began first."""
        if self._heap is None:
            self._heap = [(-len(numbers), numbers[0], key) for key, (numbers, _) in self.by_key.items()]
            heapify(self._heap)
        while True:
            length, first, key = self._heap[0]
            numbers = self.by_key.get(key, ([], []))[0]
            if numbers and (-len(numbers), numbers[0]) == (length, first):
                return key
            heappop(self._heap)

    def oldest(self, otherwise: int) -> int:
        """Return the number of the first element, or `otherwise` without any."""
        return next((numbers[0] for numbers, _ in self.by_key.values()), otherwise)


class _GrouperRun(Run):
    """Holds the groups that are not full. Which inputs these are is in the state; a restore reads them again.

    A group goes out with the input that fills it, or the buffer; so the inputs taken tell which groups went.
    """

    anchored = True
    leaves_out = True
    count_fields = ("taken",)

    def check(self, position: Position) -> None:
        super().check(position)
        held_from(position, self.stage)

    def restore(self, position: Position) -> None:
        self.groups, self.anchors, self.taken = _Groups(), HeldAnchors(self.upstream), 0
        self.held = Held((), 0)
        if position is None:
            self.anchors.note(0)
            return
        taken, held, anchor = position["taken"], position["held"], position["anchor"]["taken"]
        self.anchors.note(anchor)
        elements = self.inputs[0].replay(taken - anchor, [number - anchor for number in held])
        for number, element in zip(held, elements, strict=True):
            self.groups.add(self._key(element), number, element)
        self.taken, self.held = taken, Held(held, taken)

    def elements(self) -> Iterator[Any]:
        groups = self.groups
        group_size, buffer_size = self.pipe.group_size or math.inf, self.pipe.buffer_size or math.inf
        for element in self.inputs[0]:
            key = self._key(element)
            length = groups.add(key, self.taken, element)
            self.taken += 1
            if length >= group_size:
                yield self._given(key)
            elif groups.size >= buffer_size:
                yield from self._make_room(element)
            if self.taken % _ANCHOR_EVERY == 0:
                self.anchors.note_from(groups.oldest(self.taken), self.taken)
        while groups.by_key:
            yield self._given(next(iter(groups.by_key)))

    def _key(self, element: Any) -> Hashable:
        try:
            key: Hashable = self.pipe.group_key_fn(element)
            hash(key)
        except BaseException as error:
            self.note(error, element)
            raise
        return key

    def _make_room(self, element: Any) -> Iterator[Any]:
        """Give the largest group, or leave it out where it is too small."""
        key, least = self.groups.largest(), self.pipe.guaranteed_group_size or 1
        length = len(self.groups.by_key[key][0])
        if length >= least:
            yield self._given(key)
        elif self.pipe.drop_remaining:
            numbers, _ = self.groups.pop(key)
            self.held.leave(numbers, self.taken)
            if self.tally is not None:
                for _ in numbers:
                    self.tally.leave_out("of groups too small")
        else:
            error = RuntimeError(
                f"Failed to group items: the buffer of stage {self.stage} is full with {self.groups.size} elements of "
                f"{len(self.groups.by_key)} keys, and the largest group has {length} of the {least} that it needs; "
                "raise buffer_size, lower guaranteed_group_size, or leave such groups out with drop_remaining=True"
            )
            self.note(error, element)
            raise error

    def _given(self, key: Hashable) -> Any:
        numbers, elements = self.groups.pop(key)
        self.held.leave(numbers, self.taken)
        chunk = DataChunk(elements)
        return (key, chunk) if self.pipe.keep_key else chunk

    def capture(self) -> Capture:
        return self.held.capture(self.taken), self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        held, entries = captured
        numbers, taken = Held.numbers(held), held[-1]
        return {"taken": taken, "held": numbers, "anchor": self.anchors.describe(entries, min(numbers, default=taken))}


@functional_datapipe("groupby")
class Grouper(IterDataPipe[Any]):
    """Gather elements of the same key into a list, given once it has `group_size` elements.

    Args:
        datapipe: gives the elements; shards after `.groupby`, not before it, keep groups whole.
        group_key_fn: gives an element's key, which can be hashed.
        keep_key: give `(key, group)`.
        buffer_size: the most elements that are held (None: no limit). When they are so many, the largest group is
            given, of equal ones that which began first. At the end all are given, in the order in which they began.
        group_size: None gives groups only when the buffer is full, and at the end.
        guaranteed_group_size: the least that a group given by a full buffer has, `group_size` by default; a full
            buffer without such a group is a RuntimeError.
        drop_remaining: leave such a largest group out, and count its elements (`loader.stats()["left_out"]`).

    A restore reads again from the oldest held element on. Raises AssertionError for a buffer_size below 1, and unless
    0 < guaranteed_group_size <= group_size <= buffer_size.

    >>> from pipes.iter import IterableWrapper
    >>> names = IterableWrapper(["a.jpg", "b.jpg", "b.txt", "a.txt"])
    >>> list(names.groupby(lambda name: name[0], group_size=2, keep_key=True))
    [('b', ['b.jpg', 'b.txt']), ('a', ['a.jpg', 'a.txt'])]
    """

    run_class = _GrouperRun
    _levels = 2
    # Shares of the elements would be parts of groups.
    _numbers = True
    forms_batches = True
    _calls = ("group_key_fn",)
    _chained_overloads: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "group_key_fn: Callable[[T], Any], *, buffer_size: int | None = 10000, group_size: int | None = None, "
            "guaranteed_group_size: int | None = None, drop_remaining: bool = False",
            "IterDataPipe[DataChunk[T]]",
        ),
        (
            "group_key_fn: Callable[[T], Any], *, keep_key: bool, buffer_size: int | None = 10000, "
            "group_size: int | None = None, guaranteed_group_size: int | None = None, drop_remaining: bool = False",
            "IterDataPipe[Any]",
        ),
    )

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        group_key_fn: Callable[[Any], Any],
        *,
        keep_key: bool = False,
        buffer_size: int | None = 10000,
        group_size: int | None = None,
        guaranteed_group_size: int | None = None,
        drop_remaining: bool = False,
    ) -> None:
        check_columns(group_key_fn, None)
        buffer_size, group_size = whole_or_none("buffer_size", buffer_size), whole_or_none("group_size", group_size)
        least = whole_or_none("guaranteed_group_size", guaranteed_group_size)
        assert buffer_size is None or buffer_size > 0, f"buffer_size must be at least 1, not {buffer_size}"
        assert group_size is None or 0 < group_size <= (buffer_size or group_size), (
            f"group_size must be from 1 to the buffer_size of {buffer_size}, not {group_size}"
        )
        assert least is None or 0 < least <= (group_size or 0), (
            f"guaranteed_group_size must be from 1 to the group_size of {group_size}, not {least}"
        )
        self.datapipe = as_pipe(datapipe)
        self.group_key_fn = group_key_fn
        self.keep_key = keep_key
        self.buffer_size = buffer_size
        self.group_size = group_size
        self.guaranteed_group_size = group_size if least is None else least
        self.drop_remaining = drop_remaining
