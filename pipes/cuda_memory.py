"""What torch does not offer of CUDA's memory: page-locking of memory that is there already, and who shares the host's.

Nothing here is called without a CUDA device, and importing it loads nothing of CUDA.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch

__all__ = ["lock_pages", "shares_host_memory", "unlock_pages"]

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
            # A copy that the user began may still read it.
            torch.cuda.synchronize()
        finally:
            if int(_cudart().cudaHostUnregister(address)):
                _forget_error(device)


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
