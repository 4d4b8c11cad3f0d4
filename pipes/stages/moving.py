"""Batches to a device, as the last stage of a graph: `.to_device`, `.pin_memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of
from pipes.device_choice import check_memory, resolve_device
from pipes.devices import Device, HostDevice
from pipes.moving import Sender
from pipes.run import Run
from pipes.stages.wrapping import as_pipe

__all__ = ["DeviceMover", "PinMemory"]

T = TypeVar("T")

#: As many as a runner's states can leave out.
_MOST_AHEAD = 32


class DeviceRun(Run):
    """Sends each input to the device; without a loader nothing is sent ahead."""

    def elements(self) -> Iterator[Any]:
        sender = self.pipe.sender(self.pipe.resolved())
        try:
            for element in self.inputs[0]:
                yield self._sent(sender, element)
        finally:
            sender.finish()

    def _sent(self, sender: Sender, element: Any) -> Any:
        sender.let_go(1)
        try:
            return sender.hand_over(sender.send(element))
        except Exception as error:
            self.note(error)
            raise

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        sender = self.pipe.sender(self.pipe.resolved())
        try:
            return [self._sent(sender, element) for element in self.inputs[0].replay(count, wanted)]
        finally:
            sender.finish()


@functional_datapipe("to_device")
class DeviceMover(IterDataPipe[T]):
    """Give each batch with its tensors on a device, copied from page-locked memory ahead of the loop that uses it.

    Args:
        device: what `torch.device` takes, or a `pipes.devices.Device`; "cuda" is the current one at the first batch.
        memory: "pinned" (page-locked), "unified", "pageable", or "auto": pinned for CUDA and XPU, unified for MPS.
        prefetch: batches that a DataLoader2 with workers copies ahead, 0 to 32.
        on_device: a function that is applied to each batch there, on the stream of the copies: send uint8 and convert
            to bfloat16 on the device, and a quarter of the bytes travel.
        arrays: also turn numpy arrays into tensors on the device.

    It belongs at the end of a graph, and runs in the calling process. Raises ValueError for a number that makes no
    sense, DeviceError when iterated, or given to a DataLoader2, for a device that is not there; a batch that cannot be
    moved is a DeviceError that names the place in it.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(4)).batch(2).collate().to_device("cpu", on_device=lambda batch: batch.float()))
    [tensor([0., 1.]), tensor([2., 3.])]
    """

    run_class = DeviceRun

    def __init__(
        self,
        source_datapipe: IterDataPipe[T],
        device: Any,
        memory: str = "auto",
        prefetch: int = 2,
        *,
        on_device: Callable[[Any], Any] | None = None,
        arrays: bool = False,
    ) -> None:
        check_memory(memory)
        prefetch = whole("prefetch", prefetch)
        if not 0 <= prefetch <= _MOST_AHEAD:
            raise ValueError(f"prefetch must lie in 0 to {_MOST_AHEAD}, not {prefetch}")
        if on_device is not None and not callable(on_device):
            raise TypeError(f"on_device must be a function of a batch, not {type(on_device).__name__}")
        self.source_datapipe = as_pipe(source_datapipe)
        self.device = device
        self.memory = memory
        self.prefetch = prefetch
        self.on_device = on_device
        self.arrays = arrays

    def resolved(self) -> Device:
        """Return what moves the batches; raises DeviceError when it is not there."""
        return resolve_device(self.device, self.memory) or HostDevice("pageable")

    def sender(self, device: Device) -> Sender:
        """Return a new sender of this stage's batches."""
        return Sender(device, on_device=self.on_device, arrays=self.arrays)

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return length_of(self.source_datapipe, shard)


@functional_datapipe("pin_memory")
class PinMemory(DeviceMover[T]):
    """Give each batch in page-locked memory, from which the user's own copies to an accelerator are fast.

    `pin_memory_fn(batch, device)` does it in another way. Raises DeviceError when iterated, or given to a DataLoader2,
    on a machine without an accelerator.

    >>> from pipes.iter import IterableWrapper
    >>> IterableWrapper(range(4)).batch(2).collate().pin_memory().memory
    'pinned'
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[T],
        device: Any = None,
        pin_memory_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        super().__init__(source_datapipe, device, "pinned")
        self.pin_memory_fn = pin_memory_fn

    def resolved(self) -> Device:
        """Return what page-locks the batches; raises DeviceError without an accelerator."""
        own = HostDevice("pageable") if self.pin_memory_fn is not None else None
        return own or resolve_device(None, "pinned") or HostDevice("pageable")

    def sender(self, device: Device) -> Sender:
        """Return a new sender of this stage's batches."""
        pin = self.pin_memory_fn
        return Sender(device, on_device=None if pin is None else lambda batch: pin(batch, self.device))
