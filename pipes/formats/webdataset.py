"""Group the members of a WebDataset shard into samples.

The convention (https://github.com/webdataset/webdataset, "The WebDataset Format"): consecutive files with the same
path up to the first dot of the base name are one sample, and what follows that dot is the field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from operator import itemgetter
from typing import Any, Literal

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.errors import DataError
from pipes.run import Run
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, Ticks, damaged
from pipes.utils import StreamWrapper

__all__ = ["Sample", "WebDataset", "group_samples", "split_path"]

Duplicates = Literal["refuse", "number"]
OnBad = Callable[[Exception, str], Any] | None

_ANCHOR_EVERY = 16
_first = itemgetter(0)


def _plain(key: Any) -> Any:
    return key[1:] if isinstance(key, str) and key.startswith(".") else key


class Sample(dict[str, Any]):
    """One sample: its fields by name, and its key under "__key__".

    >>> sample = Sample({"__key__": "a/0001", "jpg": b"...", "cls": b"3"})
    >>> sample["cls"], sample[".cls"], ".jpg" in sample, sample.get(".txt")
    (b'3', b'3', True, None)
    >>> sample[".cls"] = 3; sample["cls"], list(sample)
    (3, ['__key__', 'jpg', 'cls'])

    Names have no leading dot; with one, as torchdata spelled them, they mean the same field.
    """

    __slots__ = ()

    def __missing__(self, key: Any) -> Any:
        plain = _plain(key)
        if plain is key:
            raise KeyError(f"{key!r}; sample {dict.get(self, '__key__')!r} has {[k for k in self if k != '__key__']}")
        return self[plain]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or dict.__contains__(self, _plain(key))

    def __setitem__(self, key: str, value: Any) -> None:
        dict.__setitem__(self, _plain(key), value)

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self, _plain(key))

    def get(self, key: str, default: Any = None) -> Any:
        return dict.get(self, _plain(key), default)

    def pop(self, key: str, *default: Any) -> Any:
        return dict.pop(self, _plain(key), *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return dict.setdefault(self, _plain(key), default)

    def copy(self) -> Sample:
        return Sample(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sample, (dict(self),)  # half the time of item by item


def split_path(path: str) -> tuple[str, str] | None:
    """A member's path as (sample key, field); None when its base name has no extension.

    >>> split_path("v1.2/s0001.seg.json"), split_path("v1.2/README"), split_path("v1.2/.hidden")
    (('v1.2/s0001', 'seg.json'), None, None)
    """
    base = path.rfind("/") + 1
    dot = path.find(".", base)
    if dot <= base or dot + 1 == len(path):
        return None
    return path[:dot], path[dot + 1 :]


class _Bad(dict[str, Any]):
    """Swallows what else belongs to a bad sample; `stand_in` is what to give instead of it."""

    stand_in: Any = None

    @classmethod
    def of(cls, error: DataError, fields: dict[str, Any], on_bad: OnBad) -> _Bad:
        """What stands for the fields of a bad sample, whose streams are closed; raises `error` without `on_bad`."""
        if on_bad is None:
            raise error
        StreamWrapper.close_streams(fields)
        bad = cls()
        bad.stand_in = on_bad(error, fields["__key__"])
        return bad

    def __setitem__(self, key: str, value: Any) -> None:
        StreamWrapper.close_streams(value)


def group_samples(
    items: Iterable[tuple[str, Any]],
    on_skip: Callable[[str], object] | None = None,
    on_bad: OnBad = None,
    *,
    required: Sequence[str] = (),
    duplicates: Duplicates = "refuse",
) -> Iterator[Any]:
    """Consecutive `(path, data)` as samples.

    >>> list(group_samples([("a.jpg", b"1"), ("a.cls", b"2"), ("b.jpg", b"3")]))
    [{'__key__': 'a', 'jpg': b'1', 'cls': b'2'}, {'__key__': 'b', 'jpg': b'3'}]

    Paths without an extension belong to no sample; `on_skip(path)` is told of each. Values are passed on as they are.
    `on_bad(error, key)` returns what to give instead of a bad sample, or None to go on without. Bad is one that lacks a
    `required` field or has one twice; `duplicates="number"` calls the second "2.jpg" instead, the third "3.jpg".

    Raises:
        AssertionError: a path is not a str.
        DataError: a sample has a field twice, or lacks one; it is named.
    """
    current: str | None = None
    fields: dict[str, Any] = {}
    for path, data in items:
        if not isinstance(path, str):
            raise AssertionError(f"the path of a member must be str, got {type(path)}")
        # As `split_path`, without the call: this runs once a member.
        base = path.rfind("/") + 1
        dot = path.find(".", base)
        key, field = path[:dot], path[dot + 1 :]
        if dot <= base or not field:
            if on_skip is not None:
                on_skip(path)
            continue
        if key != current:
            if required and fields:
                fields = _complete(fields, required, on_bad)
            if fields:
                yield Sample(fields)
            elif type(fields) is _Bad and fields.stand_in is not None:
                yield fields.stand_in
            current, fields = key, {"__key__": key}
        if field in fields:
            if duplicates == "number":
                field = next(name for n in count(2) if (name := f"{n}.{field}") not in fields)
            else:
                error = DataError(f"sample {key!r} has the field {field!r} twice: {path!r} is the second")
                fields = _Bad.of(error, fields, on_bad)
        fields[field] = data
    if required and fields:
        fields = _complete(fields, required, on_bad)
    if fields:
        yield Sample(fields)
    elif type(fields) is _Bad and fields.stand_in is not None:
        yield fields.stand_in


def _complete(fields: dict[str, Any], required: Sequence[str], on_bad: OnBad) -> dict[str, Any]:
    """The fields, or what tells that some are missing."""
    missing = [field for field in required if _plain(field) not in fields]
    if not missing:
        return fields
    found = [field for field in fields if field != "__key__"]
    error = DataError(f"sample {fields['__key__']!r} is incomplete: it has {found}, and lacks {missing}")
    return _Bad.of(error, fields, on_bad)


class _WebDatasetRun(Run):
    """Looks one member ahead: between two samples it holds the first member of the next, the last input taken.

    An anchor is taken every 16 samples, so a restore takes the members of at most 16 samples again, and keeps one.
    """

    stateful = True
    anchored = True
    leaves_out = True
    count_fields = ("taken", "held")

    def check(self, position: Position) -> None:
        super().check(position)
        if position["held"] > 1 or position["anchor"]["taken"] + position["held"] > position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.anchors = Anchors(self.upstream, 2)
        self.ahead: list[Any] = []
        self.held = 0
        self.ticks = Ticks(0)
        if position is None:
            self.anchors.note(0)
            return
        taken, self.held, anchor = position["taken"], position["held"], position["anchor"]["taken"]
        self.anchors.note(anchor)
        self.ahead = self.inputs[0].replay(taken - anchor, [taken - anchor - 1] if self.held else [])
        self.ticks = Ticks(taken)

    def elements(self) -> Iterator[Sample]:
        self.held = 1
        taken = map(_first, zip(self.inputs[0], self.ticks, strict=False))
        members = chain(self.ahead, taken, self._end())
        on_bad, pipe = None if self.tolerant is None else self._handle, self.pipe
        samples = group_samples(members, self._leave_out, on_bad, required=pipe.required, duplicates=pipe.duplicates)
        if self.tolerant is not None:
            samples = map(_first, zip(samples, self.tolerant.ticks, strict=False))
        try:
            for number, sample in enumerate(samples, 1):
                if number % _ANCHOR_EVERY == 0:
                    self.anchors.note(self.ticks.count)
                yield sample
        except (AssertionError, DataError) as error:
            if not getattr(error, "__notes__", None):  # else it is one of the input's
                self.note(error)
            raise

    def _end(self) -> Iterator[Any]:
        """Give nothing, and note that nothing is held: this is reached when the input has ended."""
        self.held = 0
        yield from ()

    def _leave_out(self, _path: str) -> None:
        if self.tally is not None:
            self.tally.leave_out("no extension")

    def _handle(self, error: Exception, key: str) -> Any:
        assert self.tally is not None
        return self.tally.handle_record(error, key)

    def capture(self) -> Capture:
        return self.ticks.count, self.held, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, held, entries = captured
        return {"taken": taken, "held": held, "anchor": self.anchors.describe(entries, taken - held)}


@functional_datapipe("webdataset")
class WebDataset(IterDataPipe[Sample]):
    """Group consecutive `(path, data)` with the same path up to the first dot of the base name into samples.

    >>> from pipes.iter import IterableWrapper
    >>> members = [("a/1.jpg", b"..."), ("a/1.seg.json", b"{}"), ("a/2.jpg", b"...")]
    >>> list(IterableWrapper(members).webdataset())
    [{'__key__': 'a/1', 'jpg': b'...', 'seg.json': b'{}'}, {'__key__': 'a/2', 'jpg': b'...'}]

    A sample is a dict with the fields by name and the key under "__key__"; `sample[".jpg"]`, as torchdata spelled it,
    is `sample["jpg"]`. Values are passed on as they are: after `.load_from_tar()`, streams, which `.map(decode)` reads.
    Names without an extension are left out and counted. A sample is bad that has a field twice, unless
    `duplicates="number"` calls the second "2.jpg" and so on, or lacks one of the fields `required`, as ("jpg", "cls");
    `on_error="skip"` leaves those out and counts them, up to `max_errors`.

    Raises ValueError for another `duplicates`; while iterating, DataError for a bad sample, which is named,
    AssertionError for a path that is not a str.
    """

    run_class = _WebDatasetRun

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        required: Sequence[str] = (),
        duplicates: Literal["refuse", "number"] = "refuse",
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        if duplicates not in ("refuse", "number"):
            raise ValueError(f"duplicates={duplicates!r} is not one of 'refuse', 'number'")
        self.source_datapipe = as_pipe(source_datapipe)
        self.required = [required] if isinstance(required, str) else list(required)
        self.duplicates = duplicates
        self.on_error = on_error
        self.max_errors = max_errors
