"""Chunks of bytes: out of any binary stream, and through the decompressors.

Everything that reads a format here starts from an iterator of byte chunks of any size, so that a local file, an
HTTP body and an object in a store are all the same. Decompression is streaming with bounded output; gzip files of
several members (RFC 1952, 2.2), bzip2 and xz files of several streams and zstd files of several frames are one text.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, Protocol

from pipes.errors import DataError, StateError, TruncatedError

__all__ = [
    "COMPRESSIONS",
    "chunks_from",
    "decompress",
    "drop",
    "expand",
    "go_to",
    "read_chunks",
    "read_up_to",
    "reader_of",
    "sniff",
    "whole_lines",
]

# Large enough to make calls rare, small enough to stay in a core's own cache: 1 MiB was 15 % slower over tar.
CHUNK = 1 << 18
_BOUND = 1 << 20
# zstandard's decompressor cannot bound its output; a 2 KiB piece makes at most 64 MiB of it.
_ZSTD_PIECE = 1 << 11

COMPRESSIONS = ("gz", "bz2", "xz", "zst")


def reader_of(stream: Any, name: str) -> Callable[[int], bytes]:
    """A `read(n)` over a stream that has `read` or only `readinto`; it gives at most `n` bytes, and b"" at the end.

    Raises:
        TypeError: the stream has neither, or is in text mode.
        BlockingIOError: a non-blocking stream had nothing to give.
    """
    read = getattr(stream, "read", None)
    if read is None:
        readinto = getattr(stream, "readinto", None)
        if readinto is None:
            raise TypeError(f"{name}: {type(stream).__name__} has neither read() nor readinto(); pass a binary stream")

        def read(size: int) -> bytes:
            buffer = bytearray(size)
            return bytes(memoryview(buffer)[: readinto(buffer)])

    def checked(size: int) -> bytes:
        chunk = read(size)
        if type(chunk) is bytes:
            return chunk
        if chunk is None:
            raise BlockingIOError(f"{name}: the stream is non-blocking and has no data ready; pass a blocking one")
        if isinstance(chunk, str):
            raise TypeError(f"{name}: the stream gives str; open it in binary mode, `mode='rb'`")
        return bytes(chunk)

    return checked


def read_chunks(stream: Any, name: str, size: int = CHUNK) -> Iterator[bytes]:
    """The stream's bytes, at most `size` at a time.

    >>> import io
    >>> list(read_chunks(io.BytesIO(b"abcde"), "a.bin", 2))
    [b'ab', b'cd', b'e']

    Raises:
        TypeError: the stream is in text mode or cannot be read.
    """
    return iter(partial(reader_of(stream, name), size), b"")


def read_up_to(read: Callable[[int], Any], size: int) -> bytes:
    """The next `size` bytes, fewer only at the end, of a `read(n)` that may give less than it is asked for.

    >>> import io
    >>> stream = io.BytesIO(b"abcde")
    >>> read_up_to(lambda size: stream.read(min(size, 2)), 4)
    b'abcd'
    """
    data = read(size)
    if len(data) == size:
        return bytes(data)
    parts = [data]
    left = size - len(data)
    while left and len(parts[-1]):
        parts.append(read(left))
        left -= len(parts[-1])
    return b"".join(parts)


def sniff(head: bytes) -> str:
    """The compression that the first bytes (ten are enough) tell: one of `COMPRESSIONS`, or "" for none.

    >>> import gzip
    >>> sniff(gzip.compress(b"abc")), sniff(b"abc")
    ('gz', '')
    """
    if head[:3] == b"\x1f\x8b\x08":
        return "gz"
    # The block's own magic (or the end mark's, when empty): a text that starts with "BZh9" is no bzip2 file.
    if head[:3] == b"BZh" and head[4:10] in (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    if head[:6] == b"\xfd7zXZ\x00":
        return "xz"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return "zst"
    return ""


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gzip:
    """zlib's decompressor in the manner of bz2's and lzma's."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        out = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        # A full output may hide more of it inside zlib, even when all input is taken.
        self.needs_input = len(out) < max_length and not self._inner.unconsumed_tail
        return out


class _Zstandard:
    """The `zstandard` package's decompressor in the manner of bz2's and lzma's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._rest = b""

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def needs_input(self) -> bool:
        return not self._rest

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + self._rest

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        data = self._rest + data
        data, self._rest = data[:_ZSTD_PIECE], data[_ZSTD_PIECE:]
        return bytes(self._inner.decompress(data))


def _codec(kind: str, name: str) -> tuple[Callable[[], _Decoder], tuple[type[Exception], ...]]:
    if kind == "gz":
        return _Gzip, (zlib.error,)
    if kind == "bz2":
        return bz2.BZ2Decompressor, (OSError,)
    if kind == "xz":
        return lzma.LZMADecompressor, (lzma.LZMAError,)
    if kind != "zst":
        raise ValueError(f"{name}: unknown compression {kind!r}; known are {', '.join(COMPRESSIONS)}")
    try:
        module: Any = import_module("compression.zstd")  # Python 3.14
        return module.ZstdDecompressor, (module.ZstdError,)
    except ModuleNotFoundError:
        pass
    try:
        module = import_module("zstandard")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is compressed with zstd, which this Python cannot read: `pip install zstandard`"
        ) from error
    return lambda: _Zstandard(module.ZstdDecompressor().decompressobj()), (module.ZstdError,)


def expand(chunks: Iterable[bytes], name: str, kind: str) -> Iterator[bytes]:
    """Decompress chunks of `kind` ("gz", "bz2", "xz", "zst"), at most 1 MiB at a time (zstd: 64 MiB).

    >>> import gzip
    >>> b"".join(expand([gzip.compress(b"abc") + gzip.compress(b"def")], "a.gz", "gz"))
    b'abcdef'

    Raises:
        TruncatedError: the data ends inside a compressed stream, after everything before was given.
        DataError: the bytes are not of this compression, or damaged.
        ModuleNotFoundError: zstd on Python < 3.14 without the `zstandard` package.
        ValueError: unknown `kind`.
    """
    make, failures = _codec(kind, name)
    decoder = make()
    taken, begun, members = 0, False, 0
    for chunk in chunks:
        rest = chunk
        taken += len(chunk)
        while rest or (begun and not decoder.needs_input):
            if not begun and members:
                # Zeros after a member are padding (tape blocks), as gzip(1) and xz(1) have it.
                rest = rest.lstrip(b"\0")
                if not rest:
                    break
            try:
                out = decoder.decompress(rest, _BOUND)
            except failures as error:
                raise DataError(f"{name}: bad {kind} data before compressed byte {taken}: {error}") from error
            rest, begun = b"", True
            if out:
                yield out
            if decoder.eof:
                rest, begun, members, decoder = decoder.unused_data, False, members + 1, make()
    if begun or not members:
        raise TruncatedError(
            f"{name}: empty file, expected {kind} data"
            if not taken
            else f"{name}: cut at byte {taken}, inside its {kind} compression; fetch or write the file again"
        )


def decompress(chunks: Iterable[bytes], name: str, kind: str = "*") -> Iterator[bytes]:
    """The chunks as they are, or decompressed: `kind` is "" for none, "*" for what the first bytes tell.

    >>> import bz2
    >>> b"".join(decompress([bz2.compress(b"abc")], "a.bz2")), b"".join(decompress([b"abc"], "a.txt"))
    (b'abc', b'abc')

    Raises:
        As `expand`.
    """
    chunks = iter(chunks)
    if kind == "*":
        head = b""
        for chunk in chunks:
            head += chunk
            if len(head) >= 10:
                break
        kind = sniff(head)
        chunks = chain((head,), chunks) if head else iter(())
    return expand(chunks, name, kind) if kind else chunks


def _beyond(name: str, offset: int, missing: int) -> StateError:
    return StateError(
        f"{name}: the state stands at byte {offset}, and there are only {offset - missing}; the data changed: resume "
        "with the data the state was made from, or start the epoch afresh"
    )


def drop(chunks: Iterable[bytes], size: int, name: str = "stream") -> Iterator[bytes]:
    """The chunks without their first `size` bytes.

    >>> list(drop([b"ab", b"cd", b"ef"], 3))
    [b'd', b'ef']

    Raises:
        StateError: there are fewer bytes.
    """
    left = size
    for chunk in chunks:
        if left < len(chunk):
            yield chunk[left:] if left else chunk
        left = max(left - len(chunk), 0)
    if left:
        raise _beyond(name, size, left)


def go_to(stream: Any, name: str, offset: int, taken: int = 0) -> None:
    """Bring the stream to byte `offset`, when `taken` bytes of it were read.

    By `seek`, else by the stream's own `skip(n)`, else by reading.

    Raises:
        StateError: the stream ends before.
    """
    left = offset - taken
    if left and getattr(stream, "seekable", bool)():
        here = stream.tell()
        end = stream.seek(0, 2)
        left = max(0, here + left - end)
        stream.seek(end if left else here + offset - taken)
    elif left and getattr(stream, "skip", None) is not None:
        passed = stream.skip(left)
        left = 0 if passed is None else left - passed
    else:
        read = reader_of(stream, name)
        while left and (chunk := read(min(left, CHUNK))):
            left -= len(chunk)
    if left:
        raise _beyond(name, offset, left)


def chunks_from(stream: Any, name: str, offset: int = 0) -> Iterator[bytes]:
    """The stream's content from byte `offset` on, decompressed when its first bytes say that it is compressed.

    >>> import gzip, io
    >>> list(chunks_from(io.BytesIO(b"abcdef"), "a.txt", 4))
    [b'ef']
    >>> list(chunks_from(io.BytesIO(gzip.compress(b"abcdef")), "a.txt.gz", 4))
    [b'ef']

    Raises:
        As `read_chunks` and `expand`; StateError for an offset beyond the content's end.
    """
    read = reader_of(stream, name)
    head = b""
    while len(head) < 10 and (chunk := read(10 if offset else CHUNK)):
        head += chunk
    kind = sniff(head)
    rest = chain((head,) if head else (), read_chunks(stream, name))
    if kind:
        return drop(expand(rest, name, kind), offset, name)
    if offset > len(head):
        go_to(stream, name, offset, len(head))
        return read_chunks(stream, name)
    return drop(rest, offset, name)


def whole_lines(chunks: Iterable[bytes], *, lone_cr: bool = False) -> Iterator[bytes]:
    """The chunks cut anew behind a LF (with `lone_cr`, or behind a CR without LF); only the last may lack it.

    >>> list(whole_lines([b"a\\nb", b"c\\n\\nd"]))
    [b'a\\n', b'bc\\n\\n', b'd']
    """
    parts: list[bytes] = []
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if lone_cr:
            # A CR at the very end may have its LF in the next chunk.
            cut = max(cut, chunk.rfind(b"\r", 0, max(len(chunk) - 1, 0)) + 1)
        if not cut:
            parts.append(chunk)
            continue
        # Joined only when a line ends, so that a line of many chunks is copied once.
        parts.append(chunk[:cut])
        yield b"".join(parts)
        parts = [chunk[cut:]] if cut < len(chunk) else []
    rest = b"".join(parts)
    if rest:
        yield rest
