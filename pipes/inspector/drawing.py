"""A report as a drawing: a graph of lanes and a table for the terminal, or a Mermaid flowchart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from pipes.inspector.report import Report, StageReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from pipes.inspector.elements import Described

__all__ = ["draw_elements", "draw_report", "lanes", "mermaid"]

_SHARDING = {
    "all": ("every stream", "yellow"),
    "point": ("split here", "bold cyan"),
    "point after": ("split after", "bold cyan"),
    "share": ("own share", "green"),
}
_PLAIN = str.maketrans("●◆│├╯╮┴┬─…≤", "*#||/\\++-.<")


def lanes(report: Report) -> Iterator[tuple[str, StageReport | None]]:
    """Yield the lines of the graph from its sources down: the lanes drawn so far, and the stage of the line.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.inspector.report import describe_graph
    >>> for drawn, stage in lanes(describe_graph(IterableWrapper("ab").zip(IterableWrapper("cd")).batch(2))):
    ...     print(drawn, stage.name if stage else "")
    ● IterableWrapper
    │ ● IterableWrapper
    ├─╯
    ◆ zip
    ● batch
    """
    readers: dict[str, list[str]] = {stage.id: [] for stage in report.stages}
    for stage in report.stages:
        for source in stage.inputs:
            readers[source].append(stage.id)
    open_lanes: list[str | None] = []
    for stage in report.stages:
        mine = [lane for lane, reader in enumerate(open_lanes) if reader == stage.id]
        if len(mine) > 1:
            yield _joint(open_lanes, mine[0], mine[1:], "╯"), None
            for lane in mine[1:]:
                open_lanes[lane] = None
        lane = mine[0] if mine else _free_lane(open_lanes)
        while open_lanes and open_lanes[-1] is None and len(open_lanes) - 1 > lane:
            open_lanes.pop()
        mark = "◆" if stage.sharding.startswith("point") else "●"
        yield " ".join(mark if at == lane else "│" if open_lanes[at] else " " for at in range(len(open_lanes))), stage
        following = readers[stage.id]
        open_lanes[lane] = following[0] if following else None
        more = [_free_lane(open_lanes, reader) for reader in following[1:]]
        if more:
            yield _joint(open_lanes, lane, more, "╮"), None


def _free_lane(open_lanes: list[str | None], reader: str | None = None) -> int:
    """Return the number of a lane right of all in use, now taken by `reader`."""
    while open_lanes and open_lanes[-1] is None:
        open_lanes.pop()
    open_lanes.append(reader)
    return len(open_lanes) - 1


def _joint(open_lanes: list[str | None], into: int, others: list[int], corner: str) -> str:
    """Return the line on which `others` meet the lane `into`, or leave it."""
    last = max(others)
    line = ""
    for at in range(len(open_lanes)):
        if at == into:
            line += "├"
        elif at in others:
            line += corner if at == last else "┴" if corner == "╯" else "┬"
        else:
            line += "│" if open_lanes[at] else "─" if into < at < last else " "
        line += "─" if into <= at < last else " "
    return line.rstrip()


def draw_report(report: Report, title: str, console: Console) -> Iterator[RenderableType]:
    """Yield what to print for a report: heading, graph, table, key to its words, notes."""
    one = report.streams == 1
    yield Text.assemble(
        (title, "bold"), (f"  {len(report.stages)} stages, {report.streams} stream{'' if one else 's'}", "dim")
    )
    yield ""
    yield from _graph(report, console)
    yield ""
    yield _table(report, console)
    yield from _key(report, console)
    for note in report.notes:
        yield ""
        yield Text.assemble(("! ", "bold yellow"), note)


def _graph(report: Report, console: Console) -> Iterator[RenderableType]:
    for number, (drawn, stage) in enumerate_stages(report):
        line = Text(f"{number:>3} " if stage else "    ", style="dim", no_wrap=True, overflow="ellipsis")
        line.append(_fit(drawn, console) + " ", style="cyan")
        if stage is not None:
            line.append(stage.name, style="bold")
            for name, value in stage.parameters.items():
                line.append(f" {name}=", style="dim")
                line.append(_fit(value, console))
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        yield line


def enumerate_stages(report: Report) -> Iterator[tuple[int, tuple[str, StageReport | None]]]:
    """Number the stages of `lanes` from 1; a line without a stage has the number of the one before."""
    number = 0
    for drawn, stage in lanes(report):
        number += stage is not None
        yield number, (drawn, stage)


def _table(report: Report, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if _fancy(console) else box.ASCII2, padding=(0, 2, 0, 0))
    table.show_edge = table.pad_edge = False
    table.add_column("", justify="right", style="dim")
    for head in ("stage", "sharding", "on restore"):
        table.add_column(head)
    for head in ("length", "holds"):
        table.add_column(head, justify="right")
    for number, (_, stage) in enumerate_stages(report):
        if stage is not None:
            words, style = _SHARDING[stage.sharding]
            cells = stage.name, words, _state(stage), _length(stage), _held(stage, report.streams)
            styles = "", style, "bold red" if stage.state == "replay" else "", "", ""
            shown = [Text(_fit(cell, console), style) for cell, style in zip(cells, styles, strict=True)]
            table.add_row(str(number), *shown)
    return table


def _state(stage: StageReport) -> str:
    if stage.state == "anchor":
        return f"re-reads ~{stage.rereads:,}" if stage.rereads is not None else "re-reads a few"
    return {"none": "-", "position": "goes to position", "own": "own state", "replay": "REPLAYS"}.get(
        stage.state, stage.state
    )


def _length(stage: StageReport) -> str:
    if stage.length is None:
        return "?"
    return f"{'≤ ' if stage.length_note else ''}{stage.length:,}"


def _held(stage: StageReport, streams: int) -> str:
    if stage.buffer == 0:
        return "-"
    if stage.buffer == -1:
        return "no limit"
    return f"{stage.buffer:,}" if streams == 1 else f"{streams} x {stage.buffer:,}"


def _key(report: Report, console: Console) -> Iterator[RenderableType]:
    states = {stage.state for stage in report.stages}
    places = {stage.sharding for stage in report.stages}
    lines = []
    if "all" in places or "point after" in places:
        lines.append("every stream / split after: each stream runs it on all elements.")
    if "anchor" in states:
        lines.append("re-reads ~n: a restore reads about n inputs again, to refill what it held.")
    if any(stage.buffer for stage in report.stages):
        lines.append(
            "holds: the most elements it keeps in memory" + (", streams x buffer." if report.streams > 1 else ".")
        )
    reason = next((stage for stage in report.stages if stage.length is None and stage.length_note), None)
    if reason is not None:
        lines.append(f"length ?: {reason.length_note}.")
    if lines:
        yield Text("\n".join(_fit(line, console) for line in lines), style="dim")


def draw_elements(elements: list[Described], console: Console) -> Iterator[RenderableType]:
    """Yield what to print for the first elements of a graph."""
    yield ""
    if not elements:
        yield Text("The graph gives no elements.", style="yellow")
    for number, element in enumerate(elements):
        yield Text.assemble((f"element {number}  ", "bold"), (f"{element.kind} ", "cyan"), _fit(element.text, console))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        for column in ("", "cyan", ""):
            table.add_column(style=column, overflow="fold" if not column else "ellipsis")
        _add_rows(table, element, 1, console)
        if table.row_count:
            yield table


def _add_rows(table: Table, element: Described, depth: int, console: Console) -> None:
    for key, value in element.inside.items():
        table.add_row(Text("  " * depth + _fit(key, console)), value.kind, Text(_fit(value.text, console)))
        _add_rows(table, value, depth + 1, console)
    if element.left_out and element.inside:
        table.add_row(
            Text("  " * depth + _fit("…", console), style="dim"), "", Text(f"{element.left_out:,} more", style="dim")
        )


def mermaid(report: Report) -> str:
    """Return the graph as a Mermaid flowchart (https://mermaid.js.org/syntax/flowchart.html).

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.inspector.report import describe_graph
    >>> print(mermaid(describe_graph(IterableWrapper([1]).sharding_filter())))
    flowchart TD
        s0["IterableWrapper<br/>iterable=[1]"]
        s1{{"sharding_filter"}}
        s0 --> s1
    """
    place = {stage.id: f"s{number}" for number, stage in enumerate(report.stages)}
    lines = ["flowchart TD"]
    for stage in report.stages:
        label = "<br/>".join([stage.name, *(f"{name}={value}" for name, value in stage.parameters.items())])
        for raw, safe in (("&", "&amp;"), ('"', "&quot;"), ("#", "&num;")):
            label = label.replace(raw, safe)
        label = label.replace("<br/>", "\0").replace("<", "&lt;").replace(">", "&gt;").replace("\0", "<br/>")
        first, last = ("{{", "}}") if stage.sharding == "point" else ("[", "]")
        lines.append(f'    {place[stage.id]}{first}"{label}"{last}')
    lines += [f"    {place[source]} --> {place[stage.id]}" for stage in report.stages for source in stage.inputs]
    return "\n".join(lines)


def _fancy(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _fit(text: str, console: Console) -> str:
    """Return `text` in characters that the terminal can show."""
    if _fancy(console):
        return text
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
