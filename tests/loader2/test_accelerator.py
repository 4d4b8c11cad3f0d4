"""What the fake device proves, on a real one; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
IS_CUDA = ACCELERATOR is not None and ACCELERATOR.type == "cuda"
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs CUDA")
needs_any = pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator")

COUNT, SIZE = 200, 1 << 20


def batch_of(number: int) -> dict[str, Any]:
    return {
        "x": torch.full((SIZE,), number, dtype=torch.int32),
        "half": torch.full((8, 8), number, dtype=torch.bfloat16),
        "complex": torch.full((1 << 15,), complex(number, 1), dtype=torch.complex64),
        "name": str(number),
    }


def loader_to(device: Any, workers: int = 2, memory: Any = "auto") -> DataLoader2[Any]:
    pipe = IterableWrapper(range(COUNT)).sharding_filter().map(batch_of)
    service = MultiProcessingReadingService(workers)
    return DataLoader2(pipe, reading_service=service, device=device, memory=memory, num_streams=2)


def all_equal(x: torch.Tensor, number: int) -> torch.Tensor:
    """A kernel's answer, on the device: nothing waits for it yet."""
    return (x == number).all()


@needs_any
@pytest.mark.cuda
@pytest.mark.mps
@pytest.mark.usefixtures("no_residue")
@pytest.mark.parametrize("workers", [0, 2])
def test_values_arrive_though_each_batch_is_dropped_at_once(workers: int) -> None:
    assert ACCELERATOR is not None
    answers = []
    with loader_to(ACCELERATOR.type, workers) as loader:
        for batch in loader:
            assert batch["x"].device.type == ACCELERATOR.type
            number = int(batch["name"])
            answers.append(all_equal(batch["x"], number))
            answers.append(all_equal(batch["half"].float(), number))
            del batch
    assert len(answers) == 2 * COUNT
    assert all(bool(answer) for answer in answers)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
def test_the_slabs_of_workers_are_page_locked_and_wait_for_the_users_own_copies() -> None:
    answers = []
    with loader_to(None, memory="pinned") as loader:
        assert loader.stats()["memory"] == "pinned"
        for batch in loader:
            assert batch["x"].is_pinned()
            assert batch["half"].is_pinned()
            number = int(batch["name"])
            answers.append(all_equal(batch["x"].to("cuda", non_blocking=True), number))
            del batch
    assert len(answers) == COUNT
    assert all(bool(answer) for answer in answers)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
def test_a_function_on_the_device_runs_ahead_on_the_stream_of_the_copies() -> None:
    pipe = IterableWrapper(range(50)).sharding_filter().map(batch_of)
    moved = pipe.to_device("cuda", on_device=lambda batch: batch["x"].to(torch.bfloat16) / 2)
    with DataLoader2(moved, reading_service=MultiProcessingReadingService(2), num_streams=2) as loader:
        firsts = [batch[0].float() * 2 for batch in loader]
    assert [int(first) for first in firsts] == list(range(50))


@needs_cuda
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
def test_a_loader_without_room_on_the_device_can_be_closed() -> None:
    endless = IterableWrapper(range(8)).map(batch_of)
    pipe = endless.to_device("cuda", on_device=lambda _: torch.empty(1 << 50, device="cuda"))
    with DataLoader2(pipe) as loader, pytest.raises(torch.OutOfMemoryError):
        next(iter(loader))
