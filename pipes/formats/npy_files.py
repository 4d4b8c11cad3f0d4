"""Numpy files as a stage: `.load_npy`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.errors import DataError
from pipes.formats.npy import NpyReader, read_npz
from pipes.formats.records import RecordsRun
from pipes.sources.seeking import seekable
from pipes.stages.wrapping import as_pipe
from pipes.utils import StreamWrapper

__all__ = ["NpyLoader"]


class _NpyRun(RecordsRun):
    fields: ClassVar[tuple[str, ...]] = ("start", "row")

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        pipe, start, row = self.pipe, at.get("start", 0), at.get("row", 0)
        while isinstance(stream, StreamWrapper):
            stream = stream.file_obj
        self.reader = NpyReader(stream, path, rows=pipe.rows, mmap=pipe.mmap, start=start, row=row)
        outputs = self._archive(path, stream) if path.lower().endswith(".npz") else iter(self.reader)
        return ((path, output) for output in outputs) if pipe.return_path else outputs

    def _archive(self, path: str, stream: Any) -> Iterator[Any]:
        if self.pipe.rows or self.pipe.mmap:
            raise DataError(f"{path}: an .npz archive is one element; load it without rows=True and mmap=True")
        if not self.reader.start:
            arrays = read_npz(seekable(stream, path), path)
            self.reader.start = 1
            yield arrays

    def where(self) -> tuple[Any, ...]:
        return self.reader.start, self.reader.row


@functional_datapipe("load_npy")
class NpyLoader(IterDataPipe[Any]):
    """Give the arrays of numpy's `.npy` and `.npz` files; nothing in them can run code.

    Args:
        datapipe: gives `(path, binary stream)`; the stream need not seek, but for `.npz` one that cannot is copied to a
            temporary file first (S3's are read by ranges).
        rows: give the entries of each array's first axis, one by one, instead of arrays. A resume goes to the row by
            its offset; in Fortran order it has to read the whole array.
        mmap: map local files, read-only, instead of reading them.
        return_path: give `(path, array)`.
        on_error, max_errors: "skip" leaves out the rest of bad files, up to so many; see the page on errors.

    An array has the file's shape, dtype (byte order included) and memory order, and may be written to unless mapped. An
    `.npz`, which the path's end tells, is one dict of arrays. A `.npy` to which arrays were appended gives each.

    Raises, while iterating, TruncatedError for an empty or cut file, DataError for one that is damaged, no numpy file,
    or holds objects (pickles): both name it. DataError also for rows of an array without axes, or rows or mapping of an
    `.npz`; TypeError for mapping what is no local file.

    >>> import io
    >>> import numpy as np
    >>> from pipes.iter import IterableWrapper
    >>> file = io.BytesIO(); np.save(file, np.arange(6).reshape(3, 2))
    >>> list(IterableWrapper([("a.npy", io.BytesIO(file.getvalue()))]).load_npy(rows=True))
    [array([0, 1]), array([2, 3]), array([4, 5])]
    """

    run_class = _NpyRun

    def __init__(
        self,
        datapipe: Any,
        *,
        rows: bool = False,
        mmap: bool = False,
        return_path: bool = False,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        self.datapipe = as_pipe(datapipe)
        self.rows = rows
        self.mmap = mmap
        self.return_path = return_path
        self.on_error = on_error
        self.max_errors = max_errors
