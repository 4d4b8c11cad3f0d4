"""Listing and opening: all is listed when the first name is wanted, and a resume knows whether it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from pipes.errors import ChangedDataError, StateError
from pipes.run import Run
from pipes.stages.flattening import ExpandingRun
from pipes.state import Capture, Position, count_from

__all__ = ["Listing", "ListingRun", "OpeningRun", "RootsRun"]


class Listing:
    """Names in memory, with the count and digest by which a resume knows that they are the same.

    `identity` gives what has to stay the same about one name: the name, and its size and version where known.
    """

    def __init__(self, names: Iterable[Any], identity: Callable[[Any], str]) -> None:
        self.names = list(names)
        self._identity = identity
        self._digest = ""

    def describe(self) -> dict[str, Any]:
        """The count and the digest, as JSON data."""
        if not self._digest:
            digest = hashlib.blake2b(digest_size=16)
            names = iter(self.names)
            while part := list(islice(names, 1000)):
                digest.update(
                    "".join(f"{self._identity(name)}\n\0" for name in part).encode("utf-8", "surrogateescape")
                )
            self._digest = digest.hexdigest()
        return {"count": len(self.names), "digest": self._digest}

    def check(self, known: Any, what: str) -> None:
        """Raise ChangedDataError, naming both, if this is not the listing described by `known`."""
        if known is not None and known != self.describe():
            now = self.describe()
            before = known if isinstance(known, dict) else {}
            raise ChangedDataError(
                f"{what} lists {now['count']} names (digest {now['digest']}), but the state was saved with "
                f"{before.get('count')} (digest {before.get('digest')}); resume with the data the state was made from, "
                "or start the epoch afresh"
            )


class ListingRun(Run):
    """Lists the constant roots of a pipe (`roots`, `names`, `identity`); the position is the number of names given."""

    stateful = True

    def restore(self, position: Position) -> None:
        self.start = 0 if position is None else count_from(position, "at", self.stage)
        self.known = None if position is None else position.get("listing")
        self.cursor: Any = None

    def _read(self) -> None:
        if self.cursor is not None:
            return
        pipe = self.pipe
        try:
            self.listing = Listing((name for root in pipe.roots() for name in pipe.names(root)), pipe.identity)
        except BaseException as error:
            self.note(error)
            raise
        self.listing.check(self.known, f"stage {self.stage}")
        if self.start > len(self.listing.names):
            raise StateError(f"the saved state is damaged: stage {self.stage} has no name number {self.start}")
        self.cursor = iter(self.listing.names)
        self.cursor.__setstate__(self.start)

    def elements(self) -> Iterator[Any]:
        self._read()
        return self.cursor  # type: ignore[no-any-return]

    def capture(self) -> Capture:
        return self.start if self.cursor is None else len(self.listing.names) - self.cursor.__length_hint__()

    def describe(self, captured: Capture) -> Position:
        known = self.known if self.cursor is None else self.listing.describe()
        return {"at": captured, **({} if known is None else {"listing": known})}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if count == 0:
            return []
        self._read()
        start = self.capture()
        names = self.listing.names
        if start + count > len(names):
            return super().replay(count, wanted)
        self.cursor.__setstate__(start + count)
        return [names[start + offset] for offset in wanted]


class RootsRun(ExpandingRun):
    """Lists each root that comes from a pipe; beside the counts, the position has the last listing's digest."""

    def restore(self, position: Position) -> None:
        self.listing: Listing | None = None
        super().restore(position)
        self.known = None if position is None else position.get("listing")

    def expand(self, element: Any) -> Iterator[Any]:
        self.listing = Listing(self.pipe.names(element), self.pipe.identity)
        self.listing.check(self.known, f"stage {self.stage}, root {element!r},")
        self.known = None
        return iter(self.listing.names)

    def capture(self) -> Capture:
        return super().capture(), self.known or self.listing

    def describe(self, captured: Capture) -> Position:
        counts, listing = captured
        position: dict[str, Any] = super().describe(counts)
        if listing is not None:
            position["listing"] = listing.describe() if isinstance(listing, Listing) else listing
        return position


class OpeningRun(Run):
    """Opens each name (`opened` of its pipe); a restore opens only those that are still wanted."""

    def elements(self) -> Iterator[Any]:
        for name in self.inputs[0]:
            try:
                opened = self.pipe.opened(name)
            except BaseException as error:
                self.note(error, name)
                raise
            yield opened

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        return [self.pipe.opened(name) for name in self.inputs[0].replay(count, wanted)]
