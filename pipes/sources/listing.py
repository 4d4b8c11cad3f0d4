"""Listing and opening: all is listed when the first name is wanted, and a resume knows whether it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from pipes.changes import refuse_or_warn
from pipes.errors import ChangedDataError, StateError
from pipes.run import Node, Run, inputs_of
from pipes.stages.flattening import ExpandingRun
from pipes.stages.mapping import AppliedPipe, AppliedRun
from pipes.state import Capture, Cursor, Position, count_from, damaged
from pipes.utils import StreamWrapper

__all__ = [
    "Identity",
    "Listing",
    "ListingRun",
    "OpenerPipe",
    "OpeningRun",
    "RootsRun",
    "has_constant_roots",
    "listing_of",
]


# What is known of one name: what it is (name, size, version), and when it was last changed, "" if nobody knows.
Identity = tuple[str, str]


class Listing:
    """Names in memory, with the count and digest by which a resume knows that they are the same."""

    def __init__(self, names: Sequence[Any], digest: str) -> None:
        self.names, self.digest = names, digest

    @classmethod
    def of(cls, names: Iterable[Any], identity: Callable[[Any], Identity]) -> Listing:
        """List `names`; the digest is that of what they are and, behind a "/", of when they changed where known.

        >>> Listing.of(["a", "b"], lambda name: (name, "")).describe()
        {'count': 2, 'digest': '...'}
        """
        listed, timed = list(names), False
        digest, times = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        rest = map(identity, listed)
        while part := list(islice(rest, 1000)):
            digest.update("".join(f"{what}\n\0" for what, _ in part).encode("utf-8", "surrogateescape"))
            times.update("".join(f"{time}\n" for _, time in part).encode())
            timed = timed or any(time for _, time in part)
        return cls(listed, f"{digest.hexdigest()}/{times.hexdigest()}" if timed else digest.hexdigest())

    def describe(self) -> dict[str, Any]:
        """The count and the digest, as JSON data."""
        return {"count": len(self.names), "digest": self.digest}

    def check(self, known: Any, what: str) -> None:
        """Raise ChangedDataError, naming the difference, if this is not the listing described by `known`."""
        if known is None or known == self.describe():
            return
        (own, _, _), (before, _, _) = self.digest.partition("/"), str(known["digest"]).partition("/")
        if (known["count"], before) == (len(self.names), own):
            raise ChangedDataError(
                f"{what} lists the {known['count']} names that the state was saved with, of the same sizes, but "
                "changed at other times"
            )
        raise ChangedDataError(
            f"{what} lists {len(self.names)} names (digest {own}), but the state was saved with {known['count']} "
            f"(digest {before})"
        )


def _check_listing(position: Position, stage: str) -> None:
    """Refuse a position whose listing, if it has one, was not described by a `Listing`."""
    listing = position.get("listing", {"count": 0, "digest": ""})
    count_from(listing, "count", stage)
    if not isinstance(listing.get("digest"), str):
        raise damaged(f"the listing of stage {stage} has no digest")


class ListingRun(Run):
    """Lists the constant roots of a pipe (`roots`, `names`, `identity`); the position is the number of names given.

    A context that brings the listing along, made once for all streams, is not listed again.
    """

    stateful = True
    count_fields = ("at",)

    def check(self, position: Position) -> None:
        super().check(position)
        _check_listing(position, self.stage)

    def restore(self, position: Position) -> None:
        self.start = 0 if position is None else position["at"]
        self.known = None if position is None else position.get("listing")
        self.listing: Listing | None = self.context.listings.get(self.stage)
        self.cursor: Any = None

    def _read(self) -> None:
        if self.cursor is not None:
            return
        if self.listing is None:
            try:
                self.listing = listing_of(self.pipe)
            except BaseException as error:
                self.note(error)
                raise
        refuse_or_warn(self.context.on_changed_data, self.listing.check, self.known, f"stage {self.stage}")
        if self.start > len(self.listing.names):
            raise StateError(
                f"stage {self.stage} lists {len(self.listing.names)} names, and the state stands after number "
                f"{self.start}: it is damaged, or of other data; use an earlier state, or start the epoch afresh"
            )
        self.cursor = Cursor(self.listing.names, self.start)

    def elements(self) -> Iterator[Any]:
        self._read()
        return self.cursor.elements  # type: ignore[no-any-return]

    def capture(self) -> Capture:
        return self.start if self.cursor is None else self.cursor.position

    def describe(self, captured: Capture) -> Position:
        known = self.known if self.listing is None else self.listing.describe()
        return {"at": captured, **({} if known is None else {"listing": known})}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if count == 0:
            return []
        self._read()
        assert self.listing is not None
        if self.capture() + count > len(self.listing.names):
            return super().replay(count, wanted)
        return self.cursor.skip(count, wanted)  # type: ignore[no-any-return]


def has_constant_roots(node: Node) -> bool:
    """Return whether `node` lists roots that are known before anything runs."""
    return all(hasattr(node, name) for name in ("roots", "names", "identity")) and not inputs_of(node)


def listing_of(lister: Any) -> Listing:
    """List all that the constant roots of `lister` hold."""
    return Listing.of((name for root in lister.roots() for name in lister.names(root)), lister.identity)


class RootsRun(ExpandingRun):
    """Lists each root that comes from a pipe; beside the counts, the position has the last listing's digest."""

    def check(self, position: Position) -> None:
        super().check(position)
        _check_listing(position, self.stage)

    def restore(self, position: Position) -> None:
        super().restore(position)
        #: The description of the listing that is open, or that the state was saved with.
        self.known = None if position is None else position.get("listing")
        self.checks = self.known is not None

    def expand(self, element: Any) -> Iterator[Any]:
        listing = Listing.of(self.pipe.names(element), self.pipe.identity)
        known, self.known = self.known if self.checks else None, listing.describe()
        self.checks = False
        refuse_or_warn(self.context.on_changed_data, listing.check, known, f"stage {self.stage}, root {element!r},")
        return iter(listing.names)

    def capture(self) -> Capture:
        return super().capture(), self.known

    def describe(self, captured: Capture) -> Position:
        counts, known = captured
        position: dict[str, Any] = super().describe(counts)
        return position if known is None else {**position, "listing": known}


class OpeningRun(AppliedRun):
    """Opens each name (`opened` of its pipe); a restore opens only those that are still wanted."""

    def function(self) -> Callable[..., Any]:
        return self.pipe.opened  # type: ignore[no-any-return]


class OpenerPipe(AppliedPipe[tuple[str, StreamWrapper]]):
    """Base of openers, which give `opened`: each name comes out as `(name, stream)`."""

    run_class = OpeningRun
    _opens = True
