"""Local files: `.list_files` and `.open_files`."""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from pipes.arguments import whole
from pipes.context import Context
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, no_length
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.run import Run
from pipes.sources.listing import Identity, ListingRun, OpenerPipe, RootsRun
from pipes.sources.local_stream import kind_of, open_local
from pipes.stages.wrapping import as_pipe
from pipes.utils import StreamWrapper

__all__ = ["FileLister", "FileOpener", "checked_read_mode", "list_folder"]

_MODES = ("r", "rt", "t", "rb", "b")


def checked_read_mode(mode: str) -> None:
    """Raise ValueError for a mode that does not read.

    >>> checked_read_mode("rb")
    """
    if mode not in _MODES:
        raise ValueError(f"Invalid mode {mode!r}; a file is opened with one of {', '.join(_MODES)}")


def list_folder(
    root: str | os.PathLike[str],
    masks: str | Sequence[str] = "",
    *,
    recursive: bool = False,
    abspath: bool = False,
    non_deterministic: bool = False,
) -> Iterator[str]:
    """The files below `root` whose base name fits one of `masks` (as in `fnmatch`; "" fits all).

    The files of a folder come first, sorted, then its folders, sorted; links to folders are not followed. A `root` that
    is a file gives itself. FIFOs, sockets and devices are left out, with a warning.

    Raises:
        OSError: `root`, or a folder below it, cannot be read; a warning says which.
    """
    root = os.fspath(root)
    patterns = [masks] if isinstance(masks, str) else list(masks)
    if os.path.isfile(root):
        if _fits(os.path.basename(root), patterns):
            yield os.path.abspath(root) if abspath else root
        return
    for folder, folders, files in os.walk(root, onerror=_refuse):
        if not non_deterministic:
            files.sort()
            folders.sort()
        place = os.path.abspath(folder) if abspath else folder
        for name in files:
            if _fits(name, patterns) and _is_regular(path := os.path.join(place, name)):
                yield path
        if not recursive:
            return


def _fits(name: str, patterns: list[str]) -> bool:
    return not any(patterns) or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_regular(path: str) -> bool:
    try:
        kind = kind_of(os.stat(path).st_mode)
    except OSError:
        return True  # A link that leads nowhere: opening it tells what is wrong.
    if kind:
        warnings.warn(f"{path!r} is left out: it is {kind}, no file", stacklevel=2)
    return not kind


def _refuse(error: OSError) -> None:
    what = f"cannot list {error.filename!r}: {error.strerror}; check its name and permissions, or leave it out"
    warnings.warn(what, stacklevel=2)
    raise error


@functional_datapipe("list_files")
class FileLister(IterDataPipe[str]):
    """Give the names of the files below a folder, several folders, or each folder that a pipe gives.

    Args:
        root: a path, a list of paths, or a pipe of paths; one that is a file gives itself.
        masks: a pattern or patterns of `fnmatch` for the base name; "" gives all.
        recursive: also go into the folders below (not into links to folders).
        abspath: give absolute names.
        non_deterministic: in the order of the file system, instead of sorted.
        length: what `len()` says; -1 is unknown.
        strict: raise FileNotFoundError for a root under which nothing is found, instead of giving nothing.

    The names are listed once an epoch, when the first is wanted; a DataLoader2 lists once for all its epochs, workers
    and ranks, at its first `iter`. A resume lists again and is refused, with ChangedDataError, when names, sizes or
    times of change differ. Raises OSError, while iterating, for a folder that cannot be read.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("b.tar", "a.tar", "c.txt"):
    ...         Path(folder, name).touch()
    ...     [Path(name).name for name in FileLister(folder, "*.tar")]
    ['a.tar', 'b.tar']
    """

    def __init__(
        self,
        root: Any = ".",
        masks: str | Sequence[str] = "",
        *,
        recursive: bool = False,
        abspath: bool = False,
        non_deterministic: bool = False,
        length: int = -1,
        strict: bool = False,
    ) -> None:
        self.root = os.fspath(root) if isinstance(root, os.PathLike) else root
        if not isinstance(root, str | os.PathLike | list | tuple):
            self.root = as_pipe(root)
        self.masks = masks
        self.recursive = recursive
        self.abspath = abspath
        self.non_deterministic = non_deterministic
        self.length = whole("length", length)
        self.strict = strict

    def _make_run(self, context: Context, stage: str) -> Run:
        return (RootsRun if isinstance(self.root, IterDataPipe) else ListingRun)(self, context, stage)

    def roots(self) -> list[str]:
        """The constant roots, as a list."""
        return [self.root] if isinstance(self.root, str) else [os.fspath(root) for root in self.root]

    def names(self, root: Any) -> Iterator[str]:
        """The names below one root."""
        found = False
        for name in list_folder(
            root,
            self.masks,
            recursive=self.recursive,
            abspath=self.abspath,
            non_deterministic=self.non_deterministic,
        ):
            found = True
            yield name
        if self.strict and not found:
            fitting = f" that fits {self.masks!r}" if any(self.masks) else ""
            raise FileNotFoundError(
                f"{os.fspath(root)!r} holds no file{fitting}. Check the folder, or drop strict=True to read nothing."
            )

    def identity(self, name: str) -> Identity:
        """What must not change about a name while a saved state refers to it."""
        try:
            status = os.stat(name)
        except OSError:
            return name, ""
        return f"{name}\0{status.st_size}", str(status.st_mtime_ns)

    def _length(self, shard: Shard) -> int:
        if self.length < 0:
            raise no_length(self, "pass length= if you know how many files there are")
        return self.length


@functional_datapipe("open_files")
class FileOpener(OpenerPipe):
    """Open each file name and give `(name, stream)`; the stream closes when it is dropped.

    Args:
        datapipe: a pipe or list of names.
        mode: "r", "rt", "t" for text, "rb", "b" for bytes; archive readers need bytes.
        encoding: of text.
        length: what `len()` says; -1 is the input's length.
        on_error, max_errors: "skip" leaves out names that cannot be opened, up to so many; see the page on errors.

    Raises ValueError for another mode, or an encoding with bytes; while iterating, TypeError for a name that is no str,
    OSError for a file that cannot be opened, for FIFOs, sockets and devices. Reading a stream raises ChangedDataError
    at its end when the file was cut, continued or rewritten since it was opened: never short data.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("hello")
    ...     [stream.read() for _, stream in FileLister(folder).open_files()]
    ['hello']
    """

    def __init__(
        self,
        datapipe: IterDataPipe[str] | Sequence[str],
        mode: str = "r",
        encoding: str | None = None,
        length: int = -1,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        checked_read_mode(mode)
        if "b" in mode and encoding is not None:
            raise ValueError(f"binary mode {mode!r} takes no encoding, got {encoding!r}")
        super().__init__(datapipe, on_error, max_errors)
        self.mode = mode
        self.encoding = encoding
        self.length = whole("length", length)

    def opened(self, name: Any) -> tuple[str, StreamWrapper]:
        """Open one file."""
        if not isinstance(name, str):
            raise TypeError(f"a file name must be str, not {type(name).__name__}")
        return name, StreamWrapper(open_local(name, text="b" not in self.mode, encoding=self.encoding), name=name)

    def _length(self, shard: Shard) -> int:
        if self.length >= 0:
            return self.length
        return super()._length(shard)
