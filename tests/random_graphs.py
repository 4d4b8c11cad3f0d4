"""Random graphs, each built again from its seed, and what they give in one process."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from loading import loader_of, plain, with_draws
from tars import make_tar

from pipes import IterDataPipe
from pipes.iter import FileLister, IterableWrapper

Pipe = IterDataPipe[Any]


def mark(element: Any) -> int:
    return zlib.crc32(repr(element).encode())


# Stages: each takes a pipe and a source of random choices, and gives the longer pipe.


def shuffled(pipe: Pipe, draw: random.Random) -> Pipe:
    return pipe.shuffle(draw.choice([1, 2, 5, 12, 40]))


def mapped(pipe: Pipe, draw: random.Random) -> Pipe:
    number = draw.randrange(100)
    return pipe.map(lambda x: (number, x))


def keyed(pipe: Pipe, draw: random.Random) -> Pipe:
    return pipe.map(lambda x, rng: (x, int(rng.integers(1000))), rng=True)


def filtered(pipe: Pipe, draw: random.Random) -> Pipe:
    rest, share = draw.randrange(4), draw.choice([2, 4])
    return pipe.filter(lambda x: mark(x) % share != rest)


def tolerant(pipe: Pipe, draw: random.Random) -> Pipe:
    rest, share, first = draw.randrange(4), draw.choice([2, 4]), draw.randrange(2)

    def fail(element: Any) -> Any:
        if mark(element) % share == rest:
            raise ValueError("bad")
        return element

    def stand_in(error: Exception, element: Any) -> Any:
        return ("replaced", element) if mark(element) % 3 == first else None

    return pipe.map(fail, on_error=draw.choice(["skip", stand_in]), max_errors=None)


def batched_and_back(pipe: Pipe, draw: random.Random) -> Pipe:
    pipe = pipe.batch(draw.randint(1, 5), drop_last=draw.random() < 0.3)
    return (pipe.shuffle(draw.randint(1, 4)) if draw.random() < 0.5 else pipe).unbatch()


def expanded(pipe: Pipe, draw: random.Random) -> Pipe:
    return pipe.flatmap(lambda x: [(x, i) for i in range(mark(x) % 3)])


def counted(pipe: Pipe, draw: random.Random) -> Pipe:
    return pipe.enumerate(draw.randrange(3))


def cut_short(pipe: Pipe, draw: random.Random) -> Pipe:
    return pipe.skip(draw.randrange(4)) if draw.random() < 0.5 else pipe.header(draw.randint(10, 30))


def repeated(pipe: Pipe, draw: random.Random) -> Pipe:
    return draw.choice([pipe.cycle, pipe.repeat])(2)


def forked_and_zipped(pipe: Pipe, draw: random.Random) -> Pipe:
    left, right = pipe.fork(2)
    return simple(left, draw).zip(simple(right, draw))


def split_and_joined(pipe: Pipe, draw: random.Random) -> Pipe:
    left, right = pipe.demux(2, lambda x: mark(x) % 2)
    left, right = simple(left, draw), simple(right, draw)
    return draw.choice([left.mux, left.concat, left.zip, left.mux_longest, left.zip_longest])(right)


def joined(pipe: Pipe, draw: random.Random) -> Pipe:
    other = simple(IterableWrapper(range(1000, 1000 + draw.choice([0, 1, 30, 80]))), draw)
    return draw.choice([pipe.zip, pipe.mux, pipe.concat])(other)


SIMPLE = (shuffled, mapped, keyed, counted)
STAGES = (
    *SIMPLE,
    *(filtered, tolerant, batched_and_back, expanded, cut_short, repeated, forked_and_zipped, split_and_joined),
)


def simple(pipe: Pipe, draw: random.Random) -> Pipe:
    for _ in range(draw.randrange(3)):
        pipe = draw.choice(SIMPLE)(pipe, draw)
    return pipe


def bulky(element: Any) -> Any:
    """Return the element with a leaf that travels in shared memory."""
    return element, np.full(20_000, mark(plain(element)), np.uint64)


class RandomGraph:
    """One random graph, which can be built again and again, and how it is run."""

    def __init__(self, seed: int, shards: Path) -> None:
        draw = random.Random(seed)
        self.seed, self.shards = seed, shards
        self.source = draw.choice(["numbers", "numbers", "tar", "generator"])
        self.size = draw.choice([0, 1, 7, 60, 120])
        self.above = [
            draw.choice((shuffled, mapped, keyed, joined, forked_and_zipped)) for _ in range(draw.choice([0, 0, 1, 2]))
        ]
        if self.source == "generator":
            self.above = []
        self.explicit = draw.random() < 0.7
        stages = [stage for stage in STAGES if self.source != "generator" or stage is not repeated]
        self.below = [draw.choice(stages) for _ in range(draw.randrange(5))]
        self.draws, self.bulk = draw.random() < 0.5, draw.random() < 0.5
        self.batch = draw.choice([0, 1, 3, 4])
        self.streams = draw.randint(1, 4)
        self.in_order = self.source == "generator" or draw.random() < 0.7
        # A generator can be read once.
        self.epochs = 1 if self.source == "generator" else 2

    def graph(self) -> Pipe:
        draw = random.Random(self.seed)
        pipe: Pipe
        if self.source == "tar":
            pipe = FileLister(str(self.shards), "*.tar").open_files("rb").load_from_tar()
            pipe = pipe.map(lambda member: (os.path.basename(member[0]), zlib.crc32(member[1].read())))
        elif self.source == "generator":
            pipe = IterableWrapper(x for x in range(self.size))
        else:
            pipe = IterableWrapper(range(self.size))
        for stage in self.above:
            pipe = stage(pipe, draw)
        if self.explicit and self.source != "generator":
            pipe = pipe.sharding_filter()
        for stage in self.below:
            pipe = stage(pipe, draw)
        if self.draws:
            pipe = pipe.map(with_draws)
        if self.batch:
            pipe = pipe.batch(self.batch)
        return pipe.map(bulky) if self.bulk else pipe

    def expected(self) -> list[tuple[list[Any], dict[str, Any]]]:
        """Return the outputs of each epoch, and what its stages skipped and replaced."""
        with loader_of(self.graph(), 0, self.streams) as loader:
            return [([plain(output) for output in loader], errors_of(loader)) for _ in range(self.epochs)]


def errors_of(loader: Any) -> dict[str, Any]:
    """Return how many elements each stage took, skipped and replaced in this epoch, less those that skipped none."""
    errors = loader.stats()["errors"].items()
    return {stage: tuple(counts[name] for name in ("taken", "skipped", "replaced")) for stage, counts in errors}


def write_shards(folder: Path) -> None:
    draw = random.Random(0)
    for shard in range(4):
        members = [(f"{shard}-{number}.bin", draw.randbytes(100 * draw.randrange(8))) for number in range(9)]
        (folder / f"{shard}.tar").write_bytes(make_tar(members))
