"""Where batches go and what memory they come from: page-locked host memory, copies on a stream of their own.

Contract
- Copies are asked for in order and run on one stream of the device, apart from the user's; `record` marks a place in
  it. `wait` lets the user's current stream wait for a mark; the calling thread never waits.
- The host memory of a copy must stay as it is until its mark is `query`ed as done: that is the caller's part.
- What `copy` gave was allocated on the copying stream; `keep` tells the allocator that the user's stream uses it too,
  so that the memory is not given to a later copy while the user's kernels still read it. What is on the device already
  was made in the user's stream: the copying stream waits for that, and the allocator is told of this use, too.
- Page-locking is done once a slab. Where the system refuses it, batches pass through page-locked memory of torch's own
  (one copy in main each), which one warning says: as much as the copies under way need, of `prefetch + 1` batches at
  most. Where that is refused too, they are copied from ordinary memory, which the process waits for, as another says.
- Nothing here is imported, initialised or allocated on a device before a batch is to be moved.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipes import cuda_memory

__all__ = ["AcceleratorDevice", "Device", "HostDevice", "Mark", "Memory"]

_logger = logging.getLogger("pipes.devices")

Memory = Literal["auto", "pinned", "unified", "pageable"]
_ADVICE = "Raise the limit of locked memory (`ulimit -l`), or lower prefetch= and max_held= of the reading service"
#: Tensors smaller than this are copied by the driver itself before a copy call returns, pinned or not.
SMALL = 1 << 16


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
        """Undo `page_lock` just before the memory is unmapped; never raises."""

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
        return self._accelerator.stage(tensor)

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
        # The user's, while the copying stream is the current one.
        self._users: Any = None
        # By address, the process that page-locked it.
        self._locked: dict[int, int] = {}
        self._told: set[str] = set()

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
        return cuda_memory.lock_pages(address, nbytes, self.device)

    def unlock_pages(self, address: int) -> None:
        cuda_memory.unlock_pages(address, self.device)

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
        """Mark what the user's current streams were given so far, that of each device that he may copy to."""
        if self.device.type == "cuda":
            return cuda_memory.StreamsMark()
        return self._user_stream().record_event()  # type: ignore[no-any-return]

    def _copy_stream(self) -> Any:
        if self._stream is None:
            self.bind()
            self._stream = torch.Stream(self.device)
            # A function on the device may read what was made there before.
            self._stream.wait_stream(self._user_stream())
        return self._stream

    def _user_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    # What is the same for every device.

    def page_lock(self, address: int, nbytes: int) -> None:
        if self.memory != "pinned":
            return
        why = self.lock_pages(address, nbytes)
        if why is None:
            self._locked[address] = os.getpid()
        else:
            # No limit keeps torch for XPU from it.
            advice = "" if self.device.type == "xpu" else f". {_ADVICE}"
            self._tell_once(
                f"shared memory of the workers cannot be page-locked ({why}): every batch is copied once in this "
                f"process to page-locked memory of torch's own, which is slower{advice}"
            )

    def _tell_once(self, sentence: str) -> None:
        about = sentence.partition("(")[0]
        if about not in self._told:
            self._told.add(about)
            try:
                warnings.warn(sentence, RuntimeWarning, stacklevel=_users_level())
            except RuntimeWarning:
                # Where warnings are errors, a batch that is only slower must not end the epoch.
                _logger.warning(sentence)

    def page_unlock(self, address: int, nbytes: int) -> None:
        # The pages belong to the process that locked them, not to a child forked from it.
        if self._locked.get(address) == os.getpid():
            del self._locked[address]
            # A device that failed says so at its next use; the memory must go all the same.
            with suppress(Exception):
                self.unlock_pages(address)

    def copying(self) -> AbstractContextManager[Any]:
        stream = self._copy_stream()
        self._users = self._user_stream()
        return stream if hasattr(stream, "__enter__") else _current(stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.holds(tensor):
            self.follow(tensor)
            return tensor
        if self.memory == "pinned" and _can_pin(tensor) and tensor.nbytes >= SMALL and not self.is_pinned(tensor):
            tensor = self.stage(tensor)
        return self.send(tensor, non_blocking=self.memory != "pageable")

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to page-locked memory of torch's own, or give it back where there is none to be had."""
        try:
            return self.pinned(tensor)
        except RuntimeError as error:
            self._tell_once(
                f"page-locked memory cannot be had ({str(error).splitlines()[0]}): batches are copied from ordinary "
                "memory, which is slower and makes the process wait. Leave more memory free, or lower prefetch="
            )
            return tensor

    def follow(self, tensor: torch.Tensor) -> None:
        """Let the copying stream, inside `copying`, use what the user's stream made."""
        stream = self._copy_stream()
        if self._users is not None:
            stream.wait_stream(self._users)
        for part in _parts(tensor):
            part.record_stream(stream)

    def move(self, value: Any) -> Any:
        takes = _takes_non_blocking(type(value))  # type: ignore[arg-type]
        if takes is not False:
            try:
                return value.to(self.device, non_blocking=True)
            except TypeError:
                if takes:
                    raise
        return value.to(self.device)

    def record(self) -> Mark:
        return self._copy_stream().record_event()  # type: ignore[no-any-return]

    def wait(self, mark: Mark) -> None:
        self._user_stream().wait_event(mark)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = self._user_stream()
        for tensor in tensors:
            if self.holds(tensor):
                for part in _parts(tensor):
                    part.record_stream(stream)

    def used(self) -> Mark | None:
        return None if self.dropping else self.mark_of_user()


class BlockingDevice(AcceleratorDevice):
    """Copies with plain, finished copies: for MPS, whose memory is the host's, and where nothing is page-locked."""

    def copying(self) -> AbstractContextManager[Any]:
        self.bind()
        return nullcontext()

    def send(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        return tensor.to(self.device)

    def move(self, value: Any) -> Any:
        return value.to(self.device)

    def record(self) -> Mark:
        return DONE

    def wait(self, mark: Mark) -> None:
        pass

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def used(self) -> Mark | None:
        return None


def _users_level() -> int:
    """The `stacklevel` by which the caller's warning names the user's line."""
    here = os.path.dirname(__file__) + os.sep
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    return level


@contextmanager
def _current(stream: Any) -> Iterator[None]:
    """Do what `with stream:` does in torch 2.7 and later."""
    index = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(stream.device_index)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


@lru_cache(maxsize=256)
def _takes_non_blocking(kind: type) -> bool | None:
    """Whether a class's method `to` says that it takes `non_blocking`; None where it may, as it takes any keyword."""
    if issubclass(kind, PackedSequence):
        return True
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return False
    if "non_blocking" in parameters:
        return True
    # TensorDict's, which without it waits for the device.
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else False


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold a tensor's memory: `record_stream` is there for no others."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _parts(getattr(wrapper, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.is_quantized:
        yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    else:
        yield tensor


def _can_pin(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
