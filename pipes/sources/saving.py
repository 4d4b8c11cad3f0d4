"""Savers: `.save_to_disk`, and what the savers of other stores share.

A saver takes `(meta, data)`, writes `data` to the path that `filepath_fn(meta)` gives (without a function: to `meta`)
and gives that path on. A file appears under its name when it is complete; a process that is killed leaves at most a
temporary file `.pipes-*.tmp` beside it. A resume writes again what a buffer behind the saver held: the same file once
more, and never one that was written and given away for good.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import PurePath
from typing import IO, Any

from pipes.datapipe import functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.stages.mapping import AppliedPipe, AppliedRun

__all__ = ["Saver", "SaverPipe", "SavingRun", "checked_mode", "path_and_data", "save_file", "write_data"]


def checked_mode(mode: str) -> str:
    """Return "w" or "wb" for any of torchdata's ways to say it.

    >>> checked_mode("b"), checked_mode("wt")
    ('wb', 'w')

    Raises ValueError for a mode that does not write a whole file.
    """
    if mode not in ("w", "wt", "t", "wb", "b"):
        raise ValueError(f"Invalid mode {mode!r}; a file is saved with one of w, wt, t, wb, b")
    return "wb" if "b" in mode else "w"


def path_and_data(element: Any, filepath_fn: Callable[[Any], Any] | None) -> tuple[str, Any]:
    """Return the path to write to, and the data, of one `(meta, data)`.

    >>> path_and_data(("a", b"x"), lambda meta: f"out/{meta}.bin")
    ('out/a.bin', b'x')

    Raises TypeError for an element that is no pair or a path that is no text; ValueError for a path that names no file,
    or one with ".." in it that no function of the user gave: names inside archives come from strangers.
    """
    if not isinstance(element, tuple | list) or len(element) != 2:
        raise TypeError(f"a saver takes pairs (name, data), not {type(element).__name__}")
    meta, data = element
    path = meta if filepath_fn is None else filepath_fn(meta)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path must be str, not {type(path).__name__}; give filepath_fn= to make one from the name")
    path = os.fspath(path)
    if not path or path.endswith("/"):
        raise ValueError(f"{path!r} names no file to save to; give filepath_fn= to make a path from the name")
    if filepath_fn is None and ".." in PurePath(path).parts:
        raise ValueError(f"{path!r} leads out of its folder with '..'; give filepath_fn= to say where it belongs")
    return path, data


def write_data(file: IO[Any], data: Any, *, text: bool) -> None:
    """Write text, bytes, or what is left of a stream, to an open file.

    >>> import io
    >>> file = io.BytesIO()
    >>> write_data(file, b"ab", text=False); write_data(file, io.BytesIO(b"cd"), text=False); file.getvalue()
    b'abcd'

    Raises TypeError for data of the other kind.
    """
    if hasattr(data, "read"):
        shutil.copyfileobj(data, file, 1 << 20)
        return
    if not isinstance(data, str if text else bytes | bytearray | memoryview):
        raise TypeError(
            f"data to save must be {'text' if text else 'bytes'} (or a stream of it), not {type(data).__name__}; "
            f"the saver's mode is {'w' if text else 'wb'!r}"
        )
    file.write(data)


def save_file(path: str, data: Any, mode: str) -> None:
    """Write a local file, "w" or "wb", that appears whole or not at all; its folders are made.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(f"{folder}/a/b.txt", "hello", "w")
    ...     pathlib.Path(folder, "a/b.txt").read_text()
    'hello'
    """
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".pipes-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            write_data(file, data, text="b" not in mode)
        os.replace(temporary, path)
    except BaseException as error:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.add_note(f"while saving {path!r}")
        raise


class SavingRun(AppliedRun):
    """Saves each element (`saved` of its pipe); a restore writes again only what is still wanted."""

    def function(self) -> Callable[..., Any]:
        return self.pipe.saved  # type: ignore[no-any-return]

    def subject(self, element: Any) -> Any:
        return element[0] if isinstance(element, tuple | list) and element else element


class SaverPipe(AppliedPipe[str]):
    """Base of savers, which give `saved`: each `(name, data)` is written, and the name written comes out."""

    run_class = SavingRun
    _calls = ("filepath_fn",)

    def __init__(
        self,
        datapipe: Any,
        mode: str,
        filepath_fn: Callable[[Any], Any] | None,
        on_error: OnError,
        max_errors: MaxErrors,
    ) -> None:
        checked_mode(mode)
        super().__init__(datapipe, on_error, max_errors)
        self.mode = mode
        self.filepath_fn = filepath_fn


@functional_datapipe("save_to_disk")
class Saver(SaverPipe):
    """Write each `(name, data)` to a local file and give its path.

    Args:
        source_datapipe: a pipe or list of pairs; data is text, bytes, or a stream of them, which is copied.
        mode: "w", "wt", "t" for text (UTF-8), "wb", "b" for bytes.
        filepath_fn: makes the path from the name; without it the name is the path.
        on_error, max_errors: "skip" leaves out what cannot be saved, up to so many; see the page on errors.

    Folders are made, files are overwritten. A file appears whole, by a rename, or not at all, and works in worker
    processes. After a resume some files may be written again, with the same content.
    Raises ValueError for another mode; while iterating, TypeError for data of the wrong kind, ValueError for a name
    with ".." in it when there is no `filepath_fn`, OSError when the file cannot be written.

    >>> import pathlib, tempfile
    >>> from pipes.iter import IterableWrapper
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saver = IterableWrapper([("a.txt", "hello")]).save_to_disk(filepath_fn=lambda name: f"{folder}/x/{name}")
    ...     [pathlib.Path(path).read_text() for path in saver]
    ['hello']
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        mode: str = "w",
        filepath_fn: Callable[[Any], Any] | None = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        super().__init__(source_datapipe, mode, filepath_fn, on_error, max_errors)

    def saved(self, element: Any) -> str:
        """Write one element."""
        path, data = path_and_data(element, self.filepath_fn)
        save_file(path, data, checked_mode(self.mode))
        return path
