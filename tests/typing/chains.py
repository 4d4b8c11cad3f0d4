"""What type checkers know about chains; read by mypy alone (tests/test_typing.py), never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import torch

from pipes import DataChunk, IterDataPipe, MapDataPipe
from pipes.iter import Batcher, Collator, IterableWrapper, Mapper, Shuffler
from pipes.map import SequenceWrapper

numbers = IterableWrapper(range(3))
assert_type(numbers, IterableWrapper[int])
assert_type(numbers.map(str), Mapper[str])
assert_type(numbers.map(str).batch(2), Batcher[str])
assert_type(next(iter(numbers.map(str).batch(2))), DataChunk[str])
assert_type(next(iter(numbers.shuffle(buffer_size=5).filter(bool).sharding_filter().header(3).skip(1).cycle(2))), int)
assert_type(numbers.shuffle(), Shuffler[int])
assert_type(next(iter(numbers.enumerate())), tuple[int, int])
assert_type(next(iter(numbers.flatmap(lambda x: [str(x)]))), str)
assert_type(numbers.fork(2), list[IterDataPipe[int]])
assert_type(numbers.demux(2, lambda x: x % 2), list[IterDataPipe[int]])
assert_type(next(iter(numbers.zip(numbers.map(str)))), tuple[int, str])
assert_type(next(iter(numbers.zip(numbers, numbers.map(str)))), tuple[int, int, str])
assert_type(numbers.batch(2).collate(), Collator[Any])
assert_type(numbers.batch(2).collate(torch.tensor), Collator[torch.Tensor])
assert_type(IterableWrapper([{"a": 1}]).map(str, input_col="a"), Mapper[Any])
assert_type(len(numbers), int)
assert_type(numbers.shuffle().set_seed(3).batch(2), Batcher[int])


def with_generator(x: int, rng: Any) -> float:
    return float(rng.random())


assert_type(numbers.map(with_generator, rng=True), Mapper[float])

sequence: SequenceWrapper[str] = SequenceWrapper(["a", "b"])
assert_type(sequence[0], str)
assert_type(next(iter(sequence.to_iter_datapipe())), str)
assert_type(sequence.map(len)[0], int)


class Own(IterDataPipe[str]):
    def __init__(self, source: IterDataPipe[int], sep: str = ",") -> None:
        self.source, self.sep = source, sep

    def __iter__(self) -> Iterator[str]:
        for x in self.source:
            yield f"{x}{self.sep}"


assert_type(numbers.then(Own), Own)
assert_type(next(iter(numbers.then(Own, sep=";").batch(3))), DataChunk[str])
assert_type(sequence.then(lambda source: 3), int)

as_parent: IterDataPipe[object] = numbers
as_map_parent: MapDataPipe[object] = sequence

# Each of these is an error; mypy complains if one is not.
numbers.shufle()  # type: ignore[attr-defined]
numbers.batch("two")  # type: ignore[arg-type]
numbers.batch()  # type: ignore[call-arg]
numbers.shuffle(buffer=3)  # type: ignore[call-arg]
numbers.then(Own, separator=";")  # type: ignore[call-arg]
numbers.demux(2, lambda x: x.upper())  # type: ignore[attr-defined]
sequence.shuffle_all()  # type: ignore[attr-defined]
