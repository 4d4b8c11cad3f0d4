"""One graph, at least, for every public stage, source and format reader; each element carries `PAYLOAD`.

Graphs end in plain data that JSON holds. The key begins with the catalogue and the class: "iter.Batcher".
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from path_manager import FolderManager
from s3_objects import put_objects
from tars import make_tar
from torch.utils.data import RandomSampler
from user_pipes import Plain, Stateless, Summing

from pipes import IterDataPipe
from pipes.formats.decode import decode
from pipes.iter import (
    FileLister,
    FileOpener,
    FSSpecFileLister,
    IoPathFileLister,
    IterableWrapper,
    MapToIterConverter,
    S3FileLister,
    SampleMultiplexer,
    Sampler,
)
from pipes.map import SequenceWrapper

PAYLOAD = "payload-7c1e"


@dataclass(frozen=True)
class Places:
    """Where the cases find their files and objects."""

    folder: str
    s3: str

    @classmethod
    def make(cls, folder: Path, s3: str) -> Places:
        """Write all that the cases read."""
        for number in range(3):
            lines = [f"{PAYLOAD}{number}{line}" for line in range(4)]
            (folder / f"{number}.txt").write_text("\n".join(lines))
            for suffix, pack in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
                (folder / f"{number}.txt.{suffix}").write_bytes(pack("\n".join(lines).encode()))
            (folder / f"{number}.csv").write_text("a,b\n" + "".join(f"{line},x\n" for line in lines))
            (folder / f"{number}.jsonl").write_text("".join(json.dumps({"a": line}) + "\n" for line in lines))
            (folder / f"{number}.json").write_text(json.dumps({"a": lines}))
            np.save(folder / f"{number}.npy", lines)
            np.savez(folder / f"{number}.npz", a=lines)
            table = pa.table({"a": lines, "b": range(4)})
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=3)
            packed = make_tar([(f"{number}{place}.{end}", line.encode()) for place, line in enumerate(lines)
                               for end in ("txt", "a.txt")])  # fmt: skip
            with zipfile.ZipFile(folder / f"{number}.zip", "w", compression=zipfile.ZIP_DEFLATED) as archive:
                for place, line in enumerate(lines):
                    archive.writestr(f"{place}.txt", line)
            (folder / f"{number}.tar").write_bytes(gzip.compress(packed) if number == 1 else packed)
        put_objects(s3, "cases", {f"in/{number}.txt": f"{PAYLOAD}{number}".encode() for number in range(5)})
        return cls(str(folder), s3)

    def files(self, mask: str, mode: str = "rb") -> IterDataPipe[Any]:
        return FileLister(self.folder, mask).open_files(mode)


#: Classes that make no stage of their own, but give a list of others.
SPLITTERS = ("Forker", "Demultiplexer", "RoundRobinDemultiplexer", "UnZipper", "RandomSplitter")

Case = Callable[[Places], IterDataPipe[Any]]


def texts(count: int = 9) -> IterDataPipe[str]:
    return IterableWrapper([f"{PAYLOAD}{number}" for number in range(count)])


def keyed(count: int = 9) -> SequenceWrapper[str]:
    return SequenceWrapper([f"{PAYLOAD}{number}" for number in range(count)])


def draw(element: Any, rng: np.random.Generator) -> tuple[Any, float]:
    return element, rng.random()


def read(element: tuple[str, Any]) -> tuple[str, str]:
    path, stream = element
    data = stream.read()
    return path.rpartition("/")[2], data if isinstance(data, str) else data.decode()


def samples(at: Places) -> IterDataPipe[Any]:
    return at.files("*.tar").load_from_tar().webdataset().map(decode)  # type: ignore[no-any-return]


def _forked(at: Places) -> IterDataPipe[Any]:
    left, right = texts().shuffle(4).fork(2)
    return left.shuffle(3).zip(right)


def _demuxed(at: Places) -> IterDataPipe[Any]:
    even, odd = texts(12).shuffle(4).demux(2, lambda text: int(text[-1]) % 2)
    return even.shuffle(2).concat(odd)


def _dealt(at: Places) -> IterDataPipe[Any]:
    first, second, third = texts(11).shuffle(4).round_robin_demux(3)
    return first.shuffle(2).concat(second).zip_longest(third)


def _unzipped(at: Places) -> IterDataPipe[Any]:
    numbers, names = texts().shuffle(4).enumerate().map(lambda pair: (*pair, 0)).unzip(3, columns_to_skip=[2])
    return numbers.shuffle(3).zip(names)


CASES: dict[str, Case] = {
    "iter.ArrowToTensors": lambda at: (
        FileLister(at.folder, "*.parquet").load_parquet("batches").arrow_to_tensors(["b"])
        .map(lambda tensors: [tensors["b"].tolist(), PAYLOAD])
    ),
    "iter.BatchMapper": lambda at: (
        texts(20).shuffle(4).map_batches(lambda batch: [text + str(len(batch)) for text in batch[1:]], 3)
    ),
    "iter.Batcher": lambda at: texts(11).shuffle(4).batch(3),
    "iter.BucketBatcher": lambda at: texts(11).bucketbatch(2, False, 2, 2, sorted),
    "iter.BucketBatcher of a shuffle": lambda at: texts(11).bucketbatch(2, True, 2, use_in_batch_shuffle=False),
    "iter.CSVDictParser": lambda at: at.files("*.csv").parse_csv_as_dict(),
    "iter.CSVParser": lambda at: at.files("*.csv").parse_csv(),
    "iter.Collator": lambda at: texts().map(lambda text: (text, 1.5)).batch(2).collate(),
    "iter.Concater": lambda at: texts(4).concat(texts(0), texts(5).shuffle(3)),
    "iter.Cycler": lambda at: texts(4).shuffle(3).cycle(3),
    "iter.Bz2FileLoader": lambda at: at.files("*.bz2").load_from_bz2().readlines(decode=True),
    "iter.XzFileLoader": lambda at: at.files("*.xz").load_from_xz().readlines(decode=True),
    "iter.Decompressor": lambda at: at.files("*.gz").decompress().readlines(decode=True),
    "iter.Decompressor of archives": lambda at: at.files("*.tar").shuffle(2).decompress().load_from_tar().map(read),
    "iter.Demultiplexer": _demuxed,
    "iter.DeviceMover": lambda at: texts().to_device("cpu"),
    "iter.Dropper": lambda at: texts().shuffle(3).enumerate().drop(0),
    "iter.Enumerator": lambda at: texts().enumerate(3),
    "iter.Extractor": lambda at: at.files("*.gz").shuffle(2).extract("gzip").map(read),
    "iter.FSSpecFileLister": lambda at: (
        FSSpecFileLister(f"file://{at.folder}", "*.csv").map(lambda url: url + PAYLOAD)
    ),
    "iter.FSSpecFileLister of a pipe": lambda at: (
        IterableWrapper([at.folder, f"file://{at.folder}"]).list_files_by_fsspec("*.csv").map(lambda url: url + PAYLOAD)
    ),
    "iter.FSSpecFileOpener": lambda at: (
        FSSpecFileLister(at.folder, "*.txt").shuffle(2).open_files_by_fsspec().map(read)
    ),
    "iter.FSSpecSaver": lambda at: (
        texts().map(lambda text: (f"file://{at.folder}/fsspec/{text}", text)).shuffle(3).save_by_fsspec()
    ),
    "iter.FileLister": lambda at: FileLister(at.folder, "*.csv").map(lambda path: path + PAYLOAD),
    "iter.FileLister of a pipe": lambda at: (
        IterableWrapper([at.folder, at.folder]).list_files("*.csv").map(lambda path: path + PAYLOAD)
    ),
    "iter.FileOpener": lambda at: FileOpener([f"{at.folder}/{n}.txt" for n in range(3)], "r").map(read),
    "iter.Filter": lambda at: texts(12).filter(lambda text: int(text[-1]) % 3 > 0),
    "iter.FlatMapper": lambda at: texts(6).flatmap(lambda text: [text] * (int(text[-1]) % 3)),
    "iter.Flattener": lambda at: texts().shuffle(3).enumerate().map(lambda pair: {"pair": pair}).flatten(),
    "iter.Forker": _forked,
    "iter.Grouper": lambda at: texts(12).shuffle(4).groupby(lambda text: int(text[-1]) % 3, group_size=3, buffer_size=5,
                                                            guaranteed_group_size=2),
    "iter.HashChecker": lambda at: (
        texts().map(lambda text: (text, io.BytesIO(text.encode()))).shuffle(3)
        .check_hash({f"{PAYLOAD}{n}": hashlib.md5(f"{PAYLOAD}{n}".encode()).hexdigest() for n in range(9)}, "md5")
        .map(read)
    ),
    "iter.Header": lambda at: texts().shuffle(3).header(5),
    "iter.HttpReader": lambda at: (
        IterableWrapper([f"{at.s3}/cases/in/{n}.txt?Signature=x" for n in range(5)])
        .shuffle(3).read_from_http(timeout=30).map(read)
    ),
    "iter.IoPathFileLister": lambda at: (
        IoPathFileLister("here://", "*.csv", pathmgr=FolderManager(str(at.folder))).map(lambda path: path + PAYLOAD)
    ),
    "iter.IoPathFileOpener": lambda at: (
        FileLister(at.folder, "*.txt").shuffle(2).open_files_by_iopath(pathmgr=FolderManager("/")).map(read)
    ),
    "iter.IoPathSaver": lambda at: (
        texts().map(lambda text: (f"{at.folder}/iopath/{text}", text)).shuffle(3)
        .save_by_iopath(pathmgr=FolderManager("/"))
    ),
    "iter.InBatchShuffler": lambda at: texts(12).batch(5).in_batch_shuffle().shuffle(2),
    "iter.IndexAdder": lambda at: texts().shuffle(4).map(lambda text: {"text": text}).add_index().shuffle(3),
    "iter.IterKeyZipper": lambda at: texts(12).shuffle(3).zip_with_iter(texts(14).shuffle(5), str),
    "iter.IterableWrapper": lambda at: texts(),
    "iter.IterableWrapper of what is no list": lambda at: IterableWrapper({f"{PAYLOAD}{n}": n for n in range(5)}),
    "iter.JsonLinesParser": lambda at: at.files("*.jsonl").parse_jsonl(),
    "iter.JsonParser": lambda at: at.files("*.json").parse_json_files(),
    "iter.LengthSetter": lambda at: texts().shuffle(4).set_length(5).shuffle(3),
    "iter.LineReader": lambda at: at.files("*.txt").readlines(decode=True),
    "iter.LineReader of text": lambda at: at.files("*.txt", "r").readlines(),
    "iter.MapToIterConverter": lambda at: MapToIterConverter(keyed(), [3, 1, 1, 8]),
    "iter.MapKeyZipper": lambda at: (
        texts().shuffle(3).zip_with_map(keyed(), lambda text: int(text[-1]), keep_key=True)
    ),
    "iter.Mapper": lambda at: texts().map(lambda text: text + "x"),
    "iter.Mapper with rng": lambda at: texts().map(draw, rng=True).shuffle(4),
    "iter.MaxTokenBucketizer": lambda at: (
        texts(12).map(lambda text: text + "x" * (int(text[-1]) % 4)).shuffle(4).max_token_bucketize(
            30, min_len=13, max_len=15, buffer_size=5
        )
    ),
    "iter.Multiplexer": lambda at: texts(7).shuffle(3).mux(texts(5)),
    "iter.MultiplexerLongest": lambda at: texts(7).shuffle(3).mux_longest(texts(0), texts(5).shuffle(2)),
    "iter.NpyLoader": lambda at: at.files("*.npy").load_npy().map(lambda array: array.tolist()),
    "iter.NpyLoader of archives": lambda at: at.files("*.npz").load_npy().map(lambda sample: sample["a"].tolist()),
    "iter.NpyLoader of rows": lambda at: at.files("*.npy").load_npy(rows=True, mmap=True).map(str),
    "iter.ParagraphAggregator": lambda at: (
        texts(50).map(lambda text: ("ab"[int(text[-1]) > 6], text if int(text[-1]) % 3 else ""))
        .shuffle(3).lines_to_paragraphs()
    ),
    "iter.ParquetDataFrameLoader": lambda at: (
        FileLister(at.folder, "*.parquet").load_parquet_as_df().map(lambda table: table.to_pydict())
    ),
    "iter.ParquetLoader": lambda at: FileLister(at.folder, "*.parquet").load_parquet(batch_size=2),
    "iter.ParquetLoader of units": lambda at: (
        FileLister(at.folder, "*.parquet").list_parquet_row_groups().shuffle(3).sharding_filter()
        .load_parquet("columns").map(lambda columns: [columns["a"], columns["b"].tolist()])
    ),
    "iter.ParquetRowGroupLister": lambda at: (
        FileLister(at.folder, "*.parquet").list_parquet_row_groups().map(lambda unit: [*unit, PAYLOAD])
    ),
    "iter.PinMemory": lambda at: texts().shuffle(3).pin_memory(pin_memory_fn=lambda batch, device: batch + "x"),
    "iter.RowRebatcher": lambda at: (
        FileLister(at.folder, "*.parquet").shuffle(2).load_parquet("batches").rebatch_rows(2)
        .map(lambda batch: batch.to_pydict())
    ),
    "iter.RandomSplitter": lambda at: (
        texts(20).random_split({"train": 3, "valid": 2}, 5)[0].shuffle(3).sharding_filter()
    ),
    "iter.RandomSplitter of a target": lambda at: (
        texts(20).random_split({"train": 0.7, "valid": 0.2, "test": 0.1}, 5, target="train").shuffle(3)
    ),
    "iter.Repeater": lambda at: texts(5).shuffle(3).repeat(3).shuffle(4),
    "iter.RoundRobinDemultiplexer": _dealt,
    "iter.Rows2Columnar": lambda at: texts().enumerate().shuffle(3).batch(2).rows2columnar(["number", "text"]),
    "iter.S3FileLister": lambda at: S3FileLister("s3://cases/in/", endpoint_url=at.s3).map(lambda url: url + PAYLOAD),
    "iter.S3FileLoader": lambda at: (
        S3FileLister("s3://cases/in/", endpoint_url=at.s3).shuffle(3).load_files_by_s3(endpoint_url=at.s3).map(read)
    ),
    "iter.S3FileSaver": lambda at: (
        texts()
        .map(lambda text: (text, text.encode()))
        .shuffle(3)
        .save_to_s3(filepath_fn=lambda name: f"s3://cases/saved/{name}", endpoint_url=at.s3)
    ),
    "iter.SampleMultiplexer": lambda at: (
        SampleMultiplexer({texts(12).shuffle(3): 3, texts(5): 1.5, texts(0): 1}).shuffle(3)
    ),
    "iter.Sampler": lambda at: Sampler(texts(12), RandomSampler).map(lambda index: [index, PAYLOAD]).shuffle(3),
    "iter.Saver": lambda at: texts().map(lambda text: (f"{at.folder}/saved/{text}", text)).shuffle(3).save_to_disk(),
    "iter.ShardExpander": lambda at: texts().map(lambda text: text + "-{08..11}").shuffle(3).shard_expand(),
    "iter.ShardingFilter": lambda at: texts().shuffle(4).sharding_filter().shuffle(2),
    "iter.Shuffler": lambda at: texts(20).shuffle(4),
    "iter.Shuffler twice": lambda at: texts(20).shuffle(6).shuffle(3),
    "iter.Shuffler switched off": lambda at: texts().shuffle(4).set_shuffle(False),
    "iter.Skipper": lambda at: texts().shuffle(3).skip(2),
    "iter.Slicer": lambda at: texts().shuffle(3).enumerate().slice(1),
    "iter.StreamReader": lambda at: at.files("*.txt").read_from_stream(30).map(lambda pair: [pair[1].decode()]),
    "iter.TarArchiveLoader": lambda at: at.files("*.tar").load_from_tar().map(read),
    "iter.ThreadPoolMapper": lambda at: texts(40).shuffle(4).threadpool_map(
        lambda text: text + "x", scheduled_tasks=20, max_workers=2
    ),
    "iter.ThreadPoolMapper with rng": lambda at: (
        texts().threadpool_map(draw, rng=True, scheduled_tasks=3, max_workers=2).shuffle(4)
    ),
    "iter.UnBatcher": lambda at: texts().batch(4).unbatch(),
    "iter.UnZipper": _unzipped,
    "iter.WebDataset": lambda at: samples(at).shuffle(3),
    "iter.WebDatasetSaver": lambda at: (
        texts().map(lambda text: {"__key__": text[-1], "txt": text}).shuffle(3)
        .save_to_webdataset(f"{at.folder}/out", maxcount=2).map(lambda path: [PAYLOAD, path.rpartition("/")[2]])
    ),
    "iter.ZipArchiveLoader of opened archives": lambda at: (
        at.files("*.zip").decompress().load_from_zip().map(read)
    ),
    "iter.ZipArchiveLoader": lambda at: at.files("*.zip").load_from_zip().map(read),
    "iter.Zipper": lambda at: texts().shuffle(3).zip(texts(7)),
    "iter.ZipperLongest": lambda at: texts().shuffle(3).zip_longest(texts(4), fill_value="none"),
    "map.Batcher": lambda at: keyed().batch(2).to_iter_datapipe(),
    "map.Concater": lambda at: keyed(4).concat(keyed(3)).to_iter_datapipe(),
    "map.InMemoryCacheHolder": lambda at: keyed().map(lambda text: text + "x").in_memory_cache().to_iter_datapipe(),
    "map.IterToMapConverter": lambda at: (
        texts().shuffle(3).map(lambda text: (int(text[-1]), text)).to_map_datapipe().to_iter_datapipe()
    ),
    "map.Mapper": lambda at: keyed().map(lambda text: text + "x").to_iter_datapipe(),
    "map.SequenceWrapper": lambda at: keyed().to_iter_datapipe(),
    "map.Shuffler": lambda at: keyed().shuffle(),
    "map.UnZipper": lambda at: keyed().zip(keyed()).unzip(2)[1].to_iter_datapipe(),
    "map.Zipper": lambda at: keyed().zip(keyed()).to_iter_datapipe(),
    "users.Plain": lambda at: texts(5).then(Twice).shuffle(2),
    "users.Stateless": lambda at: texts().shuffle(3).then(Stateless),
    "users.Summing": lambda at: texts().shuffle(3).map(len).enumerate().map(lambda pair: pair[0]).then(Summing).map(
        lambda pair: [PAYLOAD, *pair]
    ),
    "everything": lambda at: (
        FileLister(at.folder, "*.txt").shuffle(2).sharding_filter().open_files("rb").readlines(decode=True)
        .flatmap(lambda pair: [pair[1], pair[1] + "y"]).shuffle(5).map(draw, rng=True).batch(2)
    ),
}  # fmt: skip


class Twice(Plain):
    def __iter__(self) -> Any:
        for text in self.source:
            yield text
            yield text + "again"
