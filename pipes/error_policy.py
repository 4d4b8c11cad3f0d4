"""What a stage does with elements that fail: the setting `on_error`, the counts, and the budget `max_errors`.

Contract
- "raise": the error ends the run. No code of this module runs for an element.
- "skip": the element is left out. A function gets (error, element): what it returns is given instead, None leaves the
  element out, and what it raises ends the run. Errors that say nothing about the element are never skipped.
- A `Tally` counts for one stage in one stream, from the start of the epoch. It is part of the state like a stage of its
  own, called "<stage>+errors", so neither a resume nor a restarted worker counts an element twice.
- The budget counts skipped and replaced elements. A count is the most there may be in all streams of a process; a
  fraction is of the elements taken, of 100 at least. One stream checks what it can know; whoever runs the streams
  checks their sum, after each output and at the end, where a stage that skipped all it took fails under any budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from pipes.errors import (
    ErrorBudgetExceeded,
    GraphError,
    StaleIteratorError,
    StateError,
    WorkerError,
    add_note,
    brief,
    mask,
)
from pipes.state import Capture, Position, Ticks, count_from, damaged

__all__ = [
    "BUDGET",
    "Counts",
    "MaxErrors",
    "OnError",
    "Tallies",
    "Tally",
    "check_budget",
    "check_policy",
    "summed",
    "tell",
]

OnError = Literal["raise", "skip"] | Callable[[Exception, Any], Any]
MaxErrors = int | float | None

#: The default of `max_errors`: a tenth of the elements.
BUDGET = 0.1
_LEAST = 100
# A stream that gives nothing would otherwise go on to the end of its data, and some data have no end.
_IN_A_ROW = 10_000

_NEVER_SKIPPED = (
    GraphError,
    StateError,
    StaleIteratorError,
    ErrorBudgetExceeded,
    WorkerError,
    ImportError,
    MemoryError,
)

_log = logging.getLogger("pipes")


def check_policy(on_error: Any, max_errors: Any) -> None:
    """Refuse, when a stage is built, what is no policy: ValueError, TypeError for a budget that is no number."""
    if not callable(on_error) and on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is 'raise', 'skip' or a function of (error, element), not {on_error!r}")
    if max_errors is not None and (isinstance(max_errors, bool) or not isinstance(max_errors, int | float)):
        raise TypeError(f"max_errors is a count, a fraction or None, not {max_errors!r}")
    if isinstance(max_errors, float) and not 0 < max_errors < 1:
        raise ValueError(f"max_errors={max_errors}: a fraction lies between 0 and 1; a count is an int")
    if isinstance(max_errors, int) and max_errors < 0:
        raise ValueError(f"max_errors={max_errors}: a count must be 0 or more")
    if on_error == "raise" and max_errors != BUDGET:
        raise ValueError(f"max_errors={max_errors} has no effect with on_error='raise'; pass on_error='skip'")


class Counts(NamedTuple):
    """What one stage counted; `left_out` holds what is no error, by kind, such as the directories of an archive."""

    taken: int = 0
    skipped: int = 0
    replaced: int = 0
    first: str = ""
    last: str = ""
    left_out: tuple[tuple[str, int], ...] = ()
    max_errors: MaxErrors = None

    @property
    def errors(self) -> int:
        return self.skipped + self.replaced


def summed(streams: Iterable[Mapping[str, Counts]]) -> dict[str, Counts]:
    """Return the counts of several streams as one, by stage.

    >>> summed([{"1:Mapper": Counts(5, 1)}, {"1:Mapper": Counts(4, 2)}])["1:Mapper"][:2]
    (9, 3)
    """
    total: dict[str, Counts] = {}
    for counts in streams:
        for stage, new in counts.items():
            old = total.get(stage, Counts())
            left_out = dict(old.left_out)
            for kind, number in new.left_out:
                left_out[kind] = left_out.get(kind, 0) + number
            total[stage] = Counts(
                old.taken + new.taken,
                old.skipped + new.skipped,
                old.replaced + new.replaced,
                old.first or new.first,
                new.last or old.last,
                tuple(left_out.items()),
                new.max_errors,
            )
    return total


def check_budget(stages: Mapping[str, Counts], *, ended: bool = False) -> None:
    """Raise ErrorBudgetExceeded if a stage had more errors than its budget allows; `ended` says that all was read."""
    for stage, counts in stages.items():
        why = _exceeded(counts, ended)
        if why:
            raise _exceeding(stage, counts, why)


def _exceeded(counts: Counts, ended: bool) -> str:
    budget = counts.max_errors
    if budget is None or not counts.errors:
        return ""
    if isinstance(budget, int):
        if counts.errors > budget:
            return f"max_errors={budget}"
    elif counts.errors > budget * max(counts.taken, _LEAST):
        return f"max_errors={budget:g}, a fraction of those taken,"
    if ended and counts.skipped == counts.taken:
        return "any max_errors but None"
    return ""


def _exceeding(stage: str, counts: Counts, why: str) -> ErrorBudgetExceeded:
    replaced = f" and replaced {counts.replaced}" if counts.replaced else ""
    last = f"; the last: {counts.last}" if counts.errors > 1 and counts.last else ""
    return ErrorBudgetExceeded(
        f"stage {stage} skipped {counts.skipped}{replaced} of the {counts.taken} elements it took, more than {why} "
        f"allows. The first: {counts.first}{last}. Mend the data or the function, or raise max_errors"
    )


def tell(stages: Mapping[str, Counts]) -> None:
    """Log, once an epoch, one line a stage: a warning for errors, an info for what is left out by rule."""
    for stage, counts in stages.items():
        if counts.errors:
            replaced = f", replaced {counts.replaced}" if counts.replaced else ""
            _log.warning(
                "stage %s skipped %d%s of the %d elements it took in this epoch; the first: %s",
                stage,
                counts.skipped,
                replaced,
                counts.taken,
                counts.first,
            )
        if counts.left_out:
            listed = ", ".join(f"{number} ({kind})" for kind, number in counts.left_out)
            _log.info("stage %s left out %s in this epoch", stage, listed)


class Owner(Protocol):
    """The run that a tally counts for."""

    stage: str
    pipe: Any

    def note(self, error: BaseException, *element: Any) -> None: ...


class Tally:
    """The counts of one stage in one stream; stands in the state beside its stage."""

    optional = True
    __slots__ = (
        "_at_error",
        "_first",
        "_last",
        "_left_out",
        "_owner",
        "_replaced",
        "_row",
        "_skipped",
        "_whole",
        "max_errors",
        "on_error",
        "stage",
        "ticks",
    )

    def __init__(self, owner: Owner, *, whole: bool) -> None:
        self._owner = owner
        self.stage = f"{owner.stage}+errors"
        self.on_error: OnError = getattr(owner.pipe, "on_error", "raise")
        self.max_errors: MaxErrors = getattr(owner.pipe, "max_errors", None) if self.tolerant else None
        # Whether this stream is all there is, so that its own counts decide about the budget.
        self._whole = whole
        self._row, self._at_error = 0, -1
        self.start(Counts())

    @property
    def tolerant(self) -> bool:
        """Whether errors are handled here at all; else only what is left out is counted."""
        return self.on_error != "raise"

    def start(self, counts: Counts) -> None:
        """Go on from `counts`."""
        self.ticks = Ticks(counts.taken)
        self._skipped, self._replaced = counts.skipped, counts.replaced
        self._first, self._last = counts.first, counts.last
        self._left_out = dict(counts.left_out)

    def take(self) -> None:
        """Count one element taken; fast loops zip with `ticks` instead."""
        next(iter(self.ticks))

    def leave_out(self, kind: str) -> None:
        """Count something that is left out by rule."""
        self._left_out[kind] = self._left_out.get(kind, 0) + 1

    def handle_record(self, error: Exception, element: Any) -> Any:
        """As `handle`, where elements count when they are given: one that is left out is counted here."""
        stand_in = self.handle(error, element, 1)
        if stand_in is None:
            self.take()
        return stand_in

    def handle(self, error: BaseException, element: Any, uncounted: int = 0) -> Any:
        """Return what stands in for the element that failed with `error`, None to skip it; or raise.

        `uncounted` elements have been taken beyond those that `ticks` counts.
        """
        self._owner.note(error, element)
        if not self.tolerant or not isinstance(error, Exception) or isinstance(error, _NEVER_SKIPPED):
            raise error
        stand_in = None
        if not isinstance(self.on_error, str):
            try:
                stand_in = self.on_error(error, element)
            except BaseException as raised:
                if raised is not error:
                    add_note(raised, f"while on_error of stage {self._owner.stage} handled the error before")
                raise
        if stand_in is None:
            self._skipped += 1
        else:
            self._replaced += 1
        self._last = _shown(error, element)
        self._first = self._first or self._last
        _log.debug("stage %s: %s", self._owner.stage, self._last)
        self._check(error, self.ticks.count + uncounted)
        return stand_in

    def _check(self, error: Exception, taken: int) -> None:
        self._row = self._row + 1 if taken <= self._at_error + 1 else 1
        self._at_error = taken
        counts = self.counts()._replace(taken=taken)
        why = _exceeded(counts, False) if self._whole or isinstance(self.max_errors, int) else ""
        if not why and self._row >= _IN_A_ROW and self.max_errors is not None:
            why = f"{_IN_A_ROW} in a row, which max_errors={self.max_errors:g}"
        if why:
            raise _exceeding(self._owner.stage, counts, why) from error

    def counts(self) -> Counts:
        """Return the counts as they are now."""
        return Counts(
            self.ticks.count if self.tolerant else 0,
            self._skipped,
            self._replaced,
            self._first,
            self._last,
            tuple(self._left_out.items()),
            self.max_errors,
        )

    def capture(self) -> Capture:
        if self.tolerant:
            return self.ticks.count, self._skipped, self._replaced, self._first, tuple(self._left_out.items())
        return (0, 0, 0, "", tuple(self._left_out.items())) if self._left_out else None

    def describe(self, captured: Capture) -> Position:
        if captured is None:
            return None
        taken, skipped, replaced, first, left_out = captured
        position: dict[str, Position] = {"taken": taken} if self.tolerant else {}
        if skipped or replaced:
            position.update(skipped=skipped, replaced=replaced, first=first)
        if left_out:
            position["left_out"] = dict(left_out)
        return position

    def check(self, position: Position) -> None:
        """Refuse, with StateError, what `describe` never gives."""
        self.read(position)

    def check_upstream(self, position: Position) -> None:
        """A tally reads nothing."""

    def read(self, position: Position) -> Counts:
        """Return the counts that a saved position holds; raises StateError for what is none."""
        fields = {} if position is None else position
        taken, skipped, replaced = (
            count_from(fields, name, self.stage) if not isinstance(fields, dict) or name in fields else 0
            for name in ("taken", "skipped", "replaced")
        )
        first, left_out = fields.get("first", ""), fields.get("left_out", {})
        if not isinstance(first, str) or not isinstance(left_out, dict) or skipped + replaced > taken:
            raise damaged(f"{self.stage} holds no counts")
        kinds = tuple((kind, count_from(left_out, kind, self.stage)) for kind in left_out)
        return Counts(taken, skipped, replaced, first[:_LONGEST], "", kinds, self.max_errors)


_LONGEST = 240


def _shown(error: Exception, element: Any) -> str:
    try:
        text = mask(str(error))
    except Exception:
        text = "<unprintable>"
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    shown = brief(element, 60)
    at = f" (element {shown})" if shown not in what else ""
    return f"{what[: _LONGEST - len(at)]}{at}".replace("\n", " ")


class _Record:
    """All tallies of one stage in a stream: those in use now, and the counts of the rounds before theirs."""

    def __init__(self, rounds: tuple[int, ...]) -> None:
        self.rounds = rounds
        self.before = Counts()
        self.peak = Counts()
        self.live: list[Tally] = []

    def counts(self) -> Counts:
        return max([self.peak, *[tally.counts() for tally in self.live]], key=_progress)


def _progress(counts: Counts) -> tuple[int, int, int]:
    return counts.taken, counts.errors, sum(number for _, number in counts.left_out)


class Tallies:
    """The tallies of one stream, over all contexts in which its stages run.

    A stage runs again in each round of a cycle and goes on from the counts of the round before. A stage may be open
    twice in one round, when one of the two goes over elements again: the one that is ahead counts.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, tally: Tally, stage: str, rounds: tuple[int, ...], position: Position) -> None:
        """Have `tally` count from `position`, or from where its round begins."""
        record = self._records.setdefault(stage, _Record(rounds))
        if rounds > record.rounds:
            record.before = record.peak = record.counts()
            record.rounds = rounds
            record.live.clear()
        if position is not None:
            tally.start(tally.read(position))
        elif rounds == record.rounds:
            tally.start(record.before)
        record.live.append(tally)

    def drop(self, tally: Tally, stage: str) -> None:
        """Forget a tally that counts no more, but not its counts."""
        record = self._records[stage]
        if tally in record.live:
            record.peak = record.counts()
            record.live.remove(tally)

    def counts(self) -> dict[str, Counts]:
        """Return what each stage counted so far."""
        return {stage: record.counts() for stage, record in self._records.items()}
