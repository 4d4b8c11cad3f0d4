"""Batches a second in the main process: samples ready in the worker's memory, collated there, carried to main.

Peers: torch's DataLoader on the same samples with as many workers, the loaders of `transport_peers`, and the limit that
memory sets: as many processes as there are workers, which do nothing but `torch.stack` into a warm buffer. A row with
JPEG decoding in the workers stands beside them: there decoding is the work, and transport is not; quote both together.
"""

from __future__ import annotations

import io
import multiprocessing
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from report import Row, arguments, median, row, show, spread
from transport_peers import BATCH, WARM, Ready, grain, rate, spdl, stateful_loader, torch_loader, torchdata_09

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

CASES: dict[str, tuple[tuple[int, ...], torch.dtype, int, float]] = {
    # name: (shape of a sample, dtype, batches measured, the ratio to torch's DataLoader that is promised)
    "64x3x224x224 float32": ((3, 224, 224), torch.float32, 150, 8),
    "64x3x224x224 uint8": ((3, 224, 224), torch.uint8, 1000, 10),
    "64x512 int64": ((512,), torch.int64, 6000, 5),
}


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


def ours(make: Callable[[int], torch.Tensor], workers: int, count: int) -> tuple[float, int]:
    pipe = IterableWrapper(range((WARM + count) * BATCH)).sharding_filter().map(make).batch(BATCH).collate()
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers)) as loader:
        found = rate(iter(loader), min(WARM, count), count - workers)
        return found, loader.stats()["copied_batches"]


def stack_alone(make: Callable[[int], torch.Tensor], count: int, together: Any = None) -> float:
    """Batches a second of `torch.stack` into one warm buffer; begins with all that wait at the barrier `together`."""
    torch.set_num_threads(1)
    samples = [make(index) for index in range(BATCH)]
    warm = torch.empty((BATCH, *samples[0].shape), dtype=samples[0].dtype)

    def stacked() -> Iterator[torch.Tensor]:
        while True:
            yield torch.stack(samples, out=warm)

    batches = stacked()
    if together is not None:
        rate(batches, 0, WARM)
        together.wait()
    return rate(batches, WARM, count)


def limit(make: Callable[[int], torch.Tensor], count: int, processes: int) -> float:
    """What the memory allows so many workers, were there no transport at all."""
    if processes == 1:
        return stack_alone(make, count)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        together = manager.Barrier(processes)
        return sum(pool.map(stack_alone, [make] * processes, [count] * processes, [together] * processes))


#: Least ratios that are promised, for images; SPDL's is one process by its nature.
PEERS: dict[str, tuple[Callable[..., float], float | None, tuple[int, ...]]] = {
    "SPDL, shared-memory pool": (spdl, 3, (1,)),
    "grain mp_prefetch": (grain, None, (1, 2)),
    "StatefulDataLoader": (stateful_loader, 8, (1, 2)),
    "torchdata 0.9 DataLoader2": (torchdata_09, 10, (1, 2)),
}


def measure(case: str, workers: int, rounds: int, peers: dict[str, Callable[..., float]]) -> list[Row]:
    """Interleave ours, the peers and the limit; what is an order of magnitude slower runs an eighth of the batches."""
    shape, dtype, count, promised = CASES[case]
    found: dict[str, list[float]] = {name: [] for name in ("ours", "torch DataLoader", *peers, "limit")}
    copied, few = 0, max(30, count // 8)
    for _ in range(rounds):
        fastest, copies = ours(Ready(shape, dtype), workers, count)
        copied += copies
        found["ours"].append(fastest)
        found["torch DataLoader"].append(torch_loader(Ready(shape, dtype), workers, few))
        for name, peer in peers.items():
            found[name].append(peer(Ready(shape, dtype), workers, few))
        found["limit"].append(limit(Ready(shape, dtype), count, workers))
    mine = median(found["ours"])
    name = f"{case}, {workers} worker{'s' if workers > 1 else ''}"
    note = f"ours {spread(found['ours'])}, copied batches {copied}"
    image = "224" in case
    targets = {"torch DataLoader": promised, **{peer: PEERS[peer][1] if image else None for peer in peers}}
    rows = [
        row("transport", name, peer, mine, median(found[peer]), "batches/s", more_is_better=True, target=target,
            note=note)
        for peer, target in targets.items()
    ]  # fmt: skip
    alone = f"torch.stack alone, {workers} process{'es' if workers > 1 else ''}"
    rows.append(
        row("transport", name, alone, mine, median(found["limit"]), "batches/s", more_is_better=True,
            target=0.85 if image and workers == 1 else None, note=f"theirs {spread(found['limit'])}")
    )  # fmt: skip
    return rows


def measure_jpeg(workers: int, rounds: int) -> Row:
    count = 12
    mine, other = [], []
    for _ in range(rounds):
        mine.append(ours(Decode(), workers, count)[0])
        other.append(torch_loader(Decode(), workers, count))
    name = f"JPEG 256x256 decoded in {workers} worker{'s' if workers > 1 else ''}"
    note = "decoding is the work here, not transport"
    return row("transport", name, "torch DataLoader", median(mine), median(other), "batches/s", more_is_better=True,
               note=note)  # fmt: skip


def peers_for(workers: int, python: str | None) -> dict[str, Callable[..., float]]:
    """Return the peers that can run with so many workers."""
    peers: dict[str, Callable[..., float]] = {}
    for name, (peer, _, counts) in PEERS.items():
        if workers in counts and (peer is not torchdata_09 or python is not None):
            peers[name] = peer
    if python is not None:
        peers["torchdata 0.9 DataLoader2"] = lambda ready, workers, count: torchdata_09(
            python, ready.shape, ready.dtype, workers, count
        )
    return peers


def main() -> None:
    def extend(parser: ArgumentParser) -> None:
        parser.add_argument("--case", choices=[*CASES, "jpeg"], help="measure this case alone")
        parser.add_argument("--torchdata-09", metavar="PYTHON", help="interpreter of an environment with torchdata 0.9")
        parser.add_argument("--no-peers", action="store_true", help="only torch's DataLoader and the limit")

    options = arguments(__doc__ or "", rounds=5, extend=extend)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        if options.case in (None, case):
            for workers in (1, 2):
                peers = {} if options.no_peers else peers_for(workers, options.torchdata_09)
                rows += measure(case, workers, options.rounds, peers)
    if options.case in (None, "jpeg"):
        rows += [measure_jpeg(workers, options.rounds) for workers in (1, 2)]
    left_out = [] if options.no_peers or options.torchdata_09 else ["left out: torchdata 0.9 (see --torchdata-09)"]
    show(rows, title="Batches a second in the main process", as_json=options.json, notes=left_out)


if __name__ == "__main__":
    main()
