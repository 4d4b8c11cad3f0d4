"""Which device and which memory a user gets, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch

from pipes import cuda_memory
from pipes.devices import AcceleratorDevice, BlockingDevice, Device, HostDevice, Memory
from pipes.errors import DeviceError

__all__ = ["check_memory", "resolve_device"]


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
    if chosen == "unified":
        _check_unified(place)
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


def _check_unified(place: torch.device) -> None:
    if place.type != "cuda":
        return
    index = torch.accelerator.current_device_index() if place.index is None else place.index
    if not cuda_memory.shares_host_memory(index):
        raise DeviceError(
            f"memory='unified' {_PURPOSE['unified']}, and {place.type}:{index} has memory of its own: use "
            "memory='auto', which page-locks"
        )


def _on_the_host(memory: str) -> Device | None:
    if memory in ("auto", "pageable"):
        return None
    found = _accelerator()
    if found is None:
        raise DeviceError(
            f"memory={memory!r} {_PURPOSE[memory]}, and torch {torch.__version__} sees none here: use memory='auto', "
            "which picks what the machine has, and leave out .pin_memory()"
        )
    if memory == "unified":
        _check_unified(found)
    if found.type == "mps" or memory == "unified":
        return HostDevice("unified")
    # Which of them is settled by the first batch: a rank may name its own after its loader was made.
    return HostDevice("pinned", AcceleratorDevice(torch.device(found.type), "pinned"))
