"""Batches a second in the main process: samples ready in the worker's memory, collated there, carried to main.

Peers: torch's DataLoader on the same samples with as many workers, and the limit, `torch.stack` into a warm buffer in
this process. A row with JPEG decoding in the workers stands beside them: there decoding is the work, and transport is
not; quote both together.
"""

from __future__ import annotations

import io
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from report import Row, arguments, median, row, show, spread
from torch.utils.data import DataLoader, Dataset

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

BATCH = 64
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, int, float]] = {
    # name: (shape of a sample, dtype, batches measured, the ratio to torch's DataLoader that is promised)
    "64x3x224x224 float32": ((3, 224, 224), torch.float32, 150, 8),
    "64x3x224x224 uint8": ((3, 224, 224), torch.uint8, 1000, 10),
    "64x512 int64": ((512,), torch.int64, 6000, 5),
}
WARM = 30


class Ready:
    """Hands out the same prepared samples, whatever the index."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.samples: list[torch.Tensor] = []

    def __call__(self, index: int) -> torch.Tensor:
        if not self.samples:
            self.samples = [torch.randint(0, 100, self.shape).to(self.dtype) for _ in range(BATCH)]
        return self.samples[index % BATCH]


class Decode:
    """Decodes one prepared JPEG of 256x256, whatever the index."""

    def __init__(self) -> None:
        from PIL import Image

        noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).resize((256, 256)).save(buffer, "JPEG", quality=90)
        self.jpeg = buffer.getvalue()

    def __call__(self, index: int) -> torch.Tensor:
        from PIL import Image

        return torch.from_numpy(np.array(Image.open(io.BytesIO(self.jpeg)).convert("RGB")))


class Samples(Dataset[torch.Tensor]):
    def __init__(self, make: Callable[[int], torch.Tensor], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.make(index)


def rate(batches: Iterator[Any], warm: int, count: int) -> float:
    """Batches a second, after `warm` batches; each batch is dropped when the next is asked for."""
    for _ in range(warm):
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count / (time.perf_counter() - start)


def ours(make: Callable[[int], torch.Tensor], workers: int, count: int) -> tuple[float, int]:
    pipe = IterableWrapper(range((WARM + count) * BATCH)).sharding_filter().map(make).batch(BATCH).collate()
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers)) as loader:
        found = rate(iter(loader), min(WARM, count), count - workers)
        return found, loader.stats()["copied_batches"]


def theirs(make: Callable[[int], torch.Tensor], workers: int, count: int) -> float:
    loader = DataLoader(Samples(make, (WARM + count) * BATCH), batch_size=BATCH, num_workers=workers)
    return rate(iter(loader), min(WARM, count), count)


def limit(make: Callable[[int], torch.Tensor], count: int) -> float:
    samples = [make(index) for index in range(BATCH)]
    warm = torch.empty((BATCH, *samples[0].shape), dtype=samples[0].dtype)

    def stacked() -> Iterator[torch.Tensor]:
        while True:
            yield torch.stack(samples, out=warm)

    return rate(stacked(), WARM, count)


def measure(case: str, workers: int, rounds: int) -> list[Row]:
    shape, dtype, count, promised = CASES[case]
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "limit": []}
    copied = 0
    for _ in range(rounds):
        fastest, copies = ours(Ready(shape, dtype), workers, count)
        copied += copies
        found["ours"].append(fastest)
        # torch's loader is an order of magnitude slower: fewer batches tell as much.
        found["theirs"].append(theirs(Ready(shape, dtype), workers, max(30, count // 8)))
        found["limit"].append(limit(Ready(shape, dtype), count))
    mine = median(found["ours"])
    name = f"{case}, {workers} worker{'s' if workers > 1 else ''}"
    note = f"ours {spread(found['ours'])}, copied batches {copied}"
    rows = [
        row("transport", name, "torch DataLoader", mine, median(found["theirs"]), "batches/s", more_is_better=True,
            target=promised, note=note)
    ]  # fmt: skip
    if workers == 1:
        target = 0.85 if "224" in case else None
        rows.append(
            row("transport", name, "torch.stack, in process", mine, median(found["limit"]), "batches/s",
                more_is_better=True, target=target, note=f"theirs {spread(found['limit'])}")
        )  # fmt: skip
    return rows


def measure_jpeg(workers: int, rounds: int) -> Row:
    count = 12
    mine, other = [], []
    for _ in range(rounds):
        mine.append(ours(Decode(), workers, count)[0])
        other.append(theirs(Decode(), workers, count))
    name = f"JPEG 256x256 decoded in {workers} worker{'s' if workers > 1 else ''}"
    note = "decoding is the work here, not transport"
    return row("transport", name, "torch DataLoader", median(mine), median(other), "batches/s", more_is_better=True,
               note=note)  # fmt: skip


def main() -> None:
    def extend(parser: ArgumentParser) -> None:
        parser.add_argument("--case", choices=[*CASES, "jpeg"], help="measure this case alone")

    options = arguments(__doc__ or "", rounds=5, extend=extend)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        if options.case in (None, case):
            for workers in (1, 2):
                rows += measure(case, workers, options.rounds)
    if options.case in (None, "jpeg"):
        rows += [measure_jpeg(workers, options.rounds) for workers in (1, 2)]
    show(rows, title="Batches a second in the main process", as_json=options.json)


if __name__ == "__main__":
    main()
