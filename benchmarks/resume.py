"""Resume in mid-epoch: the time to the first sample after a restore, as a share of the time it took to get there.

100 local tar shards of 1,000 samples (2 KB and a label each), in the page cache, stopped at 90 %, in one process.
`promised` for a sample shuffle of B is 2 % + B (ln B + 2) / samples: the oldest element that a buffer of B holds is
about B (ln B + 0.58) inputs old, and everything from there on is read again.

Peers: webdataset has no position, so a resume reads everything again; torchdata's StatefulDataLoader does the same for
a dataset without a state of its own.
"""

from __future__ import annotations

import io
import math
import random
import tarfile
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from report import Row, arguments, median, row, show

from pipes import IterDataPipe
from pipes.iter import FileLister
from pipes.loader2 import DataLoader2

SHARDS, SAMPLES, SIZE = 100, 1_000, 2_048
SHARE = 0.9


def write_shards(folder: Path, shards: int, samples: int) -> None:
    draw = random.Random(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:06d}.tar", "w", format=tarfile.GNU_FORMAT) as archive:
            for number in range(samples):
                for extension, data in (("bin", draw.randbytes(SIZE)), ("cls", str(number % 10).encode())):
                    member = tarfile.TarInfo(f"{shard:06d}/{number:06d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def decode(sample: dict[str, Any]) -> tuple[str, int, int]:
    return sample["__key__"], len(sample["bin"].read()), int(sample["cls"].read())


def graph(folder: Path, buffer: int) -> IterDataPipe[Any]:
    shards = FileLister(str(folder), "*.tar").shuffle().sharding_filter()
    samples = shards.open_files("rb").load_from_tar().webdataset().map(decode)
    return samples.shuffle(buffer) if buffer else samples


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def ours(folder: Path, buffer: int, stop: int) -> tuple[float, float]:
    """Return the seconds to sample number `stop`, and from a new loader's restore to the sample after it."""
    with DataLoader2(graph(folder, buffer)) as loader:
        loader.seed(1)
        iterator = iter(loader)
        there, _ = seconds(lambda: list(islice(iterator, stop)))
        state = loader.state_dict()
        expected = next(iterator)
    with DataLoader2(graph(folder, buffer)) as again:

        def restore() -> Any:
            again.load_state_dict(state)
            return next(iter(again))

        back, found = seconds(restore)
    if found != expected:
        raise SystemExit(f"the resume is wrong: {found} instead of {expected}")
    return there, back


def webdataset(folder: Path) -> Any:
    from webdataset import WebDataset

    names = [str(path) for path in sorted(folder.glob("*.tar"))]

    def decoded(sample: dict[str, Any]) -> tuple[str, int, int]:
        return sample["__key__"], len(sample["bin"]), int(sample["cls"])

    return WebDataset(names, shardshuffle=False).map(decoded)


def replay(folder: Path, stop: int) -> tuple[float, float]:
    there, _ = seconds(lambda: list(islice(webdataset(folder), stop)))
    back, _ = seconds(lambda: next(islice(webdataset(folder), stop, None)))
    return there, back


def stateful(folder: Path, stop: int) -> tuple[float, float]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(webdataset(folder), batch_size=None)
    iterator: Iterator[Any] = iter(loader)
    there, _ = seconds(lambda: list(islice(iterator, stop)))
    state = loader.state_dict()
    again = StatefulDataLoader(webdataset(folder), batch_size=None)

    def restore() -> Any:
        again.load_state_dict(state)
        return next(iter(again))

    back, _ = seconds(restore)
    return there, back


def main() -> None:
    def extend(parser: ArgumentParser) -> None:
        parser.add_argument("--shards", type=int, default=SHARDS)
        parser.add_argument("--samples", type=int, default=SAMPLES, help="in each shard")

    options = arguments(__doc__ or "", rounds=3, extend=extend)
    total = options.shards * options.samples
    stop = int(SHARE * total)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder, options.shards, options.samples)
        contenders: dict[str, Callable[[], tuple[float, float]]] = {
            "no sample shuffle": lambda: ours(folder, 0, stop),
            "shuffle(100)": lambda: ours(folder, 100, stop),
            "shuffle(1000)": lambda: ours(folder, 1000, stop),
            "webdataset": lambda: replay(folder, stop),
            "StatefulDataLoader": lambda: stateful(folder, stop),
        }
        found: dict[str, list[tuple[float, float]]] = {case: [] for case in contenders}
        for _ in range(options.rounds):
            for case, contender in contenders.items():
                found[case].append(contender())
    shares = {case: 100 * median(back / there for there, back in rounds) for case, rounds in found.items()}
    rows: list[Row] = []
    for case, buffer in (("no sample shuffle", 0), ("shuffle(100)", 100), ("shuffle(1000)", 1000)):
        promised = 2 + 100 * buffer * (math.log(buffer) + 2) / total if buffer else 5
        note = f"promised {promised:.1f} % or less"
        rows += [
            row("resume", case, peer, shares[case], shares[peer], "% of the way", more_is_better=False,
                target=shares[peer] / promised, note=note)
            for peer in ("webdataset", "StatefulDataLoader")
        ]  # fmt: skip
    took = ", ".join(f"{case} {median(there for there, _ in rounds):.2f} s" for case, rounds in found.items())
    show(rows, title="Time to the next sample after a restore at 90 %", as_json=options.json,
         notes=[f"the way there: {took}"])  # fmt: skip


if __name__ == "__main__":
    main()
