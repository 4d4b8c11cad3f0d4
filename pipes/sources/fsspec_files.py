"""Files of every store that fsspec knows: `.list_files_by_fsspec`, `.open_files_by_fsspec`, `.save_by_fsspec`.

A pipe holds settings only. The file system is asked of fsspec for each list or file, in the process that uses it;
fsspec keeps one for each process and thread, and none is shared over a fork.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipes.context import Context
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, no_length
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import ChangedDataError, TruncatedError
from pipes.run import Run
from pipes.sources.files import checked_read_mode
from pipes.sources.listing import Identity, ListingRun, OpenerPipe, RootsRun
from pipes.sources.local_stream import open_local
from pipes.sources.saving import SaverPipe, checked_mode, path_and_data, save_file, write_data
from pipes.stages.wrapping import as_pipe
from pipes.utils import StreamWrapper

__all__ = ["FSSpecFileLister", "FSSpecFileOpener", "FSSpecSaver", "FSSpecUrl"]

_BUFFER = 128 * 1024
_TAGS = ("ETag", "etag", "checksum", "md5Hash", "content_md5", "sha256", "version_id", "generation")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def _need_fsspec() -> None:
    if importlib.util.find_spec("fsspec") is None:
        raise ModuleNotFoundError('fsspec pipes need fsspec: pip install "pipes[fsspec]"', name="fsspec")


def _system(url: str, connection: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    system, path = fsspec.url_to_fs(url, **connection)
    return system, path


def _is_local(system: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(system, LocalFileSystem)


def _followed(system: Any, info: dict[str, Any]) -> dict[str, Any]:
    """What a link of the local file system leads to; a listing does not follow it."""
    if info["type"] != "other" or not info.get("islink"):
        return info
    try:
        return dict(system.info(info["name"]))
    except OSError:
        return {**info, "type": "file"}  # It leads nowhere: opening it tells what is wrong.


def _is_file(info: dict[str, Any]) -> bool:
    if info["type"] == "other":
        warnings.warn(f"{info['name']!r} is left out: it is neither a file nor a folder", stacklevel=2)
    return info["type"] not in ("directory", "other")


def _spelled(name: str, root: str) -> str:
    """Return `name`, as a file system gives it, with the protocol that `root` has; chains keep their later parts."""
    parts = root.split("::")
    ways = []
    while len(parts) > 1 and "://" not in parts[0]:  # "simplecache::s3://...": a way to read, which has no path
        ways.append(parts.pop(0))
    protocol, found, _ = parts[0].partition("://")
    own = name if not found or name.startswith(f"{protocol}://") else f"{protocol}://{name}"
    return "::".join([*ways, own, *parts[1:]])


class FSSpecUrl(str):
    """A name that also carries the `size` (bytes) and a `tag` (ETag, checksum or version) which its listing showed.

    >>> url = FSSpecUrl("memory:///a", size=3, tag="t1")
    >>> url == "memory:///a", url.size, url.tag, url.time
    (True, 3, 't1', '')
    """

    __slots__ = ("size", "tag", "time")
    size: int | None
    tag: str
    time: str

    def __new__(cls, url: str, size: int | None = None, tag: str = "", time: str = "") -> FSSpecUrl:
        self = super().__new__(cls, url)
        self.size, self.tag, self.time = size, tag, time
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FSSpecUrl, (str(self), self.size, self.tag, self.time)

    @classmethod
    def of(cls, url: str, info: dict[str, Any]) -> FSSpecUrl:
        """The name of what fsspec's `info` describes."""
        tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
        time = next((str(info[key]) for key in _TIMES if info.get(key)), "")
        return cls(url, info.get("size"), tag, time)


@functional_datapipe("list_files_by_fsspec")
class FSSpecFileLister(IterDataPipe[FSSpecUrl]):
    """Give the names of the files in a folder of any store that fsspec knows, sorted, with their protocol.

    Args:
        root: a URL such as `s3://bucket/folder` or a path, a list of them (protocols may differ), or a pipe of
            them; one that is a file gives itself.
        masks: a pattern or patterns of `fnmatch` for the whole name; "" gives all.
        recursive: also go into the folders below.
        strict: raise FileNotFoundError for a root under which nothing is found, instead of giving nothing.
        connection: what the file system takes (fsspec's storage options), plain data.

    Folders are not given, nor links to folders; FIFOs and devices are left out, with a warning. The names carry `size`
    and `tag` as listed. A resume lists again and is refused, with ChangedDataError, when names, sizes, tags or times of
    change differ. Raises ModuleNotFoundError without fsspec; while iterating, what the file system raises,
    FileNotFoundError for a folder that is not there.

    >>> import fsspec
    >>> fsspec.filesystem("memory").pipe({"/doc/b.txt": b"b", "/doc/a.txt": b"a"})
    >>> list(FSSpecFileLister("memory://doc", masks="*.txt"))
    ['memory:///doc/a.txt', 'memory:///doc/b.txt']
    """

    def __init__(
        self,
        root: Any,
        masks: str | Sequence[str] = "",
        *,
        recursive: bool = False,
        strict: bool = False,
        **connection: Any,
    ) -> None:
        _need_fsspec()
        self.root = root if isinstance(root, str | list | tuple) else as_pipe(root)
        self.masks = masks
        self.recursive = recursive
        self.strict = strict
        self.connection = connection

    def _make_run(self, context: Context, stage: str) -> Run:
        return (RootsRun if isinstance(self.root, IterDataPipe) else ListingRun)(self, context, stage)

    def roots(self) -> list[str]:
        """The constant roots, as a list."""
        return [self.root] if isinstance(self.root, str) else list(self.root)

    def names(self, root: str) -> Iterator[FSSpecUrl]:
        """The names under one root."""
        system, path = _system(root, self.connection)
        system.invalidate_cache()
        if system.isfile(path):
            found = [FSSpecUrl.of(root, system.info(path))]
        else:
            infos = system.find(path, detail=True).values() if self.recursive else system.ls(path, detail=True)
            files = [info for info in (_followed(system, info) for info in infos) if _is_file(info)]
            files.sort(key=lambda info: str(info["name"]))
            found = [FSSpecUrl.of(_spelled(info["name"], root), info) for info in files]
        masks = [self.masks] if isinstance(self.masks, str) else list(self.masks)
        if any(masks):
            found = [url for url in found if any(fnmatch.fnmatchcase(url, mask) for mask in masks)]
        if self.strict and not found:
            fitting = f" that fits {masks}" if any(masks) else ""
            raise FileNotFoundError(
                f"{root}: no file is listed here{fitting}. Check the name, or drop strict=True to read nothing."
            )
        yield from found

    def identity(self, name: FSSpecUrl) -> Identity:
        """What must not change about a name while a saved state refers to it."""
        return f"{name}\0{name.size}\0{name.tag}", "" if name.tag else name.time

    def _length(self, shard: Shard) -> int:
        raise no_length(self, "the store must be asked")


class _WholeFile(io.RawIOBase):
    """An fsspec file whose end is believed only where its size says so."""

    def __init__(self, file: Any, url: str, size: int | None, system: Any) -> None:
        self._file, self._url, self._size = file, url, size
        self._system = system  # A zip's file system closes the archive when it is dropped.

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        if not data:
            self._check()
        return len(data)

    def readall(self) -> bytes:
        data: bytes = self._file.read()
        self._check()
        return data

    def _check(self) -> None:
        if self._size is not None and (at := self._file.tell()) < self._size:
            raise TruncatedError(
                f"{self._url}: the store gave {at} of {self._size} bytes. Read it again; if the file was replaced "
                "meanwhile, list it again first"
            )

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@functional_datapipe("open_files_by_fsspec")
class FSSpecFileOpener(OpenerPipe):
    """Open each name through fsspec and give `(name, stream)`; the stream closes when it is dropped.

    Args:
        source_datapipe: a pipe or list of URLs or paths, of one protocol or several.
        mode: "r", "rt", "t" for text, "rb", "b" for bytes; archive readers need bytes.
        kwargs_for_open: what the file system's `open` takes, plain data; for text also `encoding`, `errors`, `newline`.
        on_error, max_errors: "skip" leaves out names that cannot be opened, up to so many; see the page on errors.
        connection: what the file system takes (fsspec's storage options), plain data.

    Raises ValueError for another mode, ModuleNotFoundError without fsspec; while iterating, TypeError for a name that
    is no str, ChangedDataError for a file whose size is not the listed one, and what the file system raises. Reading
    raises TruncatedError when a store gives less than it said.

    >>> import fsspec
    >>> fsspec.filesystem("memory").pipe({"/open/a.txt": b"hello"})
    >>> [(name, stream.read()) for name, stream in FSSpecFileOpener(["memory://open/a.txt"])]
    [('memory://open/a.txt', 'hello')]
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        mode: str = "r",
        *,
        kwargs_for_open: dict[str, Any] | None = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
        **connection: Any,
    ) -> None:
        _need_fsspec()
        checked_read_mode(mode)
        super().__init__(source_datapipe, on_error, max_errors)
        self.mode = mode
        self.kwargs_for_open = kwargs_for_open
        self.connection = connection

    def opened(self, url: Any) -> tuple[str, StreamWrapper]:
        """Open one file."""
        if not isinstance(url, str):
            raise TypeError(f"a file name must be str, not {type(url).__name__}")
        named = dict(self.kwargs_for_open or {})
        textual = {key: named.pop(key) for key in ("encoding", "errors", "newline") if key in named}
        system, path = _system(url, self.connection)
        if _is_local(system) and not named:
            return url, StreamWrapper(open_local(path, text="b" not in self.mode, **textual), name=url)
        file = system.open(path, "rb", **named)
        size = None if named.get("compression") else getattr(file, "size", None)
        listed = getattr(url, "size", None)
        if None not in (size, listed) and size != listed:
            file.close()
            raise ChangedDataError(f"{url}: it was listed with {listed} bytes and has {size} now; list it again")
        stream: Any = io.BufferedReader(_WholeFile(file, url, size, system), _BUFFER)
        if "b" not in self.mode:
            stream = io.TextIOWrapper(stream, **textual)
        return url, StreamWrapper(stream, name=url)


@functional_datapipe("save_by_fsspec")
class FSSpecSaver(SaverPipe):
    """Write each `(name, data)` through fsspec and give the name written.

    Args:
        source_datapipe: a pipe or list of pairs; data is text, bytes, or a stream of them, which is copied.
        mode: "w", "wt", "t" for text (UTF-8), "wb", "b" for bytes.
        filepath_fn: makes the URL from the name; without it the name is the URL.
        kwargs_for_open: what the file system's `open` takes for writing, plain data.
        on_error, max_errors: "skip" leaves out what cannot be saved, up to so many; see the page on errors.
        connection: what the file system takes (fsspec's storage options), plain data.

    Files are overwritten. A file appears when it is complete: local ones by a rename (their folders are made), others
    by a transaction of fsspec, as far as the file system keeps those (memory and object stores do). After a resume some
    files may be written again, with the same content.
    Raises ValueError for another mode, ModuleNotFoundError without fsspec; while iterating, TypeError for data of the
    wrong kind, ValueError for a name with ".." in it when there is no `filepath_fn`, and what the file system raises.

    >>> import fsspec
    >>> list(FSSpecSaver([("memory://save/a.txt", "hello")]))
    ['memory://save/a.txt']
    >>> fsspec.filesystem("memory").cat("/save/a.txt")
    b'hello'
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        mode: str = "w",
        filepath_fn: Callable[[Any], Any] | None = None,
        *,
        kwargs_for_open: dict[str, Any] | None = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
        **connection: Any,
    ) -> None:
        _need_fsspec()
        super().__init__(source_datapipe, mode, filepath_fn, on_error, max_errors)
        self.kwargs_for_open = kwargs_for_open
        self.connection = connection

    def saved(self, element: Any) -> str:
        """Write one element."""
        url, data = path_and_data(element, self.filepath_fn)
        mode = checked_mode(self.mode)
        system, path = _system(url, self.connection)
        if _is_local(system) and not self.kwargs_for_open:
            save_file(path, data, mode)
            return url
        if "b" not in mode:
            text = io.StringIO(newline="")
            write_data(text, data, text=True)
            data = text.getvalue().encode()
        with system.transaction, system.open(path, "wb", **(self.kwargs_for_open or {})) as file:
            write_data(file, data, text=False)
        return url
