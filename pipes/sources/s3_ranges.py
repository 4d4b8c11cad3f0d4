"""An S3 object as a file that seeks: what Parquet and zip need, which keep their directories at the end.

Contract
- Every byte is of one version of the object: all requests carry `If-Match` with the tag that a listing or an open
  stream had, or that the first answer told. A replaced object raises ChangedDataError, unless the bucket keeps
  versions: then the version that the first answer named is read on.
- A read smaller than a block goes through the cache, which keeps the blocks used last, at most `cache` bytes of them.
  Missing blocks that lie side by side are one request. A larger read is one request for just its bytes and is not kept.
- Nothing is open between two reads, so a file may wait in a shuffle buffer or go through a fork. One thread at a time.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from pipes.sources.s3_names import split_s3_url
from pipes.sources.s3_retry import Attempts
from pipes.sources.s3_stream import S3Stream

if TYPE_CHECKING:
    from pipes.sources.s3_client import S3Store

__all__ = ["RangedFile"]

_BLOCK = 256 << 10
_CACHE = 8 << 20


class RangedFile(io.BufferedIOBase):
    """A seekable binary file over one object, read by ranges; made by `S3Store.ranged` and `S3Stream.ranged`.

    `etag` and `size` (bytes), where known, pin the object, else its first answer does; they default to what `url`
    carries, if it comes from a listing. A size that is not known costs one HEAD request at the first use.

    Raises, while reading, the Store errors of `pipes.errors`, and ChangedDataError for a replaced object; ValueError
    for a block that is not positive or a cache smaller than one block.
    """

    def __init__(
        self,
        store: S3Store,
        url: str,
        *,
        etag: str | None = None,
        size: int | None = None,
        version: str | None = None,
        block: int = _BLOCK,
        cache: int = _CACHE,
    ) -> None:
        # First, for `close`: it runs also where this raises.
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        if not 0 < block <= cache:
            raise ValueError(f"block={block} and cache={cache}: bytes, a block at least 1 and the cache one block")
        self._store = store
        self._bucket, self._key = split_s3_url(url)
        self._etag = getattr(url, "etag", None) if etag is None else etag
        self._size = getattr(url, "size", None) if size is None else size
        self._version = version
        self._block, self._kept = block, cache // block
        self._at = 0

    @property
    def name(self) -> str:
        """The object's `s3://` name."""
        return f"s3://{self._bucket}/{self._key}"

    @property
    def size(self) -> int:
        """Of the whole object, in bytes."""
        if self._size is None:
            self._pin()
        assert self._size is not None
        return self._size

    @property
    def etag(self) -> str | None:
        """The object's tag, as the store wrote it."""
        if self._etag is None:
            self._pin()
        return self._etag

    def read_at(self, offset: int, length: int) -> bytes:
        """The `length` bytes from byte `offset` on, fewer only at the object's end; the file's place stays.

        Raises ValueError for a negative offset or length.
        """
        if self.closed:
            raise ValueError(f"read from a closed file: {self.name}")
        if offset < 0 or length < 0:
            raise ValueError(f"{self.name}: read_at({offset}, {length}): neither may be negative")
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        if stop - offset >= self._block:
            return self._fetch(offset, stop)
        first, last = offset // self._block, (stop - 1) // self._block
        blocks = self._cached(first, last)
        begin = offset - first * self._block
        return b"".join(blocks)[begin : begin + stop - offset]

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.size - self._at, 0)
        data = self.read_at(self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(self._block if size < 0 else size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        place = offset + (self.size if start is None else start)
        if place < 0:
            raise ValueError(f"{self.name}: seek to byte {place}")
        self._at = place
        return place

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._blocks.clear()
        super().close()

    def __repr__(self) -> str:
        return f"<RangedFile {self.name} at {self._at} of {self._size}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: send its name and open it where it is read")

    def _cached(self, first: int, last: int) -> list[bytes]:
        """The blocks `first` to `last`: two at most, since a read is shorter than a block."""
        missing = [number for number in range(first, last + 1) if number not in self._blocks]
        found = {number: self._blocks[number] for number in range(first, last + 1) if number in self._blocks}
        if missing:
            start = missing[0] * self._block
            data = self._fetch(start, min((missing[-1] + 1) * self._block, self.size))
            for number in missing:
                begin = number * self._block - start
                found[number] = data[begin : begin + self._block]
        for number in range(first, last + 1):
            self._blocks[number] = found[number]
            self._blocks.move_to_end(number)
        while len(self._blocks) > self._kept:
            self._blocks.popitem(last=False)
        return [found[number] for number in range(first, last + 1)]

    def _fetch(self, start: int, stop: int) -> bytes:
        with S3Stream(
            self._store,
            self._bucket,
            self._key,
            etag=self._etag,
            size=self._size,
            version=self._version,
            offset=start,
            stop=stop,
        ) as stream:
            self._etag, self._version = stream.etag, stream.version
            return stream.read()

    def _pin(self) -> None:
        attempts = Attempts(self._store.options, self._bucket, self._key)
        size, found, version = attempts.run(lambda _: self._store.head(self._bucket, self._key))
        for pinned, now, what in ((self._etag, found, "ETag {}"), (self._size, size, "{} bytes")):
            if pinned is not None and now is not None and now != pinned:
                raise self._store.changed(self._bucket, self._key, what.format(pinned), what.format(now))
        self._size, self._etag, self._version = size, self._etag or found, self._version or version
