"""What stages count: elements that failed under `on_error`, and what they leave out by rule.

Contract
- A `Tally` counts for one stage in one stream, from the start of the epoch. It is part of the state like a stage of its
  own, called "<stage>+errors", so neither a resume nor a restarted worker counts an element twice.
- A stage under on_error="raise" that leaves nothing out has none, and no code of this module runs for an element.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from pipes.error_policy import (
    LONGEST,
    MaxErrors,
    OnError,
    StageCounts,
    counts_as_data,
    counts_from_data,
    exceeded,
    exceeding,
)
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
from pipes.state import Capture, Position, Ticks

__all__ = ["Tallies", "Tally", "open_tally"]

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
    torch.OutOfMemoryError,
)

# No more descriptors, memory or space.
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))

# How torch says in a RuntimeError that the system has no memory left.
_NO_MEMORY = "DefaultCPUAllocator: "

_log = logging.getLogger("pipes")


def _is_elsewhere(error: Exception) -> bool:
    """Whether an error says nothing about the element, so that another run, or machine, would not meet it there."""
    if isinstance(error, RuntimeError) and _NO_MEMORY in str(error):
        return True
    return isinstance(error, _NEVER_SKIPPED) or (isinstance(error, OSError) and error.errno in _EXHAUSTED)


class Owner(Protocol):
    """The run that a tally counts for."""

    stage: str
    pipe: Any
    context: Any
    tally: Any

    @property
    def leaves_out(self) -> bool: ...
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
        self.start(StageCounts())

    @property
    def tolerant(self) -> bool:
        """Whether errors are handled here at all; else only what is left out is counted."""
        return self.on_error != "raise"

    def start(self, counts: StageCounts) -> None:
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
        if not self.tolerant or not isinstance(error, Exception) or _is_elsewhere(error):
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
        why = exceeded(counts, False) if self._whole or isinstance(self.max_errors, int) else ""
        if not why and self._row >= _IN_A_ROW and self.max_errors is not None:
            why = f"{_IN_A_ROW} in a row, which max_errors={self.max_errors:g}"
        if why:
            raise exceeding(self._owner.stage, counts, why) from error

    def counts(self) -> StageCounts:
        """Return the counts as they are now."""
        return StageCounts(
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
        return counts_as_data(StageCounts(taken, skipped, replaced, first, "", left_out))

    def check(self, position: Position) -> None:
        """Refuse, with StateError, what `describe` never gives."""
        self.read(position)

    def check_upstream(self, position: Position) -> None:
        """A tally reads nothing."""

    def read(self, position: Position) -> StageCounts:
        """Return the counts that a saved position holds; raises StateError for what is none."""
        return counts_from_data({} if position is None else position, self.stage, self.max_errors)


def _shown(error: Exception, element: Any) -> str:
    try:
        text = mask(str(error))
    except Exception:
        text = "<unprintable>"
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    shown = brief(element, 60)
    at = f" (element {shown})" if shown not in what else ""
    return f"{what[: LONGEST - len(at)]}{at}".replace("\n", " ")


class _Record:
    """All tallies of one stage in a stream: those in use now, and the counts of the rounds before theirs."""

    def __init__(self, rounds: tuple[int, ...]) -> None:
        self.rounds = rounds
        self.before = StageCounts()
        self.peak = StageCounts()
        self.live: list[Tally] = []

    def counts(self) -> StageCounts:
        return max([self.peak, *[tally.counts() for tally in self.live]], key=_progress)


def _progress(counts: StageCounts) -> tuple[int, int, int]:
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

    def drop(self, runs: Iterable[Owner]) -> None:
        """Forget the tallies of runs that count no more, but not their counts."""
        for run in runs:
            record = self._records.get(run.stage)
            if record is not None and run.tally in record.live:
                record.peak = record.counts()
                record.live.remove(run.tally)

    def counts(self) -> dict[str, StageCounts]:
        """Return what each stage counted so far."""
        return {stage: record.counts() for stage, record in self._records.items()}


def open_tally(run: Owner, table: Mapping[str, Position] | None) -> Tally | None:
    """Return the tally of a stage that needs one, at the counts that `table` holds."""
    # Not by getattr: a name that is not there is compared with all others, for the error's hint.
    if not run.leaves_out and vars(run.pipe).get("on_error", "raise") == "raise":
        return None
    context = run.context
    tally = Tally(run, whole=context.alone or context.streams == 1)
    context.tallies.add(tally, run.stage, context.rounds, None if table is None else table.get(tally.stage))
    return tally
