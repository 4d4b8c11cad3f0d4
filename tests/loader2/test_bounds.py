"""What a loader keeps, and no more: outputs on the way, descriptors, shared memory, slabs, memory of many epochs."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from loading import loader_of, logged_calls, take

from pipes import IterDataPipe
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2

pytestmark = pytest.mark.usefixtures("no_residue")


def numbers(count: int) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


def pids(loader: DataLoader2[Any]) -> list[int]:
    found: list[int] = loader.stats()["workers"]
    return found


def slab_bytes(pid: int | str = "self") -> int:
    """Bytes of slabs mapped into a process."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "pipes-slab" in line:
            low, high = line.split()[0].split("-")
            total += int(high, 16) - int(low, 16)
    return total


def settle(measure: Callable[[], Any], expected: Any) -> Any:
    """Wait until `measure()` is `expected`, then for what might come on top; return what it is then."""
    deadline = time.monotonic() + 20
    while measure() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)
    return measure()


class TestBytesInFlight:
    @pytest.mark.parametrize("workers", [1, 3])
    @pytest.mark.parametrize("outputs", [0.001, 1.5, 10.5], ids=lambda outputs: f"budget of {outputs} outputs")
    # The inline ones fit into the sockets' buffers, where main lets them wait.
    @pytest.mark.parametrize("floats", [1_000, 250_000], ids=["inline", "in slabs"])
    def test_the_peak_is_the_budget(self, floats: int, outputs: float, workers: int, tmp_path: Path) -> None:
        call = logged_calls(tmp_path)
        (tmp_path / "calls").touch()
        pipe = numbers(300).map(lambda x: torch.zeros(floats) + call(x))
        budget = max(1, int(outputs * floats * 4)) * workers
        with loader_of(pipe, workers, prefetch=50, max_bytes_in_flight=budget) as loader:
            iterator = iter(loader)
            # The last one of a worker is begun while the others do not fill its part of the budget.
            each = max(1, math.ceil(outputs))
            given = 0
            for _ in range(3):
                made = settle(lambda: (tmp_path / "calls").stat().st_size, given + workers * each)
                assert made == given + workers * each
                # It sleeps until half of what waits was given.
                half = workers * ((each + 1) // 2)
                batch = take(iterator, half)[-1]
                del batch
                given += half

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_no_budget_stops_the_merge(self, workers: int) -> None:
        pipe = numbers(40).map(lambda x: torch.zeros(1_000 if x % 2 else 250_000) + x)
        for budget in (1, 4_500, 1_000_001):
            with loader_of(pipe, workers, prefetch=3, max_bytes_in_flight=budget) as loader:
                assert [int(output[0]) for output in loader] == list(range(40))


SMALL_SHARED_MEMORY = """
import os, sys
if "posix" in sys.argv: del os.memfd_create
import torch
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

def make(number):
    return {"x": torch.full((18_000,), float(number)), "y": torch.tensor(number)}

def loader_of(pipe):
    how = "fork" if "posix" in sys.argv else "forkserver"
    return DataLoader2(pipe, reading_service=MultiProcessingReadingService(2, how))

def names():
    return [name for name in os.listdir("/dev/shm") if name.startswith("pipes-")]

with loader_of(IterableWrapper(range(2000)).sharding_filter().map(make)) as loader:
    kept = list(loader)
    assert loader.stats()["copied_batches"] >= 1900
    assert len(os.listdir("/proc/self/fd")) < 64 and not names()
assert [int(batch["y"]) for batch in kept] == list(range(2000))
assert all((batch["x"] == batch["y"]).all() for batch in kept)
del kept
with loader_of(IterableWrapper([80, 300, 80]).map(lambda size: torch.full((size << 18,), float(size)))) as loader:
    for size, batch in zip([80, 300, 80], loader, strict=True):
        assert batch.nbytes == size << 20 and batch[0] == batch[-1] == size and not names()
print("all came")
"""


def in_small_shared_memory(command: str) -> list[str]:
    """Return how to run `command` with few descriptors and, where the system allows it, a /dev/shm of 64 MiB."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    own = ["unshare", "-rm", "sh", "-c"]
    if shutil.which("unshare") and subprocess.run([*own, mount], capture_output=True).returncode == 0:
        return [*own, f"{mount} && ulimit -n 256 && exec {command}"]
    return ["sh", "-c", f"ulimit -n 256 && exec {command}"]


@pytest.mark.parametrize("memory", ["memfd", "posix"])
def test_2000_kept_batches_and_large_ones_in_little_shared_memory(memory: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SMALL_SHARED_MEMORY)
    done = subprocess.run(
        in_small_shared_memory(f"{sys.executable} {script} {memory}"), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "all came\n", done.stderr


def test_batches_of_varying_size_reuse_slabs() -> None:
    def make(number: int) -> torch.Tensor:
        return torch.full((int(np.random.default_rng(number).integers(20_000, 1_000_000)),), float(number))

    with loader_of(numbers(400).map(make), 1) as loader:
        for number, batch in enumerate(loader):
            assert batch[0] == batch[-1] == number
        (worker,) = loader._runner._workers  # type: ignore[union-attr]
        # Slabs are numbered as they are made.
        assert max(worker.receiver.loans._mapped) < 40
        assert slab_bytes() < 60_000_000


def test_slabs_of_a_burst_go_back_to_the_system() -> None:
    def make(number: int) -> Any:
        return torch.full((2_000_000,), float(number)) if number < 12 else number

    with loader_of(numbers(120).map(make), 1, prefetch=8) as loader:
        iterator = iter(loader)
        burst = take(iterator, 12)
        assert slab_bytes() >= 12 * 8_000_000
        del burst
        assert take(iterator, 50) == list(range(12, 62))
        # Longer than a slab may lie idle.
        time.sleep(5.2)
        assert take(iterator, 50) == list(range(62, 112))
        # The smallest slab has 128 KiB; one page says where a worker is.
        assert slab_bytes() < 100_000
        assert slab_bytes(pids(loader)[0]) < 100_000


def test_copies_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe = numbers(60).map(lambda x: torch.zeros(50_000) + x)
    with loader_of(pipe, 2, max_held=4) as loader:
        kept = [*loader, *loader]
        assert loader.stats()["copied_batches"] == 120 - 2 * 4
    assert [int(tensor[0]) for tensor in kept] == [*range(60), *range(60)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "hold the 4 shared-memory blocks" in caplog.text


def test_max_held_zero_copies_every_batch_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(numbers(10).map(lambda x: torch.zeros(50_000) + x), 1, max_held=0) as loader:
        assert [int(tensor[0]) for tensor in loader] == list(range(10))
        assert loader.stats()["copied_batches"] == 10
    assert not caplog.records


def test_kept_batches_outlive_their_worker_and_the_loader() -> None:
    def make(number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((50_000,), float(number)), "few": torch.full((10,), float(number))}

    weight = torch.ones(50_000, requires_grad=True)
    loader = loader_of(numbers(40).map(make), 2, prefetch=1)
    iterator = iter(loader)
    kept = take(iterator, 4)
    losses = [(weight * batch["x"]).pow(2).sum() for batch in kept]
    for pid in pids(loader):
        os.kill(pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="SIGKILL"):
        kept += take(iterator, 6)
    losses += [(weight * batch["x"]).pow(2).sum() for batch in kept[4:7]]
    loader.shutdown()
    losses += [(weight * batch["x"]).pow(2).sum() for batch in kept[7:]]
    del loader, iterator
    gc.collect()
    for number, batch in enumerate(kept):
        assert (batch["x"] == number).all()
        assert (batch["few"] == number).all()
        batch["few"].add_(1)
        # Not through the tensor, or autograd would see that what it saved has changed.
        batch["x"].numpy()[0] += 0
    del kept, batch
    assert slab_bytes() > 0
    for number, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert torch.equal(gradient, torch.full((50_000,), 2.0 * number**2))
    del losses, loss
    assert slab_bytes() == 0


def test_300_epochs_leave_everything_flat() -> None:
    def sample(number: int) -> tuple[torch.Tensor, int, str]:
        return torch.full((10_000,), float(number)), number, str(number)

    def measure() -> list[list[float]]:
        gc.collect()
        processes = [psutil.Process(), *map(psutil.Process, pids(loader))]
        return [[p.num_fds(), p.num_threads(), p.memory_full_info().uss] for p in processes]

    threads = threading.active_count()
    with loader_of(numbers(16).shuffle(5).map(sample).batch(4).collate(), 2) as loader:
        found = []
        for epoch in range(300):
            assert sorted(int(label) for _, labels, _ in loader for label in labels) == list(range(16))
            if epoch >= 100 and epoch % 10 == 9:
                found.append(measure())
        series = np.array(found)
        assert loader.stats()["restarts"] == 0
    assert threading.active_count() == threads
    for process in range(3):
        descriptors, threads, memory = series[:, process].T
        assert np.ptp(descriptors) <= 2, descriptors
        assert np.ptp(threads) == 0, threads
        slope = np.polyfit(np.arange(len(memory)) * 10, memory, 1)[0]
        assert slope < 50_000, memory
