"""Parquet as a stage: every form and source, row groups as units, resume, memory, damage."""

from __future__ import annotations

import datetime
import importlib.util
import io
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_server import FaultServer, Step
from stage_contract import check_stage, saved, start

from pipes.errors import (
    ChangedDataError,
    DataError,
    StateError,
    StoreConnectionError,
    StoreNotFoundError,
    TruncatedError,
)
from pipes.formats.parquet import ParquetReader
from pipes.formats.parquet_files import RowGroup
from pipes.iter import FileOpener, IterableWrapper, ParquetLoader, ParquetRowGroupLister
from pipes.sources.s3_options import S3Options


def table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {"id": list(numbers), "text": [f"t{n}" if n % 3 else None for n in numbers], "x": [n / 2 for n in numbers]}
    )


def packed(content: pa.Table, row_group_size: int = 4, **settings: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(content, file, row_group_size=row_group_size, **settings)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.parquet").write_bytes(packed(table(10, 10 * number)))
    return tmp_path


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


def on(server: FaultServer) -> S3Options:
    return S3Options(endpoint_url=server.url, unsigned=True, attempts=3, backoff=0.01)


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.parquet"))]


def test_rows_keep_every_promise_of_a_stage(folder: Path) -> None:
    expected = [row for number in range(3) for row in table(10, 10 * number).to_pylist()]
    check_stage(lambda: IterableWrapper(files(folder)).load_parquet(batch_size=3), expected)


def test_units_keep_every_promise_of_a_stage(folder: Path) -> None:
    check_stage(
        lambda: IterableWrapper(files(folder)).list_parquet_row_groups().sharding_filter().load_parquet(columns=["id"]),
        [{"id": number} for number in range(30)],
    )


@pytest.mark.parametrize("form", ["columns", "batches", "tables"])
def test_other_forms_resume_at_every_output(folder: Path, form: Any) -> None:
    def make() -> Any:
        pipe = IterableWrapper(files(folder)).load_parquet(form, columns=["id", "text"], batch_size=3)
        return pipe.map(lambda part: repr(part if isinstance(part, dict) else part.to_pydict()))

    check_stage(make)
    sizes = [len(part["id"]) for part in IterableWrapper(files(folder)).load_parquet(form, batch_size=3)]
    assert sizes == ([4, 4, 2] if form == "tables" else [3, 1, 3, 1, 2]) * 3


def test_row_groups_of_one_file_are_split_over_streams(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(packed(table(12)))
    pipe = IterableWrapper(files(tmp_path)).list_parquet_row_groups().sharding_filter().load_parquet()
    shares = [[row["id"] for row in start(pipe, stream=stream, streams=2)] for stream in range(2)]
    assert shares == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]


def test_every_source_gives_the_same(folder: Path, server: FaultServer) -> None:
    server.reset({path.name: path.read_bytes() for path in folder.iterdir()})
    names = [f"s3://bkt/{number}.parquet" for number in range(3)]
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe({f"/tables/{name}": body for name, body in server.objects.items()})
    options, streams = on(server), [(name, Unseekable(body)) for name, body in server.objects.items()]
    expected = [row for number in range(3) for row in table(10, 10 * number).to_pylist()]
    by_name = sorted(server.objects)
    for pipe in (
        ParquetLoader(IterableWrapper([folder / name for name in by_name])),
        FileOpener(files(folder), "rb").load_parquet(),
        IterableWrapper(names).load_parquet(options=options),
        IterableWrapper(names).load_files_by_s3(options=options).load_parquet(),
        IterableWrapper(names).list_parquet_row_groups(options=options).load_parquet(options=options),
        IterableWrapper([f"memory://tables/{name}" for name in by_name]).load_parquet(storage_options={}),
        IterableWrapper(sorted(streams), deepcopy=False).load_parquet(),
    ):
        assert list(pipe) == expected


class Unseekable(io.BytesIO):
    def seekable(self) -> bool:
        return False


def test_of_an_object_only_the_footer_and_the_wanted_columns_are_read(server: FaultServer) -> None:
    big = pa.table({"id": range(50_000), "fat": [str(n) * 20 for n in range(50_000)]})
    body = packed(big, 10_000, compression="none")
    server.reset({"a": body})
    pipe = IterableWrapper(["s3://bkt/a"]).load_parquet("batches", columns=["id"], batch_size=5000, options=on(server))
    run = start(pipe)
    elements = iter(run)
    for _ in range(3):
        next(elements)
    state = saved(run)
    server.requests.clear()
    rest = pa.Table.from_batches(list(start(pipe, state)))
    assert rest["id"].to_pylist() == list(range(15_000, 50_000))
    # HEAD, the footer, and one range for each of the four row groups that are left.
    spans = [value[6:].split("-") for r in server.requests for name, value in r.headers.items() if name == "Range"]
    asked = sum(int(last or len(body) - 1) + 1 - int(first) for first, last in spans)
    assert len(server.requests) == 6
    assert asked < len(body) / 4
    assert run.table()


def test_what_lies_between_the_wanted_columns_is_not_read(server: FaultServer) -> None:
    numbers = np.random.default_rng(0).bytes(2 << 20)
    fat = [numbers[at : at + 1024] for at in range(0, len(numbers), 1024)]
    content = pa.table({"a": range(2048), "b": range(2048), "fat": fat, "c": range(2048), "d": range(2048)})
    body = packed(content, 1024, compression="none")
    server.reset({"a": body})
    pipe = IterableWrapper(["s3://bkt/a"]).load_parquet("tables", columns=["d", "b", "c", "a"], options=on(server))
    assert pa.concat_tables(pipe).equals(content.select(["d", "b", "c", "a"]))
    spans = [
        value[6:].split("-") for r in server.requests for name, value in r.headers.items() if name.lower() == "range"
    ]
    sizes = [int(last or len(body) - 1) + 1 - int(first) for first, last in spans]
    # HEAD, the footer, what lies before the first fat column, and between the two; of their 2 MiB only by the block.
    assert len(server.requests) == 4
    assert len(sizes) == 3
    assert max(sizes) <= 256 << 10


def test_a_range_that_breaks_is_resumed_and_a_store_that_fails_is_named(server: FaultServer) -> None:
    server.reset({"a": packed(table(10))})
    server.script("a", Step(), Step(cut=100), Step(status=503))
    pipe = IterableWrapper(["s3://bkt/a"]).load_parquet(options=on(server))
    assert list(pipe) == table(10).to_pylist()
    server.script("a", Step(), Step(status=503, forever=True))
    with pytest.raises(StoreConnectionError, match=r"s3://bkt/a.*gave up after 3 attempts"):
        list(pipe)
    with pytest.raises(StoreNotFoundError, match="s3://bkt/none"):
        list(IterableWrapper(["s3://bkt/none"]).load_parquet(options=on(server)))


def test_an_object_that_changes_is_refused(server: FaultServer, tmp_path: Path) -> None:
    server.reset({"a": packed(table(10))})
    pipe = IterableWrapper(["s3://bkt/a"]).load_parquet(options=on(server))
    run = start(pipe)
    next(iter(run))
    state = saved(run)
    server.reset({"a": packed(table(10, 5))})
    with pytest.raises(ChangedDataError, match="s3://bkt/a"):
        list(start(pipe, state))
    path = tmp_path / "b.parquet"
    path.write_bytes(packed(table(10)))
    units = list(ParquetRowGroupLister([str(path)]))
    path.write_bytes(packed(table(10), 5))
    with pytest.raises(ChangedDataError, match=r"b.parquet: row group 0 was listed with 4 rows and has 5 now"):
        list(IterableWrapper(units).load_parquet())
    with pytest.raises(StateError, match=r"b.parquet: row group 7 is wanted, and there are 2"):
        list(IterableWrapper([RowGroup(str(path), 7, 4)]).load_parquet())


MORNING = datetime.datetime(2026, 1, 2, 3)
NESTED = pa.table(
    {
        "dictionary": pa.array(["a", None, "a"]).dictionary_encode(),
        "list": pa.array([[1, None], [], None], pa.list_(pa.int16())),
        "struct": pa.array([{"a": 1, "b": {"c": "x"}}, None, {"a": None, "b": None}]),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "when": pa.array([MORNING, None, datetime.datetime(1969, 1, 1)], pa.timestamp("us", "UTC")),
        "day": pa.array([datetime.date(2026, 1, 2)] * 3),
        "money": pa.array(["1.10", None, "-2.30"]).cast(pa.decimal128(5, 2)),
        "bytes": pa.array([b"\0", b"", None]),
        "flag": pa.array([True, False, True]),
        "half": pa.array(np.array([1, 2, 3], np.float16)),
        "ns": pa.array([1, 2, 3], pa.timestamp("ns")),
        "nothing": pa.nulls(3),
    }
)  # fmt: skip


def test_nested_types_dictionaries_nulls_and_times() -> None:
    stream = io.BytesIO(packed(NESTED))

    def load(form: Any, *columns: str) -> list[Any]:
        return list(IterableWrapper([("n", stream)], deepcopy=False).load_parquet(form, columns=columns or None))

    (whole,) = load("tables")
    assert whole.equals(NESTED)
    easy = [name for name in NESTED.column_names if name != "ns"]
    assert load("rows", *easy) == NESTED.select(easy).to_pylist()
    (columns,) = load("columns")
    assert [columns[name].dtype for name in ("flag", "half", "ns")] == ["bool", "float16", "datetime64[ns]"]
    assert columns["flag"].flags.writeable
    assert columns["ns"].astype(int).tolist() == [1, 2, 3]
    assert {name: columns[name] for name in easy if name not in ("flag", "half")} == {
        name: NESTED[name].to_pylist() for name in easy if name not in ("flag", "half")
    }
    assert load("rows", "struct.b.c", "flag")[0] == {"struct": {"b": {"c": "x"}}, "flag": True}
    if importlib.util.find_spec("pandas"):
        assert [row["ns"].value for row in load("rows", "ns")] == [1, 2, 3]
    else:
        with pytest.raises(DataError, match=r"n: a value has no Python form .*form='batches'"):
            load("rows", "ns")


def test_columns_that_are_not_there_or_there_twice() -> None:
    body = packed(pa.table([[1], [2]], names=["a", "a"]))
    with pytest.raises(DataError, match=r"f: no column 'b', 'c'; it has a, a"):
        list(IterableWrapper([("f", io.BytesIO(body))]).load_parquet(columns=["a", "b", "c"]))
    for form in ("rows", "columns"):
        with pytest.raises(DataError, match=r"f: several columns are called \['a'\]"):
            list(IterableWrapper([("f", io.BytesIO(body))]).load_parquet(form))  # type: ignore[arg-type]


def test_files_without_rows(tmp_path: Path) -> None:
    for content in (packed(table(0)), packed(table(0).slice(0, 0), write_statistics=False)):
        for form in ("rows", "columns", "batches", "tables"):
            assert list(IterableWrapper([("f", io.BytesIO(content))]).load_parquet(form)) == []  # type: ignore[arg-type]


def damaged_files() -> dict[str, tuple[bytes, type[Exception], str]]:
    body = packed(table(4000), 1000, write_page_checksum=True)
    flipped = bytearray(body)
    flipped[len(body) // 3] ^= 0xFF
    return {
        "empty": (b"", TruncatedError, "z.parquet: empty file, expected Parquet"),
        "cut": (body[:-100], TruncatedError, f"z.parquet: cut at byte {len(body) - 100}"),
        "short": (body[:6], TruncatedError, "z.parquet: cut at byte 6"),
        "other": (b"id,text\n" * 10, DataError, "z.parquet: no Parquet file, or damaged"),
        "flipped": (bytes(flipped), DataError, r"z.parquet: row group \d of 4 is damaged"),
    }


@pytest.mark.parametrize("case", damaged_files())
@pytest.mark.parametrize("store", ["local", "s3"])
def test_damaged_files_are_named(case: str, store: str, server: FaultServer, tmp_path: Path) -> None:
    body, error, message = damaged_files()[case]
    server.reset({"z.parquet": body})
    (tmp_path / "z.parquet").write_bytes(body)
    name = "s3://bkt/z.parquet" if store == "s3" else str(tmp_path / "z.parquet")
    options = on(server)
    with pytest.raises(error, match=message) as caught:
        list(IterableWrapper([name]).load_parquet(options=options))
    assert store == "local" or "s3://bkt/z.parquet" in str(caught.value)
    good = tmp_path / "good.parquet"
    good.write_bytes(packed(table(4)))
    skipping = IterableWrapper([name, str(good)]).load_parquet(options=options, on_error="skip", max_errors=1)
    assert [row["id"] for row in skipping][-4:] == [0, 1, 2, 3]
    assert not [r for r in server.requests if r.headers.get("Range", "").startswith("bytes=0--")]


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_days_beyond_those_of_python_are_named(form: Any) -> None:
    table = pa.table({"day": pa.array([2**31 - 1], pa.int32()).cast(pa.date32())})
    stream = io.BytesIO()
    pq.write_table(table, stream)
    with pytest.raises(DataError, match=r"a\.parquet.*: a value has no Python form .*form='batches'"):
        list(IterableWrapper([("a.parquet", stream)]).load_parquet(form))


def test_every_byte_that_is_cut_off_is_missed() -> None:
    body = packed(table(5))
    for size in range(len(body)):
        with pytest.raises(DataError, match="f: "):
            list(IterableWrapper([("f", io.BytesIO(body[:size]))]).load_parquet())


@pytest.mark.parametrize(
    ("form", "local"), [("rows", True), ("batches", True), ("batches", False), ("columns", False), ("tables", False)]
)
def test_memory_stays_below_two_row_groups(form: Any, local: bool, tmp_path: Path) -> None:
    rows, groups = 50_000, 2
    numbers = np.random.default_rng(0).integers(0, 1 << 60, (10, rows * groups))
    path = tmp_path / "big.parquet"
    pq.write_table(
        pa.table({f"c{n}": row for n, row in enumerate(numbers)}), path, row_group_size=rows, use_dictionary=False
    )
    group = pq.read_metadata(path).row_group(0).total_byte_size
    stream = (io.BufferedReader if local else Remote)(io.FileIO(path))
    before = pa.total_allocated_bytes()
    peak = 0
    tracemalloc.start()
    with stream:
        pipe = IterableWrapper([("big", stream)], deepcopy=False).load_parquet(form, batch_size=2000)
        outputs = iter(pipe)
        while next(outputs, None) is not None:
            peak = max(peak, pa.total_allocated_bytes() - before + tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
    tracemalloc.stop()
    assert 0 < peak < (3 if form == "tables" else 2) * group, (peak, group)


class Remote(io.BufferedReader):
    def fileno(self) -> int:
        raise OSError("none")


def test_settings_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: ParquetLoader(["a"], "frames"), "form='frames' is none of 'rows'"),  # type: ignore[arg-type]
        (lambda: ParquetLoader(["a"], batch_size=0), "batch_size=0"),
        (lambda: ParquetLoader(["a"], columns="id"), r"did you mean \['id'\]"),
        (lambda: IterableWrapper(["a"]).load_parquet_as_df(device="cuda"), "torcharrow's settings"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="names of Parquet files are needed, not int"):
        list(IterableWrapper([3]).list_parquet_row_groups())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for make in (lambda: ParquetLoader(["a"]), lambda: ParquetRowGroupLister(["a"]), lambda: ParquetReader(None, "a")):
        with pytest.raises(ModuleNotFoundError, match=r'pip install "pipes\[arrow\]"'):
            make()


def test_columns_of_texts_are_given_as_dictionaries(folder: Path) -> None:
    path = IterableWrapper([str(folder / "0.parquet")])
    batches = list(path.load_parquet("batches", dictionaries=["text"], batch_size=3))
    assert {str(batch["text"].type.value_type) for batch in batches} == {"string"}
    texts = [text for batch in batches for text in batch["text"].to_pylist()]
    assert texts == table(10)["text"].to_pylist()
    assert list(path.load_parquet(dictionaries=["text"])) == table(10).to_pylist()
    with pytest.raises(DataError, match=r"one of \['y'\] is no column"):
        list(path.load_parquet("batches", dictionaries=["y"]))
    with pytest.raises(DataError, match="column 'id' is int64, and only texts"):
        list(path.load_parquet("batches", dictionaries=["id"]))
    with pytest.raises(ValueError, match="dictionaries='text'"):
        path.load_parquet("batches", dictionaries="text")
