"""Page-locking against a runtime that refuses, forgets nothing by itself and fails, as CUDA's does; no hardware."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from pipes.cuda_memory import lock_pages, shares_host_memory, unlock_pages
from pipes.devices import AcceleratorDevice
from pipes.loader2.segments import create_segment, map_segment

DEVICE = torch.device("cuda", 0)


class Runtime:
    """Page-locks at most `room` bytes; the last error stays until a kernel is blamed for it."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.locked, self.error, self.broken, self.waited = room, dict[int, int](), 0, False, 0

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

    def synchronize(self) -> None:
        self.waited += 1
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
    monkeypatch.setattr(torch, "ones", runtime.launch)
    return runtime


def test_a_refusal_is_not_left_for_the_users_next_kernel(runtime: Runtime) -> None:
    runtime.room = 4096
    assert lock_pages(1 << 20, 4096, DEVICE) is None
    assert lock_pages(1 << 21, 4096, DEVICE) == "cudaHostRegister failed with code 2"
    assert runtime.error == 0
    unlock_pages(1 << 20, DEVICE)
    assert (runtime.locked, runtime.waited) == ({}, 1)


def test_what_an_earlier_mapping_left_locked_is_locked_anew(runtime: Runtime) -> None:
    runtime.locked[1 << 20] = 1
    assert lock_pages(1 << 20, 4096, DEVICE) is None
    assert (runtime.locked, runtime.error) == ({1 << 20: 4096}, 0)
    unlock_pages(1 << 20, DEVICE)
    unlock_pages(1 << 20, DEVICE)
    assert runtime.error == 0


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
