"""Which device and memory a user gets, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from pipes import cuda_memory
from pipes.device_choice import resolve_device
from pipes.devices import AcceleratorDevice, BlockingDevice, HostDevice
from pipes.errors import DeviceError
from pipes.loader2.fake_device import FakeDevice
from pipes.moving import Sender

HAS_NONE = not torch.accelerator.is_available()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make torch believe in an accelerator of a type, with two devices."""

    def believe(kind: str) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)

    return believe


@pytest.mark.parametrize(
    ("kind", "memory", "made", "chosen"),
    [
        ("cuda", "auto", AcceleratorDevice, "pinned"),
        ("cuda", "unified", AcceleratorDevice, "unified"),
        ("cuda:1", "pageable", BlockingDevice, "pageable"),
        ("xpu", "auto", AcceleratorDevice, "pinned"),
        ("mps", "auto", BlockingDevice, "unified"),
    ],
)
def test_memory_follows_the_device(
    accelerator: Any, kind: str, memory: str, made: type, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator(kind.split(":")[0])
    monkeypatch.setattr(cuda_memory, "shares_host_memory", lambda index: True)
    found = resolve_device(kind, memory)
    assert type(found) is made
    assert found is not None
    assert (found.memory, found.name) == (chosen, kind)


def test_a_device_without_a_number_is_the_current_one_when_it_is_used(accelerator: Any) -> None:
    accelerator("mps")
    found = resolve_device("mps")
    assert isinstance(found, BlockingDevice)
    assert found.device == torch.device("mps")
    with found.copying():
        assert found.device == torch.device("mps", 1)


def test_without_a_device_batches_stay_as_they_are_or_are_page_locked(accelerator: Any) -> None:
    assert resolve_device(None) is None
    assert resolve_device(None, "pageable") is None
    accelerator("cuda")
    found = resolve_device(None, "pinned")
    assert isinstance(found, HostDevice)
    assert (found.memory, found.name) == ("pinned", "host")
    accelerator("mps")
    unified = resolve_device(None, "pinned")
    assert unified is not None
    assert unified.memory == "unified"


def test_a_device_of_the_users_own_is_taken_as_it_is() -> None:
    device = FakeDevice()
    assert resolve_device(device) is device


@pytest.mark.skipif(not HAS_NONE, reason="this machine has an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps", "xpu", torch.device("cuda", 0)])
def test_a_device_that_is_not_there_is_an_error_that_says_what_to_do(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"sees no accelerator here: .* or use device='cpu'"):
        resolve_device(device)


@pytest.mark.skipif(not HAS_NONE, reason="this machine has an accelerator")
def test_page_locked_memory_needs_an_accelerator() -> None:
    with pytest.raises(DeviceError, match=r"memory='pinned' page-locks memory .* use memory='auto'"):
        resolve_device(None, "pinned")


def test_bad_devices_and_memories(accelerator: Any) -> None:
    accelerator("cuda")
    with pytest.raises(DeviceError, match="there are 2: 0 to 1"):
        resolve_device("cuda:2")
    with pytest.raises(DeviceError, match="sees only 'cuda' here"):
        resolve_device("xpu")
    with pytest.raises(DeviceError, match=r"not what torch.device takes"):
        resolve_device("gpu7x")
    with pytest.raises(TypeError, match=r"device must be what torch.device takes, or None, not a list"):
        resolve_device([0])
    with pytest.raises(ValueError, match="memory must be one of auto, pinned, unified, pageable, not 'fast'"):
        resolve_device("cuda", "fast")
    with pytest.raises(DeviceError, match="device='cpu' is none"):
        resolve_device("cpu", "pinned")
    accelerator("mps")
    with pytest.raises(DeviceError, match="of no use on MPS"):
        resolve_device("mps", "pinned")


def test_unified_memory_is_refused_where_the_device_has_its_own(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator("cuda")
    monkeypatch.setattr(cuda_memory, "shares_host_memory", lambda index: index == 0)
    found = resolve_device("cuda:0", "unified")
    assert found is not None
    assert found.memory == "unified"
    for device in ("cuda", "cuda:1", None):
        with pytest.raises(DeviceError, match="cuda:1 has memory of its own: use memory='auto'"):
            resolve_device(device, "unified")


def test_the_copying_stream_is_the_current_one_also_where_torchs_streams_are_no_context_managers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As torch 2.6 offers it; two devices, each with its current stream.
    index, streams = 0, ["main 0", "main 1"]

    def set_index(to: int) -> None:
        nonlocal index
        index = to

    def set_stream(stream: Any) -> None:
        streams[index] = stream

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_index)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: streams[index])
    monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
    device = AcceleratorDevice(torch.device("cuda", 1), "pinned")
    device._stream = own = SimpleNamespace(device_index=1)
    inside = []

    def fail_while_copying() -> None:
        with device.copying():
            inside.extend([index, *streams])
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_copying()
    assert inside == [1, "main 0", own]
    assert (index, streams) == (0, ["main 0", "main 1"])


class Stream:
    """Notes what it waits for, and its marks."""

    def __init__(self, name: str) -> None:
        self.name, self.waited = name, list[str]()

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def wait_event(self, mark: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def kept_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Note what `record_stream` is called for, as strictly as torch does it: plain, strided tensors alone."""
    found = list[tuple[int, str]]()

    def record(tensor: torch.Tensor, stream: Stream) -> None:
        assert type(tensor) is torch.Tensor
        assert (tensor.layout, tensor.is_nested, tensor.is_quantized) == (torch.strided, False, False)
        found.append((tensor.untyped_storage().data_ptr(), stream.name))

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return found


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream]:
    """Let the CPU pass for an accelerator with these streams: the copies' and the user's."""
    own, users = Stream("copies"), Stream("user's")
    monkeypatch.setattr(torch, "Stream", lambda device: own)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: users)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(AcceleratorDevice, "bind", lambda self: None)
    return own, users


def test_what_is_on_the_device_already_is_waited_for_and_kept(
    streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, _ = streams
    kept = kept_by(monkeypatch)
    here = torch.ones(3)
    sender = Sender(AcceleratorDevice(torch.device("cpu"), "pinned"), on_device=lambda batch: batch[0])
    sent = sender.send([here])
    # What on_device read as it began, and what this batch brought.
    assert own.waited == ["user's", "user's"]
    assert kept == [(here.data_ptr(), "copies")]
    assert sender.hand_over(sent) is here
    assert kept[1:] == [(here.data_ptr(), "user's")] * 2
    # Copies wait for nothing of the user's.
    elsewhere = Sender(AcceleratorDevice(torch.device("meta"), "pinned"))
    elsewhere.hand_over(elsewhere.send([torch.ones(3)]))
    assert own.waited[2:] == ["user's"]


@pytest.mark.filterwarnings("ignore:(?s).*([Ss]parse|[Qq]uanti|nested tensors)")
def test_the_memory_of_every_layout_is_kept(streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_by(monkeypatch)
    eye, rows = torch.eye(4), [torch.ones(2, 3), torch.ones(1, 3)]
    coo, csr, csc, bsr = eye.to_sparse(), eye.to_sparse_csr(), eye.to_sparse_csc(), eye.to_sparse_bsr((2, 2))
    nested, jagged = torch.nested.nested_tensor(rows), torch.nested.nested_tensor(rows, layout=torch.jagged)
    quantized = torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8)
    batch = {
        coo: [coo._indices(), coo._values()],
        csr: [csr.crow_indices(), csr.col_indices(), csr.values()],
        csc: [csc.ccol_indices(), csc.row_indices(), csc.values()],
        bsr: [bsr.crow_indices(), bsr.col_indices(), bsr.values()],
        nested: [nested.values()],
        jagged: [jagged.values(), jagged.offsets()],
        quantized: [quantized],
    }
    device = AcceleratorDevice(torch.device("cpu"), "pinned")
    for tensor, parts in batch.items():
        kept.clear()
        device.keep([tensor])
        assert {(part.untyped_storage().data_ptr(), "user's") for part in parts} <= set(kept)
    elsewhere = AcceleratorDevice(torch.device("meta"), "pinned")
    # Of what has no bytes to be counted none is asked.
    assert [elsewhere.copy(tensor).layout for tensor in (coo, csr, csc, bsr)] == [
        tensor.layout for tensor in (coo, csr, csc, bsr)
    ]


class Takes:
    def to(self, device: Any, *, non_blocking: bool = False) -> Any:
        return non_blocking


class TakesNot:
    def to(self, device: Any) -> Any:
        return False


class TakesAny:
    def to(self, *args: Any, **options: Any) -> Any:
        return options.get("non_blocking", False)


class Forwards:
    def to(self, *args: Any, **options: Any) -> Any:
        return TakesNot().to(*args, **options)


def test_objects_that_can_are_moved_without_the_process_waiting() -> None:
    device = AcceleratorDevice(torch.device("meta"), "pinned")
    assert device.move(Takes()) is True
    assert device.move(TakesAny()) is True
    assert device.move(Forwards()) is False
    packed = device.move(pack_sequence([torch.ones(3), torch.ones(2)]))
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")
    assert device.move(TakesNot()) is False
    assert BlockingDevice(torch.device("meta"), "unified").move(Takes()) is False


class Full(FakeDevice):
    """The host has no page-locked memory left."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")


def test_without_page_locked_memory_batches_are_copied_from_ordinary_memory_and_a_warning_says_so() -> None:
    device = Full(lockable=0)
    large = torch.arange(1 << 14)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        device.page_lock(0, 1)
        copies = [device.copy(large), device.copy(large), HostDevice("pinned", device).copy(large)]
        device.page_lock(0, 1)
    device.wait(device.record())
    device.synchronize()
    assert all(torch.equal(copy, large) for copy in copies)
    assert [str(each.message).partition(" (")[0] for each in told] == [
        "shared memory of the workers cannot be page-locked",
        "page-locked memory cannot be had",
    ]


def test_pages_are_unlocked_by_the_process_that_locked_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, process = FakeDevice(), 1
    monkeypatch.setattr(os, "getpid", lambda: process)
    # A child forked before its first batch, which locks for itself.
    process = 2
    device.page_lock(4096, 4096)
    process = 3
    device.page_unlock(4096, 4096)
    assert device.locked == 4096
    process = 2
    device.page_unlock(4096, 4096)
    assert device.locked == 0


def test_the_advice_of_a_warning_fits_the_device() -> None:
    told = []
    for kind in ("xpu", "cuda"):
        device = AcceleratorDevice(torch.device(kind, 0), "pinned")
        if kind == "cuda":
            device.lock_pages = lambda address, nbytes: "no room"  # type: ignore[method-assign]
        with pytest.warns(RuntimeWarning, match="cannot be page-locked") as found:
            device.page_lock(0, 1)
        told.append("ulimit" in str(found[0].message))
    assert told == [False, True]


def test_where_warnings_are_errors_a_slower_way_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    device, large = Full(lockable=0), torch.arange(1 << 14)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.page_lock(0, 1)
        copy = device.copy(large)
    device.wait(device.record())
    device.synchronize()
    assert torch.equal(copy, large)
    assert [text.partition(" (")[0] for text in caplog.messages] == [
        "shared memory of the workers cannot be page-locked",
        "page-locked memory cannot be had",
    ]


def test_nothing_of_cuda_is_imported_or_initialised_without_it() -> None:
    program = (
        "import sys, torch; from pipes.iter import IterableWrapper; from pipes.loader2 import DataLoader2\n"
        "loader = DataLoader2(IterableWrapper(range(4)).batch(2).collate(), device='cpu'); print(len(list(loader)))\n"
        "print(torch.cuda.is_initialized(), 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
