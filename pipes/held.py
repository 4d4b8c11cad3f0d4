"""Which inputs a stage holds, where its elements decide how long: captured in no time, whatever their number.

`Held` is a list from some time ago and what has left since; a capture is a view of both. `HeldAnchors` keeps few
anchors however old the oldest held input is: so a restore reads again what is that old, and not much more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pipes.state import Anchors, Capture, Position, anchor_of, damaged

__all__ = ["Held", "HeldAnchors", "Journal", "held_from"]

# So many more numbers than were held at its start may leave before the list is written anew.
_SPARE = 1024
_KEPT_ANCHORS = 40


class _View:
    """The first `count` numbers of a journal, to which more may be appended; travels as a tuple."""

    __slots__ = ("_count", "_numbers")

    def __init__(self, numbers: array[int], count: int) -> None:
        self._numbers, self._count = numbers, count

    def __iter__(self) -> Iterator[int]:
        return islice(self._numbers, self._count)

    def __reduce__(self) -> Any:
        return tuple, (list(self),)


class Journal:
    """Numbers that are only ever appended, so that what it was at a moment is known by their count.

    >>> journal = Journal()
    >>> journal.extend([3, 1]); before = journal.view(); journal.extend([2])
    >>> list(before), len(journal)
    ([3, 1], 3)
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = array("q")

    def __len__(self) -> int:
        return len(self._numbers)

    def extend(self, numbers: Iterable[int]) -> None:
        self._numbers.extend(numbers)

    def view(self) -> Iterable[int]:
        """Return what the journal holds now, which stays as it is."""
        return _View(self._numbers, len(self._numbers))


class Held:
    """The numbers of the inputs that a stage has taken and not given: all, but those that `leave` it.

    >>> held = Held([], 0)
    >>> held.leave([1], 2); captured = held.capture(4)
    >>> held.leave([0, 2], 4); Held.numbers(captured), Held.numbers(held.capture(5))
    ([0, 2, 3], [3, 4])
    """

    __slots__ = ("_first", "_gone", "_start")

    def __init__(self, numbers: Iterable[int], taken: int) -> None:
        self._first, self._start, self._gone = tuple(numbers), taken, Journal()

    def leave(self, numbers: Iterable[int], taken: int) -> None:
        """Note that inputs left, after `taken` inputs."""
        self._gone.extend(numbers)
        if len(self._gone) > 2 * len(self._first) + _SPARE:
            self._first, self._start, self._gone = tuple(self.numbers(self.capture(taken))), taken, Journal()

    def capture(self, taken: int) -> Capture:
        """Return what is held after `taken` inputs."""
        return self._first, self._start, self._gone.view(), taken

    @staticmethod
    def numbers(captured: Capture) -> list[int]:
        """Return the numbers that were held at a capture; they ascend."""
        first, start, gone, taken = captured
        held = {*first, *range(start, taken)}
        held.difference_update(gone)
        return sorted(held)


class HeldAnchors(Anchors):
    """Anchors of a stage that tells its oldest held input: older ones than it needs go, every second of too many."""

    __slots__ = ()

    def __init__(self, upstream: tuple[Any, ...]) -> None:
        super().__init__(upstream, 2 * _KEPT_ANCHORS)

    def note_from(self, oldest: int, taken: int, extra: tuple[int, ...] = ()) -> None:
        """Capture upstream now, after `taken` inputs, while no held one is older than number `oldest`."""
        entries = self.entries
        needed = max((place for place, entry in enumerate(entries) if entry[0] <= oldest), default=0)
        entries = entries[needed:]
        if len(entries) > _KEPT_ANCHORS:
            entries = (entries[0], *entries[1::2])
        self.entries = entries
        self.note(taken, extra)


def held_from(position: Position, stage: str) -> list[int]:
    """Return the held numbers of a saved position that counts `taken`; raises StateError for what nobody saved."""
    anchor, taken, held = anchor_of(position, stage)["taken"], position["taken"], position.get("held")
    if not isinstance(held, list) or not all(type(number) is int for number in held):
        raise damaged(f"stage {stage} does not say which inputs it holds")
    if any(a >= b for a, b in zip([anchor - 1, *held], [*held, taken], strict=True)) or anchor > taken:
        raise damaged(f"the counts of stage {stage} contradict each other")
    return held
