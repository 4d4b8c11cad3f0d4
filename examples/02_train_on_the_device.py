"""Train networks shaped like ResNet, VGG and BERT in bf16, on batches that are copied to the device ahead of the step.

Images leave the workers as bytes, N x H x W x C, so a quarter of float32's bytes cross the bus; there they become
bfloat16, and channels-last by a change of view. The device is the accelerator that torch finds, or else the CPU.

    python examples/02_train_on_the_device.py             # small networks, seconds on a laptop
    python examples/02_train_on_the_device.py --full      # ResNet-50, VGG-16 and BERT-base, for an accelerator

Exit status 1 says that a sample was lost or came twice, that a batch was not as it should be, or that nothing was
learnt; of the full networks, which would take longer for that, that the loss is no number.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from models import Encoder, resnet, vgg
from rich.console import Console
from rich.table import Table
from torch import nn

from pipes import DataLoader2
from pipes.iter import IterableWrapper
from pipes.loader2 import MultiProcessingReadingService

DEVICE = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")
CLASSES = 4
VOCABULARY = 1000
LONGEST = 128
Sample = dict[str, Any]


class Image:
    """Makes image `number`, uint8 `(side, side, 3)`: noise in which stripes of one of four widths lie."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, number: int) -> Sample:
        label = number % CLASSES
        noise = torch.randint(0, 100, (self.side, self.side, 3), generator=torch.Generator().manual_seed(number))
        stripes = (torch.arange(self.side) >> label) % 2 * 150
        return {"input": (noise + stripes[:, None, None]).to(torch.uint8), "label": label, "number": number}


class Text:
    """Makes text `number`, int64 `(length,)`: random tokens, some of which tell one of four subjects."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, number: int) -> Sample:
        label = number % CLASSES
        tokens = torch.randint(10, VOCABULARY, (self.length,), generator=torch.Generator().manual_seed(number))
        tokens[:: self.length // 4] = label + 1
        return {"input": tokens, "label": label, "number": number}


def on_the_device(batch: Sample) -> Sample:
    """Runs on the stream of the copies, ahead of the step."""
    if batch["input"].dtype is torch.uint8:
        # N x H x W x C in memory is what channels-last means: nothing is moved.
        batch["input"] = batch["input"].permute(0, 3, 1, 2).to(torch.bfloat16).div_(255)
    return batch


def loader_of(make: Callable[[int], Sample], samples: int, batch: int, workers: int) -> DataLoader2[Sample]:
    pipe = IterableWrapper(range(samples)).shuffle().sharding_filter().map(make).batch(batch).collate()
    service = MultiProcessingReadingService(num_workers=workers)
    loader: DataLoader2[Sample] = DataLoader2(pipe.to_device(DEVICE, on_device=on_the_device), reading_service=service)
    loader.seed(1)
    return loader


def fits(batch: Sample) -> bool:
    """Whether a batch is on the device, and an image channels-last."""
    x = batch["input"]
    last = x.dim() != 4 or (x.dtype is torch.bfloat16 and x.is_contiguous(memory_format=torch.channels_last))
    return last and x.device.type == batch["label"].device.type == DEVICE.type


def train(model: nn.Module, loader: DataLoader2[Sample], samples: int, epochs: int, part: float) -> tuple[Any, ...]:
    """Train `epochs` epochs; return what the report says, and whether the loss fell below a `part` of itself."""
    # Weights of convolutions lie channels-last, too; autocast chooses bf16 for what is exact enough in it.
    model = model.to(DEVICE, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses: list[torch.Tensor] = []
    right, started = True, time.perf_counter()
    for _ in range(epochs):
        numbers: list[torch.Tensor] = []
        for batch in loader:
            right &= fits(batch)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(batch["input"]), batch["label"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            # They stay on the device: reading one here would wait for the device in every step.
            losses.append(loss.detach())
            numbers.append(batch["number"])
        right &= sorted(torch.cat(numbers).tolist()) == list(range(samples))
    values = torch.stack(losses).float().cpu()
    seconds, few = time.perf_counter() - started, max(1, len(values) // 10)
    first, last = values[:few].mean().item(), values[-few:].mean().item()
    rate, fall = f"{epochs * samples / seconds:,.0f}", f"{first:.2f} to {last:.2f}"
    return str(len(values)), rate, fall, right and last < part * first


def networks(full: bool) -> dict[str, tuple[nn.Module, Callable[[int], Sample]]]:
    if full:
        return {"ResNet-50": (resnet(classes=CLASSES), Image(224)), "VGG-16": (vgg(classes=CLASSES), Image(224)),
                "BERT-base": (Encoder(classes=CLASSES), Text(LONGEST))}  # fmt: skip
    bert = Encoder(VOCABULARY, 32, 2, 2, LONGEST, CLASSES)
    return {"ResNet": (resnet((1, 1), 8, CLASSES), Image(32)), "VGG": (vgg((1, 1), 8, 32, CLASSES), Image(32)),
            "BERT": (bert, Text(16))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="ResNet-50, VGG-16 and BERT-base instead of small networks")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    if DEVICE.type == "cpu":
        # The workers have the others; more threads than cores would wait for each other.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - options.workers))
    table = Table("network", "batches", "samples/s", "loss", "as it should be", title=f"bf16 on {DEVICE}")
    fine = True
    for name, (model, make) in networks(options.full).items():
        with loader_of(make, options.samples, options.batch, options.workers) as loader:
            *found, right = train(model, loader, options.samples, options.epochs, math.inf if options.full else 0.7)
        table.add_row(name, *found, "yes" if right else "NO")
        fine &= right
    Console().print(table)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
