"""Prepare a table by whole columns, as pandas or TorchArrow would, from Parquet to tensors, and train on it.

Workers share the row groups; each reads record batches, filters them, fills nulls, takes logarithms, sorts into
buckets, hashes categories and looks cities up in a small table: one call for some thousand rows each, never Python for
a row. Batches of exactly `--batch` rows become tensors of Arrow's own memory and go to torch's accelerator, if any.

Exit status 1 says that a row was lost or came twice, that a batch was not as it should be, or that nothing was learnt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import nn

from pipes import DataLoader2, IterDataPipe
from pipes.formats.arrow import hash_categories
from pipes.iter import FileLister
from pipes.loader2 import MultiProcessingReadingService

DEVICE = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")
AGES = (18, 25, 35, 50, 65)
BUCKETS = 1000
REGIONS = 7
EPOCHS = 2
Batch = dict[str, torch.Tensor]


def write_sales(folder: Path, rows: int, files: int = 4) -> pa.RecordBatch:
    """Write Parquet in which a buyer's age, the shop and the city's region sway `sold`; return the cities."""
    draw = np.random.default_rng(0)
    region = draw.integers(0, REGIONS, 300)
    for number in range(files):
        count = rows // files
        age, shop, city = draw.integers(15, 80, count), draw.integers(0, 200, count), draw.integers(0, 330, count)
        score = (age > 35) + (shop % 3 == 0) + (city < 300) * (region[city % 300] > 3) + draw.normal(0, 0.3, count)
        columns = {
            "row": np.arange(number * count, (number + 1) * count),
            "price": pa.array(draw.lognormal(3, 1, count), mask=draw.random(count) < 0.1),
            "age": pa.array(age.astype(np.int16), mask=draw.random(count) < 0.05),
            "shop": pa.array(np.char.add("shop ", shop.astype(str)), mask=draw.random(count) < 0.02),
            "city": city,
            "returned": draw.random(count) < 0.1,
            "sold": (score > 1.5).astype(np.float32),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=max(1, count // 8))
    return pa.record_batch({"city": np.arange(300), "region": region.astype(np.int64)})


def prepare(batch: pa.RecordBatch, cities: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns that the model takes, for the rows to keep."""
    batch = batch.filter(pc.invert(batch["returned"]))
    # A left join that keeps the order of rows, which Table.join does not promise.
    places = pc.index_in(batch["city"], value_set=cities["city"])
    age = pc.fill_null(batch["age"], 0).to_numpy()
    bucket = np.zeros(len(age), np.int8)
    for bound in AGES:  # for a few bounds quicker than a search
        bucket += age >= bound
    prepared = {
        "row": batch["row"],
        "price": np.log1p(pc.fill_null(batch["price"], 0.0).to_numpy()).astype(np.float32),
        "age": bucket.astype(np.int64),
        "shop": pc.fill_null(hash_categories(batch["shop"], BUCKETS), 0),
        "region": pc.fill_null(cities["region"].take(places), REGIONS),
        "sold": batch["sold"],
    }
    return pa.record_batch(prepared)


def pipe_of(folder: Path, cities: pa.RecordBatch, batch: int) -> IterDataPipe[Batch]:
    row_groups = FileLister(str(folder), "*.parquet").list_parquet_row_groups()
    return (
        row_groups.shuffle()
        .sharding_filter()  # every stream has row groups of its own
        .load_parquet("batches", batch_size=65_536, dictionaries=["shop"])
        .map(partial(prepare, cities=cities))
        .rebatch_rows(batch)  # the filter left any number of rows
        .arrow_to_tensors()
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"age": len(AGES) + 1, "shop": BUCKETS, "region": REGIONS + 1}
        self.tables = nn.ModuleDict({name: nn.Embedding(size, 8) for name, size in sizes.items()})
        self.layers = nn.Sequential(nn.Linear(25, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        found = [table(batch[name]) for name, table in self.tables.items()]
        return self.layers(torch.cat([batch["price"][:, None], *found], 1))[:, 0]


def train(loader: DataLoader2[Batch], size: int, expected: set[int]) -> bool:
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses: list[torch.Tensor] = []
    right = True
    for _ in range(EPOCHS):
        rows: list[int] = []
        for batch in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["sold"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            right &= len(batch["row"]) <= size and batch["price"].dtype is torch.float32
            rows += batch["row"].tolist()
        right &= set(rows) == expected and len(rows) == len(expected)
    few = max(1, len(losses) // 10)
    first, last = torch.stack(losses[:few]).mean().item(), torch.stack(losses[-few:]).mean().item()
    print(f"{len(losses)} steps on {DEVICE}, loss {first:.2f} to {last:.2f}, rows as they should be: {right}")
    return right and last < 0.7 * first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small, and the workers have the other cores
    with tempfile.TemporaryDirectory() as name:
        cities = write_sales(Path(name), options.rows)
        kept = pq.read_table(name, columns=["row"], filters=~pc.field("returned"))["row"]
        pipe = pipe_of(Path(name), cities, options.batch)
        with DataLoader2(pipe, reading_service=MultiProcessingReadingService(options.workers), device=DEVICE) as loader:
            loader.seed(1)
            started = time.perf_counter()
            fine = train(loader, options.batch, set(kept.to_pylist()))
            rate = EPOCHS * len(kept) / (time.perf_counter() - started)
    print(f"{rate:,.0f} rows a second, start of the workers and training included")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
