"""Where batches go and what memory they come from: page-locked host memory, copies on a stream of their own.

Contract
- Copies are asked for in order and run on one stream of the device, apart from the user's; `record` marks a place in
  it. `wait` lets the user's current stream wait for a mark; the calling thread never waits.
- The host memory of a copy must stay as it is until its mark is `query`ed as done: that is the caller's part.
- What `copy` gave was allocated on the copying stream; `keep` tells the allocator that the user's stream uses it too,
  so that the memory is not given to a later copy while the user's kernels still read it.
- Page-locking is done once a slab. Where the system refuses it, batches pass through page-locked memory of torch's own
  (one copy in main each), which one warning says.
- Nothing here is imported, initialised or allocated on a device before a batch is to be moved.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

from pipes.errors import DeviceError

__all__ = ["AcceleratorDevice", "Device", "HostDevice", "Mark", "Memory", "check_memory", "resolve_device"]

Memory = Literal["auto", "pinned", "unified", "pageable"]
#: Tensors smaller than this are copied by the driver itself before a copy call returns, pinned or not.
SMALL = 1 << 16
_PORTABLE = 1
_ALREADY_REGISTERED = 712


class Mark(Protocol):
    """A place in a stream's work."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@runtime_checkable
class Device(Protocol):
    """What moves batches; the one interface between the loader and any accelerator."""

    #: "pinned", "unified" or "pageable".
    memory: str
    #: As in `torch.device`, or "host" when batches stay in page-locked host memory.
    name: str
    #: True while the loader itself drops host memory whose copies are done: `used` need not mark anything then.
    dropping: bool

    def page_lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that stays mapped, where that helps; never raises."""

    def page_unlock(self, address: int, nbytes: int) -> None:
        """Undo `page_lock` just before the memory is unmapped."""

    def copying(self) -> AbstractContextManager[Any]:
        """Make the copying stream the current one."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor."""

    def move(self, value: Any) -> Any:
        """Move an object that has a method `to`, or `pin_memory` where batches stay on the host."""

    def record(self) -> Mark:
        """Mark the end of the copies begun so far."""

    def wait(self, mark: Mark) -> None:
        """Let the user's current stream wait for a mark."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors until the user's current stream has done what it is given so far."""

    def used(self) -> Mark | None:
        """Mark what the user's stream may still do with host memory that was dropped just now; None for nothing."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE: Mark = _Done()


class HostDevice:
    """Leaves batches in host memory: page-locked for the user's own copies, or just as they are.

    >>> HostDevice("pageable").copy(torch.ones(2))
    tensor([1., 1.])
    """

    name = "host"

    def __init__(self, memory: str, accelerator: AcceleratorDevice | None = None) -> None:
        self.memory = memory
        self.dropping = False
        self._accelerator = accelerator

    def page_lock(self, address: int, nbytes: int) -> None:
        if self._accelerator is not None:
            self._accelerator.page_lock(address, nbytes)

    def page_unlock(self, address: int, nbytes: int) -> None:
        if self._accelerator is not None:
            self._accelerator.page_unlock(address, nbytes)

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._accelerator is None or not _can_pin(tensor) or self._accelerator.is_pinned(tensor):
            return tensor
        return self._accelerator.pinned(tensor)

    def move(self, value: Any) -> Any:
        return value if self._accelerator is None else value.pin_memory()

    def record(self) -> Mark:
        return DONE

    def wait(self, mark: Mark) -> None:
        pass

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def used(self) -> Mark | None:
        return None if self._accelerator is None else self._accelerator.used()


class AcceleratorDevice:
    """Copies batches to an accelerator (CUDA, XPU, MPS, ...) through `torch.accelerator`'s streams and events."""

    def __init__(self, device: torch.device, memory: str) -> None:
        self.device, self.memory, self.name = device, memory, str(device)
        self.dropping = False
        self._stream: Any = None
        self._locked: set[int] = set()
        self._pid = os.getpid()
        self._told = False

    # What the driver does; a fake device has its own of these.

    def bind(self) -> None:
        """Settle which device "cuda" is: the current one when the first batch comes."""
        index: int | None = self.device.index
        if index is None:
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        """Page-lock memory; return why it cannot be, or None."""
        if self.device.type != "cuda":
            return f"torch offers no page-locking of foreign memory for {self.device.type}"
        self.bind()
        with torch.cuda.device(self.device):
            code = int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        return None if code in (0, _ALREADY_REGISTERED) else f"cudaHostRegister failed with code {code}"

    def unlock_pages(self, address: int) -> None:
        with torch.cuda.device(self.device):
            # A copy that the user began may still read it.
            torch.cuda.synchronize()
            _cudart().cudaHostUnregister(address)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device already."""
        return tensor.device == self.device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in page-locked memory of torch's own, which knows when that may be used again."""
        return tensor.pin_memory()

    def send(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=non_blocking)

    def mark_of_user(self) -> Mark:
        """Mark what the user's current stream was given so far."""
        return self._user_stream().record_event()  # type: ignore[no-any-return]

    def _copy_stream(self) -> Any:
        if self._stream is None:
            self.bind()
            self._stream = torch.Stream(self.device)
        return self._stream

    def _user_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    # What is the same for every device.

    def page_lock(self, address: int, nbytes: int) -> None:
        if self.memory != "pinned":
            return
        why = self.lock_pages(address, nbytes)
        if why is None:
            self._locked.add(address)
        elif not self._told:
            self._told = True
            warnings.warn(
                f"shared memory of the workers cannot be page-locked ({why}): every batch is copied once in this "
                "process to page-locked memory of torch's own, which is slower. Raise the limit of locked memory "
                "(`ulimit -l`), or lower prefetch= and max_held= of the reading service",
                RuntimeWarning,
                stacklevel=2,
            )

    def page_unlock(self, address: int, nbytes: int) -> None:
        # The pages belong to the process that locked them, not to a child forked from it.
        if os.getpid() == self._pid and address in self._locked:
            self._locked.discard(address)
            self.unlock_pages(address)

    def copying(self) -> AbstractContextManager[Any]:
        return self._copy_stream()  # type: ignore[no-any-return]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.holds(tensor):
            return tensor
        if self.memory == "pinned" and tensor.nbytes >= SMALL and _can_pin(tensor) and not self.is_pinned(tensor):
            tensor = self.pinned(tensor)
        return self.send(tensor, non_blocking=self.memory != "pageable")

    def move(self, value: Any) -> Any:
        return value.to(self.device)

    def record(self) -> Mark:
        return self._copy_stream().record_event()  # type: ignore[no-any-return]

    def wait(self, mark: Mark) -> None:
        self._user_stream().wait_event(mark)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = self._user_stream()
        for tensor in tensors:
            if self.holds(tensor):
                tensor.record_stream(stream)

    def used(self) -> Mark | None:
        return None if self.dropping else self.mark_of_user()


class BlockingDevice(AcceleratorDevice):
    """Copies with plain, finished copies: for MPS, whose memory is the host's, and where nothing is page-locked."""

    def copying(self) -> AbstractContextManager[Any]:
        self.bind()
        return nullcontext()

    def send(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        return tensor.to(self.device)

    def record(self) -> Mark:
        return DONE

    def wait(self, mark: Mark) -> None:
        pass

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def used(self) -> Mark | None:
        return None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _can_pin(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def check_memory(memory: str) -> None:
    """Raise ValueError for what is no kind of memory."""
    if memory not in get_args(Memory):
        raise ValueError(f"memory must be one of {', '.join(get_args(Memory))}, not {memory!r}")


def resolve_device(device: Any, memory: str = "auto") -> Device | None:
    """Return what moves batches to `device`, from memory of the kind `memory`; None when nothing is to be done.

    `device` is what `torch.device` takes, a `Device` of your own, or None for batches that stay on the host. "auto"
    is pinned for CUDA and XPU, unified for MPS, pageable for the CPU and without a device. Raises ValueError for an
    unknown `memory`, DeviceError for a device that is not there and for memory that it cannot use.

    >>> resolve_device(None) is None, resolve_device("cpu").memory
    (True, 'pageable')
    >>> resolve_device("cpu", "pinned")
    Traceback (most recent call last):
    pipes.errors.DeviceError: memory='pinned' page-locks memory for copies to an accelerator, ...
    """
    check_memory(memory)
    if device is not None and not isinstance(device, str | int | torch.device):
        if isinstance(device, Device):
            return device
        raise TypeError(f"device must be what torch.device takes, or None, not a {type(device).__name__}")
    if device is None:
        return _on_the_host(memory)
    place = _place(device)
    if place.type == "cpu":
        if memory in ("pinned", "unified"):
            raise DeviceError(
                f"memory={memory!r} {_PURPOSE[memory]}, and device='cpu' is none: use memory='auto', or leave device "
                "out if you copy to one yourself"
            )
        return HostDevice("pageable")
    kind = {"cuda": "pinned", "xpu": "pinned", "mps": "unified"}.get(place.type, "pageable")
    chosen = kind if memory == "auto" else memory
    if chosen == "pinned" and place.type == "mps":
        raise DeviceError("memory='pinned' is of no use on MPS, whose memory is the host's: use memory='auto'")
    _check_there(place)
    make: Callable[[torch.device, str], AcceleratorDevice]
    make = BlockingDevice if place.type == "mps" or chosen == "pageable" else AcceleratorDevice
    return make(place, chosen)


_PURPOSE = {"pinned": "page-locks memory for copies to an accelerator", "unified": "is shared with an accelerator"}


def _place(device: str | int | torch.device) -> torch.device:
    try:
        # An index alone means CUDA to old releases of torch, and the accelerator to new ones.
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device={device!r} is not what torch.device takes: {str(error).splitlines()[0]}") from error


def _accelerator() -> torch.device | None:
    if not hasattr(torch, "accelerator"):
        raise DeviceError(f"device= needs torch 2.6 or later, and this is {torch.__version__}")
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _check_there(place: torch.device) -> None:
    found = _accelerator()
    if found is None or found.type != place.type:
        raise DeviceError(
            f"device={str(place)!r} was asked for, and torch {torch.__version__} sees "
            f"{'no accelerator' if found is None else f'only {found.type!r}'} here: install a build of torch for it, "
            "or use device='cpu'"
        )
    count = torch.accelerator.device_count()
    if place.index is not None and place.index >= count:
        raise DeviceError(f"device={str(place)!r} was asked for, and there are {count}: 0 to {count - 1}")


def _on_the_host(memory: str) -> Device | None:
    if memory in ("auto", "pageable"):
        return None
    found = _accelerator()
    if found is None:
        raise DeviceError(
            f"memory={memory!r} {_PURPOSE[memory]}, and torch {torch.__version__} sees none here: use memory='auto', "
            "which picks what the machine has"
        )
    if found.type == "mps" or memory == "unified":
        return HostDevice("unified")
    return HostDevice(
        "pinned", AcceleratorDevice(torch.device(found.type, torch.accelerator.current_device_index()), "pinned")
    )
