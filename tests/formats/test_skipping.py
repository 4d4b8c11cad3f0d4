"""A resume skips whole shards by position, goes inside one by offset, and calls 1:1 functions for what is held only.

Only counts are asserted: files opened, bytes read, calls.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import loader_of, plain, take, through_json
from tars import make_tar

from pipes import IterDataPipe
from pipes.iter import FileLister, FileOpener

SHARDS, SAMPLES = 100, 20


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        names = [f"{shard:03d}{sample:02d}" for sample in range(SAMPLES)]
        (folder / f"{shard:03d}.tar").write_bytes(
            make_tar([(f"{name}.{end}", name.encode()) for name in names for end in ("txt", "cls")])
        )
    return str(folder)


class Counts:
    """What a run has cost so far."""

    def __init__(self) -> None:
        self.opened = self.read = self.decoded = self.mapped = 0

    def open(self, path: str) -> tuple[str, Any]:
        self.opened += 1
        return path, Counted(Path(path).read_bytes(), self)

    def decode(self, sample: dict[str, Any]) -> int:
        self.decoded += 1
        return int(sample["cls"].read())

    def map(self, number: int) -> int:
        self.mapped += 1
        return number


class Counted(io.BytesIO):
    """A file that can seek, and counts the bytes that are read."""

    def __init__(self, data: bytes, counts: Counts) -> None:
        super().__init__(data)
        self.counts = counts

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.counts.read += len(data)
        return data


def over_shards(folder: str, counts: Counts, buffer: int | None, shuffled_names: bool) -> IterDataPipe[Any]:
    names = FileLister(folder, "*.tar")
    listed: Any = names.shuffle(SHARDS) if shuffled_names else names
    samples = listed.sharding_filter().map(counts.open).load_from_tar().webdataset().map(counts.decode)
    return (samples if buffer is None else samples.shuffle(buffer)).map(counts.map).batch(10)  # type: ignore[no-any-return]


def resumed_at(make: Callable[[Counts], IterDataPipe[Any]], batches: int) -> tuple[Counts, Counts]:
    """Return what it costs to get to a batch, and what it costs to resume there and give one more; checks the rest."""
    there, again = Counts(), Counts()
    loader = loader_of(make(there))
    iterator = iter(loader)
    take(iterator, batches)
    state = through_json(loader.state_dict())
    cost = Counts()
    cost.__dict__.update(there.__dict__)
    rest = plain(list(iterator))
    other = loader_of(make(again))
    other.load_state_dict(state)
    resumed = iter(other)
    first = plain(next(resumed))
    paid = Counts()
    paid.__dict__.update(again.__dict__)
    assert [first, *plain(list(resumed))] == rest
    return cost, paid


@pytest.mark.parametrize("shuffled_names", [False, True])
def test_whole_shards_are_skipped_by_position(shards: str, shuffled_names: bool) -> None:
    total = SHARDS * SAMPLES
    cost, paid = resumed_at(lambda counts: over_shards(shards, counts, None, shuffled_names), 9 * total // 100)
    assert (cost.opened, cost.decoded) >= (90, 9 * total // 10)
    # the anchor of the grouping stage lies at most 32 samples back
    assert paid.opened <= 2 + 32 // SAMPLES + 1
    assert paid.read <= cost.read * 5 / 100
    assert paid.decoded == paid.mapped == 10


@pytest.mark.parametrize("buffer", [20, 100])
def test_a_shuffle_opens_the_shards_of_what_it_holds(shards: str, buffer: int) -> None:
    total = SHARDS * SAMPLES
    cost, paid = resumed_at(lambda counts: over_shards(shards, counts, buffer, True), 9 * total // 100)
    # a buffer's anchors lie at least 64 elements apart
    again = buffer * (math.log(buffer) + 2) + 64
    assert paid.opened <= again / SAMPLES + 3
    assert paid.opened < cost.opened
    # decoded: what the buffer holds, and what came in for the ten that went out; mapped: those ten
    assert paid.decoded == buffer + 10
    assert paid.mapped == 10


def test_inside_a_shard_by_offset(tmp_path: Path) -> None:
    samples, size = 200, 20_000
    names = [f"{number:04d}" for number in range(samples)]
    (tmp_path / "one.tar").write_bytes(
        make_tar([(f"{name}.{end}", name.encode().ljust(size)) for name in names for end in ("txt", "cls")])
    )
    whole = (tmp_path / "one.tar").stat().st_size

    def graph(counts: Counts) -> IterDataPipe[Any]:
        return over_shards(str(tmp_path), counts, None, False)

    cost, paid = resumed_at(graph, 18)
    assert cost.read >= 0.9 * whole
    assert paid.opened == 1
    # at most 32 samples before the place, ten after it, and the chunk that was begun
    assert paid.read <= 42 * 2 * (size + 1024) + 3 * (1 << 18)
    assert paid.decoded == 10


@pytest.mark.parametrize("reader", ["readlines", "parse_csv", "parse_jsonl"])
def test_lines_by_offset(reader: str, tmp_path: Path) -> None:
    lines = 100_000
    line = {"readlines": "some text", "parse_csv": "1,two,three", "parse_jsonl": '{"a": 1, "b": [2, 3]}'}[reader]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{line}\n" * lines)

    def graph(counts: Counts) -> IterDataPipe[Any]:
        opened = FileLister(str(tmp_path), "*.txt").sharding_filter().map(counts.open)
        return getattr(opened, reader)().batch(1000)  # type: ignore[no-any-return]

    cost, paid = resumed_at(graph, lines * 18 // 10 // 1000)
    assert cost.opened == 2
    assert paid.opened == 1
    assert paid.read <= 2 * (1 << 18) + 1000 * len(line) < cost.read / 2


def test_files_are_opened_only_where_reading_goes_on(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    own = FileOpener.opened

    def counted(self: Any, name: Any) -> Any:
        opened.append(name)
        return own(self, name)

    monkeypatch.setattr(FileOpener, "opened", counted)

    def make() -> IterDataPipe[Any]:
        members: Any = FileLister(shards, "*.tar").sharding_filter().open_files("rb").load_from_tar()
        return members.map(_name).batch(20)  # type: ignore[no-any-return]

    loader = loader_of(make())
    iterator = iter(loader)
    take(iterator, 180)
    state = through_json(loader.state_dict())
    assert len(opened) == 90
    opened.clear()
    other = loader_of(make())
    other.load_state_dict(state)
    rest = iter(other)
    assert next(rest) == next(iterator)
    assert len(set(opened)) <= 2
    loader.shutdown()
    other.shutdown()


def _name(member: tuple[str, Any]) -> str:
    return member[0]
