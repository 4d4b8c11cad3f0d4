"""Seconds from making a loader to its first batch, in a program that has imported everything.

Every figure comes from a fresh process, because the first loader of a program also starts the server that workers are
forked from, which imports torch once. "warm" is the second loader of the program.
Peers: torch's DataLoader on the same data, with each start method.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable

import torch
from report import Row, arguments, median, row, show, spread
from torch.utils.data import DataLoader, Dataset

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

COUNT, BATCH = 6_400, 16


def sample(number: int) -> torch.Tensor:
    return torch.full((16,), number)


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


def ours(workers: int) -> float:
    start = time.perf_counter()
    pipe = IterableWrapper(range(COUNT)).sharding_filter().map(sample).batch(BATCH).collate()
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers)) as loader:
        next(iter(loader))
        return time.perf_counter() - start


def warm(workers: int) -> float:
    ours(workers)
    return ours(workers)


def theirs(workers: int, method: str) -> float:
    start = time.perf_counter()
    iterator = iter(DataLoader(Samples(), BATCH, num_workers=workers, multiprocessing_context=method))
    next(iterator)
    return time.perf_counter() - start


CONTENDERS: dict[str, Callable[[], float]] = {
    "ours, 1 worker": lambda: ours(1),
    "ours, 4 workers": lambda: ours(4),
    "ours, 4 workers, warm": lambda: warm(4),
    "torch, 4 workers, spawn": lambda: theirs(4, "spawn"),
    "torch, 4 workers, forkserver": lambda: theirs(4, "forkserver"),
    "torch, 4 workers, fork": lambda: theirs(4, "fork"),
}


def in_fresh_process(name: str) -> float:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--only", name], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(json.loads(done.stdout))


def main() -> None:
    def extend(parser: ArgumentParser) -> None:
        parser.add_argument("--only", choices=CONTENDERS, help="measure this one in this process and print the seconds")

    options = arguments(__doc__ or "", rounds=5, extend=extend)
    if options.only is not None:
        print(json.dumps(CONTENDERS[options.only]()), flush=True)
        return
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            found[name].append(in_fresh_process(name))

    def compare(mine: str, peer: str, target: float | None = None) -> Row:
        note = f"ours {spread(found[mine])}"
        return row("startup", mine, peer, median(found[mine]), median(found[peer]), "s", more_is_better=False,
                   target=target, note=note)  # fmt: skip

    four = "ours, 4 workers"
    rows: list[Row] = [
        compare(four, "ours, 1 worker", 1 / 1.3),
        compare(four, "torch, 4 workers, spawn", 2),
        *(compare(four, f"torch, 4 workers, {method}") for method in ("forkserver", "fork")),
        *(compare(f"{four}, warm", f"torch, 4 workers, {method}") for method in ("spawn", "forkserver", "fork")),
    ]
    show(rows, title="Seconds to the first batch", as_json=options.json)


if __name__ == "__main__":
    main()
