"""Shared-memory slabs: how the arrays of a batch cross from a worker to the main process without a copy.

Contract.
Success: a worker owns the slabs of its `SlabPool`. It fills one and lends it; the main process (`Loans`) maps a slab
    once, hands out views, and notes the loan as ended when the last view of it dies, also one reached through slices,
    `.numpy()` or autograd's saved tensors. Only then, and when no view lives in the worker, is a slab filled again.
Failure: nothing has a name, so a process that ends at any moment leaves nothing behind. Views stay readable and
    writable after the worker died: the mapping holds the memory. A loan of a dead worker never frees a slab of its
    successor: loan numbers start with the worker's generation, and a pool ignores numbers that it has not lent.
Stop: a mapping is never closed by a call. It goes when the last reference to it dies; a close under a live view would
    be a segmentation fault, because a tensor holds a reference to the memory's owner but no buffer export.
Fork: in a child of the main process views stay valid, but their end returns nothing.
Bounds: one descriptor a slab, only until it has been sent (worker) or mapped (main). Sizes are rounded up to classes,
    so that batches of varying size reuse slabs. Slabs that neither the last `idle_uses` batches, large or small, nor
    those of the last `idle_seconds` used, or that lie free beyond `max_free_bytes`, are given up; `retired()` tells the
    main process to forget them. A new slab costs ten times as much as filling a used one, in page faults.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from pipes.devices import Device, Mark
from pipes.loader2 import fault_points
from pipes.loader2.segments import Owner, Window, create_segment, map_segment, view_bytes

__all__ = ["ALIGNMENT", "Loans", "Slab", "SlabPool", "size_class"]

ALIGNMENT = 64
_FIRST_CLASS = 1 << 17


def size_class(nbytes: int) -> int:
    """The size of the slab for `nbytes`: four steps per power of two, at least 128 KiB, whole pages.

    >>> size_class(1), size_class(150_000), size_class(38_535_168)
    (131072, 163840, 41943040)
    """
    if nbytes <= _FIRST_CLASS:
        return _FIRST_CLASS
    step = 1 << ((nbytes - 1).bit_length() - 3)
    step = max(step, mmap.PAGESIZE)
    return -(-nbytes // step) * step


class Slab:
    """A worker's piece of shared memory, filled from the front; made by `SlabPool.open`."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.used = 0
        self.last_use = 0
        self.last_time = 0.0
        self.draft = False
        self.loan: int | None = None
        self.fd = create_segment(size)
        try:
            self._owner = map_segment(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = ctypes.addressof(self._owner)
        self._viewed: weakref.ref[Window] | None = None

    @property
    def free(self) -> bool:
        """Whether neither the main process nor anything in this one looks at it."""
        return self.loan is None and (self._viewed is None or self._viewed() is None)

    @property
    def room(self) -> int:
        """The largest `nbytes` that `allocate` can give."""
        return self.size - -(-self.used // ALIGNMENT) * ALIGNMENT

    def window(self) -> Window:
        """All bytes of the slab, as an array; the slab stays in use while any view of it lives."""
        window = self._viewed() if self._viewed is not None else None
        if window is None:
            window = view_bytes(self._owner, self.size)
            self._viewed = weakref.ref(window)
        return window

    def allocate(self, nbytes: int) -> int | None:
        """The offset of the next free `nbytes`, a multiple of 64, or None when they do not fit."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self.size:
            return None
        self.used = start + nbytes
        return start

    def take_fd(self) -> int | None:
        """The descriptor, once; from then on the caller closes it."""
        fd, self.fd = self.fd, -1
        return fd if fd >= 0 else None

    def close(self) -> None:
        """Close the descriptor if nobody took it; the mapping ends with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SlabPool:
    """A worker's slabs: opens one to be filled, lends it, takes it back.

    `ended`, if any, gives the loans that ended since the last call: each slab to be filled is chosen with the newest.

    >>> pool = SlabPool()
    >>> slab = pool.open(1_000_000)
    >>> slab.allocate(1_000_000), slab.size
    (0, 1048576)
    >>> loan = pool.lend(slab)
    >>> slab.free, len(pool)
    (False, 1)
    >>> pool.take_back([loan])
    >>> pool.open(1_000_000) is slab
    True
    >>> pool.close()
    """

    def __init__(
        self,
        generation: int = 0,
        *,
        ended: Callable[[], Iterable[int]] | None = None,
        max_free_bytes: int = 1 << 29,
        idle_uses: int = 64,
        idle_seconds: float = 5.0,
    ) -> None:
        #: Bytes to leave free beside what is stacked, so that the rest of the batch finds room in the same slab.
        self.headroom = 0
        self._next_loan = generation << 32
        self._ended = ended
        self._max_free_bytes = max_free_bytes
        self._idle_uses = idle_uses
        self._idle_seconds = idle_seconds
        self._slabs: list[Slab] = []
        self._lent: dict[int, Slab] = {}
        self._retired: list[int] = []
        self._uses = 0
        # The count of uses when `retired` was last called.
        self._told = 0
        self._made = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, lent and free."""
        return sum(slab.size for slab in self._slabs)

    def __len__(self) -> int:
        return len(self._slabs)

    def open(self, nbytes: int) -> Slab:
        """An empty slab with room for `nbytes`: a free one that is not much too large, else a new one.

        Take its `window` before the next `open`: a slab that nobody looks at is free.
        """
        self._uses += 1
        self._take_ended()
        free = [slab for slab in self._slabs if slab.free]
        self._retire(free)
        fitting = [slab for slab in free if nbytes <= slab.size <= max(4 * nbytes, _FIRST_CLASS)]
        if fitting:
            # The smallest; of equals the one used last, so that those in excess fall idle.
            slab = min(fitting, key=lambda slab: (slab.size, -slab.last_use))
        else:
            slab = Slab(self._made, size_class(nbytes))
            self._made += 1
            self._slabs.append(slab)
        slab.used = 0
        slab.draft = True
        slab.last_use = self._uses
        slab.last_time = time.monotonic()
        fault_points.reach("before the slab is written")
        return slab

    def find(self, low: int, high: int) -> Slab | None:
        """The slab, not lent since it was opened, that the addresses from `low` up to `high` lie in."""
        for slab in self._slabs:
            if slab.draft and slab.address <= low and high <= slab.address + slab.used:
                return slab
        return None

    def lend(self, slab: Slab) -> int:
        """Mark the slab as lent to the main process; returns the loan's number."""
        fault_points.reach("after the slab is written")
        slab.draft = False
        slab.loan = self._next_loan
        self._lent[self._next_loan] = slab
        self._next_loan += 1
        return slab.loan

    def take_back(self, numbers: Iterable[int]) -> None:
        """Mark loans as ended: `numbers` is what `Loans.returned` gave. Numbers that are not lent are ignored."""
        for number in numbers:
            slab = self._lent.pop(number, None)
            if slab is not None:
                slab.loan = None

    def retired(self) -> list[int]:
        """The numbers of the slabs given up since the last call, for the main process to forget; once a batch."""
        if self._uses == self._told and self._slabs:
            # Else slabs of a burst would stay for as long as all batches after it are small.
            self._uses += 1
            self._take_ended()
            self._retire([slab for slab in self._slabs if slab.free])
        self._told = self._uses
        retired, self._retired = self._retired, []
        return retired

    def close(self) -> None:
        """Drop all slabs; what has been lent stays valid in the main process."""
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
        self._lent.clear()

    def _take_ended(self) -> None:
        if self._ended is not None:
            self.take_back(self._ended())

    def _retire(self, free: list[Slab]) -> None:
        free.sort(key=lambda slab: slab.last_use)
        excess = sum(slab.size for slab in free) - self._max_free_bytes
        while free and (excess > 0 or self._is_idle(free[0])):
            slab = free.pop(0)
            excess -= slab.size
            slab.close()
            self._slabs.remove(slab)
            self._retired.append(slab.number)

    def _is_idle(self, slab: Slab) -> bool:
        unused = self._uses - slab.last_use > self._idle_uses
        return unused and time.monotonic() - slab.last_time >= self._idle_seconds


class Loans:
    """The main process's side of one worker's slabs: mappings, live loans, and those to be returned.

    `device`, if any, page-locks each mapping, and says what copies of the user's own may still read a loan that ended;
    it is returned when they are done.

    >>> pool, loans = SlabPool(), Loans()
    >>> slab = pool.open(4096)
    >>> slab.window()[:3] = [1, 2, 3]
    >>> loans.map(slab.number, slab.size, slab.take_fd())
    >>> window = loans.borrow(slab.number, pool.lend(slab), 3)
    >>> window.tolist(), loans.returned()
    ([1, 2, 3], [])
    >>> view = window[1:]
    >>> del window
    >>> view.tolist(), loans.returned()
    ([2, 3], [])
    >>> del view
    >>> pool.take_back(loans.returned())
    >>> slab.free
    True
    >>> pool.close()
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self._mapped: dict[int, Owner] = {}
        # (loan, mark of what may still read it)
        self._ended: deque[tuple[int, Mark | None]] = deque()
        self._held: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all mapped slabs."""
        return sum(len(owner) for owner in self._mapped.values())

    @property
    def held(self) -> int:
        """Live loans that were marked with `hold`."""
        return len(self._held)

    def map(self, slab: int, size: int, fd: int) -> None:
        """Map the slab whose number is `slab`; closes `fd` on every path."""
        try:
            owner = map_segment(fd, size, None if self._device is None else self._device.page_unlock)
        finally:
            os.close(fd)
        if self._device is not None:
            self._device.page_lock(ctypes.addressof(owner), size)
        self._mapped[slab] = owner

    def borrow(self, slab: int, loan: int, nbytes: int) -> Window:
        """The first `nbytes` of a slab; the loan ends with the last view of what this returns."""
        window = view_bytes(self._mapped[slab], nbytes)
        used = None if self._device is None else self._device.used
        weakref.finalize(window, _end_loan, self._held, self._ended, loan, os.getpid(), used).atexit = False
        return window

    def hold(self, loan: int) -> None:
        """Count a loan in `held` until it ends."""
        self._held.add(loan)

    def returned(self) -> list[int]:
        """The numbers of the loans that ended since the last call, for `SlabPool.take_back`."""
        numbers: list[int] = []
        # Finalizers run in any thread and at any moment, so only single deque operations are safe.
        while self._ended:
            mark = self._ended[0][1]
            if mark is not None and not mark.query():
                break
            numbers.append(self._ended.popleft()[0])
        return numbers

    def forget(self, slabs: list[int]) -> None:
        """Drop the mappings of slabs that the worker gave up."""
        for slab in slabs:
            self._mapped.pop(slab, None)

    def close(self) -> None:
        """Drop all mappings; each ends with its last view."""
        self._mapped.clear()


def _end_loan(
    held: set[int],
    ended: deque[tuple[int, Mark | None]],
    loan: int,
    pid: int,
    used: Callable[[], Mark | None] | None,
) -> None:
    if os.getpid() == pid:
        held.discard(loan)
        # Where this raises, the device has failed, and the slab is not filled again.
        ended.append((loan, None if used is None else used()))
