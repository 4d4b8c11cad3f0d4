"""Two pipes joined by key, one of them read ahead: `.zip_with_iter`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from pipes.arguments import whole_or_none
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of
from pipes.held import Held, HeldAnchors, held_from
from pipes.run import Node, Run
from pipes.stages.columns import check_columns
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Position, count_from, damaged
from pipes.utils import janitor

__all__ = ["IterKeyZipper"]

_ANCHOR_EVERY = 64


class _IterKeyZipperRun(Run):
    """Holds the references that no element asked for so far; the state says which, and a restore reads them again.

    `taken` counts the references, `given` the elements of the source; an anchor has both.
    """

    anchored = True
    leaves_out = True
    count_fields = ("taken", "given")

    def input_pipes(self) -> Sequence[Node]:
        return self.pipe.source_datapipe, self.pipe.ref_datapipe

    def check(self, position: Position) -> None:
        super().check(position)
        held_from(position, self.stage)
        extra = position["anchor"].get("extra")
        if not isinstance(extra, list) or len(extra) != 1:
            raise damaged(f"the anchor of stage {self.stage} does not count its elements")
        if count_from({"extra": extra[0]}, "extra", self.stage) > position["given"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        # By key, in the order in which they were read: the number of a reference, and what it is.
        self.buffer: dict[Hashable, tuple[int, Any]] = {}
        self.anchors, self.held = HeldAnchors(self.upstream), Held((), 0)
        self.taken, self.given, self.warned = 0, 0, False
        if position is None:
            self.anchors.note(0, (0,))
            return
        taken, given, held, anchor = position["taken"], position["given"], position["held"], position["anchor"]
        first, passed = anchor["taken"], anchor["extra"][0]
        self.anchors.note(first, (passed,))
        self.inputs[0].replay(given - passed, [])
        references = self.inputs[1].replay(taken - first, [number - first for number in held])
        for number, reference in zip(held, references, strict=True):
            self.buffer[self._key(self.pipe.ref_key_fn, reference)] = number, reference
        self.taken, self.given, self.held = taken, given, Held(held, taken)

    def elements(self) -> Iterator[Any]:
        pipe, buffer, noted = self.pipe, self.buffer, self.taken + self.given
        try:
            for element in self.inputs[0]:
                key = self._key(pipe.key_fn, element)
                if key in buffer:
                    number, reference = buffer.pop(key)
                else:
                    number, reference = self._search(key, element)
                self.held.leave([number], self.taken)
                self.given += 1
                merged = self._merged(element, reference)
                yield (key, merged) if pipe.keep_key else merged
                if self.taken + self.given - noted >= _ANCHOR_EVERY:
                    noted = self.taken + self.given
                    oldest = next((number for number, _ in buffer.values()), self.taken)
                    self.anchors.note_from(oldest, self.taken, (self.given,))
        finally:
            for _, reference in buffer.values():
                janitor(reference)
            buffer.clear()

    def _key(self, function: Callable[[Any], Any], element: Any) -> Hashable:
        try:
            key: Hashable = function(element)
            hash(key)
        except BaseException as error:
            self.note(error, element)
            raise
        return key

    def _search(self, key: Hashable, element: Any) -> tuple[int, Any]:
        """Read references until that of `key` comes, and keep the others; return its number and it."""
        pipe, buffer = self.pipe, self.buffer
        for reference in self.inputs[1]:
            number, self.taken = self.taken, self.taken + 1
            found = self._key(pipe.ref_key_fn, reference)
            if found == key:
                return number, reference
            if found in buffer:
                duplicate = ValueError(
                    f"Duplicate key is found in the reference pipe of stage {self.stage}: {found!r}; keys must differ "
                    "while they wait for an element that asks for them"
                )
                self.note(duplicate, reference)
                raise duplicate
            if len(buffer) == pipe.buffer_size:
                self._drop_oldest()
            buffer[found] = number, reference
        error = BufferError(
            f"No matching key can be found in the reference pipe of stage {self.stage} for key {key!r}"
            + ("; its buffer was full, so raise buffer_size" if self.warned else "")
        )
        self.note(error, element)
        raise error

    def _drop_oldest(self) -> None:
        number, reference = self.buffer.pop(next(iter(self.buffer)))
        self.held.leave([number], self.taken)
        janitor(reference)
        if self.tally is not None:
            self.tally.leave_out("of references beyond the buffer")
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.pipe.buffer_size} references wait in stage {self.stage} for elements that ask for them, so the "
                "oldest are dropped from now on; raise buffer_size",
                stacklevel=2,
            )

    def _merged(self, element: Any, reference: Any) -> Any:
        merge = self.pipe.merge_fn
        if merge is None:
            return element, reference
        try:
            return merge(element, reference)
        except BaseException as error:
            self.note(error, element)
            raise

    def capture(self) -> Capture:
        return self.held.capture(self.taken), self.given, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        held, given, entries = captured
        numbers, taken = Held.numbers(held), held[-1]
        anchor = self.anchors.describe(entries, min(numbers, default=taken))
        return {"taken": taken, "given": given, "held": numbers, "anchor": anchor}


@functional_datapipe("zip_with_iter")
class IterKeyZipper(IterDataPipe[Any]):
    """Give each element of the source with the element of another pipe that has the same key, in the source's order.

    Args:
        source_datapipe: gives the elements.
        ref_datapipe: gives the references, each for one element, in any order.
        key_fn, ref_key_fn: give an element's, and a reference's, key, which can be hashed; the same by default.
        keep_key: give `(key, merged)`.
        buffer_size: the most references that wait for their elements (None: no limit). The oldest of more is dropped,
            with a warning, and counted (`loader.stats()["left_out"]`).
        merge_fn: `merge_fn(element, reference)` makes what is given; a pair by default.

    Files of references that no element asks for are closed. A restore reads again from the oldest waiting reference on.
    Raises TypeError for a reference that is no iterable pipe, ValueError for a buffer_size below 1; while iterating,
    BufferError for an element without a reference, ValueError for two waiting references of one key.

    >>> from pipes.iter import IterableWrapper
    >>> labels = IterableWrapper([("b", 1), ("a", 0)])
    >>> list(IterableWrapper(["a.jpg", "b.jpg"]).zip_with_iter(labels, lambda name: name[0], lambda pair: pair[0]))
    [('a.jpg', ('a', 0)), ('b.jpg', ('b', 1))]
    """

    run_class = _IterKeyZipperRun
    _pairs = True
    _levels = 2
    _calls = ("key_fn", "ref_key_fn", "merge_fn")

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        ref_datapipe: IterDataPipe[Any],
        key_fn: Callable[[Any], Any],
        ref_key_fn: Callable[[Any], Any] | None = None,
        keep_key: bool = False,
        buffer_size: int | None = 10000,
        merge_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if not isinstance(ref_datapipe, IterableDataset):
            raise TypeError(
                f"ref_datapipe is an iterable pipe, not a {type(ref_datapipe).__name__}; IterableWrapper(...) makes one"
            )
        buffer_size = whole_or_none("buffer_size", buffer_size)
        if buffer_size is not None and buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, or None for no limit, not {buffer_size}")
        ref_key_fn = key_fn if ref_key_fn is None else ref_key_fn
        for function in (key_fn, ref_key_fn):
            check_columns(function, None)
        if merge_fn is not None:
            check_columns(merge_fn, ("element", "reference"))
        self.source_datapipe = as_pipe(source_datapipe)
        self.ref_datapipe = as_pipe(ref_datapipe)
        self.key_fn = key_fn
        self.ref_key_fn = ref_key_fn
        self.keep_key = keep_key
        self.buffer_size = buffer_size
        self.merge_fn = merge_fn

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return length_of(self.source_datapipe, shard)
