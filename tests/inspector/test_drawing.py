"""Graphs drawn in lanes, tables and Mermaid."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pipes.datapipe import IterDataPipe
from pipes.inspector.drawing import draw_elements, draw_report, lanes, mermaid
from pipes.inspector.elements import describe_element
from pipes.inspector.report import describe_graph
from pipes.iter import IterableWrapper


def drawn(pipe: IterDataPipe[Any]) -> list[str]:
    return [f"{line} {stage.name if stage else ''}".rstrip() for line, stage in lanes(describe_graph(pipe))]


def source() -> IterDataPipe[Any]:
    return IterableWrapper(range(4))


def test_a_chain_is_one_lane() -> None:
    assert drawn(source().sharding_filter().batch(2)) == ["● IterableWrapper", "◆ sharding_filter", "● batch"]


def test_a_join_of_three() -> None:
    assert drawn(source().zip(source().map(str), source())) == [
        "● IterableWrapper",
        "│ ● IterableWrapper",
        "│ ● map",
        "│ │ ● IterableWrapper",
        "├─┴─╯",
        "◆ zip",
    ]


def test_a_fork_that_meets_again_beside_another() -> None:
    a, b, c = source().fork(3)
    assert drawn(source().concat(a.zip(b, c))) == [
        "● IterableWrapper",
        "│ ● IterableWrapper",
        "│ ● fork",
        "│ ├─┬─╮",
        "│ ● │ │ fork 0",
        "│ │ ● │ fork 1",
        "│ │ │ ● fork 2",
        "│ ├─┴─╯",
        "│ ● zip",
        "├─╯",
        "◆ concat",
    ]


def text_of(pipe: IterDataPipe[Any], width: int = 80, encoding: str = "utf-8", streams: int = 4) -> str:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=width, highlight=False, markup=False)
    for part in draw_report(describe_graph(pipe, streams), "g.yaml", console):
        console.print(part)
    for part in draw_elements([describe_element({"a…": "é≤", "b": [1, {"c": b""}]})], console):
        console.print(part)
    console.file.flush()
    return raw.getvalue().decode(encoding)


def test_a_report_for_the_terminal() -> None:
    text = text_of(source().shuffle(50).sharding_filter().map(str).batch(2))
    lines = text.splitlines()
    assert lines[0] == "g.yaml  5 stages, 4 streams"
    assert lines[2:7] == [
        "  1 ● IterableWrapper iterable=range(0, 4)",
        "  2 ● shuffle buffer_size=50",
        "  3 ◆ sharding_filter",
        "  4 ● map fn=str",
        "  5 ● batch batch_size=2",
    ]
    assert "re-reads ~225" in text
    assert "4 x 50" in text
    assert "split here" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_of_the_table_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, text_of(source().shuffle().batch(2), width).splitlines())) <= width


def test_a_terminal_without_unicode_gets_ascii() -> None:
    text = text_of(source().zip(source()).shuffle(20), encoding="ascii")
    assert "|-/" in text
    assert "* shuffle" in text


def test_square_brackets_are_text_and_no_markup() -> None:
    assert "iterable=['[red]', '[/']" in text_of(IterableWrapper(["[red]", "[/"]))


def test_mermaid_quotes_what_it_has_to() -> None:
    text = mermaid(describe_graph(IterableWrapper(['a "b" <c> &#']).zip(source()).sharding_filter()))
    assert text.splitlines() == [
        "flowchart TD",
        "    s0[\"IterableWrapper<br/>iterable=['a &quot;b&quot; &lt;c&gt; &amp;&num;']\"]",
        '    s1["IterableWrapper<br/>iterable=range(0, 4)"]',
        '    s2["zip"]',
        '    s3{{"sharding_filter"}}',
        "    s0 --> s2",
        "    s1 --> s2",
        "    s2 --> s3",
    ]
