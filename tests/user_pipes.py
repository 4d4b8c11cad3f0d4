"""Pipe classes as users write them, in every form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipes import IterDataPipe
from pipes.iter import Batcher, Collator, IterableWrapper, Mapper, Shuffler


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


class Reader(IterDataPipe[Any]):
    """What most of them share; it does not call super().__init__(), as many do not."""

    def __init__(self, source: Any) -> None:
        self.source = source


class Plain(Reader):
    def __iter__(self) -> Iterator[Any]:
        for x in self.source:
            yield x
            yield -x


class Stateless(Reader):
    stateless = True

    def __iter__(self) -> Iterator[Any]:
        for x in self.source:
            yield 2 * x


class Summing(Reader):
    """Has a state, set back by reset()."""

    total = 0

    def reset(self) -> None:
        self.total = 0

    def __iter__(self) -> Iterator[Any]:
        for x in self.source:
            self.total += x
            yield x, self.total

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


class Rounds(Reader):
    """Iterates its source three times and says which time it is."""

    done = 0

    def reset(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < 3:
            for x in self.source:
                yield self.done, x
            self.done += 1

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Product(Reader):
    def __iter__(self) -> Iterator[Any]:
        for a in self.source:
            for b in self.source:
                yield a, b


class ByNext(Reader):
    """Returns itself from `__iter__`."""

    stateless = True

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.source)
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class SourceIterator(Reader):
    """Returns some other iterator."""

    stateless = True

    def __iter__(self) -> Iterator[Any]:
        return map(str, self.source)


class Pairing(IterDataPipe[Any]):
    stateless = True

    def __init__(self, first: Any, others: dict[str, Any]) -> None:
        self.first, self.others = first, others

    def __iter__(self) -> Iterator[Any]:
        yield from zip(self.first, self.others["b"], strict=False)


class Nested(Reader):
    """Builds a graph over its source while it runs."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.source.map(lambda x: -x).shuffle(4).batch(2)


class Keeps(Reader):
    """Keeps what it was given beside the pipes that it built over it."""

    stateless = True

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.left, self.right = source.fork(2)
        self.pairs = self.left.map(str).zip(self.right)

    def __iter__(self) -> Iterator[Any]:
        yield from self.pairs


class Parts(Reader):
    """Reads one pipe by way of several, one after the other, and itself."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.odd, self.even = source.filter(lambda x: x % 2 > 0), source.filter(lambda x: x % 2 == 0)

    def __iter__(self) -> Iterator[Any]:
        yield sum(1 for _ in self.source)
        yield from self.odd
        yield from self.even


class Equal(Stateless):
    """Cannot be hashed."""

    def __eq__(self, other: object) -> Any:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


class OwnPickle(Stateless):
    """Pickles the way torch's documentation tells."""

    def __getstate__(self) -> Any:
        state = (self.source,)
        if IterDataPipe.getstate_hook is not None:
            return IterDataPipe.getstate_hook(state)
        return state

    def __setstate__(self, state: Any) -> None:
        (self.source,) = state


class Strings(Mapper[str]):
    """Lets its base work."""

    stateless = True

    def __iter__(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield x, "sub"


class Twice(Strings):
    """Lets its base work, which lets its base work."""

    def __iter__(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield x, "twice"


class Shuffled(Shuffler[Any]):
    stateless = True

    def __iter__(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield "shuffled", x


class ShuffledReplayed(Shuffler[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield "first"
        yield from super().__iter__()


class OwnBatches(Batcher[Any]):
    """Does the work of its base by itself."""

    stateless = True

    def __iter__(self) -> Iterator[Any]:
        for x in self.datapipe:
            yield [x, self.batch_size]


class Negated(IterableWrapper[int]):
    stateless = True

    def __iter__(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield -x


class Named(Collator[Any]):
    """Overrides nothing that runs."""

    name = "x"


class Squatter(Reader):
    """Keeps things of its own under names that the library uses for its traits."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._shards = self._shared = self._opaque = self._levels = ["mine"]
        self._iterable = self._length = self._make_run = self._label = self._built = None
        self._is_replayed = self._iterations = 7

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        yield from self.source
