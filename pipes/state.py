"""The state protocol: what a saved position is, how it is captured while running, and how it is read back.

Contract
- A stage that has something to remember gives `capture()`: an immutable Python value (ints, strings, tuples), made in
  well under a microsecond, never holding elements. `describe(captured)` turns it into plain JSON data, only when a
  user asks for a state.
- A *table* is `{stage id: position}`. It belongs to a moment at which every stage is suspended between two elements.
- A stage that holds elements (a buffer, an open batch, a half-read list) does not save them. It keeps *anchors*:
  captures of everything upstream from some inputs ago. Its position holds one table, the newest anchor that is not
  younger than the oldest element it still holds, and counts; what is upstream is restored from there and re-read.
- Positions count a stage's inputs, from the start of the epoch.
- Reading a state never runs code from it: `check_table` admits dicts, lists, strings, finite numbers, booleans, None.
  `check_positions` then refuses what no run of the graph can have given, before anything is opened.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from pipes.errors import StateError, brief

__all__ = [
    "Anchors",
    "Capture",
    "Captures",
    "Cursor",
    "Position",
    "Remembers",
    "Table",
    "Ticks",
    "anchor_of",
    "check_positions",
    "check_table",
    "count_from",
    "damaged",
    "positions_in",
    "pull",
    "table_of",
]

Position = Any
Table = dict[str, Position]
Capture = Any
Captures = tuple[Capture, ...]
AnchorEntry = tuple[int, Captures, tuple[int, ...]]

_FAR = 1 << 62
_BUILT_IN = (list, tuple, range, str, bytes)
_first = operator.itemgetter(0)
# A stage that holds elements takes three levels, above which stand those of its anchor.
_MAX_DEPTH = 512
_MAX_ITEMS = 1_000_000
_MAX_TEXT = 1 << 20
_MAX_BITS = 4096


class Ticks:
    """Count elements at the speed of `zip`: iterate it beside the elements, ask `count` when it matters.

    >>> ticks = Ticks(3)
    >>> [x for x, _ in zip("ab", ticks)], ticks.count
    (['a', 'b'], 5)
    """

    __slots__ = ("_iterator",)

    def __init__(self, start: int = 0) -> None:
        self._iterator = iter(range(start, _FAR))

    def __iter__(self) -> Iterator[int]:
        return self._iterator

    @property
    def count(self) -> int:
        return _FAR - operator.length_hint(self._iterator)


class Cursor:
    """Iterate a sequence from a position on, at the speed of its own iterator, and tell where that stands.

    `data` is a list, tuple, range, string or bytes, or has `from_position(start)` and `take(positions)`.

    >>> cursor = Cursor("abcd", 1)
    >>> next(cursor.elements), cursor.position
    ('b', 2)
    >>> cursor.skip(2, [1]), cursor.position
    (['d'], 4)
    """

    __slots__ = ("_data", "_ticks", "elements")

    def __init__(self, data: Any, start: int = 0) -> None:
        self._data = data
        self._go_to(start)

    @staticmethod
    def reads(data: Any) -> bool:
        """Return whether `data` is of a kind that a cursor can read."""
        return type(data) in _BUILT_IN or hasattr(data, "from_position")

    def _go_to(self, start: int) -> None:
        self._ticks: Ticks | None = None
        self.elements: Iterator[Any]
        if type(self._data) in _BUILT_IN:
            elements: Any = iter(self._data)
            elements.__setstate__(start)
            self.elements = elements
        else:
            self._ticks = Ticks(start)
            self.elements = map(_first, zip(self._data.from_position(start), self._ticks, strict=False))

    @property
    def position(self) -> int:
        """The number of elements before the next one."""
        return len(self._data) - operator.length_hint(self.elements) if self._ticks is None else self._ticks.count

    def skip(self, count: int, wanted: Sequence[int]) -> list[Any]:
        """Go `count` elements forward, which must be there; return those at the offsets `wanted`, which ascend."""
        start = self.position
        places = [start + offset for offset in wanted]
        kept = [self._data[place] for place in places] if self._ticks is None else self._data.take(places)
        self._go_to(start + count)
        return kept


class Remembers(Protocol):
    """What the helpers here need of a stage that runs."""

    @property
    def stage(self) -> str: ...
    @property
    def optional(self) -> bool: ...
    def capture(self) -> Capture: ...
    def describe(self, captured: Capture) -> Position: ...
    def check(self, position: Position) -> None: ...
    def check_upstream(self, position: Position) -> None: ...


def table_of(stages: tuple[Remembers, ...], captured: Captures) -> Table:
    """Return the table that `captured`, one capture a stage, stands for."""
    return {stage.stage: stage.describe(capture) for stage, capture in zip(stages, captured, strict=True)}


class Anchors:
    """The captures of what is upstream that a stage which holds elements may have to go back to.

    `entries` is a tuple of `(inputs taken, captures, extra counts)`, oldest first, and immutable, so a snapshot
    takes it by reference.
    The first entry (the start of the epoch, or where the run was restored, unless a stage has it forgotten) is always
    kept, so there is an anchor for an element of any age.
    """

    __slots__ = ("_keep", "entries", "upstream")

    def __init__(self, upstream: tuple[Remembers, ...], keep: int) -> None:
        self.upstream = upstream
        self._keep = keep
        self.entries: tuple[AnchorEntry, ...] = ()

    def note(self, taken: int, extra: tuple[int, ...] = ()) -> None:
        """Capture upstream now, after `taken` inputs; `extra` holds further counts of the stage's own."""
        entry = (taken, tuple([stage.capture() for stage in self.upstream]), extra)
        kept = self.entries
        if len(kept) > self._keep:
            kept = (kept[0], *kept[2:])
        self.entries = (*kept, entry)

    def forget(self, oldest: int) -> None:
        """Drop the entries before the newest one that is not after input number `oldest`: none will go back further."""
        newest = max(place for place, entry in enumerate(self.entries) if entry[0] <= oldest)
        self.entries = self.entries[newest:]

    def describe(self, entries: tuple[AnchorEntry, ...], oldest: int) -> dict[str, Position]:
        """Return the newest anchor that is not after input number `oldest`, as JSON data."""
        taken, captured, extra = max((entry for entry in entries if entry[0] <= oldest), key=lambda entry: entry[0])
        anchor: dict[str, Position] = {"taken": taken, "table": table_of(self.upstream, captured)}
        return {**anchor, "extra": list(extra)} if extra else anchor


def damaged(what: str) -> StateError:
    """Return the StateError of a state that nobody saved as it is."""
    return StateError(f"the saved state is damaged: {what}; use an earlier state")


def count_from(position: Position, field: str, stage: str) -> int:
    """Return the non-negative int `position[field]`, or raise StateError naming field and stage, or what else it is."""
    value = position.get(field) if isinstance(position, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _FAR:
        raise damaged(f"{field!r} of {stage} is {brief(value)}, which is not a count")
    return value


def anchor_of(position: Position, stage: str) -> dict[str, Position]:
    """Return the anchor, with its table, of a stage that holds elements; raises StateError without one."""
    anchor = position.get("anchor") if isinstance(position, dict) else None
    if not isinstance(anchor, dict) or not isinstance(anchor.get("table"), dict):
        raise damaged(f"stage {stage} has no anchor")
    return anchor


def check_positions(stages: Iterable[Remembers], table: Any, where: str) -> None:
    """Refuse a table that is not exactly one sound position for each of `stages`, down to the last anchor.

    Positions that are `optional` may lack: a run that failed goes on with `on_error="skip"`.
    """
    stages = list(stages)
    expected = {stage.stage for stage in stages}
    needed = {stage.stage for stage in stages if not stage.optional}
    if not isinstance(table, dict) or not needed <= table.keys() <= expected:
        found = sorted(table) if isinstance(table, dict) else type(table).__name__
        raise damaged(f"{where} holds positions of {brief(found)}, where {brief(sorted(expected))} belong")
    for stage in stages:
        if stage.stage in table:
            stage.check(table[stage.stage])
            stage.check_upstream(table[stage.stage])


def positions_in(table: Table | None, stage: str) -> list[Position]:
    """Return all positions of `stage` in a table, those inside anchors included."""
    found: list[Position] = []
    pending: list[Any] = [table]
    while pending:
        value = pending.pop()
        # What lies beside "round" or "again" belongs to another pass over the same stages.
        if isinstance(value, dict) and not value.keys() & {"round", "again"}:
            for key, item in value.items():
                if key == stage:
                    found.append(item)
                pending.append(item)
    return found


def pull(iterator: Iterator[Any], count: int, wanted: Sequence[int], stage: str) -> list[Any]:
    """Take `count` elements from `iterator` and return those at the offsets `wanted`."""
    kept: list[Any] = []
    at = 0
    for offset in (*wanted, count):
        deque(islice(iterator, min(offset - at, sys.maxsize)), maxlen=0)
        at = offset
        if offset < count:
            try:
                kept.append(next(iterator))
            except StopIteration:
                raise StateError(
                    f"stage {stage} has fewer elements than when the state was saved (wanted number {offset} after "
                    "its anchor); the data changed: resume with the data the state was made from, or start afresh"
                ) from None
            at += 1
    return kept


def check_table(value: Any, path: str = "state", depth: int = 0, budget: list[int] | None = None) -> None:
    """Refuse whatever is not small, plain JSON data; raises StateError with the path of the culprit."""
    budget = [_MAX_ITEMS] if budget is None else budget
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise StateError(f"{path}: the saved state is too deep or too large to be one of ours")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or len(key) > _MAX_TEXT:
                raise StateError(f"{path}: a key of the saved state is no short string")
            check_table(item, f"{path}[{key[:60]!r}]", depth + 1, budget)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_table(item, f"{path}[{index}]", depth + 1, budget)
    elif isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise StateError(f"{path}: a string of {len(value)} characters does not belong in a saved state")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise StateError(f"{path}: {value} does not belong in a saved state")
    elif isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise StateError(f"{path}: a number of {value.bit_length()} bits does not belong in a saved state")
    elif value is not None:
        raise StateError(f"{path}: {type(value).__name__} does not belong in a saved state; it holds JSON data only")
