from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_contract import check_everywhere, check_stage, saved, start

from pipes import IterDataPipe
from pipes.errors import DataError, StateError, notes_of
from pipes.iter import FileLister, IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


def batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = list(range(first, first + rows))
    return pa.record_batch({"id": numbers, "text": [f"t{number}" for number in numbers]})


def batches(lengths: list[int]) -> IterableWrapper[pa.RecordBatch]:
    return IterableWrapper([batch(sum(lengths[:place]), rows) for place, rows in enumerate(lengths)])


def ids(pipe: IterDataPipe[Any]) -> IterDataPipe[list[int]]:
    return pipe.map(lambda batch: batch["id"].to_pylist())


def sized(number: int) -> pa.RecordBatch:
    return batch(10 * number, number * 7 % 5)


def test_contract() -> None:
    check_stage(
        lambda: ids(batches([3, 1, 0, 2, 7]).rebatch_rows(4)), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]
    )
    assert list(ids(batches([5, 1]).rebatch_rows(4, drop_last=True))) == [[0, 1, 2, 3]]
    assert list(batches([]).rebatch_rows(4)) == []
    check_everywhere(lambda source: ids(source.map(sized).rebatch_rows(3)))
    check_stage(
        lambda: batches([2, 1]).arrow_to_tensors(["id"]),
        [{"id": torch.tensor([0, 1])}, {"id": torch.tensor([2])}],
        epochs=1,
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12), st.data())
def test_rows_keep_their_order_and_a_resume_is_exact(lengths: list[int], size: int, data: st.DataObject) -> None:
    pipe = batches(lengths).rebatch_rows(size)
    run = start(pipe)
    given: list[pa.RecordBatch] = []
    stop = data.draw(st.integers(0, -(-sum(lengths) // size)))
    for _ in range(stop):
        given.append(next(iter(run)))
    again = start(pipe, saved(run))
    assert saved(again) == saved(run)
    rest = list(iter(run))
    assert list(iter(again)) == rest
    whole = given + rest
    assert [number for one in whole for number in one["id"].to_pylist()] == list(range(sum(lengths)))
    assert all(one.num_rows == size for one in whole[:-1])


def test_tables_and_dictionaries_are_joined() -> None:
    words = [["a", "b", "a"], ["c", "a"], ["d"]]
    tables = [pa.table({"word": pa.array(each).dictionary_encode()}) for each in words]
    joined = list(IterableWrapper([tables[0], *tables[1].to_batches(), tables[2]]).rebatch_rows(4))
    assert [type(one) for one in joined] == [pa.RecordBatch] * 2
    assert [one["word"].to_pylist() for one in joined] == [["a", "b", "a", "c"], ["a", "d"]]


def test_rows_of_one_input_are_not_copied() -> None:
    source = batch(0, 10)
    first, second = IterableWrapper([source], deepcopy=False).rebatch_rows(5)
    assert first["id"].buffers()[1].address == second["id"].buffers()[1].address == source["id"].buffers()[1].address


def test_batches_of_different_columns_are_refused() -> None:
    pipe = IterableWrapper([pa.record_batch({"a": [1]}), pa.record_batch({"a": ["x"]})]).rebatch_rows(2)
    with pytest.raises(DataError, match="cannot be joined") as caught:
        list(pipe)
    assert "in stage" in "".join(notes_of(caught.value))
    assert "cast their columns" in str(caught.value)


@pytest.mark.parametrize("stage", [lambda pipe: pipe.rebatch_rows(2), lambda pipe: pipe.arrow_to_tensors()])
def test_other_elements_are_refused(stage: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a pyarrow.RecordBatch or Table, got dict; load_parquet"):
        list(stage(IterableWrapper([{"a": 1}])))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        IterableWrapper([]).rebatch_rows(0)
    with pytest.raises(ValueError, match=r"did you mean \['x'\]"):
        IterableWrapper([]).arrow_to_tensors("x")


def test_a_damaged_or_foreign_state_is_refused() -> None:
    run = start(batches([3, 3]).rebatch_rows(2))
    next(iter(run))
    state = saved(run)
    (stage,) = [name for name, position in state.items() if "row" in position]
    assert (state[stage]["taken"], state[stage]["row"]) == (0, 2)
    for position in ({"row": -1}, {"taken": "1"}, {"taken": 1}):
        with pytest.raises(StateError, match="damaged"):
            start(batches([3, 3]).rebatch_rows(2), {**state, stage: {**state[stage], **position}})
    with pytest.raises(StateError, match="row 2 of a record batch that has 1"):
        next(iter(start(batches([1, 3]).rebatch_rows(2), state)))


def test_bad_columns_are_named_or_skipped() -> None:
    holes = pa.record_batch({"x": [1, None]})
    source = IterableWrapper([pa.record_batch({"x": [1, 2]}), holes, pa.record_batch({"x": [3]})])
    with pytest.raises(DataError, match="column 'x': 1 of 2 values are null") as caught:
        list(source.arrow_to_tensors())
    assert "RecordBatch of 2 rows" in "".join(notes_of(caught.value))
    assert [one["x"].tolist() for one in source.arrow_to_tensors(on_error="skip")] == [[1, 2], [3]]
    with pytest.raises(DataError, match="0 columns are called 'y'; there are x"):
        list(source.arrow_to_tensors(["y"]))
    twins = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    with pytest.raises(DataError, match="2 columns are called 'x'"):
        list(IterableWrapper([twins]).arrow_to_tensors())
    assert len(source.arrow_to_tensors()) == 3
    with pytest.raises(TypeError, match="no length"):
        len(source.arrow_to_tensors(on_error="skip"))


@pytest.mark.usefixtures("no_residue")
def test_row_groups_through_workers_and_a_resume(tmp_path: Path) -> None:
    for number in range(2):
        table = pa.table({"id": range(100 * number, 100 * number + 100)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=30)
    pipe = (
        FileLister(str(tmp_path), "*.parquet").list_parquet_row_groups().shuffle().sharding_filter()
        .load_parquet("batches", batch_size=16).filter(lambda batch: batch.num_rows > 4).rebatch_rows(20)
    )  # fmt: skip
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)) as loader:
        loader.seed(1)
        iterator = iter(loader)
        got = [next(iterator) for _ in range(4)]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        rest = list(iterator)
    assert {one.num_rows for one in got} == {20}
    with DataLoader2(pipe.arrow_to_tensors(), num_streams=2) as loader:
        loader.seed(1)
        tensors = [one["id"].tolist() for one in loader]
    assert tensors == [one["id"].to_pylist() for one in got + rest]
    with DataLoader2(pipe, num_streams=2) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest
