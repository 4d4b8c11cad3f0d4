"""What torch does not offer of CUDA's memory: page-locking of memory that is there already, until when that may still
be read, and who shares the host's.

Nothing here is called without a CUDA device, and importing it loads nothing of CUDA.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch

__all__ = ["StreamsMark", "lock_pages", "shares_host_memory", "unlock_pages"]

_PORTABLE = 1
_ALREADY_REGISTERED = 712
# Of the driver's CUdevice_attribute: the device is integrated with the host's memory; it reads ordinary memory by the
# host's page tables.
_INTEGRATED, _BY_HOST_PAGE_TABLES = 18, 100


def lock_pages(address: int, nbytes: int, device: torch.device) -> str | None:
    """Page-lock memory; return why it cannot be, or None."""
    runtime = _cudart()
    with torch.cuda.device(device):
        codes = [int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))]
        if codes == [_ALREADY_REGISTERED]:
            # Left from memory that was here before, whose pages were others: copies would go to those.
            runtime.cudaHostUnregister(address)
            codes.append(int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)))
        if any(codes):
            _forget_error(device)
    return None if codes[-1] == 0 else f"cudaHostRegister failed with code {codes[-1]}"


def unlock_pages(address: int, device: torch.device) -> None:
    """Undo `lock_pages`, once all that the device was given is done; raises RuntimeError when the device has failed."""
    with torch.cuda.device(device):
        try:
            for index in _in_use():
                # A copy that the user began may still read it.
                torch.cuda.synchronize(index)
        finally:
            if int(_cudart().cudaHostUnregister(address)):
                _forget_error(device)


class StreamsMark:
    """Marks what the current stream of each CUDA device in use was given so far.

    While a CUDA graph is captured nothing can be marked, as its events cannot be asked for: then it is what they were
    given until the capture has ended.
    """

    def __init__(self) -> None:
        self._events: list[Any] | None = None
        self._record()

    def _record(self) -> None:
        if self._events is None and not torch.cuda.is_current_stream_capturing():
            self._events = [torch.cuda.current_stream(index).record_event() for index in _in_use()]

    def query(self) -> bool:
        self._record()
        return self._events is not None and all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for index in _in_use():
            torch.cuda.synchronize(index)


def _in_use() -> list[int]:
    """The CUDA devices that this process has a context on; torch copies on the current stream of each."""
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def _forget_error(device: torch.device) -> None:
    """Let the runtime forget the last error, which else the user's next kernel would be blamed for."""
    # cudaGetLastError, which forgets, is called behind each kernel, and offered by no older torch.
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def shares_host_memory(index: int) -> bool:
    """Whether a CUDA device (by its index) reads the host's ordinary memory as fast as its own; makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    for attribute in (_INTEGRATED, _BY_HOST_PAGE_TABLES):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0 and value.value:
            return True
    return False
