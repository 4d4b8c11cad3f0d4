"""Samples from a local tar shard: open, members, grouped samples with every field's bytes read.

5,000 samples of 10 KB and a label, in the page cache, against webdataset and `tarfile` in stream mode; the same work on
all sides: an iterator of dicts with bytes. The rows after the first two say where the time goes.
"""

from __future__ import annotations

import io
import random
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Row, arguments, interleaved, median, row, show, spread

from pipes.formats.tar import TarReader
from pipes.formats.webdataset import group_samples
from pipes.iter import FileOpener

SAMPLES, SIZE = 5_000, 10_240


def write_shard(path: Path, samples: int, size: int) -> None:
    draw = random.Random(0)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(samples):
            for extension, data in (("jpg", draw.randbytes(size)), ("cls", str(number % 10).encode())):
                member = tarfile.TarInfo(f"train/{number:06d}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def through_pipes(shard: str) -> Iterator[dict[str, Any]]:
    for sample in FileOpener([shard], "rb").load_from_tar().webdataset():
        yield {field: value if field == "__key__" else value.read() for field, value in sample.items()}


def through_reader(shard: str) -> Iterator[dict[str, Any]]:
    with open(shard, "rb") as stream:
        yield from group_samples((member.name, member.data) for member in TarReader(stream, shard))


def through_webdataset(shard: str) -> Iterator[dict[str, Any]]:
    from webdataset import WebDataset

    yield from WebDataset(shard, shardshuffle=False)


def through_tarfile(shard: str) -> Iterator[dict[str, Any]]:
    def members() -> Iterator[tuple[str, bytes]]:
        with open(shard, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in archive:
                if member.isreg():
                    opened = archive.extractfile(member)
                    assert opened is not None
                    yield member.name, opened.read()

    yield from group_samples(members())


def drain(samples: Iterator[dict[str, Any]]) -> tuple[int, int]:
    count = length = 0
    for sample in samples:
        count += 1
        length += len(sample["jpg"]) + len(sample["cls"])
    return count, length


def main() -> None:
    options = arguments(__doc__ or "", rounds=15)
    contenders = {
        "pipes": through_pipes,
        "reader": through_reader,
        "webdataset": through_webdataset,
        "tarfile r|*": through_tarfile,
    }
    notes = []
    try:
        import webdataset  # noqa: F401
    except ImportError:
        del contenders["webdataset"]
        notes.append("webdataset is not installed: pip install webdataset")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shard.tar")
        write_shard(path, SAMPLES, SIZE)
        shard = str(path)
        expected = (SAMPLES, SAMPLES * (SIZE + 1))
        for name, contender in contenders.items():
            assert drain(contender(shard)) == expected, name
        seconds = interleaved({name: lambda c=c: drain(c(shard)) for name, c in contenders.items()}, options.rounds)
    rate = {name: SAMPLES / median(values) for name, values in seconds.items()}
    case = f"{SAMPLES:,} x 10 KB + label"
    rows: list[Row] = []
    for peer, target in (("webdataset", 5.0), ("tarfile r|*", 4.0)):
        if peer in rate:
            theirs = rate[peer]
            rows.append(row("tar", case, peer, rate["pipes"], theirs, "samples/s", more_is_better=True, target=target))
            alone = f"{case}, TarReader alone"
            rows.append(row("tar", alone, peer, rate["reader"], theirs, "samples/s", more_is_better=True))
    notes.append("spread of the rounds: " + ", ".join(f"{name} {spread(values)}" for name, values in seconds.items()))
    show(rows, title="Samples from a local tar", as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
