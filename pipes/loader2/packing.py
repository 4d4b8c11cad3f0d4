"""A batch as one message, and back: large leaves in a shared-memory slab, the rest in the message itself.

Contract.
Success: `pack` (worker) gives the parts and descriptors of one message; `Receiver.unpack` (main process) gives the
    batch with equal values, dtypes, shapes, strides and types. Leaves of 64 KiB and more are writable views of the
    slab, not copied; smaller ones own their memory, so that a kept label does not hold a slab. What shared memory in
    the worker (overlapping views, the same object twice) shares it in the main process.
Failure: `pack` raises TypeError naming the path of what cannot travel, and has then lent nothing. A message whose
    content cannot be rebuilt raises in `unpack` and gives its slab back.
Bounds: while more than `max_held` slabs are held by batches that were unpacked, further batches are copied to private
    memory and their slabs go back at once: a consumer may keep every batch, and the worker never waits for a slab.
Stop: batches outlive the receiver, the worker and its pool.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from pipes.devices import Device
from pipes.loader2.channel import Bytes, close_descriptors
from pipes.loader2.leaves import INTEGERS, LARGE, Content, Leaf, collect, rebuild
from pipes.loader2.segments import Window
from pipes.loader2.slabs import ALIGNMENT, Loans, Slab, SlabPool

__all__ = ["Packed", "Parcel", "Receiver", "pack"]

_PREFIX = struct.Struct("<II")


class Packed(NamedTuple):
    """One message: what `Channel.send` takes, and how many bytes the batch holds in slabs and inline."""

    parts: list[bytes]
    fds: list[int]
    nbytes: int


class _Index(NamedTuple):
    """What stands at the front of a message."""

    # (slab's number, loan's number, size, bytes used, whether its descriptor comes with this message)
    slabs: list[tuple[int, int, int, int, bool]]
    retired: list[int]
    # Runs of bytes: (position in `slabs` or -1 for inline, offset, length).
    slots: list[tuple[int, int, int]]
    # (slot or -1 for no bytes, offset of the first element, strides in bytes or None when C-contiguous)
    leaves: list[tuple[int, int, tuple[int, ...] | None]]
    # The slot of each out-of-band buffer.
    buffers: list[int]
    # The pickle stream: (slot or -1 for inline, length); empty when all of it is inline.
    segments: list[tuple[int, int]]


class _Raw(NamedTuple):
    low: int
    nbytes: int


def pack(batch: Any, pool: SlabPool) -> Packed:
    """Pack a batch into one message; raises TypeError with the path of what cannot travel, OSError without memory.

    >>> from pipes.loader2.slabs import SlabPool
    >>> pool, receiver = SlabPool(), Receiver(max_held=4)
    >>> packed = pack({"x": torch.zeros(64, 512), "y": [1, 2]}, pool)
    >>> batch = receiver.unpack(b"".join(packed.parts), packed.fds)
    >>> batch["x"].shape, batch["y"], receiver.held
    (torch.Size([64, 512]), [1, 2], 1)
    >>> del batch
    >>> pool.take_back(receiver.returned())
    >>> pool.close()
    """
    return _Packer(collect(batch), pool).pack()


class _Packer:
    def __init__(self, content: Content, pool: SlabPool) -> None:
        self._content = content
        self._pool = pool
        self._slabs: list[Slab] = []
        # Held until the slabs are lent, so that they do not count as free.
        self._windows: list[Window] = []
        self._slots: list[tuple[int, int, int]] = []
        self._leaves: list[tuple[int, int, tuple[int, ...] | None]] = [(-1, 0, None)] * len(content.leaves)
        self._inline: list[bytes] = []
        self._inline_bytes = 0
        self._large: list[tuple[int, Any, int]] = []

    def pack(self) -> Packed:
        for group in _overlapping(self._content.leaves):
            self._place(group)
        buffers = [self._reserve(buffer, buffer.nbytes) for buffer in self._content.buffers]
        segments, rest = [], []
        for piece in self._content.stream:
            size = len(piece) if isinstance(piece, bytes) else memoryview(piece).nbytes
            if size >= LARGE:
                segments.append((self._reserve(piece, size), size))
            else:
                segments.append((-1, size))
                rest.append(bytes(piece))
        if self._large:
            self._write_large()
        return self._seal(buffers, segments if len(segments) > len(rest) else [], rest)

    def _place(self, group: list[int]) -> None:
        """Find room for the leaves of one group, whose memory overlaps."""
        leaves = [self._content.leaves[number] for number in group]
        low, high, weight = leaves[0].low, leaves[0].high, leaves[0].nbytes
        alone = len(group) == 1 or len({(leaf.first, leaf.nbytes, leaf.strides) for leaf in leaves}) == 1
        if not alone:
            low, high = min(leaf.low for leaf in leaves), max(leaf.high for leaf in leaves)
            weight = sum(leaf.nbytes for leaf in leaves)
        slab = self._pool.find(low, high) if weight >= LARGE else None
        if slab is not None:
            self._share(group, self._add_slot(self._use(slab), low - slab.address, high - low), low)
        elif leaves[0].compact if alone else high - low <= 2 * weight + LARGE:
            self._share(group, self._reserve(_Raw(low, high - low), high - low), low)
        else:
            # Few elements far apart: each leaf by itself, its elements moved together.
            slots: dict[Any, int] = {}
            for number, leaf in zip(group, leaves, strict=True):
                key = leaf.first, leaf.nbytes, leaf.strides, leaf.value.shape
                if key not in slots:
                    slots[key] = self._reserve(leaf, leaf.nbytes)
                self._leaves[number] = slots[key], 0, None

    def _share(self, group: list[int], slot: int, low: int) -> None:
        for number in group:
            leaf = self._content.leaves[number]
            self._leaves[number] = slot, leaf.first - low, leaf.strides

    def _reserve(self, piece: Any, nbytes: int) -> int:
        if nbytes >= LARGE:
            # Its place is known when the sum of all is.
            self._large.append((len(self._slots), piece, nbytes))
            return self._add_slot(-1, 0, nbytes)
        data = _read(piece)
        self._inline.append(data)
        self._inline_bytes += nbytes
        return self._add_slot(-1, self._inline_bytes - nbytes, nbytes)

    def _add_slot(self, slab: int, offset: int, nbytes: int) -> int:
        self._slots.append((slab, offset, nbytes))
        return len(self._slots) - 1

    def _use(self, slab: Slab) -> int:
        if slab not in self._slabs:
            self._slabs.append(slab)
            self._windows.append(slab.window())
        return self._slabs.index(slab)

    def _write_large(self) -> None:
        total = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for _, _, nbytes in self._large)
        for slab in self._slabs:
            if slab.room >= total:
                break
        else:
            if self._slabs:
                self._pool.headroom = total
            slab = self._pool.open(total)
        position = self._use(slab)
        for slot, piece, nbytes in self._large:
            offset = slab.allocate(nbytes)
            assert offset is not None
            _write(piece, nbytes, self._windows[position], slab.address, offset)
            self._slots[slot] = position, offset, nbytes

    def _seal(self, buffers: list[int], segments: list[tuple[int, int]], rest: list[bytes]) -> Packed:
        slabs, fds = [], []
        for slab in self._slabs:
            fd = slab.take_fd()
            if fd is not None:
                fds.append(fd)
            slabs.append((slab.number, self._pool.lend(slab), slab.size, slab.used, fd is not None))
        index = _Index(slabs, self._pool.retired(), self._slots, self._leaves, buffers, segments)
        head = pickle.dumps(tuple(index), protocol=5)
        body = b"".join([_PREFIX.pack(len(head), self._inline_bytes), head, *self._inline, *rest])
        return Packed([body], fds, len(body) + sum(slab.used for slab in self._slabs))


def _overlapping(leaves: list[Leaf]) -> Iterator[list[int]]:
    """Numbers of the leaves with bytes, those whose memory overlaps together."""
    if len(leaves) == 1 and leaves[0].nbytes:
        yield [0]
        return
    order = sorted((leaf.low, leaf.high, number) for number, leaf in enumerate(leaves) if leaf.nbytes)
    group: list[int] = []
    end = 0
    for low, high, number in order:
        if group and low >= end:
            yield group
            group = []
        group.append(number)
        end = max(end, high) if len(group) > 1 else high
    if group:
        yield group


def _read(piece: Any) -> bytes:
    if isinstance(piece, _Raw):
        return ctypes.string_at(piece.low, piece.nbytes)
    if not isinstance(piece, Leaf):
        return bytes(piece)
    if isinstance(piece.value, torch.Tensor):
        together = _bits(piece.value).contiguous()
        return ctypes.string_at(together.data_ptr(), piece.nbytes)
    data: bytes = piece.value.tobytes()
    return data


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, because not every dtype can be copied element by element."""
    dtype = INTEGERS.get(tensor.itemsize)
    return tensor if dtype is None else tensor.view(dtype)


def _write(piece: Any, nbytes: int, window: Window, address: int, offset: int) -> None:
    if isinstance(piece, _Raw):
        ctypes.memmove(address + offset, piece.low, nbytes)
    elif not isinstance(piece, Leaf):
        window[offset : offset + nbytes] = np.frombuffer(piece, dtype=np.uint8)
    elif isinstance(piece.value, torch.Tensor):
        value = _bits(piece.value)
        into = torch.frombuffer(window, dtype=value.dtype, count=value.numel(), offset=offset)
        into.view(value.shape).copy_(value)
    else:
        np.copyto(np.ndarray(piece.value.shape, piece.value.dtype, window, offset), piece.value)


class Receiver:
    """The main process's side of one worker: turns its messages into batches and counts what is held.

    `max_held` slabs may be held by unpacked batches before further ones are copied (0 copies every batch).
    `device` page-locks the slabs.
    """

    def __init__(self, max_held: int, device: Device | None = None) -> None:
        self.max_held = max_held
        self.batches = 0
        self.copied_batches = 0
        self.nbytes = 0
        self.loans = Loans(device)

    @property
    def held(self) -> int:
        """Slabs held by batches that were unpacked."""
        return self.loans.held

    def accept(self, body: Bytes, fds: list[int]) -> Parcel:
        """Take a message as it arrives, without unpacking it; closes `fds` on every path.

        Dropping the parcel gives its slabs back.
        """
        try:
            return Parcel(self, body, fds)
        finally:
            close_descriptors(fds)
            fds.clear()

    def unpack(self, body: Bytes, fds: list[int]) -> Any:
        """`accept` and `Parcel.unpack` in one."""
        return self.accept(body, fds).unpack()

    def returned(self) -> list[int]:
        """The loans that ended since the last call, for `SlabPool.take_back`."""
        return self.loans.returned()


class Parcel:
    """A message of a worker that arrived and was not unpacked yet; `nbytes` is what it keeps, in slabs and inline."""

    def __init__(self, receiver: Receiver, body: Bytes, fds: list[int]) -> None:
        head, inline = _PREFIX.unpack_from(body)
        view = memoryview(body)[_PREFIX.size :]
        self._receiver = receiver
        self._inline, self._stream = view[head : head + inline], view[head + inline :]
        self._index = index = _Index(*pickle.loads(view[:head]))
        receiver.loans.forget(index.retired)
        for number, _, size, _, new in index.slabs:
            if new:
                receiver.loans.map(number, size, fds.pop(0))
        self._windows = [receiver.loans.borrow(number, loan, used) for number, loan, _, used, _ in index.slabs]
        self._done = False
        #: Whether `unpack` copied it because the slabs that may be held were.
        self.copied = False
        self.nbytes = len(body) + sum(slab[3] for slab in index.slabs)

    def unpack(self) -> Any:
        """The batch; once only. Raises what its classes raise when they cannot be rebuilt here."""
        if self._done:
            raise RuntimeError("a parcel can be unpacked once only")
        self._done = True
        receiver, index = self._receiver, self._index
        windows, self._windows = self._windows, []
        receiver.batches += 1
        receiver.nbytes += self.nbytes
        viewed = [*(leaf[0] for leaf in index.leaves), *index.buffers]
        if any(slot >= 0 and index.slots[slot][0] >= 0 for slot in viewed):
            if receiver.held + len(windows) > receiver.max_held:
                windows = [_private(window) for window in windows]
                receiver.copied_batches += 1
                self.copied = True
            else:
                for slab in index.slabs:
                    receiver.loans.hold(slab[1])
        memory = _Memory(index, self._inline, windows)
        stream = _Segments(index.segments, memory, self._stream) if index.segments else io.BytesIO(self._stream)
        try:
            return rebuild(stream, [memory.buffer(slot) for slot in index.buffers], memory.locate)
        except Exception as error:
            error.add_note("while a batch from a worker was rebuilt in the main process")
            raise


def _private(window: Window) -> Window:
    copy: Window = torch.empty(window.nbytes, dtype=torch.uint8).numpy()
    copy[:] = window
    return copy


class _Memory:
    """Where the slots of one message lie: in the windows of its slabs, or in memory of their own."""

    def __init__(self, index: _Index, inline: memoryview, windows: list[Window]) -> None:
        self._index = index
        self._inline = inline
        self._windows = windows
        self._own: dict[int, bytearray] = {}

    def slot(self, number: int) -> tuple[Any, int]:
        slab, offset, nbytes = self._index.slots[number]
        if slab >= 0:
            return self._windows[slab], offset
        if number not in self._own:
            self._own[number] = bytearray(self._inline[offset : offset + nbytes])
        return self._own[number], 0

    def locate(self, leaf: int) -> tuple[Any, int, tuple[int, ...] | None]:
        slot, first, strides = self._index.leaves[leaf]
        buffer, offset = self.slot(slot)
        return buffer, offset + first, strides

    def buffer(self, slot: int) -> Any:
        buffer, offset = self.slot(slot)
        return buffer[offset : offset + self._index.slots[slot][2]]


class _Segments:
    """A file over a pickle stream whose large objects lie in a slab."""

    def __init__(self, segments: list[tuple[int, int]], memory: _Memory, inline: memoryview) -> None:
        self._pieces: list[memoryview] = []
        for slot, size in segments:
            if slot >= 0:
                self._pieces.append(memoryview(memory.buffer(slot)))
            else:
                self._pieces.append(inline[:size])
                inline = inline[size:]
        self._pieces.reverse()

    def readinto(self, into: Any) -> int:
        into = memoryview(into).cast("B")
        done = 0
        while done < into.nbytes and self._pieces:
            piece = self._pieces.pop()
            count = min(piece.nbytes, into.nbytes - done)
            into[done : done + count] = piece[:count]
            done += count
            if count < piece.nbytes:
                self._pieces.append(piece[count:])
        return done

    def read(self, size: int) -> bytes:
        if self._pieces and size <= self._pieces[-1].nbytes:
            piece = self._pieces.pop()
            if size < piece.nbytes:
                self._pieces.append(piece[size:])
            # Copied once: it may be a text of gigabytes.
            return bytes(piece[:size])
        data = bytearray(size)
        return bytes(data[: self.readinto(data)])

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("protocol 5 has no lines")
