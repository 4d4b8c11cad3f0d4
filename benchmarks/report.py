"""What every benchmark shares: measure peers side by side, print a table or one JSON object a line.

Contract: all contenders run in the same process, interleaved round by round, so that what else the machine does hits
them alike; a row's figures are medians. A ratio above 1 always means that ours is better.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Row", "arguments", "interleaved", "median", "row", "show", "spread"]


@dataclass(frozen=True)
class Row:
    """One comparison; `target` (the least ratio that is promised) and `note` are for the table only."""

    name: str
    case: str
    peer: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    target: float | None = field(default=None, compare=False)
    note: str = field(default="", compare=False)

    def as_json(self) -> str:
        """The row's seven public fields as one line."""
        fields = asdict(self)
        del fields["target"], fields["note"]
        return json.dumps(fields)


def row(
    name: str,
    case: str,
    peer: str,
    ours: float,
    theirs: float,
    unit: str,
    *,
    more_is_better: bool,
    target: float | None = None,
    note: str = "",
) -> Row:
    """A row whose ratio says how many times better ours is.

    >>> row("tar", "10 KB", "tarfile", 2.0, 8.0, "ms", more_is_better=False).ratio
    4.0
    """
    ratio = ours / theirs if more_is_better else theirs / ours
    return Row(name, case, peer, ours, theirs, unit, ratio, target, note)


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds, by `clock`, that each contender took in each round; all take part in every round, in turn, after `warm`
    more.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.freeze()  # a collection looks at what contenders made, not at half a million objects of modules
    for number in range(warm + rounds):
        for name in names:
            gc.collect()
            start = clock()
            contenders[name]()
            took = clock() - start
            if number >= warm:
                seconds[name].append(took)
        names.reverse()  # nobody always runs first, or always after the same neighbour
    gc.unfreeze()
    return seconds


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def spread(values: Iterable[float]) -> str:
    """The middle half of the values as a share of their median, in percent."""
    values = sorted(values)
    if len(values) < 4:
        return "-"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"±{50 * (high - low) / middle:.0f} %"


def arguments(description: str, *, rounds: int, extend: Callable[[argparse.ArgumentParser], None] | None = None) -> Any:
    """Parse `--json`, `--rounds` and what `extend` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds of each contender ({rounds})")
    if extend is not None:
        extend(parser)
    return parser.parse_args()


def show(rows: Iterable[Row], *, title: str, as_json: bool = False, notes: Iterable[str] = ()) -> None:
    """Print the rows; the notes go under the table, or to standard error beside JSON."""
    rows, notes = list(rows), list(notes)
    if as_json:
        for one in rows:
            print(one.as_json(), flush=True)
        for note in notes:
            print(note, file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=machine(), title_justify="left", caption_justify="left")
    for heading in ("case", "peer"):
        table.add_column(heading, overflow="fold")
    for heading in ("ours", "theirs", "unit", "ratio", "promised"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(one.note for one in rows):
        table.add_column("note", overflow="fold")
    for one in rows:
        met = one.target is None or one.ratio >= one.target
        cells = [
            one.case,
            one.peer,
            f"{one.ours:,.4g}",
            f"{one.theirs:,.4g}",
            one.unit,
            f"[{'green' if met else 'bold red'}]{one.ratio:.2f}x[/]",
            "" if one.target is None else f"≥ {one.target:.2g}x",
        ]
        table.add_row(*cells, *([one.note] if any(each.note for each in rows) else []))
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", highlight=False)


def machine() -> str:
    """What the figures were measured on."""
    load = os.getloadavg()[0]
    what = f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {load:.1f}"
    return f"{what}; medians, a ratio above 1 is better"
