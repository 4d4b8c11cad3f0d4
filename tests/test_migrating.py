"""What a program written against torchdata 0.9 types is here, or docs/migrating.md says that it is not."""

from __future__ import annotations

import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipes.iter
import pipes.map
from pipes import IterDataPipe, MapDataPipe
from pipes.iter import CSVParser, Enumerator, IterableWrapper, LineReader, ShardingFilter
from pipes.loader2 import DataLoader2
from pipes.map import SequenceWrapper

# What torchdata's constructors take, in their order; `*` marks what can be given by keyword only.
ITER = {
    "BatchMapper": "datapipe fn batch_size input_col",
    "Batcher": "datapipe batch_size drop_last wrapper_class",
    "BucketBatcher": "datapipe batch_size drop_last batch_num bucket_num sort_key use_in_batch_shuffle",
    "Bz2FileLoader": "datapipe length",
    "CSVDictParser": "source_datapipe *skip_lines *decode *encoding *errors *return_path",
    "CSVParser": "source_datapipe *skip_lines *decode *encoding *errors *return_path *as_tuple",
    "Collator": "datapipe conversion collate_fn",
    "Cycler": "source_datapipe count",
    "Decompressor": "source_datapipe file_type",
    "Dropper": "datapipe indices",
    "Enumerator": "source_datapipe starting_index",
    "Extractor": "source_datapipe file_type",
    "FSSpecFileLister": "root masks",
    "FSSpecFileOpener": "source_datapipe mode *kwargs_for_open",
    "FSSpecSaver": "source_datapipe mode filepath_fn *kwargs_for_open",
    "FileLister": "root masks *recursive *abspath *non_deterministic *length",
    "FileOpener": "datapipe mode encoding length",
    "Filter": "datapipe filter_fn input_col",
    "FlatMapper": "datapipe fn input_col",
    "Flattener": "datapipe indices",
    "HashChecker": "source_datapipe hash_dict hash_type rewind",
    "Grouper": "datapipe group_key_fn *keep_key *buffer_size *group_size *guaranteed_group_size *drop_remaining",
    "Header": "source_datapipe limit",
    "HttpReader": "source_datapipe timeout skip_on_error",
    "InBatchShuffler": "datapipe",
    "IndexAdder": "source_datapipe index_name",
    "IoPathFileLister": "root masks *pathmgr *handler",
    "IoPathFileOpener": "source_datapipe mode pathmgr handler",
    "IoPathSaver": "source_datapipe mode filepath_fn *pathmgr *handler",
    "IterKeyZipper": "source_datapipe ref_datapipe key_fn ref_key_fn keep_key buffer_size merge_fn",
    "IterableWrapper": "iterable deepcopy",
    "JsonParser": "source_datapipe",
    "LengthSetter": "source_datapipe length",
    "LineReader": "source_datapipe *skip_lines *strip_newline *decode *encoding *errors *return_path",
    "MapKeyZipper": "source_iterdatapipe map_datapipe key_fn merge_fn keep_key",
    "MapToIterConverter": "datapipe indices",
    "Mapper": "datapipe fn input_col output_col",
    "MaxTokenBucketizer": "datapipe max_token_count len_fn min_len max_len buffer_size include_padding",
    "ParagraphAggregator": "source_datapipe joiner",
    "ParquetDataFrameLoader": "source_dp dtype columns device use_threads",
    "PinMemory": "source_datapipe device pin_memory_fn",
    "RandomSplitter": "source_datapipe weights seed total_length target",
    "Repeater": "source_datapipe times",
    "RoundRobinDemultiplexer": "datapipe num_instances buffer_size",
    "Rows2Columnar": "source_datapipe column_names",
    "S3FileLister": "source_datapipe length request_timeout_ms region masks",
    "S3FileLoader": "source_datapipe request_timeout_ms region buffer_size multi_part_download",
    "SampleMultiplexer": "pipes_to_weights_dict seed",
    "Sampler": "datapipe sampler sampler_args sampler_kwargs",
    "Saver": "source_datapipe mode filepath_fn",
    "ShardExpander": "source_datapipe",
    "ShardingFilter": "source_datapipe sharding_group_filter",
    "Shuffler": "datapipe *buffer_size *unbatch_level",
    "Slicer": "datapipe index stop step",
    "StreamReader": "datapipe chunk",
    "TarArchiveLoader": "datapipe mode length",
    "ThreadPoolMapper": "source_datapipe fn input_col output_col scheduled_tasks max_workers",
    "UnBatcher": "datapipe unbatch_level",
    "UnZipper": "source_datapipe sequence_length buffer_size columns_to_skip",
    "WebDataset": "source_datapipe",
    "XzFileLoader": "datapipe length",
    "ZipArchiveLoader": "datapipe length",
    "ZipperLongest": "*fill_value",
}
MAP = {
    "Batcher": "datapipe batch_size drop_last wrapper_class",
    "InMemoryCacheHolder": "source_dp",
    "IterToMapConverter": "datapipe key_value_fn",
    "Mapper": "datapipe fn",
    "SequenceWrapper": "sequence deepcopy",
    "Shuffler": "datapipe *indices",
    "UnZipper": "source_datapipe sequence_length columns_to_skip",
}
# Its stages that are not here, by chained name, or by class where there is none.
MISSING_ITER = [
    "HuggingFaceHubReader",
    "async_map_batches",
    "bucketbatch",
    "dataframe",
    "end_caching",
    "fullsync",
    "groupby",
    "in_memory_cache",
    "list_files_by_ais",
    "load_files_by_ais",
    "load_from_rar",
    "load_from_tfrecord",
    "on_disk_cache",
    "prefetch",
    "read_from_gdrive",
    "read_from_remote",
    "routed_decode",
    "sharding_round_robin_dispatch",
    "shuffled_flatmap",
    "zip_with_iter",
]
MISSING_MAP: list[str] = []
MISSING_LOADER = [
    "CheckpointableReadingServiceInterface",
]


@pytest.mark.parametrize(
    ("catalogue", "name", "wanted"),
    [(pipes.iter, *item) for item in ITER.items()] + [(pipes.map, *item) for item in MAP.items()],
)
def test_parameters(catalogue: Any, name: str, wanted: str) -> None:
    has = list(inspect.signature(getattr(catalogue, name)).parameters.values())
    names = [parameter.name for parameter in has]
    for place, parameter in enumerate(wanted.split()):
        assert parameter.lstrip("*") in names, f"{name} takes no {parameter}"
        if not parameter.startswith("*"):
            assert names[place] == parameter
            assert has[place].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_the_input_keeps_its_name() -> None:
    source = IterableWrapper("ab")
    assert list(Enumerator(source_datapipe=source, starting_index=1)) == [(1, "a"), (2, "b")]
    for stage in (ShardingFilter, CSVParser, LineReader):
        assert stage(source_datapipe=source).source_datapipe is source


def test_a_graph_of_such_stages_goes_on() -> None:
    def loader() -> DataLoader2[Any]:
        return DataLoader2(IterableWrapper(range(9)).sharding_filter().enumerate())

    first = loader()
    iterator = iter(first)
    given = [next(iterator) for _ in range(4)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert given + list(again) == list(zip(range(9), range(9), strict=True))


def test_what_is_missing_is_said() -> None:
    page = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
    said = set(re.findall(r"`(\w+)`", page.split("Not there yet")[1]))
    for name in MISSING_ITER:
        here = name in IterDataPipe.functions or hasattr(pipes.iter, name)
        assert here != (name in said), f"{name}: {'is here, and' if here else 'is missing, but not'} on the page"
    assert {*MISSING_MAP, *MISSING_LOADER} <= said
    assert not any(name in MapDataPipe.functions for name in MISSING_MAP)
    assert not any(hasattr(pipes.loader2, name) for name in MISSING_LOADER)


def test_submodules_are_there_after_the_import() -> None:
    code = "import pipes as dp; dp.iter.IterableWrapper, dp.map.SequenceWrapper, dp.utils.StreamWrapper"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_of_the_dict_reader() -> None:
    def pipe() -> Any:
        texts = [("a.csv", "1,2,3\n4\n"), ("b.csv", "5,6\n")]
        opened = IterableWrapper(texts).map(lambda pair: (pair[0], io.StringIO(pair[1])))
        return opened.parse_csv_as_dict(fieldnames=("x", "y"), restkey="more", restval="-")

    rows = [{"x": "1", "y": "2", "more": ["3"]}, {"x": "4", "y": "-"}, {"x": "5", "y": "6"}]
    assert list(pipe()) == rows
    for k in range(len(rows)):
        first = pipe()
        iterator = iter(first)
        for _ in range(k):
            next(iterator)
        again = pipe()
        again.load_state_dict(first.state_dict())
        assert list(again) == rows[k:]


def test_a_map_pipe_maps_by_identity() -> None:
    assert SequenceWrapper([5, 6]).map()[1] == 6
