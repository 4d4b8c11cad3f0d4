"""Elements of like length into batches that a budget of tokens bounds: `.max_token_bucketize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

from pipes.arguments import whole
from pipes.datapipe import DataChunk, IterDataPipe, functional_datapipe
from pipes.errors import StateError
from pipes.run import Run
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, damaged

__all__ = ["MaxTokenBucketizer"]

T = TypeVar("T")

Measured = list[tuple[float, Any]]


class _BucketsRun(Run):
    """Reads a buffer of inputs, gives all of its batches, reads the next one.

    So the anchor stands where the buffer began, `taken` inputs from the start; a restore reads that buffer again and
    passes over the batches that were `given` from it.
    """

    stateful = True
    anchored = True
    leaves_out = True
    count_fields = ("taken", "given")

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] != position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.taken: int = 0 if position is None else position["taken"]
        self.given: int = 0 if position is None else position["given"]
        self.anchors = Anchors(self.upstream, 0)
        self.anchors.note(self.taken)

    def elements(self) -> Iterator[Any]:
        source, size = iter(self.inputs[0]), self.pipe.buffer_size
        passed = self.given
        while True:
            buffer = list(islice(source, size))
            read = len(buffer)
            batches = _cut(self._measured(buffer, passed > 0), self.pipe.max_token_count, self.pipe.include_padding)
            buffer.clear()
            if sum(1 for _ in islice(batches, passed)) < passed:
                raise StateError(
                    f"stage {self.stage} has fewer batches after input {self.taken} than when the state was saved "
                    f"({passed}); the data changed: resume with the data the state was made from, or start afresh"
                )
            for batch in batches:
                self.given += 1
                yield batch
            if read < size:
                return
            self.taken, self.given, passed = self.taken + read, 0, 0
            self.anchors.note(self.taken)

    def _measured(self, buffer: list[Any], again: bool) -> Measured:
        """Return (length, element) of what the bounds let pass, by length; count the others, but not `again`."""
        pipe = self.pipe
        kept: Measured = []
        for element in buffer:
            try:
                length = pipe.len_fn(element)
                kind = "too short" if length < pipe.min_len else "" if length <= pipe.max_len else "too long"
            except BaseException as error:
                self.note(error, element)
                raise
            if not kind:
                kept.append((length, element))
            elif self.tally is not None and not again:
                self.tally.leave_out(kind)
        kept.sort(key=itemgetter(0))
        return kept

    def capture(self) -> Capture:
        return self.taken, self.given, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, given, entries = captured
        return {"taken": taken, "given": given, "anchor": self.anchors.describe(entries, taken)}


def _cut(measured: Measured, most: float, include_padding: bool) -> Iterator[DataChunk[Any]]:
    """Cut what ascends in length into batches of at most `most` tokens; empties `measured`."""
    measured.reverse()
    chunk: list[Any] = []
    tokens: float = 0
    while measured:
        length, element = measured.pop()
        tokens = (len(chunk) + 1) * length if include_padding else tokens + length
        if chunk and tokens > most:
            yield DataChunk(chunk)
            chunk, tokens = [], length
        chunk.append(element)
    if chunk:
        yield DataChunk(chunk)


@functional_datapipe("max_token_bucketize")
class MaxTokenBucketizer(IterDataPipe[DataChunk[T]]):
    """Gather elements of like length into batches of at most `max_token_count` tokens.

    Args:
        datapipe: gives the elements; where their order is no matter of chance, shuffle first.
        max_token_count: the most tokens a batch may have.
        len_fn: gives an element's length, a number.
        min_len, max_len: elements that are shorter or longer are left out and counted (`loader.stats()["left_out"]`);
            `max_len` is `max_token_count` by default.
        buffer_size: so many elements are read, sorted by length and cut into batches, which are given from short to
            long; then the next ones are read. The last batch of each is what is left. Shuffle the batches after it.
        include_padding: count what a batch has once it is padded, its number of elements times its longest.

    A restore reads the elements of one buffer again. Raises ValueError unless 0 <= min_len <= max_len <=
    max_token_count, and for a buffer_size below 1.

    >>> from pipes.iter import IterableWrapper
    >>> words = IterableWrapper(["a", "bcd", "ef", "ghij", "k"])
    >>> list(words.max_token_bucketize(4)), list(words.max_token_bucketize(4, include_padding=True, max_len=3))
    ([['a', 'k', 'ef'], ['bcd'], ['ghij']], [['a', 'k'], ['ef'], ['bcd']])
    """

    run_class = _BucketsRun
    _levels = 2
    forms_batches = True
    calls_user = True

    def __init__(
        self,
        datapipe: IterDataPipe[T],
        max_token_count: int,
        len_fn: Callable[[T], int] = len,  # type: ignore[assignment]
        min_len: int = 0,
        max_len: int | None = None,
        buffer_size: int = 1000,
        include_padding: bool = False,
    ) -> None:
        max_token_count, min_len = whole("max_token_count", max_token_count), whole("min_len", min_len)
        max_len = max_token_count if max_len is None else whole("max_len", max_len)
        buffer_size = whole("buffer_size", buffer_size)
        if not 0 <= min_len <= max_len <= max_token_count:
            raise ValueError(
                f"lengths must satisfy 0 <= min_len <= max_len <= max_token_count, not 0 <= {min_len} <= {max_len} <= "
                f"{max_token_count}"
            )
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, not {buffer_size}")
        self.datapipe = as_pipe(datapipe)
        self.max_token_count = max_token_count
        self.len_fn = len_fn
        self.min_len = min_len
        self.max_len = max_len
        self.buffer_size = buffer_size
        self.include_padding = include_padding
