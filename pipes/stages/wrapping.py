"""Sources over what is already in memory: any iterable, any sequence or mapping."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

from pipes.as_built import as_built, check_numbers
from pipes.datapipe import IterDataPipe, MapDataPipe, Shard, length_of, no_length
from pipes.errors import GraphError, StateError
from pipes.run import Node, Run
from pipes.state import Capture, Cursor, Position, Ticks

__all__ = ["IterableWrapper", "KeysRun", "MapToIterConverter", "SequenceWrapper", "as_pipe"]

T = TypeVar("T")

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), range})
_first = itemgetter(0)
# By the id of the iterator that it reads, which it keeps alive.
_readers: weakref.WeakValueDictionary[int, _WrapperRun] = weakref.WeakValueDictionary()


class _ByPosition:
    """Makes Python's own position-keeping iterator for a sequence that has another."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def _has_positions(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, deque)


class _WrapperRun(Run):
    """Lists, tuples, ranges and strings are read by position; other iterables are counted and re-read on a restore."""

    stateful = True
    iterator: Iterator[Any]
    count_fields = ("at",)

    def check(self, position: Position) -> None:
        super().check(position)
        if "numbers" in position:
            check_numbers(type(self.pipe)._keeper(self.pipe), position["numbers"], self.stage)

    def restore(self, position: Position) -> None:
        self.start = 0 if position is None else position["at"]
        self.cursor: Any = None
        self.keeper = type(self.pipe)._keeper(self.pipe)
        # What the user's object had counted at the start of the epoch.
        self.numbers: dict[str, Any] = {}
        if self.keeper is not None:
            known = as_built(self.pipe).numbers(self.keeper)
            self.numbers = known if position is None else position.get("numbers", {})

    def _read(self) -> None:
        """Take the data as it is now, when the first element is wanted, and stand at `start`."""
        if self.cursor is not None:
            return
        self.data = self._snapshot()
        self.fixed = Cursor.reads(self.data)
        if self.start and isinstance(self.data, Sized) and self.start > len(self.data):
            raise StateError(
                f"stage {self.stage} has {len(self.data)} elements, but the state was saved after element "
                f"{self.start}; the data changed: resume with the data the state was made from, or start afresh"
            )
        self.cursor = Cursor(self.data, self.start) if self.fixed else Ticks(self.start)

    def _snapshot(self) -> Any:
        """Return the data to read; a list is copied, so that edits during the epoch do not show."""
        data = self.pipe.iterable
        self.copies = False
        if not self.pipe.deepcopy:
            return data
        if type(data) in _ATOMS or hasattr(data, "from_position"):
            return data
        if type(data) in (list, tuple):
            # Elements are copied one by one as they are read: a stage that edits them must not edit the source.
            self.copies = not _ATOMS.issuperset(map(type, data))
            return list(data) if type(data) is list else data
        try:
            return copy.deepcopy(data)
        except Exception as error:
            if not isinstance(data, Iterator):
                warnings.warn(
                    f"stage {self.stage} cannot deep-copy its iterable ({type(error).__name__}: {error}), so edits "
                    "to its elements show in the original; pass deepcopy=False to say that this is fine",
                    stacklevel=2,
                )
            else:
                warnings.warn(
                    f"stage {self.stage} wraps a {type(data).__name__}, which can be read once: the second epoch "
                    "will be empty; wrap a list, or a class whose __iter__ starts afresh",
                    stacklevel=2,
                )
            return data

    def elements(self) -> Iterator[Any]:
        self._read()
        if self.fixed:
            source: Iterator[Any] = self.cursor.elements
        else:
            source = self._counted()
        return map(copy.deepcopy, source) if self.copies else source

    def _counted(self) -> Iterator[Any]:
        """Iterate data of any kind from `start` on; what can be read by position is not re-read."""
        try:
            if self.start and _has_positions(self.data):
                elements: Any = iter(_ByPosition(self.data))
                elements.__setstate__(self.start)
            else:
                elements = self.begun(lambda: islice(self._begun(), self.start, None), self.keeper)
            for element, _ in zip(elements, self.cursor, strict=False):
                yield element
        except GeneratorExit:
            raise
        except BaseException as error:
            self.note(error)
            raise

    def _begun(self) -> Iterator[Any]:
        """Return a new iterator of the data; refuse one that another stream of this process reads."""
        if self.keeper is not None:
            as_built(self.pipe).set_numbers(self.keeper, self.numbers)
        iterator: Iterator[Any] = iter(self.data)
        reader = _readers.get(id(iterator))
        context = self.context
        if reader is not None and reader.iterator is iterator and reader.context.stream != context.stream:
            raise GraphError(
                f"stage {self.stage} wraps a {type(self.data).__name__} that gives all readers one and the same "
                f"iterator, so {context.streams} streams in one process would each miss what the others take: let its "
                "__iter__ make a new one, leave out deepcopy=False, or give it num_streams=1"
            )
        self.iterator = iterator
        _readers[id(iterator)] = self
        return iterator

    def capture(self) -> Capture:
        return (self._at(), self.numbers) if self.numbers else self._at()

    def _at(self) -> int:
        if self.cursor is None:
            return self.start
        at: int = self.cursor.position if self.fixed else self.cursor.count
        return at

    def describe(self, captured: Capture) -> Position:
        return dict(zip(("at", "numbers"), captured, strict=True)) if isinstance(captured, tuple) else {"at": captured}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        self._read()
        start = self._at()
        if not self.fixed or start + count > len(self.data):
            return super().replay(count, wanted)
        kept = self.cursor.skip(count, wanted)
        return [copy.deepcopy(element) for element in kept] if self.copies else kept


class IterableWrapper(IterDataPipe[T]):
    """Yield the elements of any iterable, by default as copies, so that stages which edit them leave it unchanged.

    Edits to the iterable before an epoch show in it, later ones do not. An iterator that can be read only once gives
    one epoch; a warning says so.

    >>> list(IterableWrapper([3, 1, 2]))
    [3, 1, 2]
    """

    run_class = _WrapperRun
    _opaque = frozenset({"iterable"})

    def __init__(self, iterable: Iterable[T], deepcopy: bool = True) -> None:
        self.iterable = iterable
        self.deepcopy = deepcopy

    def _keeper(self) -> Any:
        users = hasattr(self.iterable, "__dict__") and not isinstance(self.iterable, Iterator)
        return self.iterable if users and not self.deepcopy else None

    def _length(self, shard: Shard) -> int:
        try:
            return len(self.iterable)  # type: ignore[arg-type]
        except TypeError:
            raise no_length(self, f"its iterable, a {type(self.iterable).__name__}, has none") from None


class SequenceWrapper(MapDataPipe[T]):
    """Give the elements of a sequence or mapping by key, from a deep copy made at construction.

    >>> squares = SequenceWrapper([0, 1, 4])
    >>> squares[2], len(squares)
    (4, 3)
    """

    _opaque = frozenset({"sequence"})

    def __init__(self, sequence: Any, deepcopy: bool = True) -> None:
        if deepcopy:
            try:
                sequence = copy.deepcopy(sequence)
            except Exception as error:
                warnings.warn(
                    f"SequenceWrapper cannot deep-copy its sequence ({type(error).__name__}: {error}) and uses the "
                    "original; pass deepcopy=False to say that this is fine",
                    stacklevel=2,
                )
        self.sequence = sequence
        self.deepcopy = deepcopy

    def __getitem__(self, index: Any) -> T:
        return self.sequence[index]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.sequence)


class KeysRun(Run):
    """Read a map pipe key by key; the position is the number of keys read."""

    stateful = True
    count_fields = ("at",)

    def input_pipes(self) -> Sequence[Node]:
        return ()

    def restore(self, position: Position) -> None:
        self.start = 0 if position is None else position["at"]
        self.cursor: Any = None
        # The places of the keys that are read, when those between belong to others.
        self.chosen: range | None = None

    def _read(self) -> None:
        if self.cursor is not None:
            return
        self.keys = self.ordered()
        if self.start > len(self.keys):
            raise StateError(
                f"stage {self.stage} has {len(self.keys)} keys, but the state was saved after key {self.start}; the "
                "data changed: resume with the data the state was made from, or start afresh"
            )
        self.cursor = Cursor(self.keys, self.start)

    def ordered(self) -> Sequence[Any]:
        """Return the keys in the order in which they are read."""
        return self.pipe.indices or range(length_of(self.pipe.datapipe))

    def elements(self) -> Iterator[Any]:
        self._read()
        return self._values(self.cursor.elements)

    def every(self, first: int, step: int) -> Iterator[Any]:
        self._read()
        self.start = self.capture()
        self.chosen = range(self.start + first, len(self.keys), step)
        self.cursor = Cursor(self.chosen)
        self._iterator = self._values(map(self.keys.__getitem__, self.cursor.elements))
        return self._iterator

    def _values(self, keys: Iterator[Any]) -> Iterator[Any]:
        datapipe = self.pipe.datapipe
        for key in keys:
            try:
                element = datapipe[key]
            except BaseException as error:
                self.note(error, key)
                raise
            yield element

    def capture(self) -> Capture:
        if self.cursor is None:
            return self.start
        if self.chosen is None:
            return self.cursor.position
        return self.chosen[self.cursor.position - 1] + 1 if self.cursor.position else self.start

    def describe(self, captured: Capture) -> Position:
        return {"at": captured}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        self._read()
        start = self.capture()
        if start + count > len(self.keys):
            return super().replay(count, wanted)
        return [self.pipe.datapipe[key] for key in self.cursor.skip(count, wanted)]


class MapToIterConverter(IterDataPipe[T]):
    """Iterate a map pipe over `indices`, by default `range(len(datapipe))`.

    >>> list(SequenceWrapper({"a": 1, "b": 2}).to_iter_datapipe(["b", "a"]))
    [2, 1]
    """

    run_class = KeysRun

    def __init__(self, datapipe: MapDataPipe[T], indices: Iterable[Any] | None = None) -> None:
        if not isinstance(datapipe, MapDataPipe):
            raise TypeError(f"MapToIterConverter reads a MapDataPipe, not a {type(datapipe).__name__}")
        self.datapipe = datapipe
        self.indices = None if indices is None else list(indices)

    def _length(self, shard: Shard) -> int:
        if self.indices:
            return len(self.indices)
        return length_of(self.datapipe)


MapDataPipe.register_datapipe_as_function("to_iter_datapipe", MapToIterConverter)


def as_pipe(source: Any) -> IterDataPipe[Any]:
    """Return `source` if it is an iterable pipe, a map pipe's elements, or a wrapper around any other iterable."""
    if isinstance(source, IterDataPipe):
        return source
    if isinstance(source, MapDataPipe):
        return MapToIterConverter(source)
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return IterableWrapper(source, deepcopy=False)
    raise TypeError(f"a stage reads a pipe or an iterable, not a {type(source).__name__}")
