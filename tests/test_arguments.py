"""Every argument that is a whole number is refused as anything else where it is given, by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pipes.iter
import pipes.map
from pipes.arguments import whole, whole_or_none
from pipes.datapipe import parameters_of
from pipes.formats.decode import Decoder
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService, SeedGenerator
from pipes.map import SequenceWrapper
from pipes.sources.s3_options import S3Options

# What a stage needs beside its input.
NEEDED: dict[str, dict[str, Any]] = {
    "BatchMapper": {"fn": list, "batch_size": 2},
    "Batcher": {"batch_size": 2},
    "BucketBatcher": {"batch_size": 2},
    "Demultiplexer": {"num_instances": 2, "classifier_fn": abs},
    "DeviceMover": {"device": "cpu"},
    "Forker": {"num_instances": 2},
    "Grouper": {"group_key_fn": abs, "group_size": 2},
    "IterKeyZipper": {"ref_datapipe": IterableWrapper("ab"), "key_fn": str},
    "LengthSetter": {"length": 2},
    "MaxTokenBucketizer": {"max_token_count": 3},
    "RoundRobinDemultiplexer": {"num_instances": 2},
    "RandomSplitter": {"weights": {"a": 1, "b": 1}, "seed": 0},
    "Repeater": {"times": 2},
    "RowRebatcher": {"batch_size": 2},
    "Skipper": {"count": 2},
    "Dropper": {"indices": 0},
    "Slicer": {"index": 0},
    "ThreadPoolMapper": {"fn": str},
    "UnZipper": {"sequence_length": 2},
    "WebDatasetSaver": {"target": "folder"},
}
WHOLE = re.compile(r"int( \| None)?")
Make = Callable[..., Any]


def made(cls: Any, source: Any, name: str) -> Make:
    needed = NEEDED.get(name, {})
    source = {source: 1} if name == "SampleMultiplexer" else source
    return lambda **given: cls(source, **{**needed, **given})


def stages() -> Iterator[tuple[str, Make, str, Any]]:
    """Give (class, how it is made, argument, a value that fits) for all arguments of stages that are whole numbers."""
    for catalogue, source in ((pipes.iter, IterableWrapper(["s3://a/b"])), (pipes.map, SequenceWrapper("ab"))):
        for name in catalogue.__all__:
            cls = getattr(catalogue, name)
            if isinstance(cls, type) and name not in ("DataChunk", "IterDataPipe", "MapDataPipe"):
                build = cls.__new__ if "__new__" in vars(cls) else cls.__init__
                for parameter in inspect.signature(build).parameters.values():
                    if WHOLE.fullmatch(str(parameter.annotation)):
                        fitting = 2 if parameter.default in (None, parameter.empty) else parameter.default
                        yield f"{catalogue.__name__}.{name}", made(cls, source, name), parameter.name, fitting


def seeded(seed: Any) -> None:
    loader: DataLoader2[Any] = DataLoader2(IterableWrapper([1]))
    loader.seed(seed)


def limited(num_batches: Any) -> None:
    iter(DataLoader2(IterableWrapper([1]))).limit(num_batches)


def sharded(**given: Any) -> None:
    IterableWrapper([1]).sharding_filter().apply_sharding(**{"num_of_instances": 2, "instance_id": 1, **given})


OTHERS: list[tuple[str, Make, str, Any]] = [
    ("S3Options", S3Options, "attempts", 2),
    ("Decoder", Decoder, "max_pixels", 2),
    ("seed", seeded, "seed", 2),
    ("limit", limited, "num_batches", 2),
    ("set_seed", lambda seed: IterableWrapper([1]).shuffle().set_seed(seed), "seed", 2),
    ("apply_sharding", sharded, "num_of_instances", 2),
    ("apply_sharding", sharded, "instance_id", 1),
    ("apply_sharding", sharded, "sharding_group", 1),
    ("DataLoader2", lambda num_streams: DataLoader2(IterableWrapper([1]), num_streams=num_streams), "num_streams", 2),
    ("InProcessReadingService", InProcessReadingService, "prefetch_cnt", 0),
    ("SeedGenerator", SeedGenerator, "seed", 2),
    ("spawn", SeedGenerator(1).spawn, "worker_id", 2),
    *(
        ("MultiProcessingReadingService", MultiProcessingReadingService, parameter.name, 2)
        for parameter in inspect.signature(MultiProcessingReadingService.__init__).parameters.values()
        if WHOLE.fullmatch(str(parameter.annotation))
    ),
]
ALL = [pytest.param(*rest, id=f"{name} {rest[1]}") for name, *rest in [*stages(), *OTHERS]]


def test_all_are_found() -> None:
    assert len(ALL) >= 69
    found = {str(case.id) for case in ALL}
    assert {"pipes.iter.Batcher batch_size", "pipes.map.Batcher batch_size", "pipes.iter.Forker buffer_size"} <= found


@pytest.mark.parametrize(("make", "name", "fitting"), ALL)
def test_what_is_no_whole_number_is_refused_by_name(make: Make, name: str, fitting: Any) -> None:
    for wrong, said in ((2.0, "the float 2.0"), ("10", "the str '10'"), (True, "the bool True")):
        with pytest.raises(TypeError, match=rf"^{name} must be an int( or None)?, not {said}$"):
            make(**{name: wrong})


@pytest.mark.parametrize(("make", "name", "fitting"), ALL)
def test_whole_numbers_of_numpy_become_ints(make: Make, name: str, fitting: Any) -> None:
    stage = make(**{name: np.int64(fitting)})
    if isinstance(stage, pipes.IterDataPipe | pipes.MapDataPipe):
        assert type(parameters_of(stage).get(name, 0)) is int


def test_what_stands_for_a_whole_number() -> None:
    class Enumerated(int):
        pass

    assert type(whole("x", torch.tensor(3))) is int
    assert whole("x", 10**30) == 10**30
    assert type(whole("x", Enumerated(2))) is Enumerated
    assert whole_or_none("x", None) is None
    with pytest.raises(TypeError, match=r"^x must be an int, not None$"):
        whole("x", None)
    with pytest.raises(TypeError, match=r"^x must be an int or None, not the list \[1\]$"):
        whole_or_none("x", [1])
    with pytest.raises(TypeError, match=r"not the bool_? (np\.)?True(_)?"):
        whole("x", np.True_)
