"""Preparing a table for training, by whole Arrow columns, against the same steps in pandas and in row-wise Python.

Sales of 2 million rows in 8 Parquet files: leave out returned ones, fill nulls, log(1 + price), ages into six buckets,
shops hashed into 1,000, the region of the city by a left join with 300 rows, then tensors. First from Parquet to
tensors, then the steps alone, from what each keeps in memory. Ours takes a row group at a time, pandas a file.
"pandas, tuned" is what an expert makes of it (categories read as such as ours does, `map` for the join, `searchsorted`
for `cut`); no ratio is promised against it. Row-wise Python, in whose favour no stage and no collate takes part, does
one file, and its time is scaled up. Each column of each contender is compared. By CPU time of all threads; wall time is
in the notes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from report import arguments, interleaved, median, row, show, spread

from pipes.formats.arrow import hash_categories
from pipes.iter import IterableWrapper

FILES = 8
AGES = (18, 25, 35, 50, 65)
BUCKETS = 1000
CITIES = 300
REGIONS = 7
TARGETS = {"pandas": 2.0, "pandas, tuned": None, "row-wise Python": 20.0}
Tensors = dict[str, torch.Tensor]
Work = Callable[[], Iterable[Tensors]]


def write_sales(folder: Path, rows: int) -> list[str]:
    draw = np.random.default_rng(0)
    paths = []
    for number in range(FILES):
        count = rows // FILES
        shop = np.char.add("shop ", draw.integers(0, 500, count).astype(str))
        columns = {
            "price": pa.array(draw.lognormal(3, 1, count), mask=draw.random(count) < 0.1),
            "age": pa.array(draw.integers(15, 80, count).astype(np.int16), mask=draw.random(count) < 0.05),
            "shop": pa.array(shop, mask=draw.random(count) < 0.02),
            "city": draw.integers(0, CITIES + 30, count),
            "returned": draw.random(count) < 0.1,
            "sold": draw.integers(0, 2, count).astype(np.float32),
        }
        paths.append(str(folder / f"{number}.parquet"))
        pq.write_table(pa.table(columns), paths[-1], row_group_size=max(1, count // 2))
    return paths


def cities() -> pa.RecordBatch:
    return pa.record_batch({"city": np.arange(CITIES), "region": np.random.default_rng(1).integers(0, REGIONS, CITIES)})


def prepare_columns(batch: pa.RecordBatch, cities: pa.RecordBatch) -> pa.RecordBatch:
    batch = batch.filter(pc.invert(batch["returned"]))
    places = pc.index_in(batch["city"], value_set=cities["city"])
    age = pc.fill_null(batch["age"], 0).to_numpy()
    bucket = np.zeros(len(age), np.int8)
    for bound in AGES:
        bucket += age >= bound
    prepared = {
        "price": np.log1p(pc.fill_null(batch["price"], 0.0).to_numpy()).astype(np.float32),
        "age": bucket.astype(np.int64),
        "shop": pc.fill_null(hash_categories(batch["shop"], BUCKETS), 0),
        "region": pc.fill_null(cities["region"].take(places), REGIONS),
        "sold": batch["sold"],
    }
    return pa.record_batch(prepared)


def prepare_frame(frame: Any, cities: Any) -> Tensors:
    import pandas as pd

    frame = frame[~frame["returned"]].merge(cities, on="city", how="left")
    codes, texts = pd.factorize(frame["shop"].fillna(""))
    hashes = np.array([zlib.crc32(text.encode()) % BUCKETS for text in texts], np.int64)
    bounds = [-np.inf, *AGES, np.inf]
    columns = {
        "price": np.log1p(frame["price"].fillna(0.0)).astype(np.float32).to_numpy(),
        "age": pd.cut(frame["age"].fillna(0), bounds, right=False, labels=False).to_numpy(copy=True),
        "shop": hashes[codes],
        "region": frame["region"].fillna(REGIONS).astype(np.int64).to_numpy(),
        "sold": frame["sold"].to_numpy(copy=True),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def prepare_frame_tuned(frame: Any, regions: Any) -> Tensors:
    frame = frame[~frame["returned"]]
    # The last one is for nulls, whose code is -1.
    hashes = np.array([*(zlib.crc32(text.encode()) % BUCKETS for text in frame["shop"].cat.categories), 0], np.int64)
    columns = {
        "price": np.log1p(frame["price"].to_numpy(na_value=0.0)).astype(np.float32),
        "age": np.searchsorted(AGES, frame["age"].to_numpy(na_value=0), side="right"),
        "shop": hashes[frame["shop"].cat.codes],
        "region": frame["city"].map(regions).to_numpy(np.int64, na_value=REGIONS),
        "sold": frame["sold"].to_numpy(copy=True),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def prepare_rows(rows: list[dict[str, Any]], regions: dict[int, int]) -> Tensors:
    columns: dict[str, list[Any]] = {"price": [], "age": [], "shop": [], "region": [], "sold": []}
    price, age, shop, region, sold = columns.values()
    for each in rows:
        if each["returned"]:
            continue
        price.append(math.log1p(0.0 if each["price"] is None else each["price"]))
        years = 0 if each["age"] is None else each["age"]
        age.append(sum(years >= bound for bound in AGES))
        shop.append(zlib.crc32((each["shop"] or "").encode()) % BUCKETS)
        region.append(regions.get(each["city"], REGIONS))
        sold.append(each["sold"])
    floats = {"price", "sold"}
    return {
        name: torch.tensor(column, dtype=torch.float32 if name in floats else torch.int64)
        for name, column in columns.items()
    }


def from_parquet(paths: list[str], few: list[str], batch_size: int) -> dict[str, Work]:
    import pandas as pd

    small = cities()
    frame = small.to_pandas()
    series, regions = frame.set_index("city")["region"], dict(zip(*map(pa.Array.to_pylist, small.columns), strict=True))

    def ours() -> Iterable[Tensors]:
        batches = IterableWrapper(paths).load_parquet("batches", batch_size=batch_size, dictionaries=["shop"])
        return batches.map(lambda batch: prepare_columns(batch, small)).arrow_to_tensors()

    def pandas() -> Iterator[Tensors]:
        for path in paths:
            yield prepare_frame(pd.read_parquet(path, use_threads=False), frame)

    def tuned() -> Iterator[Tensors]:
        for path in paths:
            frame = pd.read_parquet(path, use_threads=False, read_dictionary=["shop"])
            yield prepare_frame_tuned(frame, series)

    def row_wise() -> Iterator[Tensors]:
        for path in few:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(1024, use_threads=False):
                    yield prepare_rows(batch.to_pylist(), regions)

    return {"pipes": ours, "pandas": pandas, "pandas, tuned": tuned, "row-wise Python": row_wise}


def steps_alone(paths: list[str], few: list[str], batch_size: int) -> dict[str, Work]:
    import pandas as pd

    small = cities()
    frame = small.to_pandas()
    series, regions = frame.set_index("city")["region"], dict(zip(*map(pa.Array.to_pylist, small.columns), strict=True))
    source = IterableWrapper(paths).load_parquet("batches", batch_size=batch_size, dictionaries=["shop"])
    batches = list(source)
    frames = [pd.read_parquet(path) for path in paths]
    tuned = [pd.read_parquet(path, read_dictionary=["shop"]) for path in paths]
    chunks = [batch.to_pylist() for batch in IterableWrapper(few).load_parquet("batches")]

    def ours() -> Iterable[Tensors]:
        source = IterableWrapper(batches, deepcopy=False)
        return source.map(lambda batch: prepare_columns(batch, small)).arrow_to_tensors()

    return {
        "pipes": ours,
        "pandas": lambda: (prepare_frame(each, frame) for each in frames),
        "pandas, tuned": lambda: (prepare_frame_tuned(each, series) for each in tuned),
        "row-wise Python": lambda: (prepare_rows(chunk, regions) for chunk in chunks),
    }


def whole(batches: Iterable[Tensors]) -> Tensors:
    parts = list(batches)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compare(work: dict[str, Work]) -> int:
    """Check that all give the same columns, as far as each goes; return how many rows were compared."""
    expected = whole(work["pipes"]())
    for name, contender in work.items():
        found = whole(contender())
        rows = len(found["sold"])
        for column, values in expected.items():
            # math.log1p and numpy's may differ in the last bit of a float64.
            assert found[column].dtype == values.dtype, (name, column)
            np.testing.assert_allclose(found[column], values[:rows], rtol=1e-6 if column == "price" else 0)
            assert rows == len(values) or name == "row-wise Python", name
    return len(expected["sold"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the table (2,000,000)")
    parser.add_argument("--batch-size", type=int, default=131_072, help="rows of our record batches (131,072)")


def drain(work: Work) -> None:
    for _ in work():
        pass


def main() -> None:
    options = arguments(__doc__ or "", rounds=5, extend=add_options)
    torch.set_num_threads(1)
    # Arrays of pandas are read-only; nobody writes to them here, and a copy would slow the peer.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_sales(Path(folder), options.rows)
        few = paths[:1]
        for case, make in {"Parquet to tensors": from_parquet, "steps alone": steps_alone}.items():
            try:
                work = make(paths, few, options.batch_size)
            except ModuleNotFoundError as error:
                raise SystemExit(f"{error}: pip install pandas") from error
            compared = compare(work)
            runs = {name: lambda each=each: drain(each) for name, each in work.items()}
            wall = interleaved(runs, 1)
            cpu = interleaved(runs, options.rounds, clock=time.process_time)
            scale = {"row-wise Python": FILES}
            rate = {name: options.rows / scale.get(name, 1) / median(values) / 1e6 for name, values in cpu.items()}
            rows += [
                row("columns", case, peer, rate["pipes"], rate[peer], "M rows per CPU s",
                    more_is_better=True, target=target)
                for peer, target in TARGETS.items()
            ]  # fmt: skip
            told = [
                f"{name} {options.rows / scale.get(name, 1) / median(values):,.0f} rows/s {spread(cpu[name])}"
                for name, values in wall.items()
            ]
            notes.append(f"{case}, by wall time, and spread of the CPU time: {', '.join(told)}")
    notes.append(
        f"{compared:,} rows were kept, equal for all; row-wise Python did 1 file of {FILES}, its time is scaled"
    )
    show(rows, title="Tables to tensors", as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
