"""Lines of files into paragraphs: torchdata's results, and where a resume goes back to."""

from __future__ import annotations

from typing import Any

import pytest
from stage_contract import check_everywhere, saved, start

from pipes.iter import IterableWrapper


def paragraphs(lines: str, **given: Any) -> list[Any]:
    """`lines` are a path's letter and a line's each: "a1 a a2" has an empty line between two."""
    pairs = [(line[0], line[1:]) for line in lines.split(" ")]
    return [(path, "".join(text)) for path, text in IterableWrapper(pairs).lines_to_paragraphs(**given)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("a1 a2 a a3 b4 b b b5", [("a", "12"), ("a", "3"), ("b", "4"), ("b", "5")]),
        ("a a1", [("a", "1")]),
        ("a b", []),
        ("a1 b2 a3", [("a", "1"), ("b", "2"), ("a", "3")]),
        ("a1 b a2", [("a", "1"), ("a", "2")]),
    ],
)
def test_where_a_paragraph_ends(lines: str, expected: list[Any]) -> None:
    assert paragraphs(lines, joiner=list) == expected


def test_joiners() -> None:
    assert paragraphs("a1 a2") == [("a", "1\n2")]
    pair = [("a", b"1"), ("a", b"2"), ("a", b"")]
    assert list(IterableWrapper(pair).lines_to_paragraphs(b"\n".join)) == [("a", b"1\n2")]
    with pytest.raises(TypeError, match="expected str instance, bytes found") as caught:
        list(IterableWrapper(pair).lines_to_paragraphs())
    assert any("in stage 1:ParagraphAggregator" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="too many values"):
        list(IterableWrapper([("a", "b", "c")]).lines_to_paragraphs())
    with pytest.raises(TypeError, match="expected a function"):
        IterableWrapper(pair).lines_to_paragraphs(5)  # type: ignore[arg-type]


def test_a_resume_goes_back_to_the_paragraph_and_no_further() -> None:
    lines = [("a", "" if number % 100 == 99 else str(number)) for number in range(1000)]
    run = start(IterableWrapper(lines).lines_to_paragraphs(list))
    for number, _ in zip(range(1, 10), run, strict=False):
        position = saved(run)["1:ParagraphAggregator"]
        assert position["taken"] == 100 * number
        assert 0 <= 100 * number - position["anchor"]["taken"] < 32


def test_contract() -> None:
    check_everywhere(
        lambda source: source.map(lambda n: (n // 5, "" if n % 3 == 0 else n)).lines_to_paragraphs(list), 40
    )
