"""Reading formats from local files in the page cache, against the usual reader of each, with equal results.

Tar: 5,000 samples of 10 KB and a label as dicts of bytes, against webdataset and `tarfile` in stream mode. CSV against
the `csv` module, JSON lines against `json`, Parquet against pyarrow's own iteration. By CPU time, which a busy machine
disturbs least; wall time stands in the notes. Then memory: what RSS grows by, in processes of their own.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from report import Row, arguments, interleaved, median, row, show, spread

from pipes.formats.webdataset import group_samples
from pipes.iter import FileOpener, IterableWrapper

SAMPLES, SIZE = 5_000, 10_240
ROWS = 100_000
MEMBERS = 200_000
GROUP = 250_000


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def write_files(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    fields = (("jpg", lambda number: draw.randbytes(SIZE)), ("cls", lambda number: b"%d" % (number % 10)))
    write_shard(
        folder / "a.tar",
        ((f"train/{number:06d}.{field}", make(number)) for number in range(SAMPLES) for field, make in fields),
    )
    rows = [(number, draw.random(), f"text {draw.random()}", number % 7) for number in range(ROWS)]
    with open(folder / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    names = ("id", "x", "text", "label")
    (folder / "a.jsonl").write_text("".join(json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in rows))
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=20_000)


def tar_through_pipes(path: str) -> Iterator[Any]:
    for sample in FileOpener([path], "rb").load_from_tar().webdataset():
        yield {field: value if field == "__key__" else value.read() for field, value in sample.items()}


def tar_through_webdataset(path: str) -> Iterator[Any]:
    from webdataset import WebDataset

    return iter(WebDataset(path, shardshuffle=False))


def tar_through_tarfile(path: str) -> Iterator[Any]:
    def members() -> Iterator[tuple[str, bytes]]:
        with open(path, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in archive:
                if member.isreg():
                    opened = archive.extractfile(member)
                    assert opened is not None
                    yield member.name, opened.read()

    return iter(group_samples(members()))


def csv_through_csv(path: str) -> Iterator[Any]:
    with open(path, newline="", encoding="utf-8") as file:
        yield from csv.reader(file)


def csv_through_dict_reader(path: str) -> Iterator[Any]:
    with open(path, newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def jsonl_through_json(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)


def parquet_batches(path: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from file.iter_batches(1024, use_threads=False)


def parquet_rows(path: str) -> Iterator[Any]:
    for batch in parquet_batches(path):
        yield from batch.to_pylist()


Reader = Callable[[str], Iterable[Any]]
# Case, file, ours, the peers with the ratio that is wanted.
CASES: list[tuple[str, str, Reader, dict[str, tuple[Reader, float]]]] = [
    (
        f"tar, {SAMPLES:,} x 10 KB + label",
        "a.tar",
        tar_through_pipes,
        {"webdataset": (tar_through_webdataset, 5.0), "tarfile r|*": (tar_through_tarfile, 4.0)},
    ),
    ("CSV rows", "a.csv", lambda path: FileOpener([path], "rb").parse_csv(), {"csv.reader": (csv_through_csv, 1.0)}),
    (
        "CSV dicts",
        "a.csv",
        lambda path: FileOpener([path], "rb").parse_csv_as_dict(),
        {"csv.DictReader": (csv_through_dict_reader, 1.0)},
    ),
    ("JSON lines", "a.jsonl", lambda path: FileOpener([path], "rb").parse_jsonl(), {"json": (jsonl_through_json, 1.0)}),
    (
        "Parquet batches",
        "a.parquet",
        lambda path: IterableWrapper([path]).load_parquet("batches"),
        {"pyarrow": (parquet_batches, 1.0)},
    ),
    (
        "Parquet rows",
        "a.parquet",
        lambda path: IterableWrapper([path]).load_parquet(),
        {"pyarrow to_pylist": (parquet_rows, 1.0)},
    ),
]


def count(elements: Iterable[Any]) -> int:
    return sum(1 for _ in elements)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(elements: Iterator[Any], every: int) -> int:
    """By how many bytes the process grows at most, over what it is after the first element."""
    next(elements)
    start = peak = resident()
    for number, _ in enumerate(elements):
        if number % every == 0:
            peak = max(peak, resident())
    return peak - start


def write_tiny(path: Path) -> None:
    write_shard(path, ((f"{number}.txt", b"0123456789") for number in range(MEMBERS)))


def write_big(path: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([(f"x{n}", pa.float64()) for n in range(10)]), use_dictionary=False) as file:
        for _ in range(8):
            file.write_table(pa.table({f"x{n}": draw.random(GROUP) for n in range(10)}), row_group_size=GROUP)
    pq.write_table(pa.table({"x": [0.0]}), path.with_suffix(".tiny"))


def grow_tar(path: str) -> float:
    return growth(iter(FileOpener([path], "rb").load_from_tar()), 1000) / 2**20


def grow_parquet(path: str) -> float:
    import pyarrow.parquet as pq

    group = pq.read_metadata(path).row_group(0).total_byte_size
    # What is imported at the first batch is not what is measured.
    assert len(list(IterableWrapper([f"{path}.tiny"]).load_parquet("columns"))) == 1
    start = peak = resident()
    for _ in IterableWrapper([path]).load_parquet("columns"):
        peak = max(peak, resident())
    return float((peak - start) / group)


GROWTH: dict[str, tuple[Callable[[Path], None], Callable[[str], float]]] = {
    "tar": (write_tiny, grow_tar),
    "parquet": (write_big, grow_parquet),
}


def measured(what: str) -> float:
    """Write a file here, and read it in a process of its own, where no memory of the writing can be used again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, what)
        GROWTH[what][0](path)
        command = [sys.executable, __file__, "--grow", what, str(path)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    if sys.argv[1:2] == ["--grow"]:
        print(GROWTH[sys.argv[2]][1](sys.argv[3]))
        return
    options = arguments(__doc__ or "", rounds=9)
    rows: list[Row] = []
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for case, name, ours, peers in CASES:
            path = str(Path(folder, name))
            readers = {"pipes": ours, **{peer: reader for peer, (reader, _) in peers.items()}}
            counts = {}
            for reader in list(readers):
                try:
                    counts[reader] = count(readers[reader](path))
                except ImportError as error:
                    del readers[reader]
                    notes.append(f"{case}: without {reader}: {error}")
            assert len(set(counts.values())) <= 2, counts  # a header is a row or names
            work = {reader: lambda read=read, path=path: count(read(path)) for reader, read in readers.items()}
            wall = interleaved(work, 3)
            cpu = interleaved(work, options.rounds, clock=time.process_time)
            rate = {reader: counts[reader] / median(values) for reader, values in cpu.items()}
            rows += [
                row("formats", case, peer, rate["pipes"], rate[peer], "per CPU s", more_is_better=True, target=target)
                for peer, (_, target) in peers.items()
                if peer in rate
            ]
            told = [f"{reader} {counts[reader] / median(wall[reader]):,.0f}/s {spread(cpu[reader])}" for reader in wall]
            notes.append(f"{case}, by wall time, and spread of the CPU time: {', '.join(told)}")
    notes.append(f"RSS growth over {MEMBERS:,} tar members of 10 bytes: {measured('tar'):.1f} MiB (at most 30)")
    notes.append(f"RSS growth over Parquet as columns: {measured('parquet'):.2f} row groups of 20 MB (below 3)")
    show(rows, title="Formats from local files", as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
