"""Stages over Arrow record batches: `.rebatch_rows`, `.arrow_to_tensors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import DataError, StateError
from pipes.formats.parquet import need_pyarrow
from pipes.run import Run
from pipes.stages.mapping import AppliedPipe, AppliedRun
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, damaged

__all__ = ["ArrowToTensors", "RowRebatcher"]


class _RebatcherRun(Run):
    """Holds, between two outputs, at most what is left of the last input.

    So the anchor stands before that input, `taken` inputs from the start, of which `row` rows were given.
    """

    stateful = True
    anchored = True
    count_fields = ("taken", "row")

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] != position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.taken: int = 0 if position is None else position["taken"]
        self.row: int = 0 if position is None else position["row"]
        self.anchors = Anchors(self.upstream, 0)
        self.anchors.note(self.taken)

    def elements(self) -> Iterator[Any]:
        size, at, passed = self.pipe.batch_size, self.row, self.taken
        held: list[Any] = []
        missing = size
        for element in self.inputs[0]:
            rows = self._rows(element, at)
            while rows - at >= missing:
                held.append(element.slice(at, missing))
                at += missing
                self.taken, self.row = (passed, at) if at < rows else (passed + 1, 0)
                if at == rows:
                    self.anchors.note(passed + 1)
                yield self._joined(held)
                held, missing = [], size
            if at < rows:
                held.append(element.slice(at))
                missing -= rows - at
            at, passed = 0, passed + 1
            self.anchors.note(passed)
        if held and not self.pipe.drop_last:
            self.taken, self.row = passed, 0
            yield self._joined(held)

    def _rows(self, element: Any, given: int) -> int:
        try:
            rows: int = _checked(element).num_rows
            if given > rows:
                raise StateError(
                    f"the state stands at row {given} of a record batch that has {rows}; the data changed: resume with "
                    "the data the state was made from, or start afresh"
                )
        except BaseException as error:
            self.note(error)
            raise
        return rows

    def _joined(self, held: list[Any]) -> Any:
        import pyarrow as pa

        if len(held) == 1 and isinstance(held[0], pa.RecordBatch):
            return held[0]
        tables = [pa.Table.from_batches([one]) if isinstance(one, pa.RecordBatch) else one for one in held]
        try:
            whole = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
            (batch,) = whole.to_batches()
        except (pa.ArrowInvalid, ValueError) as error:
            told = DataError(
                f"record batches cannot be joined: {str(error).rstrip('.')}; select and cast their columns alike first"
            )
            self.note(told)
            raise told from error
        return batch

    def capture(self) -> Capture:
        return self.taken, self.row, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, row, entries = captured
        return {"taken": taken, "row": row, "anchor": self.anchors.describe(entries, taken)}


@functional_datapipe("rebatch_rows")
class RowRebatcher(IterDataPipe[Any]):
    """Give pyarrow.RecordBatches of exactly `batch_size` rows, from record batches or tables of any length.

    The last one is shorter, or dropped. Rows keep their order; what lies in one input is given without a copy. The
    position is (input, row). Raises ValueError for a batch_size below 1, ModuleNotFoundError without pyarrow; while
    iterating, TypeError for other elements, DataError when those of one batch have different columns.

    >>> import pyarrow
    >>> from pipes.iter import IterableWrapper
    >>> batches = [pyarrow.record_batch({"id": ids}) for ids in ([1, 2, 3], [4], [5, 6])]
    >>> [batch["id"].to_pylist() for batch in IterableWrapper(batches).rebatch_rows(4)]
    [[1, 2, 3, 4], [5, 6]]
    """

    run_class = _RebatcherRun
    _levels = 2
    forms_batches = True

    def __init__(self, datapipe: IterDataPipe[Any], batch_size: int, drop_last: bool = False) -> None:
        need_pyarrow()
        batch_size = whole("batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a number of rows, at least 1, is needed")
        self.datapipe = as_pipe(datapipe)
        self.batch_size = batch_size
        self.drop_last = drop_last


class _TensorsRun(AppliedRun):
    def subject(self, element: Any) -> Any:
        # Its repr is all of its values.
        return f"{type(element).__name__} of {element.num_rows} rows" if hasattr(element, "num_rows") else element


@functional_datapipe("arrow_to_tensors")
class ArrowToTensors(AppliedPipe[dict[str, Any]]):
    """Give each pyarrow.RecordBatch (or Table) as a dict of tensors, one for each of `columns` (None: all).

    Numbers, times and fixed-size lists of them share Arrow's memory; `pipes.formats.arrow.as_tensor` says what is
    copied and what has no tensor. Raises ModuleNotFoundError without pyarrow; while iterating, TypeError for other
    elements, DataError for a column that is not there, stands twice, has nulls or no tensor. With `on_error="skip"`
    such batches are left out, up to `max_errors`.

    >>> import pyarrow
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([pyarrow.record_batch({"x": [0.5, 1.5], "id": ["a", "b"]})]).arrow_to_tensors(["x"]))
    [{'x': tensor([0.5000, 1.5000], dtype=torch.float64)}]
    """

    run_class = _TensorsRun

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        columns: Sequence[str] | None = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        need_pyarrow()
        if isinstance(columns, str):
            raise ValueError(f"columns={columns!r}: a list of names is needed; did you mean [{columns!r}]?")
        super().__init__(datapipe, on_error, max_errors)
        self.columns = None if columns is None else list(columns)

    def function(self) -> Callable[[Any], Any]:
        """Return the function of one record batch."""
        from pipes.formats.arrow import as_tensor

        def convert(batch: Any) -> dict[str, Any]:
            names = _checked(batch).schema.names
            tensors = {}
            for name in names if self.columns is None else self.columns:
                if names.count(name) != 1:
                    raise DataError(f"{names.count(name)} columns are called {name!r}; there are {', '.join(names)}")
                try:
                    tensors[name] = as_tensor(batch.column(name))
                except DataError as error:
                    raise DataError(f"column {name!r}: {error}") from None
            return tensors

        return convert


def _checked(element: Any) -> Any:
    import pyarrow as pa

    if not isinstance(element, pa.RecordBatch | pa.Table):
        raise TypeError(
            f"expected a pyarrow.RecordBatch or Table, got {type(element).__name__}; load_parquet('batches') gives them"
        )
    return element
