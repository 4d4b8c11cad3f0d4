"""Page-locking against a runtime that refuses, forgets nothing by itself and fails, as CUDA's does; no hardware."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipes.cuda_memory import StreamsMark, lock_pages, shares_host_memory, unlock_pages
from pipes.device_choice import resolve_device
from pipes.devices import AcceleratorDevice
from pipes.loader2.segments import create_segment, map_segment

DEVICE = torch.device("cuda", 0)


class Runtime:
    """Page-locks at most `room` bytes; the last error stays until a kernel is blamed for it."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.locked, self.error, self.broken = room, dict[int, int](), 0, False
        #: Devices that were waited for, and those with a context.
        self.waited, self.in_use = list[int](), {0}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        code = 712 if address in self.locked else 2 if sum(self.locked.values()) + nbytes > self.room else 0
        if code == 0:
            self.locked[address] = nbytes
        self.error = code or self.error
        return code

    def cudaHostUnregister(self, address: int) -> int:
        code = 999 if self.broken else 713 if self.locked.pop(address, None) is None else 0
        self.error = code or self.error
        return code

    def synchronize(self, index: int) -> None:
        self.waited.append(index)
        if self.broken:
            raise RuntimeError("CUDA error: the device fell off the bus")

    def launch(self, *size: int, device: Any) -> torch.Tensor:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return torch.zeros(*size)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in runtime.in_use, raising=False)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    return runtime


def test_a_refusal_is_not_left_for_the_users_next_kernel(runtime: Runtime) -> None:
    runtime.room = 4096
    assert lock_pages(1 << 20, 4096, DEVICE) is None
    assert lock_pages(1 << 21, 4096, DEVICE) == "cudaHostRegister failed with code 2"
    assert runtime.error == 0
    unlock_pages(1 << 20, DEVICE)
    assert (runtime.locked, runtime.waited) == ({}, [0])


def test_what_an_earlier_mapping_left_locked_is_locked_anew(runtime: Runtime) -> None:
    runtime.locked[1 << 20] = 1
    assert lock_pages(1 << 20, 4096, DEVICE) is None
    assert (runtime.locked, runtime.error) == ({1 << 20: 4096}, 0)
    unlock_pages(1 << 20, DEVICE)
    unlock_pages(1 << 20, DEVICE)
    assert runtime.error == 0


def test_what_each_device_in_use_may_still_read_is_waited_for(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.in_use = {0, 2}
    done = {0: True, 2: False}

    def stream_of(index: int) -> Any:
        return SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: done[index]))

    capturing = True
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    marks = [StreamsMark(), AcceleratorDevice(DEVICE, "pinned").used()]
    done[2] = True
    # An event of a capture could never be asked for.
    assert [mark.query() for mark in marks if mark is not None] == [False, False]
    capturing, done[2] = False, False
    assert [mark.query() for mark in marks if mark is not None] == [False, False]
    done[2] = True
    assert [mark.query() for mark in marks if mark is not None] == [True, True]
    lock_pages(1 << 20, 4096, DEVICE)
    unlock_pages(1 << 20, DEVICE)
    assert runtime.waited == [0, 2]


def test_page_locked_memory_is_of_the_device_that_is_current_at_the_first_batch(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, locked_on = 0, list[torch.device]()

    def on(device: torch.device) -> Any:
        locked_on.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", on)
    device = resolve_device(None, "pinned")
    assert device is not None
    # A rank may name its GPU after its loader was made; a context on the first one would cost all ranks its memory.
    current = 3
    device.page_lock(1 << 20, 4096)
    assert locked_on == [torch.device("cuda", 3)]


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") for line in maps)


def test_a_device_that_failed_keeps_no_memory_mapped(runtime: Runtime) -> None:
    device = AcceleratorDevice(DEVICE, "pinned")
    fd = create_segment(1 << 20)
    with open(fd, "rb"):
        owner = map_segment(fd, 1 << 20, device.page_unlock)
    address = ctypes.addressof(owner)
    device.page_lock(address, 1 << 20)
    assert is_mapped(address)
    runtime.broken = True
    del owner
    assert not is_mapped(address)
    assert runtime.error == 0
    # The next memory there is no more taken for locked than any other.
    runtime.broken = False
    device.page_lock(address, 1 << 20)
    assert runtime.locked == {address: 1 << 20}


class Driver:
    """Answers as libcuda, for a device of so many attributes."""

    def __init__(self, *attributes: int, broken: bool = False) -> None:
        self.attributes, self.broken = attributes, broken

    def cuInit(self, flags: int) -> int:
        return int(self.broken)

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return int(index > 0)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = int(attribute in self.attributes)
        return 0


@pytest.mark.parametrize(
    ("driver", "shares"),
    [(Driver(18), True), (Driver(100), True), (Driver(88), False), (Driver(), False), (Driver(18, broken=True), False)],
    ids=["integrated", "coherent", "HMM alone", "discrete", "broken"],
)
def test_which_devices_share_the_hosts_memory(driver: Driver, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert shares_host_memory(0) is shares
    assert shares_host_memory(1) is False


def test_without_a_driver_nothing_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert shares_host_memory(0) is False
