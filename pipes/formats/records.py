"""What stages share that read records out of streams: one `(path, stream)` in, many records out, resume by the byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from io import TextIOBase
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, cast

from pipes.changes import refuse_or_warn
from pipes.errors import ChangedDataError, DataError
from pipes.stages.flattening import ExpandingRun
from pipes.state import Capture, Position, count_from, damaged
from pipes.utils import StreamWrapper, validate_pathname_binary_tuple

__all__ = ["RecordsRun", "identity", "is_text"]

_first = itemgetter(0)


def identity(stream: Any) -> str:
    """What tells one version of an object from another: a store's ETag, a file's size and time of change, else ""."""
    etag = getattr(stream, "etag", None)
    if isinstance(etag, str):
        return etag
    try:
        status = os.fstat(stream.fileno())
        return f"{status.st_size} bytes, changed at {status.st_mtime_ns} ns"
    except (AttributeError, OSError, TypeError, ValueError):
        return ""


def _check_version(path: str, known: Any, found: str) -> None:
    if known != found:
        raise ChangedDataError(
            f"{path}: the state was saved while reading another version of it ({known}; now {found})"
        )


def _check_unchanged(path: str, before: str, now: str) -> None:
    # A reader need not come to the file's end, where a local stream looks by itself. A closed stream tells nothing.
    if now and now != before:
        raise ChangedDataError(
            f"{path} changed while it was read ({before}; now {now}): what was read may be of both versions. Write to "
            "another name and rename it when it is complete, then read again"
        )


def is_text(stream: Any) -> bool:
    """Whether the stream, under its wrappers, gives str."""
    while isinstance(stream, StreamWrapper):
        stream = stream.file_obj
    return isinstance(stream, TextIOBase)


class RecordsRun(ExpandingRun):
    """Base of such stages. A subclass gives `read`, and `where` with its words for JSON in `fields`.

    The position is that of an expanding stage, but inside the open stream it is the reader's own instead of a count, so
    a resume opens that stream again and goes straight there. It is refused when the object is another by then.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    #: Whether `read` gives parts: iterators over records that are made already, as in `Run.parts`.
    reads_parts: bool = False
    # To take an input again may be to open it.
    anchor_every = 1

    def opened_element(self, element: Any) -> tuple[str, Any]:
        """Return the name and the stream of one input; a `StreamWrapper` is closed after it."""
        validate_pathname_binary_tuple(element)
        path, stream = element
        return path, stream

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        """Return the records, from where `at` says (by `fields`; empty: the beginning)."""
        raise NotImplementedError(type(self).__name__)

    def end_part(self) -> None:
        """Empty the part at hand."""

    def where(self) -> tuple[Any, ...]:
        """Return where the reader of the open stream stands, value by value as in `fields`."""
        raise NotImplementedError(type(self).__name__)

    def check(self, position: Position) -> None:
        super().check(position)
        inside = position.get("inside")
        if inside is not None:
            if not isinstance(inside, dict) or not isinstance(inside.get("object"), str):
                raise damaged(f"stage {self.stage} does not say which object it was reading")
            self.check_inside(inside)

    def check_inside(self, inside: dict[str, Any]) -> None:
        """Refuse, with StateError, what `where` never gives."""
        for field in self.fields:
            count_from(inside, field, self.stage)

    def bad_record(self, path: str) -> Callable[[Exception], Any] | None:
        """Return what a reader calls with a bad record's error, to get what stands in for it; None: it raises."""
        tally = self.tolerant
        return None if tally is None else lambda error: tally.handle_record(error, path)

    def restore(self, position: Position) -> None:
        super().restore(position)
        self.saved: dict[str, Any] | None = None if position is None else position.get("inside")
        self.object: str | None = None
        self.in_parts = self.reads_parts and self.tolerant is None

    def elements(self) -> Iterator[Any]:
        if not self.in_parts:
            return super().elements()
        # Every error comes from making a part, so what tells of errors need not stand between the records.
        self.parts = cast("Generator[Iterator[Any], None, None]", super().elements())
        return chain.from_iterable(self.parts)

    def _open(self, element: Any, skip: int) -> Iterator[Any]:
        stream, same = None, False
        try:
            path, stream = self.opened_element(element)
            at, found = dict(self.saved or {}), identity(stream)
            refuse_or_warn(self.context.on_changed_data, _check_version, path, at.pop("object", found), found)
            same = True
            records = self.read(path, stream, at)
            self.saved, self.object = None, found
            if self.reads_parts and not self.in_parts:
                records = chain.from_iterable(records)
            if self.tolerant is not None and self.counts_records:
                records = map(_first, zip(records, self.tolerant.ticks, strict=False))
            yield from records
            _check_unchanged(path, found, identity(stream))
            return
        except GeneratorExit:
            raise
        except BaseException as error:
            if isinstance(error, UnicodeDecodeError):  # of a text stream, or of names inside a file
                told = DataError(f"{path}: bytes that are not in the encoding: {error}")
                told.__cause__ = error
                error = told
            if isinstance(error, ChangedDataError) and not same:
                self.note(error, path)
                raise  # skipping here would lose what the state promised
            if self.tolerant is not None and self.counts_records:
                self.tolerant.take()
            stand_in = self._handle(error, element[0] if isinstance(element, tuple) and element else element)
        finally:
            if isinstance(stream, StreamWrapper):
                stream.close()
        if stand_in is not None:
            yield stand_in

    def close(self) -> None:
        super().close()
        if self.parts is not None:
            with suppress(ValueError):  # it is executing: a function above replaced the iteration
                self.parts.close()
            if self.object is not None:
                self.end_part()
        # A stream that a restore opened and nobody has begun to read: no generator is there to close it.
        StreamWrapper.close_streams(self.opened)
        self.opened.clear()

    def capture(self) -> Capture:
        inside = self.saved if self.object is None or self.saved is not None else (self.object, *self.where())
        return self.taken, None if self.over else inside, self.anchors.entries, self.over

    def describe(self, captured: Capture) -> Position:
        taken, inside, entries, over = captured
        position: dict[str, Any] = super().describe((taken, 0, entries, over))
        if isinstance(inside, tuple):
            named = zip(("object", *self.fields), inside, strict=True)
            inside = {name: value for name, value in named if value is not None}
        if inside is not None:
            position["inside"] = inside
        return position
