"""A batch to another device, whatever it is made of: containers are rebuilt in their own type, their tensors moved.

Tensors are moved by the device; objects that are no tensors and have a method `to` (TensorDict, PackedSequence,
BatchEncoding), or `pin_memory` where batches stay on the host, move themselves; everything else stays the object it is.
What appears twice in a batch is moved once.

Contract of `Sender`
- Success. `send` begins the copies of a batch and returns at once; `hand_over` makes them safe to use in the user's
  current stream and returns the batch. The host memory is kept until the copies are done.
- Failure. `send` raises DeviceError or torch.OutOfMemoryError; copies that had begun end on their own.
- Stop. `finish` waits for copies under way, so many seconds at most.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from pipes.devices import Device, Mark
from pipes.errors import DeviceError

__all__ = ["Sender", "Sent", "moved", "tensors_in"]

_PLAIN = (str, bytes, bytearray, memoryview, int, float, complex, bool, type(None))
_DEPTH = 8


def moved(batch: Any, device: Device, *, arrays: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """Return `batch` with its tensors on `device`, and these tensors; with `arrays`, numpy arrays become tensors too.

    Containers come back in their own type: dicts and lists and their subclasses, tuples, named tuples, dataclasses
    (also frozen ones). Strings, bytes, numbers and unknown objects stay. Raises DeviceError that names the place in the
    batch, with the original as its cause; torch.OutOfMemoryError as it is.

    >>> from pipes.devices import HostDevice
    >>> moved({"x": [torch.ones(2), "name"]}, HostDevice("pageable"))
    ({'x': [tensor([1., 1.]), 'name']}, [tensor([1., 1.])])
    """
    move = _Move(device, arrays)
    output = move.of(batch, "batch")
    if move.own:
        # Nobody else keeps them until the device has read them.
        device.record().synchronize()
    return output, move.tensors


class _Move:
    def __init__(self, device: Device, arrays: bool) -> None:
        self._device, self._arrays = device, arrays
        self._method = "pin_memory" if device.name == "host" else "to"
        self.tensors: list[torch.Tensor] = []
        #: Copies of arrays made here, which the device may still read.
        self.own: list[Any] = []
        # By identity, with the object: a mapping may make its values when it is asked for them, and what is kept here
        # has an address that nothing else gets.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, path: str) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._seen:
            found = self._seen[id(value)][1]
            if found is _UNFINISHED:
                raise DeviceError(f"{path} holds itself, and such a batch cannot be moved to {self._device.name}")
            return found
        self._seen[id(value)] = value, _UNFINISHED
        result = self._of(value, path)
        self._seen[id(value)] = value, result
        return result

    def _of(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copied(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path) if self._arrays else value
        if not isinstance(value, type) and callable(getattr(value, self._method, None)):
            result = self._call(self._device.move, value, path)
            self.tensors.extend(tensors_in(result))
            return result
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list | tuple):
            return self._sequence(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, path)
        return value

    def _copied(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        result: torch.Tensor = self._call(self._device.copy, tensor, path)
        self.tensors.append(result)
        return result

    def _call(self, move: Callable[[Any], Any], value: Any, path: str) -> Any:
        try:
            return move(value)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"while {path} ({_kind_of(value)}) was copied to {self._device.name}: make batches smaller, or lower "
                "prefetch= of .to_device(...), 2 by default, which is how many lie there beside yours"
            )
            raise
        except Exception as error:
            raise DeviceError(
                f"{path} ({_kind_of(value)}) cannot be moved to {self._device.name}: {type(error).__name__}: {error}"
            ) from error

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        if array.dtype.kind not in "biufc" or not array.dtype.isnative:
            return array
        size = array.dtype.itemsize
        if not array.flags.writeable or any(stride < 0 or stride % size for stride in array.strides):
            # As torch takes none.
            array = array.copy()
            self.own.append(array)
        try:
            tensor = torch.from_numpy(array)
        except TypeError:
            return array
        return self._copied(tensor, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        items = {key: self.of(child, f"{path}[{key!r}]") for key, child in value.items()}
        if type(value) is dict:
            return items
        return self._rebuilt(value, path, lambda: _filled(value, items))

    def _sequence(self, value: list[Any] | tuple[Any, ...], path: str) -> Any:
        items = [self.of(child, f"{path}[{index}]") for index, child in enumerate(value)]
        if type(value) is list:
            return items
        if type(value) is tuple:
            return tuple(items)
        return self._rebuilt(value, path, lambda: _like(value, items))

    def _dataclass(self, value: Any, path: str) -> Any:
        fields = {
            field.name: self.of(getattr(value, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }

        def rebuilt() -> Any:
            result = copy.copy(value)
            for name, child in fields.items():
                object.__setattr__(result, name, child)
            return result

        return self._rebuilt(value, path, rebuilt)

    def _rebuilt(self, value: Any, path: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            raise DeviceError(
                f"{path} ({type(value).__name__}) cannot be rebuilt around tensors on {self._device.name}: "
                f"{type(error).__name__}: {error}. Give the class a method to(device), or collate into plain containers"
            ) from error


_UNFINISHED = object()


def _kind_of(value: Any) -> str:
    return f"{value.dtype} tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _filled(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    result = copy.copy(value)
    for key, child in items.items():
        result[key] = child
    return result


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(value, list):
        result = copy.copy(value)
        result[:] = items
        return result
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds, looking into objects of any class as the garbage collector does.

    >>> [tensor.shape for tensor in tensors_in({"x": [torch.ones(2)]})]
    [torch.Size([2])]
    """
    seen: set[int] = set()
    level = [value]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for each in level:
            if id(each) in seen or isinstance(each, (*_PLAIN, type, ModuleType, FunctionType)):
                continue
            seen.add(id(each))
            if isinstance(each, torch.Tensor):
                yield each
            else:
                below.extend(filter(gc.is_tracked, gc.get_referents(each)))
        level = below


class Sent(NamedTuple):
    """A batch on its way: what it will be, the mark after its copies, and its tensors."""

    output: Any
    mark: Mark
    tensors: Sequence[torch.Tensor]


class Sender:
    """Sends batches to one device; `on_device` is applied to each there, on the stream of the copies.

    >>> from pipes.devices import HostDevice
    >>> sender = Sender(HostDevice("pageable"), on_device=lambda batch: batch * 2)
    >>> sender.hand_over(sender.send(torch.ones(2)))
    tensor([2., 2.])
    """

    def __init__(self, device: Device, *, on_device: Callable[[Any], Any] | None = None, arrays: bool = False) -> None:
        self.device, self._on_device, self._arrays = device, on_device, arrays
        # Host memory that copies read: (batch, mark of their end).
        self._reading: deque[tuple[Any, Mark]] = deque()

    def send(self, batch: Any) -> Sent:
        """Begin the copies of a batch."""
        device = self.device
        move = _Move(device, self._arrays)
        try:
            with device.copying():
                output, tensors = move.of(batch, "batch"), move.tensors
                if self._on_device is not None:
                    output = self._on_device(output)
                    tensors = [*tensors, *tensors_in(output)]
                sent = Sent(output, device.record(), tensors)
        except BaseException:
            # Copies of the leaves before the failing one may be under way.
            with suppress(Exception):
                self._reading.append(((batch, move.own), device.record()))
            raise
        if not sent.mark.query():
            self._reading.append(((batch, move.own), sent.mark))
        return sent

    def hand_over(self, sent: Sent) -> Any:
        """Return a batch that was sent, for use in the user's current stream."""
        self.device.wait(sent.mark)
        self.device.keep(sent.tensors)
        return sent.output

    def under_way(self) -> int:
        """Drop the host memory of copies that are done; return how many batches are still being copied."""
        while self._reading and self._reading[0][1].query():
            self._drop_oldest()
        return len(self._reading)

    def let_go(self, most: int) -> None:
        """Drop the host memory of copies that are done; wait for the oldest while more than `most` are not."""
        while self.under_way() > most:
            self._reading[0][1].synchronize()
            self._drop_oldest()

    def finish(self, timeout: float = 5.0) -> None:
        """Wait for the copies under way, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        # A device that failed would raise here what its next use raises.
        with suppress(Exception):
            while self._reading and time.monotonic() < deadline:
                if self._reading[0][1].query():
                    self._drop_oldest()
                else:
                    time.sleep(0.0005)

    def _drop_oldest(self) -> None:
        self.device.dropping = True
        try:
            self._reading.popleft()
        finally:
            self.device.dropping = False
