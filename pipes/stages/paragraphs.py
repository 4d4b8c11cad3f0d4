"""Lines of files into paragraphs: `.lines_to_paragraphs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.run import Run
from pipes.stages.columns import check_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, damaged

__all__ = ["ParagraphAggregator"]

_ANCHOR_EVERY = 16
_join_lines = "\n".join


class _ParagraphAggregatorRun(Run):
    """The position is the number of the first line that no paragraph given has: a restore reads on from there."""

    anchored = True
    count_fields = ("taken",)

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] > position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.anchors = Anchors(self.upstream, 2)
        self.first = 0
        anchor = 0 if position is None else position["anchor"]["taken"]
        self.anchors.note(anchor)
        if position is not None:
            self.first = position["taken"]
            self.inputs[0].replay(self.first - anchor, [])

    def elements(self) -> Iterator[Any]:
        taken, name, lines = self.first, None, list[Any]()
        for element in self.inputs[0]:
            path, line = self._pair(element)
            if lines and path != name:
                yield self._paragraph(name, lines, taken)
                lines = []
            taken += 1
            if line:
                name = path
                lines.append(line)
            elif lines:
                yield self._paragraph(name, lines, taken)
                lines = []
            else:
                self.first = taken
            if taken % _ANCHOR_EVERY == 0:
                self.anchors.forget(self.first)
                self.anchors.note(taken)
        if lines:
            yield self._paragraph(name, lines, taken)

    def _pair(self, element: Any) -> Any:
        try:
            path, line = element
        except BaseException as error:
            self.note(error, element)
            raise
        return path, line

    def _paragraph(self, name: Any, lines: list[Any], taken: int) -> tuple[Any, Any]:
        """Return the paragraph of `lines`, the last ones of the first `taken`."""
        try:
            paragraph = name, self.pipe.joiner(lines)
        except BaseException as error:
            self.note(error, (name, lines))
            raise
        self.first = taken
        return paragraph

    def capture(self) -> Capture:
        return self.first, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        first, entries = captured
        return {"taken": first, "anchor": self.anchors.describe(entries, first)}


@functional_datapipe("lines_to_paragraphs")
class ParagraphAggregator(IterDataPipe[tuple[str, Any]]):
    """Give `(path, joiner(lines))` for the lines `(path, line)` of one file up to an empty one, or to the next file.

    `joiner` gets a list of lines, by default of str, which it joins by line ends; for bytes pass `b"\\n".join`.
    Raises TypeError for what is no function; while iterating, ValueError or TypeError for what is no pair.

    >>> from pipes.iter import IterableWrapper
    >>> lines = [("a", "one"), ("a", "two"), ("a", ""), ("a", "three"), ("b", "four")]
    >>> list(IterableWrapper(lines).lines_to_paragraphs(" ".join))
    [('a', 'one two'), ('a', 'three'), ('b', 'four')]
    """

    run_class = _ParagraphAggregatorRun
    _calls = ("joiner",)

    def __init__(
        self, source_datapipe: IterDataPipe[tuple[str, Any]], joiner: Callable[[list[Any]], Any] = _join_lines
    ) -> None:
        check_columns(joiner, None)
        self.source_datapipe = as_pipe(source_datapipe)
        self.joiner = joiner
