"""An accelerator without hardware: copies that come late, memory that is reused at once, kernels that run last.

It runs the same code as a real device, `AcceleratorDevice`, and differs in what the driver does. It is as unkind as a
real one may be: a copy reads host memory by its address when it is due and not before; freed device memory goes to the
next copy at once unless it was kept; and what the user's stream is given runs only at `synchronize`. So whatever is
reused too early shows as wrong values. Its tensors are CPU tensors.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipes.devices import AcceleratorDevice, Mark

__all__ = ["FakeDevice", "Reading"]

_POISON = 0xDB


@dataclass
class _Copy:
    """One copy: a plain move of bytes between addresses, done when it is due."""

    number: int
    due: float
    source: int
    target: int
    nbytes: int
    # Staged memory of the device's own, kept as the driver would.
    staged: Any = None


class _FakeMark:
    def __init__(self, device: FakeDevice, copies: int, kernels: int) -> None:
        self._device, self.copies, self.kernels = device, copies, kernels

    def query(self) -> bool:
        self._device.run_due()
        return self._device.done >= self.copies and self._device.ran >= self.kernels

    def synchronize(self) -> None:
        self._device.run_until(self.copies)
        if self._device.ran < self.kernels:
            self._device.synchronize()


class Reading:
    """What a kernel in the user's stream will have read from a tensor; there after `synchronize`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._like = tensor.data_ptr(), tensor.new_empty(0)
        self._shape, self._nbytes = tensor.shape, tensor.nbytes
        self.value: torch.Tensor | None = None

    def run(self) -> None:
        raw = torch.frombuffer(bytearray(ctypes.string_at(self._address, self._nbytes)), dtype=torch.uint8)
        self.value = raw.view(self._like.dtype).view(self._shape)


class FakeDevice(AcceleratorDevice):
    """A device whose copies take `latency` seconds and `nbytes / bandwidth` each, one after the other.

    Args:
        latency: seconds from a copy's start to its first byte.
        bandwidth: bytes a second.
        lockable: bytes that may be page-locked in all; None for any number.
        room: bytes of device memory; None for any number. A copy that finds none raises torch.OutOfMemoryError.
        moves: False leaves memory out: copies take their time and give tensors of torch's device "meta" (for measuring
            what the host does).

    Counts: `locked` bytes are page-locked now, `most_locked` were at any time, `sent` were copied from page-locked
    memory, `staged` once more in the calling process because they were not, `small` from ordinary memory; `most_staged`
    is how much of the calling process's copies was kept at any time.

    >>> device = FakeDevice(latency=0.001)
    >>> sent = device.copy(torch.arange(3))
    >>> device.wait(device.record()); device.synchronize(); sent
    tensor([0, 1, 2])
    """

    def __init__(
        self,
        latency: float = 0.0,
        bandwidth: float = 1e12,
        *,
        lockable: int | None = None,
        room: int | None = None,
        moves: bool = True,
    ) -> None:
        super().__init__(torch.device("cpu", 0), "pinned")
        self.name = "fake"
        self.latency, self.bandwidth, self.lockable, self.room, self.moves = latency, bandwidth, lockable, room, moves
        self.sent = self.staged = self.small = self.most_locked = self.most_staged = 0
        #: How many copies have been done, and how many kernels of the user's stream have run.
        self.done = self.ran = 0
        self._begun = self._launched = 0
        self._free_at = 0.0
        self._copies: deque[_Copy] = deque()
        self._waited = 0
        self._kernels: deque[tuple[int, Reading]] = deque()
        # Page-locked memory: sizes by address, and the addresses in order.
        self._ranges: dict[int, int] = {}
        self._starts: list[int] = []
        self._staged_now = 0
        # Freed blocks by size, those that are kept until the next `synchronize`, and the addresses that are kept.
        self._free: dict[int, list[torch.Tensor]] = {}
        self._until_sync: list[torch.Tensor] = []
        self._kept: set[int] = set()
        self._used = 0

    @property
    def locked(self) -> int:
        """Bytes that are page-locked now."""
        return sum(self._ranges.values())

    @property
    def under_way(self) -> int:
        """Copies that were begun and are not done."""
        self.run_due()
        return len(self._copies)

    def bind(self) -> None:
        pass

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        if self.lockable is not None and self.locked + nbytes > self.lockable:
            return f"{self.lockable} bytes may be locked"
        self._ranges[address] = nbytes
        insort(self._starts, address)
        self.most_locked = max(self.most_locked, self.locked)
        return None

    def unlock_pages(self, address: int) -> None:
        self.run_until(self._begun)
        del self._ranges[address]
        self._starts.remove(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        before = bisect_right(self._starts, start)
        if not before:
            return False
        low = self._starts[before - 1]
        return start + tensor.nbytes <= low + self._ranges[low]

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.staged += tensor.nbytes
        return tensor.clone()

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def holds(self, tensor: torch.Tensor) -> bool:
        # Its tensors are on the CPU, as what they are copied from.
        return False

    def send(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        tensor = tensor.contiguous()
        target = self._allocate(tensor)
        large = self.is_pinned(tensor)
        if large:
            self.sent += tensor.nbytes
        else:
            self.small += tensor.nbytes
        start = max(time.perf_counter(), self._free_at)
        self._free_at = start + self.latency + tensor.nbytes / self.bandwidth
        self._begun += 1
        # What is not page-locked by the loader was staged: the driver keeps its staging memory.
        staged = None if large else tensor
        self._copies.append(
            _Copy(self._begun, self._free_at, tensor.data_ptr(), target.data_ptr(), tensor.nbytes, staged)
        )
        if not large:
            self._staged_now += tensor.nbytes
            self.most_staged = max(self.most_staged, self._staged_now)
        return target

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        if not self.moves:
            return torch.empty_like(like, device="meta")
        nbytes = max(like.nbytes, 1)
        blocks = self._free.get(nbytes, [])
        if not blocks and self.room is not None and self._used + nbytes > self.room:
            raise torch.OutOfMemoryError(f"the fake device has {self.room - self._used} of {self.room} bytes left")
        if not blocks:
            self._used += nbytes
        block = blocks.pop() if blocks else torch.empty(nbytes, dtype=torch.uint8)
        block.fill_(_POISON)
        # What all views of the tensor keep alive; the tensor itself is not.
        owner = np.frombuffer(block.numpy().data, dtype=np.uint8)
        weakref.finalize(owner, self._freed, block).atexit = False
        target = torch.frombuffer(owner, dtype=torch.uint8, count=nbytes)
        return target[: like.nbytes].view(like.dtype).view(like.shape)

    def _freed(self, block: torch.Tensor) -> None:
        if block.data_ptr() in self._kept:
            self._until_sync.append(block)
        else:
            self._free.setdefault(block.numel(), []).append(block)

    def run_due(self) -> None:
        """Do the copies whose time has come."""
        now = time.perf_counter() if self._copies else 0.0
        while self._copies and self._copies[0].due <= now:
            self._run(self._copies.popleft())

    def run_until(self, number: int) -> None:
        """Wait for the copies up to `number`."""
        while self._copies and self._copies[0].number <= number:
            time.sleep(max(0.0, self._copies[0].due - time.perf_counter()))
            self._run(self._copies.popleft())

    def _run(self, copy: _Copy) -> None:
        if self.moves:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)
        self.done = copy.number
        if copy.staged is not None:
            self._staged_now -= copy.nbytes

    def record(self) -> Mark:
        return _FakeMark(self, self._begun, 0)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _FakeMark)
        self._waited = max(self._waited, mark.copies)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept.update(tensor.data_ptr() for tensor in tensors)

    def mark_of_user(self) -> Mark:
        return _FakeMark(self, 0, self._launched)

    def read(self, tensor: torch.Tensor) -> Reading:
        """Give the user's stream a kernel that reads a tensor, of the device or of page-locked host memory."""
        reading = Reading(tensor)
        self._launched += 1
        self._kernels.append((self._waited, reading))
        return reading

    def synchronize(self) -> None:
        """Let everything the user's stream was given happen, after what it was told to wait for and no more."""
        self.run_until(self._waited)
        while self._kernels:
            waited, reading = self._kernels.popleft()
            self.run_until(waited)
            reading.run()
            self.ran += 1
        self._kept.clear()
        for block in self._until_sync:
            self._free.setdefault(block.numel(), []).append(block)
        self._until_sync.clear()
