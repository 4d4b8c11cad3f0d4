"""Batches to the device: how near to the bus's limit, how long training waits, and whether every value arrives.

With an accelerator: host-to-device GB/s of loader batches beside a bare loop of pinned copies (the limit) and torch's
DataLoader with `pin_memory`; the share of ResNet-50, VGG-16 and BERT-base training steps (bf16) that waits for data;
500 batches of 64 MB of which the consumer drops its reference at once. Without one all of this runs small on the CPU.
`--fake` needs no hardware: what a batch costs the calling process when the bus is PCIe 5 x16 (55 GB/s, 10 us).
Every line of `--json` names the device. A warning that memory cannot be page-locked explains a bus that is slow.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import Row, arguments, median, row, show
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.loader2.fake_device import FakeDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import Encoder, resnet, vgg

HAS_DEVICE = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if HAS_DEVICE else torch.device("cpu")
PINS = DEVICE.type in ("cuda", "xpu")
#: Of a batch: (shape, dtype).
Kind = tuple[tuple[int, ...], torch.dtype]
IMAGES: Kind = ((64, 3, 224, 224) if HAS_DEVICE else (8, 3, 64, 64), torch.float32)
PCIE5_BANDWIDTH, PCIE5_LATENCY = 55e9, 10e-6
#: Batches that wait at once, and some 20 us of Python work.
BURST, PLAIN_WORK = 12, json.dumps({str(key): [key, {"a": key}] for key in range(36)})


def name_of_device() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else str(DEVICE)


class Ready:
    """Hands out the same prepared sample of a batch's shape; a worker stacks them."""

    def __init__(self, kind: Kind) -> None:
        (self.count, *self.shape), self.dtype = kind
        self.sample: torch.Tensor | None = None

    def __call__(self, index: int) -> torch.Tensor:
        if self.sample is None:
            self.sample = torch.randint(0, 100, self.shape).to(self.dtype)
        return self.sample


class Samples(Dataset[torch.Tensor]):
    def __init__(self, ready: Ready, batches: int) -> None:
        self.ready, self.count = ready, batches * ready.count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ready(index)


def loader_of(kind: Kind, batches: int, workers: int, device: Any, prefetch: int = 4) -> DataLoader2[torch.Tensor]:
    ready = Ready(kind)
    pipe = IterableWrapper(range(batches * ready.count)).sharding_filter().map(ready).batch(ready.count).collate()
    service = MultiProcessingReadingService(workers, prefetch=prefetch)
    return DataLoader2(pipe, reading_service=service, device=device)


def synchronize() -> None:
    if HAS_DEVICE:
        torch.accelerator.synchronize()


def gigabytes_a_second(batches: Iterator[torch.Tensor], warm: int, count: int, move: bool) -> float:
    nbytes = 0
    for place in range(warm + count):
        if place == warm:
            synchronize()
            start, nbytes = time.perf_counter(), 0
        batch = next(batches)
        if move:
            batch = batch.to(DEVICE, non_blocking=True)
        nbytes += batch.nbytes
    synchronize()
    return nbytes / (time.perf_counter() - start) / 1e9


def warm_up(workers: int) -> int:
    """Batches by which all blocks of shared memory are there and page-locked, which takes milliseconds each."""
    return 8 * workers if HAS_DEVICE else 5


def torchs_loader(kind: Kind, batches: int, workers: int) -> DataLoader[torch.Tensor]:
    return DataLoader(Samples(Ready(kind), batches), kind[0][0], num_workers=workers, pin_memory=PINS)


def bare_copies(kind: Kind, count: int) -> float:
    host = torch.zeros(kind[0], dtype=kind[1], pin_memory=PINS)
    device = torch.empty_like(host, device=DEVICE)

    def copied() -> Iterator[torch.Tensor]:
        while True:
            yield device.copy_(host, non_blocking=True)

    return gigabytes_a_second(copied(), 10, count, move=False)


def bus(workers: int, rounds: int, count: int) -> list[Row]:
    ours, torchs, limit = [], [], []
    warm = warm_up(workers)
    for _ in range(rounds):
        with loader_of(IMAGES, warm + count, workers, DEVICE) as loader:
            ours.append(gigabytes_a_second(iter(loader), warm, count, move=False))
        few = max(10, count // 4)
        torchs.append(gigabytes_a_second(iter(torchs_loader(IMAGES, few + 10, workers)), 10, few, move=True))
        limit.append(bare_copies(IMAGES, count))
    case = f"{'x'.join(map(str, IMAGES[0]))} float32 to {name_of_device()}, {workers} workers"
    return [
        row("device", case, "pinned copies alone", median(ours), median(limit), "GB/s", more_is_better=True,
            target=0.9 if HAS_DEVICE else None),
        row("device", case, "torch DataLoader, pin_memory", median(ours), median(torchs), "GB/s", more_is_better=True,
            target=3 if HAS_DEVICE else None),
    ]  # fmt: skip


def trainings() -> dict[str, tuple[Callable[[], nn.Module], Kind]]:
    if HAS_DEVICE:
        return {
            "ResNet-50, batch 128": (resnet, ((128, 3, 224, 224), torch.uint8)),
            "VGG-16, batch 64": (vgg, ((64, 3, 224, 224), torch.uint8)),
            "BERT-base, batch 64": (Encoder, ((64, 128), torch.int64)),
        }
    return {
        "small ResNet, batch 8": (lambda: resnet((1, 1), 8, 10), ((8, 3, 32, 32), torch.uint8)),
        "small VGG, batch 8": (lambda: vgg((1, 1), 8, 32, 10), ((8, 3, 32, 32), torch.uint8)),
        "small BERT, batch 8": (lambda: Encoder(128, 32, 2, 2, 64), ((8, 16), torch.int64)),
    }


def stall(batches: Iterator[torch.Tensor], model: nn.Module, warm: int, steps: int) -> float:
    """The percent of the time of training steps in which the loop waited for its batch."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    waited = 0.0
    for place in range(warm + steps):
        if place == warm:
            synchronize()
            start, waited = time.perf_counter(), 0.0
        asked = time.perf_counter()
        batch = next(batches).to(DEVICE, non_blocking=True)
        waited += time.perf_counter() - asked
        if batch.dtype is torch.uint8:
            batch = batch.to(torch.bfloat16).div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(batch).float().logsumexp(1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        # Without this the queue of kernels would hide every wait, and grow.
        loss.item()
    return 100 * waited / (time.perf_counter() - start)


def training(workers: int, steps: int) -> list[Row]:
    rows = []
    warm = warm_up(workers)
    for name, (make, kind) in trainings().items():
        torch.manual_seed(0)
        model = make().to(DEVICE).to(memory_format=torch.channels_last)
        with loader_of(kind, warm + steps, workers, DEVICE) as loader:
            ours = max(stall(iter(loader), model, warm, steps), 1e-3)
        other = max(stall(iter(torchs_loader(kind, warm + steps, workers)), model, warm, steps), 1e-3)
        case, unit = f"waiting for data, {name} on {name_of_device()}, {workers} workers", "% of the step"
        rows.append(row("device", case, "torch DataLoader, pin_memory", ours, other, unit, more_is_better=False))
        if HAS_DEVICE:
            rows.append(row("device", case, "goal", ours, 2, unit, more_is_better=False, target=1))
    return rows


def numbered(number: int, length: int) -> torch.Tensor:
    return torch.full((length,), number, dtype=torch.int32)


class Numbered:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, number: int) -> torch.Tensor:
        return numbered(number, self.length)


def wrong_batches(workers: int, count: int, nbytes: int) -> int:
    """How many of the batches, dropped as soon as a kernel was given them, were not what the worker made."""
    pipe = IterableWrapper(range(count)).sharding_filter().map(Numbered(nbytes // 4))
    service = MultiProcessingReadingService(workers)
    sums = []
    with DataLoader2(pipe, reading_service=service, device=DEVICE, num_streams=workers) as loader:
        for batch in loader:
            sums.append((batch[0].clone(), (batch == batch[0]).all()))
            del batch
        synchronize()
    numbers = [int(first) for first, same in sums if bool(same)]
    return count - len(set(numbers) & set(range(count)))


def on_a_fake_bus(count: int) -> list[Row]:
    """Main's CPU time for a batch, and what it copies: torch's pin thread copies every byte once.

    Once when a burst of batches is there, and once when main is woken for each of them. The second says as much about
    the machine as about this library: a plain piece of Python work is timed in the same places for comparison.
    """
    rows = []
    for dtype in (torch.float32, torch.uint8):
        kind: Kind = (64, 3, 224, 224), dtype
        device = FakeDevice(PCIE5_LATENCY, PCIE5_BANDWIDTH, moves=False)
        with loader_of(kind, count + 20, 1, device, prefetch=BURST) as loader:
            batches = iter(loader)
            for _ in range(20):
                nbytes = next(batches).nbytes
            # Until every block of shared memory is there: its pages are made as they are filled, ten times as slowly.
            time.sleep(0.1 * BURST)
            waiting, woken, plain = [], [], []
            for _ in range(count // 4 // BURST):
                # By then the worker has made what it may.
                time.sleep(0.01 * BURST)
                waiting += [cpu_time_of(next, batches) for _ in range(BURST - 2)]
            while len(waiting) + len(woken) < count - BURST:
                woken.append(cpu_time_of(next, batches))
                plain.append(cpu_time_of(json.loads, PLAIN_WORK))
        slower = median(plain) / median([cpu_time_of(json.loads, PLAIN_WORK) for _ in range(1000)])
        pinned = time_to_pin(nbytes)
        for state, times in (("batches are there", waiting), ("it is woken for each", woken)):
            case = f"CPU of main a batch, {state}, {str(dtype).removeprefix('torch.')} images"
            note = f"bytes copied in the process: {device.staged}"
            if times is woken:
                note += f"; plain Python work there takes {slower:.1f} times what it takes by itself"
            rows.append(row("device", case, "one copy, as a pin thread's", median(times) * 1e6, pinned * 1e6, "us",
                            more_is_better=False, note=note))  # fmt: skip
            rows.append(row("device", case, "goal", median(times) * 1e6, 100, "us", more_is_better=False, target=1))
    return rows


def cpu_time_of(function: Callable[[Any], Any], argument: Any) -> float:
    """Seconds of all threads of this process; there are none of ours."""
    before = time.process_time()
    function(argument)
    return time.process_time() - before


def time_to_pin(nbytes: int) -> float:
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    start = time.process_time()
    for _ in range(10):
        target.copy_(source)
    return (time.process_time() - start) / 10


def main() -> None:
    def extend(parser: ArgumentParser) -> None:
        parser.add_argument("--fake", action="store_true", help="the fake device: what a batch costs this process")
        # One worker fills memory at a fraction of the bus's speed.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4
        workers = min(12, max(4, cores - 4)) if HAS_DEVICE else 2
        parser.add_argument("--workers", type=int, default=workers)

    options = arguments(__doc__ or "", rounds=3 if HAS_DEVICE else 1, extend=extend)
    torch.set_num_threads(1)
    if options.fake:
        show(on_a_fake_bus(400), title="Batches to a fake device", as_json=options.json)
        return
    rows = bus(options.workers, options.rounds, 400 if HAS_DEVICE else 20)
    rows += training(options.workers, 60 if HAS_DEVICE else 5)
    count, nbytes = (500, 64_000_000) if HAS_DEVICE else (40, 1_000_000)
    wrong = wrong_batches(options.workers, count, nbytes)
    show(rows, title=f"Batches to {name_of_device()}", as_json=options.json)
    print(json.dumps({"name": "device", "device": name_of_device(), "batches": count, "bytes": nbytes, "wrong": wrong}))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
