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
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, Protocol

from pipes.errors import StateError

__all__ = ["Anchors", "Capture", "Captures", "Position", "Table", "Ticks", "check_table", "count_from", "table_of"]

Position = Any
Table = dict[str, Position]
Capture = Any
Captures = tuple[Capture, ...]
AnchorEntry = tuple[int, Captures, tuple[int, ...]]

_FAR = 1 << 62
_MAX_DEPTH = 256
_MAX_ITEMS = 1_000_000
_MAX_TEXT = 1 << 20


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


class Remembers(Protocol):
    """What the helpers here need of a stage that runs."""

    @property
    def stage(self) -> str: ...
    def capture(self) -> Capture: ...
    def describe(self, captured: Capture) -> Position: ...


def table_of(stages: tuple[Remembers, ...], captured: Captures) -> Table:
    """Return the table that `captured`, one capture a stage, stands for."""
    return {stage.stage: stage.describe(capture) for stage, capture in zip(stages, captured, strict=True)}


class Anchors:
    """The captures of what is upstream that a stage which holds elements may have to go back to.

    `entries` is a tuple of `(inputs taken, captures, extra counts)`, oldest first, and immutable, so a snapshot
    takes it by reference.
    The first entry (the start of the epoch, or where the run was restored) is always kept, so there is an
    anchor for an element of any age.
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

    def describe(self, entries: tuple[AnchorEntry, ...], oldest: int) -> dict[str, Position]:
        """Return the newest anchor that is not after input number `oldest`, as JSON data."""
        taken, captured, extra = max((entry for entry in entries if entry[0] <= oldest), key=lambda entry: entry[0])
        anchor: dict[str, Position] = {"taken": taken, "table": table_of(self.upstream, captured)}
        return {**anchor, "extra": list(extra)} if extra else anchor


def count_from(position: Position, field: str, stage: str) -> int:
    """Return the non-negative int `position[field]`, or raise StateError naming stage and field."""
    value = position.get(field) if isinstance(position, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _FAR:
        raise StateError(
            f"the saved state is damaged: {field!r} of stage {stage} is {str(value)[:40]!r}, which is not a count; "
            "use an earlier state"
        )
    return value


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
    elif not isinstance(value, int | bool | None):
        raise StateError(f"{path}: {type(value).__name__} does not belong in a saved state; it holds JSON data only")
