"""What a stage does with elements that fail: the setting `on_error`, the counts, and the budget `max_errors`.

Contract
- "raise": the error ends the run.
- "skip": the element is left out. A function gets (error, element): what it returns is given instead, None leaves the
  element out, and what it raises ends the run. Errors that say nothing about the element are never skipped.
- The budget counts skipped and replaced elements. A count is the most there may be in all streams of a process; a
  fraction is of the elements taken, of 100 at least. One stream checks what it can know; whoever runs the streams
  checks their sum, after each output and at the end, where a stage that skipped all it took fails under any budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pipes.errors import ErrorBudgetExceeded
from pipes.state import count_from, damaged

__all__ = [
    "BUDGET",
    "MaxErrors",
    "OnError",
    "StageCounts",
    "check_budget",
    "check_policy",
    "counts_as_data",
    "counts_from_data",
    "exceeded",
    "exceeding",
    "stats_of",
    "summed",
    "tell",
]

OnError = Literal["raise", "skip"] | Callable[[Exception, Any], Any]
MaxErrors = int | float | None

#: The default of `max_errors`: a tenth of the elements.
BUDGET = 0.1
_LEAST = 100
#: Characters of an error's text that are kept.
LONGEST = 240

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


class StageCounts(NamedTuple):
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


def counts_as_data(counts: StageCounts) -> dict[str, Any]:
    """Return counts as JSON data, less what is not there."""
    data: dict[str, Any] = {"taken": counts.taken} if counts.taken else {}
    if counts.errors:
        data.update(skipped=counts.skipped, replaced=counts.replaced, first=counts.first)
    return {**data, "left_out": dict(counts.left_out)} if counts.left_out else data


def counts_from_data(data: Any, stage: str, max_errors: MaxErrors = None) -> StageCounts:
    """Return the counts that `counts_as_data` gave; raises StateError for what it never gives."""
    taken, skipped, replaced = (
        count_from(data, name, stage) if not isinstance(data, dict) or name in data else 0
        for name in ("taken", "skipped", "replaced")
    )
    first, left_out = data.get("first", ""), data.get("left_out", {})
    if not isinstance(first, str) or not isinstance(left_out, dict) or skipped + replaced > taken:
        raise damaged(f"{stage} holds no counts")
    kinds = tuple((kind, count_from(left_out, kind, stage)) for kind in left_out)
    return StageCounts(taken, skipped, replaced, first[:LONGEST], "", kinds, max_errors)


def summed(streams: Iterable[Mapping[str, StageCounts]]) -> dict[str, StageCounts]:
    """Return the counts of several streams as one, by stage.

    >>> summed([{"1:Mapper": StageCounts(5, 1)}, {"1:Mapper": StageCounts(4, 2)}])["1:Mapper"][:2]
    (9, 3)
    """
    total: dict[str, StageCounts] = {}
    for counts in streams:
        for stage, new in counts.items():
            old = total.get(stage, StageCounts())
            left_out = dict(old.left_out)
            for kind, number in new.left_out:
                left_out[kind] = left_out.get(kind, 0) + number
            total[stage] = StageCounts(
                old.taken + new.taken,
                old.skipped + new.skipped,
                old.replaced + new.replaced,
                old.first or new.first,
                new.last or old.last,
                tuple(left_out.items()),
                old.max_errors if new.max_errors is None else new.max_errors,
            )
    return total


def check_budget(stages: Mapping[str, StageCounts], *, ended: bool = False) -> None:
    """Raise ErrorBudgetExceeded if a stage had more errors than its budget allows; `ended` says that all was read."""
    for stage, counts in stages.items():
        why = exceeded(counts, ended)
        if why:
            raise exceeding(stage, counts, why)


def exceeded(counts: StageCounts, ended: bool) -> str:
    """Return what `counts` exceed, in words; "" for nothing."""
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


def exceeding(stage: str, counts: StageCounts, why: str) -> ErrorBudgetExceeded:
    """Return the error that says so."""
    replaced = f" and replaced {counts.replaced}" if counts.replaced else ""
    last = f"; the last: {counts.last}" if counts.errors > 1 and counts.last else ""
    return ErrorBudgetExceeded(
        f"stage {stage} skipped {counts.skipped}{replaced} of the {counts.taken} elements it took, more than {why} "
        f"allows. The first: {counts.first}{last}. Mend the data or the function, or raise max_errors"
    )


def stats_of(stages: Mapping[str, StageCounts]) -> dict[str, dict[str, Any]]:
    """Return the counts of stages as `DataLoader2.stats` shows them."""
    shown = ("taken", "skipped", "replaced", "first", "last")
    return {
        "errors": {
            stage: {name: getattr(counts, name) for name in shown} for stage, counts in stages.items() if counts.errors
        },
        "left_out": {stage: dict(counts.left_out) for stage, counts in stages.items() if counts.left_out},
    }


def tell(stages: Mapping[str, StageCounts]) -> None:
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
