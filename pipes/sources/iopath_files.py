"""Files by iopath's path managers: `.list_files_by_iopath`, `.open_files_by_iopath`, `.save_by_iopath`.

For code that has path handlers of its own; new code is better off with fsspec. iopath tells neither sizes nor versions
of files, so these stages cannot notice a file that changed.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from pipes.context import Context
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, no_length
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.run import Run
from pipes.sources.files import checked_read_mode
from pipes.sources.listing import Identity, ListingRun, OpenerPipe, RootsRun
from pipes.sources.saving import SaverPipe, checked_mode, path_and_data, save_file, write_data
from pipes.stages.wrapping import as_pipe
from pipes.utils import StreamWrapper

__all__ = ["IoPathFileLister", "IoPathFileOpener", "IoPathSaver"]


def _manager(pathmgr: Any, handler: Any) -> Any:
    """The path manager given, or a new one for local files and http; it is told of `handler`."""
    if pathmgr is None:
        try:
            from iopath.common.file_io import HTTPURLHandler, PathManager
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError('iopath pipes need iopath: pip install "pipes[iopath]"', name="iopath") from error
        pathmgr = PathManager()
        pathmgr.register_handler(HTTPURLHandler())
    if handler is not None:
        pathmgr.register_handler(handler, allow_override=False)
    return pathmgr


@functional_datapipe("list_files_by_iopath")
class IoPathFileLister(IterDataPipe[str]):
    """Give the paths of the files in a folder, sorted, as a path manager of iopath lists it.

    Args:
        root: a path, a list of them, or a pipe of them; one that is a file gives itself.
        masks: a pattern or patterns of `fnmatch` for the file's own name; "" gives all.
        pathmgr: a `PathManager`, or what has its methods; by default a new one, for local files and http.
        handler: a `PathHandler` that is registered with it.

    Folders are not given. A resume lists again and is refused, with ChangedDataError, when the names differ.
    Raises ModuleNotFoundError without iopath; while iterating, what the handler raises.

    >>> import pathlib, tempfile
    >>> class Manager:  # in place of iopath.common.file_io.PathManager()
    ...     ls, isfile = staticmethod(os.listdir), staticmethod(os.path.isfile)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("b.txt", "a.txt", "c.csv"): _ = pathlib.Path(folder, name).write_text(name)
    ...     [os.path.basename(path) for path in IoPathFileLister(folder, "*.txt", pathmgr=Manager())]
    ['a.txt', 'b.txt']
    """

    def __init__(self, root: Any, masks: str | Sequence[str] = "", *, pathmgr: Any = None, handler: Any = None) -> None:
        self.root = root if isinstance(root, str | list | tuple) else as_pipe(root)
        self.masks = masks
        self.pathmgr = pathmgr
        self.handler = handler
        self._paths = _manager(pathmgr, handler)

    def _make_run(self, context: Context, stage: str) -> Run:
        return (RootsRun if isinstance(self.root, IterDataPipe) else ListingRun)(self, context, stage)

    def roots(self) -> list[str]:
        """The constant roots, as a list."""
        return [self.root] if isinstance(self.root, str) else list(self.root)

    def names(self, root: str) -> Iterator[str]:
        """The names under one root."""
        if self._paths.isfile(root):
            yield root
            return
        masks = [self.masks] if isinstance(self.masks, str) else list(self.masks)
        for name in sorted(self._paths.ls(root)):
            path = os.path.join(root, name)
            wanted = not any(masks) or any(fnmatch.fnmatchcase(os.path.basename(name), mask) for mask in masks)
            if wanted and self._paths.isfile(path):
                yield path

    def identity(self, name: str) -> Identity:
        """What must not change about a name while a saved state refers to it."""
        return name, ""

    def _length(self, shard: Shard) -> int:
        raise no_length(self, "the store must be asked")


@functional_datapipe("open_files_by_iopath")
class IoPathFileOpener(OpenerPipe):
    """Open each path by a path manager of iopath and give `(path, stream)`; the stream closes when it is dropped.

    Args:
        source_datapipe: a pipe or list of paths.
        mode: "r", "rt", "t" for text, "rb", "b" for bytes; archive readers need bytes.
        pathmgr, handler: as in `IoPathFileLister`.
        on_error, max_errors: "skip" leaves out names that cannot be opened, up to so many; see the page on errors.

    Raises ValueError for another mode, ModuleNotFoundError without iopath; while iterating, TypeError for a name that
    is no str, and what the handler raises.

    >>> import io
    >>> class Manager:  # in place of iopath.common.file_io.PathManager()
    ...     def open(self, path, mode): return io.StringIO(f"content of {path}")
    >>> [stream.read() for _, stream in IoPathFileOpener(["a://b"], pathmgr=Manager())]
    ['content of a://b']
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        mode: str = "r",
        pathmgr: Any = None,
        handler: Any = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        checked_read_mode(mode)
        super().__init__(source_datapipe, on_error, max_errors)
        self.mode = mode
        self.pathmgr = pathmgr
        self.handler = handler
        self._paths = _manager(pathmgr, handler)

    def opened(self, path: Any) -> tuple[str, StreamWrapper]:
        """Open one file."""
        if not isinstance(path, str):
            raise TypeError(f"a file name must be str, not {type(path).__name__}")
        return path, StreamWrapper(self._paths.open(path, "rb" if "b" in self.mode else "r"), name=path)


@functional_datapipe("save_by_iopath")
class IoPathSaver(SaverPipe):
    """Write each `(name, data)` by a path manager of iopath and give the path written.

    Args:
        source_datapipe: a pipe or list of pairs; data is text, bytes, or a stream of them, which is read before it is
            written.
        mode: "w", "wt", "t" for text (UTF-8), "wb", "b" for bytes.
        filepath_fn: makes the path from the name; without it the name is the path.
        pathmgr, handler: as in `IoPathFileLister`.
        on_error, max_errors: "skip" leaves out what cannot be saved, up to so many; see the page on errors.

    Files are overwritten, where torchdata passed over one that was there, even half of one. Paths without "://" are
    local files and appear whole, by a rename; others as the handler writes them, and are removed when that fails.
    Raises ValueError for another mode, ModuleNotFoundError without iopath; while iterating, TypeError for data of the
    wrong kind, ValueError for a name with ".." in it when there is no `filepath_fn`, and what the handler raises.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (path,) = IoPathSaver([(f"{folder}/a/b.txt", "hello")], pathmgr=object())
    ...     pathlib.Path(path).read_text()
    'hello'
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        mode: str = "w",
        filepath_fn: Callable[[Any], Any] | None = None,
        *,
        pathmgr: Any = None,
        handler: Any = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        super().__init__(source_datapipe, mode, filepath_fn, on_error, max_errors)
        self.pathmgr = pathmgr
        self.handler = handler
        self._paths = _manager(pathmgr, handler)

    def saved(self, element: Any) -> str:
        """Write one element."""
        path, data = path_and_data(element, self.filepath_fn)
        mode = checked_mode(self.mode)
        if "://" not in path:
            save_file(path, data, mode)
            return path
        if hasattr(data, "read"):
            data = data.read()  # a stream that fails must not leave half a file
        if "://" in (folder := os.path.dirname(path)):
            with suppress(NotImplementedError):
                self._paths.mkdirs(folder)
        try:
            with self._paths.open(path, mode) as file:
                write_data(file, data, text="b" not in mode)
        except BaseException:
            with suppress(Exception):
                self._paths.rm(path)
            raise
        return path
