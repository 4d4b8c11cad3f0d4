"""What the fake device proves, on a real one; skipped where there is none."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from contents import DTYPES, NOTED_BY_TORCH, of_dtype

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
IS_CUDA = ACCELERATOR is not None and ACCELERATOR.type == "cuda"
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs CUDA")
needs_any = pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator")

COUNT, SIZE = 200, 1 << 20
SIDE = 4096
SENT = ("bool", "uint8", "int16", "uint32", "int64", "bfloat16", "float64", "complex32", "complex64", "float8_e4m3fn")


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


def rare(number: int) -> dict[str, Any]:
    """Tensors of every layout and dtype, and an object that moves itself."""
    eye, rows = torch.eye(300), [torch.ones(200, 300), torch.zeros(100, 300)]
    sparse = {"coo": eye.to_sparse(), "csr": eye.to_sparse_csr(), "csc": eye.to_sparse_csc()}
    nested = {
        "strided": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }
    packed = torch.nn.utils.rnn.pack_sequence(rows)
    dtypes = {name: of_dtype(DTYPES[name], 70_000, 1) for name in SENT}
    return {"number": number, "sparse": sparse, "nested": nested, "packed": packed, "dtypes": dtypes}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@needs_cuda
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
@pytest.mark.filterwarnings(NOTED_BY_TORCH)
@pytest.mark.parametrize("workers", [0, 1])
def test_every_layout_and_dtype_comes_to_the_device(workers: int) -> None:
    pipe = IterableWrapper(range(6)).sharding_filter().map(rare)
    expected = rare(0)
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers), device="cuda") as loader:
        for number, batch in enumerate(loader):
            assert batch["number"] == number
            for name, tensor in batch["sparse"].items():
                assert tensor.device.type == "cuda"
                assert tensor.layout == expected["sparse"][name].layout
                assert tensor.to_dense().cpu().equal(torch.eye(300))
            for tensor in batch["nested"].values():
                assert tensor.device.type == "cuda"
                assert [int(row.sum()) for row in tensor.unbind()] == [200 * 300, 0]
            assert batch["packed"].data.device.type == "cuda"
            assert batch["packed"].data.cpu().equal(expected["packed"].data)
            for name, tensor in batch["dtypes"].items():
                assert (tensor.device.type, str(tensor.dtype)) == ("cuda", f"torch.{name}")
                assert raw(tensor) == raw(expected["dtypes"][name])


@needs_cuda
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
def test_a_batch_that_is_on_the_device_already_is_waited_for() -> None:
    def there(number: int) -> torch.Tensor:
        # Late: the kernels before it run longer than the copying stream would take to come to it.
        slow = torch.ones(SIDE, SIDE, device="cuda")
        for _ in range(20):
            slow = slow @ slow / SIDE
        return torch.full((SIZE,), number, device="cuda") + slow[0, 0].int() - 1

    moved = IterableWrapper(range(10)).map(there).to_device("cuda", on_device=lambda batch: batch * 2)
    with DataLoader2(moved) as loader:
        answers = [all_equal(batch, 2 * number) for number, batch in enumerate(loader)]
    assert all(bool(answer) for answer in answers)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
def test_a_batch_dropped_while_a_graph_is_captured_goes_back_after_it() -> None:
    total = torch.zeros(1, device="cuda")
    total.add_(1)
    with loader_to(None, memory="pinned") as loader:
        batches = iter(loader)
        batch = next(batches)
        number = int(batch["name"])
        answers = [all_equal(batch["x"].to("cuda", non_blocking=True), number)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.add_(1)
            del batch
        graph.replay()
        for batch in batches:
            answers.append(all_equal(batch["x"].to("cuda", non_blocking=True), int(batch["name"])))
            del batch
    assert len(answers) == COUNT
    assert all(bool(answer) for answer in answers)
    assert int(total) == 2


@pytest.mark.skipif(not IS_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.cuda
@pytest.mark.usefixtures("no_residue")
def test_page_locked_batches_wait_for_copies_to_other_devices() -> None:
    answers = []
    with loader_to(None, memory="pinned") as loader:
        for batch in loader:
            answers.append(all_equal(batch["x"].to("cuda:1", non_blocking=True), int(batch["name"])))
            del batch
    assert all(bool(answer) for answer in answers)


@needs_any
@pytest.mark.cuda
@pytest.mark.mps
@pytest.mark.usefixtures("no_residue")
def test_a_worker_that_dies_loses_nothing_and_a_state_leaves_out_what_was_ahead() -> None:
    assert ACCELERATOR is not None
    with loader_to(ACCELERATOR.type) as loader:
        batches = iter(loader)
        begun = [next(batches) for _ in range(20)]
        os.kill(loader.stats()["workers"][0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="SIGKILL"):
            begun += [next(batches) for _ in range(100)]
        state = loader.state_dict()
        # Copies of what is ahead are under way when the loader is closed.
    with loader_to(ACCELERATOR.type) as other:
        other.load_state_dict(state)
        begun += list(other)
    assert [int(batch["name"]) for batch in begun] == list(range(COUNT))
    assert all(bool(all_equal(batch["x"], number)) for number, batch in enumerate(begun))
