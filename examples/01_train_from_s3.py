"""Train a small CNN on images streamed from an S3 store, lose a worker on the way, stop in mid-epoch and go on exactly.

Without arguments it starts an S3 server on this machine, makes 4,000 labelled JPEGs in 20 tar shards and uploads them.
With `--store seaweedfs` that server is SeaweedFS, which checks signatures, and must refuse a wrong secret first.
With a store of your own (which must hold `train/*.tar` and `val/*.tar`, made by `--make` or by you):

    python examples/01_train_from_s3.py --bucket s3://my-bucket/shapes --endpoint-url https://store.example

Exit status 1 says that a sample was lost or came twice, that the resumed batches differ, or that nothing was learnt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from seaweedfs import seaweedfs
from shapes import CLASSES, SIDE, upload_shards
from torch import nn

from pipes import DataLoader2, IterDataPipe
from pipes.errors import StorePermissionError
from pipes.formats.decode import Decoder
from pipes.iter import IterableWrapper, S3FileLister
from pipes.loader2 import MultiProcessingReadingService

BATCH = 64
EPOCHS = 2
SEED = 1
console = Console()


def to_tensors(sample: dict[str, Any]) -> dict[str, Any]:
    """Name what the model wants: image, label, and the sample's number, by which the report counts."""
    return {"image": sample["jpg"], "label": sample["cls"], "number": int(sample["__key__"].rpartition("/")[2])}


def training_pipe(bucket: str) -> IterDataPipe[dict[str, torch.Tensor]]:
    return (
        S3FileLister([f"{bucket}/train/"])
        .shuffle(1000)
        .sharding_filter()
        .load_files_by_s3()
        .load_from_tar()
        .webdataset()
        .map(Decoder(images="torch"))
        .map(to_tensors)
        .shuffle(500)
        .batch(BATCH)
        .collate()
    )


def validation_pipe(bucket: str) -> IterDataPipe[dict[str, torch.Tensor]]:
    files = S3FileLister([f"{bucket}/val/"]).sharding_filter().load_files_by_s3()
    return files.load_from_tar().webdataset().map(Decoder(images="torch")).map(to_tensors).batch(BATCH).collate()


def new_loader(pipe: IterDataPipe[Any], workers: int) -> DataLoader2[dict[str, torch.Tensor]]:
    loader: DataLoader2[dict[str, torch.Tensor]] = DataLoader2(
        pipe, reading_service=MultiProcessingReadingService(num_workers=workers, timeout=60)
    )
    loader.seed(SEED)
    return loader


class Trainer:
    """A small CNN, its optimiser, and the counts of the report."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # The workers have the other core; more threads than cores would wait for each other.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        convolutions: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 32)):
            convolutions += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        side = SIDE // 8
        self.model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * side * side, len(CLASSES)))
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.samples = 0
        self.seconds = 0.0
        self.waited = 0.0
        self.waited_at_start = 0.0

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        self.optimiser.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch["image"].float() / 255), batch["label"])
        loss.backward()
        self.optimiser.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, batches: Iterator[dict[str, torch.Tensor]]) -> float:
        self.model.eval()
        right = total = 0
        for batch in batches:
            right += int((self.model(batch["image"].float() / 255).argmax(1) == batch["label"]).sum())
            total += len(batch["label"])
        return right / max(1, total)


def train(
    trainer: Trainer,
    loader: DataLoader2[dict[str, torch.Tensor]],
    iterator: Iterator[dict[str, torch.Tensor]],
    seen: list[list[int]],
    *,
    title: str,
    progress: Progress,
    batches: int | None = None,
    kill_after: int | None = None,
) -> None:
    """Train on what `iterator` gives, `batches` at most; note the numbers of the samples of each batch in `seen`."""
    task = progress.add_task(title, total=None, rate=0.0, loss=0.0, waited=0.0)
    start, waited_before, samples = time.perf_counter(), loader.stats()["seconds_waited"], 0
    trainer.model.train()
    for place, batch in enumerate(iterator, 1):
        if place == 1:
            trainer.waited_at_start += loader.stats()["seconds_waited"] - waited_before
        loss = trainer.step(batch)
        numbers = batch["number"].tolist()
        seen.append(numbers)
        samples += len(numbers)
        elapsed = time.perf_counter() - start
        waited = loader.stats()["seconds_waited"] - waited_before
        progress.update(task, completed=samples, rate=samples / elapsed, loss=loss, waited=waited)
        if place == kill_after:
            victim = loader.stats()["workers"][0]
            os.kill(victim, signal.SIGKILL)
            progress.console.print(f"  killed worker 0 (pid {victim}) with SIGKILL after batch {place}")
        if place == batches:
            break
    progress.update(task, total=samples)
    trainer.samples += samples
    trainer.seconds += time.perf_counter() - start
    trainer.waited += loader.stats()["seconds_waited"] - waited_before


@contextmanager
def local_store() -> Iterator[str]:
    """Start an S3 server in a process of its own and give its address; it ends with this one."""
    program = (
        "import sys; from moto.server import ThreadedMotoServer as Server\n"
        "server = Server('127.0.0.1', 0, verbose=False); server.start()\n"
        "print('http://%s:%d' % server.get_host_and_port(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            raise SystemExit("the S3 server did not start; is moto installed? pip install 'moto[s3,server]'")
        try:
            yield address
        finally:
            server.stdin.close()


def start_store(kind: str, stack: ExitStack) -> str:
    """Start a server on this machine, set the environment's credentials to its own, and return its address."""
    os.environ.update(AWS_ACCESS_KEY_ID="demo", AWS_SECRET_ACCESS_KEY="demo", AWS_DEFAULT_REGION="us-east-1")
    os.environ.pop("AWS_SESSION_TOKEN", None)  # of another key
    started = time.perf_counter()
    if kind == "moto":
        address = stack.enter_context(local_store())
        console.print(f"S3 server at {address}")
        return address
    server = stack.enter_context(seaweedfs())
    seconds = time.perf_counter() - started
    console.print(
        f"SeaweedFS at {server.address}, which checks signatures (pid {server.pid}, up after {seconds:.1f} s)"
    )
    os.environ.update(AWS_ACCESS_KEY_ID=server.access_key, AWS_SECRET_ACCESS_KEY=server.secret_key)
    return server.address


def check_refusal(bucket: str) -> None:
    """Ask the store with a wrong secret, to list and to load; leaves with an error unless both are refused."""
    right = os.environ["AWS_SECRET_ACCESS_KEY"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = right[::-1] + "x"
    url = f"{bucket}/train/000.tar"
    try:
        for what, pipe in (
            ("list", S3FileLister([f"{bucket}/train/"])),
            ("load", IterableWrapper([url]).load_files_by_s3()),
        ):
            try:
                next(iter(pipe))
            except StorePermissionError as error:
                console.print(f"  a wrong secret may not {what}: {type(error).__name__}: {error}", highlight=False)
            else:
                raise SystemExit(f"the store let a wrong secret {what} {url}")
    finally:
        os.environ["AWS_SECRET_ACCESS_KEY"] = right


def columns() -> list[Any]:
    return [
        TextColumn("{task.description:<19}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:>5.0f} samples {task.fields[rate]:>6.0f}/s"),
        TextColumn("loss {task.fields[loss]:.3f}  waited {task.fields[waited]:.1f} s"),
    ]


def show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    console.print(f"  {category.__name__}: {message}", style="yellow", highlight=False)


def run(bucket: str, workers: int, expected: int | None) -> bool:
    """Run the whole demonstration and print the report; returns whether everything held."""
    trainer = Trainer()
    first: list[list[int]] = []
    second: list[list[int]] = []
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = show_warning
        progress = stack.enter_context(Progress(*columns(), console=console))
        pipe = training_pipe(bucket)
        console.print(pipe, highlight=False)
        loader = stack.enter_context(new_loader(pipe, workers))
        train(trainer, loader, iter(loader), first, title="epoch 1", progress=progress, kill_after=10)

        half = len(first) // 2
        iterator = iter(loader)
        train(trainer, loader, iterator, second, title="epoch 2, first half", progress=progress, batches=half)
        state = json.dumps(loader.state_dict())
        console.print(f"  stopped after batch {half}; the state is {len(state):,} bytes of JSON")
        would_have_come = [batch["number"].tolist() for batch in iterator]
        restarts = loader.stats()["restarts"]
        loader.shutdown()

        resumed = stack.enter_context(new_loader(training_pipe(bucket), workers))
        resumed.load_state_dict(json.loads(state))
        train(trainer, resumed, iter(resumed), second, title="epoch 2, resumed", progress=progress)
        resumed.shutdown()
        same = second[half:] == would_have_come
        console.print(f"  the {len(would_have_come)} batches after the resume are those that would have come: {same}")
        with new_loader(validation_pipe(bucket), workers) as held_out:
            accuracy = trainer.accuracy(iter(held_out))
    return report(trainer, first, second, same, restarts, accuracy, expected)


def report(
    trainer: Trainer,
    first: list[list[int]],
    second: list[list[int]],
    same: bool,
    restarts: int,
    accuracy: float,
    expected: int | None,
) -> bool:
    counts = [Counter(number for batch in epoch for number in batch) for epoch in (first, second)]
    if expected is None:  # a store of the user's own: what either epoch saw
        expected = len(counts[0].keys() | counts[1].keys())
    lost = sum(expected - len(count) for count in counts)
    doubled = sum(count.total() - len(count) for count in counts)
    table = Table(title="What happened", show_header=False, title_justify="left")
    table.add_row("samples a second, training included", f"{trainer.samples / trainer.seconds:,.0f}")
    later = trainer.waited - trainer.waited_at_start
    table.add_row("seconds to start workers and fill buffers", f"{trainer.waited_at_start:.1f}")
    table.add_row(
        "data stall: share of the other time spent waiting",
        f"{100 * later / (trainer.seconds - trainer.waited_at_start):.1f} %",
    )
    table.add_row("accuracy on the held-out shard", f"{100 * accuracy:.1f} %")
    table.add_row("workers killed / restarted", f"1 / {restarts}")
    table.add_row("batches after the resume as they would have come", "yes" if same else "NO")
    table.add_row("samples an epoch", f"{expected:,}")
    table.add_row("samples lost", str(lost))
    table.add_row("samples doubled", str(doubled))
    console.print(table)
    return same and lost == 0 and doubled == 0 and restarts == 1 and accuracy > 0.9


def serve(bucket: str) -> None:
    """Say how to look at the store, and wait for Ctrl-C."""
    name, _, prefix = bucket.removeprefix("s3://").strip("/").partition("/")
    prefix = f"{prefix}/train" if prefix else "train"
    settings = [
        f"--set BUCKET={name}",
        f"--set PREFIX={prefix}",
        f"--set ENDPOINT={os.environ.get('AWS_ENDPOINT_URL', '')}",
    ]
    # Those of a server that this program started, which are good for nothing else.
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if bucket == "s3://shapes" else ()
    credentials = "".join(f"{name}={os.environ[name]} " for name in names)
    console.print("In another terminal:", highlight=False)
    print(f"  {credentials}pipes-inspect examples/graph.yaml --peek 2 {' '.join(settings)}")
    console.print("Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", help="s3://bucket/prefix of a store of your own")
    parser.add_argument("--endpoint-url", help="its address, if it is not Amazon's")
    parser.add_argument(
        "--store", choices=("moto", "seaweedfs"), default="moto", help="what to start on this machine without --bucket"
    )
    parser.add_argument("--make", action="store_true", help="make the shards and upload them there first")
    parser.add_argument(
        "--serve", action="store_true", help="keep the store up and look at it with pipes-inspect, no training"
    )
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    with ExitStack() as stack:
        local = options.bucket is None
        if local:
            options.endpoint_url, options.bucket = start_store(options.store, stack), "s3://shapes"
        if options.endpoint_url:
            # Whatever talks to S3 heeds this variable, in the workers too.
            os.environ["AWS_ENDPOINT_URL"] = options.endpoint_url
        if options.make or options.bucket == "s3://shapes":
            with tempfile.TemporaryDirectory() as folder:
                nbytes = upload_shards(options.bucket, Path(folder), options.samples, options.shards)
            console.print(f"made {options.samples:,} images in {options.shards} shards, uploaded {nbytes / 1e6:.1f} MB")
        if local and options.store == "seaweedfs":
            check_refusal(options.bucket)
        if options.serve:
            serve(options.bucket)
            return
        expected = options.samples if options.make or options.bucket == "s3://shapes" else None
        fine = run(options.bucket.rstrip("/"), options.workers, expected)
    console.print(f"{time.perf_counter() - started:.0f} s in all")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
