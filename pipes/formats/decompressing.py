"""Compressed files as streams of what is in them: `.decompress`, and `.extract` as torchdata called it first."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from pipes.arguments import whole
from pipes.datapipe import Shard, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import DataError
from pipes.formats.chunks import CHUNK, expand, read_chunks, reader_of, sniff
from pipes.formats.records import identity
from pipes.sources.seeking import seekable
from pipes.stages.mapping import AppliedPipe, AppliedRun
from pipes.utils import StreamWrapper, validate_pathname_binary_tuple

__all__ = ["ArchiveFile", "Bz2FileLoader", "ChunkStream", "Decompressor", "Extractor", "XzFileLoader"]

_BY_NAME = {"gzip": "gz", "gz": "gz", "lzma": "xz", "xz": "xz", "bz2": "bz2", "zstd": "zst", "zst": "zst"}
_BY_NAME |= {"tar": "tar", "zip": "zip"}
_PACKED_TARS = (".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tgz", ".tbz2", ".txz", ".tzst")
_BY_EXTENSION = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".lzma": "xz", ".zst": "zst", ".tar": "tar", ".zip": "zip"}
# Where POSIX's "ustar" (and GNU's "ustar ") stands in a tar header.
_USTAR = slice(257, 262)


class _Chunks(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes], source: Any) -> None:
        self._chunks, self._rest, self._source = chunks, memoryview(b""), source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        size = min(len(self._rest), len(buffer))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def close(self) -> None:
        if not self.closed and isinstance(self._source, StreamWrapper):
            self._source.close()
        super().close()


class ChunkStream(io.BufferedReader):
    """A binary stream of chunks that were made out of `source`, which it closes when that is a `StreamWrapper`.

    >>> import io
    >>> ChunkStream(iter([b"a\\nb", b"c"]), io.BytesIO()).readlines()
    [b'a\\n', b'bc']
    """

    def __init__(self, chunks: Iterator[bytes], source: Any) -> None:
        super().__init__(_Chunks(chunks, source), CHUNK)
        if version := identity(source):
            self.etag = version  # so that a resume knows whether the source is the same


class ArchiveFile:
    """The `TarFile` or `ZipFile` in a stream, opened when it is first asked for what those have.

    `packed` is the stream itself, for the readers of archives.
    """

    def __init__(self, kind: str, packed: Any, path: str) -> None:
        self.packed, self._kind, self._path = packed, kind, path
        self._archive: Any = None

    def _opened(self) -> Any:
        if self._archive is None:
            try:
                self._archive = (_open_tar if self._kind == "tar" else _open_zip)(self.packed, self._path)
            except (tarfile.TarError, zipfile.BadZipFile) as error:
                raise DataError(f"{self._path}: no {self._kind} archive, or a damaged one: {error}") from error
        return self._archive

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._opened(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._opened())

    def __repr__(self) -> str:
        return f"<{self._kind} archive {self._path!r}>"

    def close(self) -> None:
        """Close the archive and, when it is a `StreamWrapper`, its stream."""
        try:
            if self._archive is not None:
                self._archive.close()
        finally:
            if isinstance(self.packed, StreamWrapper):
                self.packed.close()


def _open_tar(stream: Any, path: str) -> tarfile.TarFile:
    kind, stream = _peeked(path, stream)
    if kind == "zst":  # tarfile knows it from Python 3.14 on
        stream = ChunkStream(expand(read_chunks(stream, path), path, kind), stream)
    seeks = getattr(stream, "seekable", bool)()
    archive = tarfile.open(name=path, fileobj=stream, mode="r:*" if seeks else "r|*")  # noqa: SIM115 - ArchiveFile closes it
    if hasattr(tarfile, "data_filter"):
        archive.extraction_filter = tarfile.data_filter  # names inside archives come from strangers
    return archive


def _open_zip(stream: Any, path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(seekable(stream, path))


def _kind_of_name(path: str) -> str:
    name = path.lower()
    if name.endswith(_PACKED_TARS):
        return "tar"
    return _BY_EXTENSION.get(os.path.splitext(name)[1], "")


def _kind_of_bytes(head: bytes) -> str:
    if head[:4] in (b"PK\3\4", b"PK\5\6"):
        return "zip"
    return "tar" if head[_USTAR] == b"ustar" else sniff(head)


def _peeked(path: str, stream: Any) -> tuple[str, Any]:
    """What the first bytes tell, and the stream from its beginning."""
    seeks = getattr(stream, "seekable", bool)()
    start, head, read = stream.tell() if seeks else 0, b"", reader_of(stream, path)
    while len(head) < _USTAR.stop and (chunk := read(512)):
        head += chunk
    if seeks:
        stream.seek(start)
        return _kind_of_bytes(head), stream
    again = ChunkStream(chain((head,) if head else (), read_chunks(stream, path)), stream)
    if (ranged := getattr(stream, "ranged", None)) is not None:
        again.ranged = ranged  # type: ignore[attr-defined]
    return _kind_of_bytes(head), again


class _DecompressorRun(AppliedRun):
    def function(self) -> Callable[..., Any]:
        return self.pipe.opened  # type: ignore[no-any-return]

    def subject(self, element: Any) -> Any:
        return element[0] if isinstance(element, tuple) and element else element


@functional_datapipe("decompress")
class Decompressor(AppliedPipe[tuple[str, StreamWrapper]]):
    """Give each `(path, stream)` with the stream decompressed: gzip, bzip2, xz, zstd; tar and zip as opened archives.

    Args:
        source_datapipe: gives `(path, binary stream)`.
        file_type: "gzip", "bz2", "lzma" or "xz", "zstd", "tar", "zip", in upper or lower case; None goes by the path's
            extension or, when that tells nothing, by the first bytes.
        on_error, max_errors: "skip" leaves out what has no known type, up to so many; see the page on errors.

    A decompressed stream is read forward, a piece at a time, whatever the file's size. A tar archive (with its
    compression, as in ".tar.gz") comes as a `tarfile.TarFile`, a zip archive as a `zipfile.ZipFile`, opened when it is
    first used; `load_from_tar` and `load_from_zip` take them. The paths stay as they are. A stream of the input that is
    a `StreamWrapper` closes with what was made of it.
    Raises ValueError for an unknown `file_type`; while iterating, DataError when no type is known, TypeError for
    what is no `(path, stream)`. Reading raises TruncatedError for cut data, DataError for damaged, and
    ModuleNotFoundError for zstd on Python < 3.14 without the `zstandard` package.

    >>> import gzip, io
    >>> pipe = Decompressor([("a.txt.gz", io.BytesIO(gzip.compress(b"hello")))])
    >>> [(path, stream.read()) for path, stream in pipe]
    [('a.txt.gz', b'hello')]
    """

    run_class = _DecompressorRun

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        file_type: str | None = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        if file_type is not None and (not isinstance(file_type, str) or file_type.lower() not in _BY_NAME):
            raise ValueError(f"{file_type!r} is not a valid CompressionType; known are {', '.join(_BY_NAME)}")
        super().__init__(source_datapipe, on_error, max_errors)
        self.file_type = file_type

    def opened(self, element: Any) -> tuple[str, StreamWrapper]:
        """Decompress one stream."""
        validate_pathname_binary_tuple(element)
        path, stream = element
        kind = _kind_of_name(path) if self.file_type is None else _BY_NAME[self.file_type.lower()]
        if not kind:
            kind, stream = _peeked(path, stream)
        if not kind:
            raise DataError(
                f"{path}: neither its extension nor its first bytes tell of a compression known here; give file_type= "
                f"(one of {', '.join(_BY_NAME)}), or leave files out that are not compressed"
            )
        if kind in ("tar", "zip"):
            return path, StreamWrapper(ArchiveFile(kind, stream, path), name=path)
        chunks = expand(read_chunks(stream, path), path, kind)
        return path, StreamWrapper(ChunkStream(chunks, stream), name=path)


@functional_datapipe("extract")
class Extractor(Decompressor):
    """Torchdata's first name for `Decompressor`, kept for old programs.

    >>> import bz2, io
    >>> [stream.read() for _, stream in Extractor([("a.bz2", io.BytesIO(bz2.compress(b"hello")))])]
    [b'hello']
    """


class _FileLoader(Decompressor):
    """Base of the stages that know one compression, and take its extension off the path."""

    file_kind = ""
    _input = "datapipe"

    def __init__(
        self,
        datapipe: Any,
        length: int = -1,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        super().__init__(datapipe, self.file_kind, on_error=on_error, max_errors=max_errors)
        self.length = whole("length", length)

    def opened(self, element: Any) -> tuple[str, StreamWrapper]:
        """Decompress one stream."""
        path, stream = super().opened(element)
        return path.removesuffix(f".{self.file_kind}"), stream

    def _length(self, shard: Shard) -> int:
        return self.length if self.length >= 0 else super()._length(shard)


@functional_datapipe("load_from_bz2")
class Bz2FileLoader(_FileLoader):
    """Give each `(path, stream)` with the stream decompressed by bzip2, and the path without ".bz2".

    Args:
        datapipe: gives `(path, binary stream)`.
        length: what `len()` tells; -1 for that of `datapipe`.
        on_error, max_errors: "skip" leaves out what is no `(path, stream)`, up to so many; see the page on errors.

    Raises, while iterating, TypeError for what is no `(path, stream)`; reading raises as with `Decompressor`.

    >>> import bz2, io
    >>> [(path, stream.read()) for path, stream in Bz2FileLoader([("2zb2.bz2", io.BytesIO(bz2.compress(b"hello")))])]
    [('2zb2', b'hello')]
    """

    file_kind = "bz2"


@functional_datapipe("load_from_xz")
class XzFileLoader(_FileLoader):
    """Give each `(path, stream)` with the stream decompressed by xz, and the path without ".xz".

    Args:
        datapipe: gives `(path, binary stream)`.
        length: what `len()` tells; -1 for that of `datapipe`.
        on_error, max_errors: "skip" leaves out what is no `(path, stream)`, up to so many; see the page on errors.

    Raises, while iterating, TypeError for what is no `(path, stream)`; reading raises as with `Decompressor`.

    >>> import io, lzma
    >>> [(path, stream.read()) for path, stream in XzFileLoader([("a.xz", io.BytesIO(lzma.compress(b"hello")))])]
    [('a', b'hello')]
    """

    file_kind = "xz"
