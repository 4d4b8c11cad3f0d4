"""Every iterable pipe, by its class name; their chained names are methods of all of them."""

from pipes.datapipe import DataChunk, IterDataPipe, functional_datapipe
from pipes.formats.archives import TarArchiveLoader, ZipArchiveLoader
from pipes.formats.arrow_batches import ArrowToTensors, RowRebatcher
from pipes.formats.decompressing import Bz2FileLoader, Decompressor, Extractor, XzFileLoader
from pipes.formats.hashing import HashChecker
from pipes.formats.lines import LineReader, StreamReader
from pipes.formats.npy_files import NpyLoader
from pipes.formats.parquet_files import ParquetDataFrameLoader, ParquetLoader, ParquetRowGroupLister
from pipes.formats.tables import CSVDictParser, CSVParser, JsonLinesParser, JsonParser
from pipes.formats.webdataset import WebDataset
from pipes.formats.webdataset_writer import WebDatasetSaver
from pipes.sources.files import FileLister, FileOpener
from pipes.sources.fsspec_files import FSSpecFileLister, FSSpecFileOpener, FSSpecSaver
from pipes.sources.http_files import HttpReader
from pipes.sources.iopath_files import IoPathFileLister, IoPathFileOpener, IoPathSaver
from pipes.sources.s3 import S3FileLister, S3FileLoader, S3FileSaver
from pipes.sources.saving import Saver
from pipes.stages.batch_mapping import BatchMapper
from pipes.stages.batching import Batcher, UnBatcher
from pipes.stages.bucketing import BucketBatcher, MaxTokenBucketizer
from pipes.stages.collating import Collator
from pipes.stages.filtering import Filter
from pipes.stages.flattening import FlatMapper, Repeater, ShardExpander
from pipes.stages.grouping import Grouper
from pipes.stages.joining import Concater, Multiplexer, MultiplexerLongest, Zipper, ZipperLongest
from pipes.stages.looking_up import MapKeyZipper
from pipes.stages.mapping import Mapper
from pipes.stages.matching import IterKeyZipper
from pipes.stages.moving import DeviceMover, PinMemory
from pipes.stages.paragraphs import ParagraphAggregator
from pipes.stages.random_splitting import RandomSplitter
from pipes.stages.restructuring import Dropper, Flattener, Rows2Columnar, Slicer
from pipes.stages.sampling import SampleMultiplexer, Sampler
from pipes.stages.selecting import Cycler, Enumerator, Header, IndexAdder, LengthSetter, Skipper
from pipes.stages.sharding import ShardingFilter
from pipes.stages.shuffling import InBatchShuffler, Shuffler
from pipes.stages.splitting import Demultiplexer, Forker, RoundRobinDemultiplexer
from pipes.stages.threads import ThreadPoolMapper
from pipes.stages.unzipping import UnZipper
from pipes.stages.wrapping import IterableWrapper, MapToIterConverter

__all__ = [
    "ArrowToTensors",
    "BatchMapper",
    "Batcher",
    "BucketBatcher",
    "Bz2FileLoader",
    "CSVDictParser",
    "CSVParser",
    "Collator",
    "Concater",
    "Cycler",
    "DataChunk",
    "Decompressor",
    "Demultiplexer",
    "DeviceMover",
    "Dropper",
    "Enumerator",
    "Extractor",
    "FSSpecFileLister",
    "FSSpecFileOpener",
    "FSSpecSaver",
    "FileLister",
    "FileOpener",
    "Filter",
    "FlatMapper",
    "Flattener",
    "Forker",
    "Grouper",
    "HashChecker",
    "Header",
    "HttpReader",
    "InBatchShuffler",
    "IndexAdder",
    "IoPathFileLister",
    "IoPathFileOpener",
    "IoPathSaver",
    "IterDataPipe",
    "IterKeyZipper",
    "IterableWrapper",
    "JsonLinesParser",
    "JsonParser",
    "LengthSetter",
    "LineReader",
    "MapKeyZipper",
    "MapToIterConverter",
    "Mapper",
    "MaxTokenBucketizer",
    "Multiplexer",
    "MultiplexerLongest",
    "NpyLoader",
    "ParagraphAggregator",
    "ParquetDataFrameLoader",
    "ParquetLoader",
    "ParquetRowGroupLister",
    "PinMemory",
    "RandomSplitter",
    "Repeater",
    "RoundRobinDemultiplexer",
    "RowRebatcher",
    "Rows2Columnar",
    "S3FileLister",
    "S3FileLoader",
    "S3FileSaver",
    "SampleMultiplexer",
    "Sampler",
    "Saver",
    "ShardExpander",
    "ShardingFilter",
    "Shuffler",
    "Skipper",
    "Slicer",
    "StreamReader",
    "TarArchiveLoader",
    "ThreadPoolMapper",
    "UnBatcher",
    "UnZipper",
    "WebDataset",
    "WebDatasetSaver",
    "XzFileLoader",
    "ZipArchiveLoader",
    "Zipper",
    "ZipperLongest",
    "functional_datapipe",
]
