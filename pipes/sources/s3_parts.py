"""Objects on their way from an S3 store, and the parts in which they come; `s3_fetch` says how."""

from __future__ import annotations

from collections import deque

from pipes.sources.s3_checksum import Checksum
from pipes.sources.s3_names import split_s3_url

__all__ = ["Fetch", "Part"]


class Part:
    """A range of an object, asked for by one request; `reserved` counts its bytes that no reader was handed."""

    __slots__ = ("active", "asked", "chunks", "done", "dropped", "error", "given", "reserved", "start", "stop")

    def __init__(self, start: int, stop: int, asked: int) -> None:
        self.start, self.stop, self.asked = start, stop, asked
        self.reserved = 0
        self.given = start
        self.chunks: deque[bytes | memoryview] = deque()
        self.active, self.done, self.dropped = True, False, False
        self.error: BaseException | None = None


class Fetch:
    """One object on its way: `size` and `etag` are known from its listing, or once it is `answered`."""

    __slots__ = (
        "__weakref__", "answered", "asleep", "bucket", "checksum", "dropped", "etag", "key", "lent", "next", "parts",
        "size", "version", "waited",
    )  # fmt: skip

    def __init__(self, url: str, asleep: bool) -> None:
        self.bucket, self.key = split_s3_url(url)
        self.size: int | None = getattr(url, "size", None)
        self.etag: str | None = getattr(url, "etag", None)
        self.version: str | None = None
        #: Not asked for before its reader comes, and then little: it may skip over much of it.
        self.asleep = asleep and self.size is not None and self.etag is not None
        self.answered, self.dropped, self.waited = False, False, False
        #: Of the whole object, where one request for all of it told.
        self.checksum: Checksum | None = None
        self.parts: deque[Part] = deque()
        self.next = 0
        #: What its reader was handed last.
        self.lent: bytes | memoryview = b""

    def ended(self) -> bool:
        """Whether nothing is left to ask for."""
        return self.dropped or (self.answered and self.size is not None and self.next >= self.size)

    def holds_up(self) -> bool:
        """Whether its next part cannot be asked for yet."""
        return self.asleep or (bool(self.parts) and not self.answered and (self.size is None or self.etag is None))
