"""The loaders beside which `transport.py` puts ours: each collates the same prepared samples in its workers.

torchdata's DataLoader2 ended with torchdata 0.9, which excludes the release that the other peer comes from, so it runs
in an environment of its own, with this file as its program.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch

Make = Callable[[int], torch.Tensor]
BATCH, WARM = 64, 30
#: Seconds after which a peer that runs as a program of its own is ended.
PATIENCE = 120.0


class Ready:
    """Hands out the same prepared samples, whatever the index."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.samples: list[torch.Tensor] = []

    def __call__(self, index: int) -> torch.Tensor:
        if not self.samples:
            self.samples = [torch.randint(0, 100, self.shape).to(self.dtype) for _ in range(BATCH)]
        return self.samples[index % BATCH]


def rate(batches: Iterator[Any], warm: int, count: int) -> float:
    """Batches a second, after `warm` batches; each batch is dropped when the next is asked for."""
    for _ in range(warm):
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count / (time.perf_counter() - start)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, make: Make, count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.make(index)


def torch_loader(make: Make, workers: int, count: int) -> float:
    samples = Samples(make, (WARM + count) * BATCH)
    return rate(iter(torch.utils.data.DataLoader(samples, BATCH, num_workers=workers)), WARM, count)


def stateful_loader(make: Make, workers: int, count: int) -> float:
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = Samples(make, (WARM + count) * BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rate(iter(StatefulDataLoader(samples, BATCH, num_workers=workers)), WARM, count)


def stacked(make: Make, count: int) -> Iterable[torch.Tensor]:
    torch.set_num_threads(1)
    return (torch.stack([make(index) for index in range(BATCH)]) for _ in range(count))


def spdl(make: Make, workers: int, count: int) -> float:
    """One subprocess, whose batches travel in SPDL's pool of shared-memory segments, as views."""
    from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

    assert workers == 1
    sample = make(0)
    pool = SharedMemorySegmentPool(BATCH * sample.numel() * sample.element_size() + (1 << 16), 4)
    batches = iter(iterate_in_subprocess(partial(stacked, make, WARM + count), buffer_size=4, arena=pool))
    found = rate(batches, WARM, count)
    for _ in batches:
        pass
    return found


class Arrays:
    """The samples as numpy arrays, which grain batches and moves through shared memory."""

    def __init__(self, make: Make) -> None:
        self.make = make

    def __call__(self, index: int) -> Any:
        return self.make(index).numpy()


def grain(make: Make, workers: int, count: int) -> float:
    from absl import flags
    from grain import MapDataset, MultiprocessingOptions

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    samples = MapDataset.source(range((WARM + count + 8 * workers) * BATCH)).map(Arrays(make)).batch(BATCH)
    options = MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4)
    with closing(iter(samples.to_iter_dataset().mp_prefetch(options))) as batches:
        return rate((torch.from_numpy(batch) for batch in batches), WARM, count)


def torchdata_09(python: str, shape: tuple[int, ...], dtype: torch.dtype, workers: int, count: int) -> float:
    """The same in the environment of the interpreter `python`, which has torchdata 0.9.

    Raises RuntimeError when it gives no figure within `PATIENCE` seconds. It may hang for good when it shuts down, with
    the figure given; then it is ended with its workers.
    """
    case = json.dumps([shape, str(dtype).removeprefix("torch."), workers, count])
    command = [python, "-W", "ignore", __file__, case]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            found, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            found, _ = process.communicate()
    if not found:
        raise RuntimeError(f"torchdata 0.9 gave no figure within {PATIENCE:.0f} s (exit code {process.returncode})")
    return float(found)


def run_torchdata_09(shape: tuple[int, ...], dtype: str, workers: int, count: int) -> None:
    from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
    from torchdata.datapipes.iter import IterableWrapper

    make = Ready(tuple(shape), getattr(torch, dtype))
    elements = range((WARM + count + 8 * workers) * BATCH)
    pipe = IterableWrapper(elements, deepcopy=False).sharding_filter().map(make).batch(BATCH).collate()
    loader = DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers, worker_prefetch_cnt=4))
    print(rate(itertools.chain.from_iterable([loader]), WARM, count), flush=True)
    loader.shutdown()


if __name__ == "__main__":
    multiprocessing.freeze_support()
    run_torchdata_09(*json.loads(sys.argv[1]))
