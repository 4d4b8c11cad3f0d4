"""Shared memory without a name: segments, their mappings, and views of those.

On Linux a segment is a memfd, which /dev/shm does not bound. Elsewhere, and where memfd is forbidden, it is a POSIX
segment that is unlinked as soon as it is open (macOS takes this path; it is tested on Linux only), and a file without a
name once /dev/shm is full.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["MapHook", "Owner", "Window", "create_segment", "map_segment", "view_bytes"]

Owner = ctypes.Array[ctypes.c_uint8]
Window = npt.NDArray[np.uint8]
MapHook = Callable[[int, int], None]

# mmap.mmap keeps a duplicate of the descriptor for as long as it lives (`trackfd=False` needs Python 3.13).
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def create_segment(size: int) -> int:
    """A descriptor of `size` bytes of zeroed shared memory without a name; raises OSError when there is no room.

    >>> fd = create_segment(4096)
    >>> os.fstat(fd).st_size
    4096
    >>> os.close(fd)
    """
    fd = -1
    if hasattr(os, "memfd_create"):
        try:
            fd = os.memfd_create("pipes-slab")
        except OSError as error:
            # Sandboxes forbid it now and then.
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                raise
    if fd < 0:
        return _posix_segment(size)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _posix_segment(size: int) -> int:
    try:
        return _shm_segment(size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    with tempfile.TemporaryFile() as file:
        # A full disk must be an error here too.
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


def _shm_segment(size: int) -> int:
    import _posixshmem  # type: ignore[import-not-found]

    # macOS allows 31 characters.
    name = f"/pipes-{secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    try:
        _posixshmem.shm_unlink(name)
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            # A full /dev/shm must be an error here and not a SIGBUS while a batch is written.
            os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_segment(fd: int, size: int, on_unmap: MapHook | None = None) -> Owner:
    """Map `size` bytes of `fd`, readable and writable; the mapping needs no descriptor and ends with its last view.

    `on_unmap(address, size)` is called just before it ends. Raises OSError.

    >>> fd = create_segment(4096)
    >>> owner = map_segment(fd, 4096)
    >>> os.close(fd)
    >>> view_bytes(owner, 3)[:2] = 7
    >>> view_bytes(owner, 3).tolist()
    [7, 7, 0]
    """
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map a slab of {size} bytes: {os.strerror(code)}")
    owner = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(owner, _unmap, address, size, on_unmap).atexit = False
    return owner


def _unmap(address: int, size: int, on_unmap: MapHook | None) -> None:
    try:
        if on_unmap is not None:
            on_unmap(address, size)
    finally:
        _LIBC.munmap(address, size)


def view_bytes(owner: Owner, nbytes: int) -> Window:
    """The first `nbytes` of a mapping, as an array that lives as long as any view made from it.

    numpy lets a view skip intermediate arrays that do not own their memory, but not the one next to the memory's owner;
    that is why each loan gets an array of its own made from the mapping, and not a slice of a common one.
    """
    return np.frombuffer(memoryview(owner), dtype=np.uint8, count=nbytes)
