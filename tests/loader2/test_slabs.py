"""Slabs: who may write into them when, and what is left of them."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pipes.devices import HostDevice, Mark
from pipes.loader2.slabs import ALIGNMENT, Loans, SlabPool, size_class

pytestmark = pytest.mark.usefixtures("closes_descriptors")

NBYTES = 1 << 20


def mapped_bytes() -> int:
    """Bytes of slabs mapped into this process, without what tests before left to the garbage collector."""
    gc.collect()
    total = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "pipes-slab" in line:
                low, high = line.split()[0].split("-")
                total += int(high, 16) - int(low, 16)
    return total


def lend(pool: SlabPool, loans: Loans, nbytes: int = NBYTES) -> tuple[int, Any]:
    slab = pool.open(nbytes)
    slab.window()[:nbytes] = 1
    fd = slab.take_fd()
    if fd is not None:
        loans.map(slab.number, slab.size, fd)
    loan = pool.lend(slab)
    return loan, loans.borrow(slab.number, loan, nbytes)


@given(st.integers(1, 1 << 40))
def test_size_classes_are_whole_pages_and_waste_at_most_a_quarter(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % mmap.PAGESIZE == 0
    assert size <= max(1 << 17, nbytes * 1.25 + mmap.PAGESIZE)
    assert size_class(size) == size


@given(st.lists(st.integers(1, 200_000), max_size=12))
@example([200_000] * 6)
@example([1 << 19, 1 << 19, 1])
def test_allocations_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    pool = SlabPool()
    slab = pool.open(1 << 20)
    end = 0
    for size in sizes:
        room = slab.room
        offset = slab.allocate(size)
        assert (offset is None) == (size > room)
        if offset is not None:
            assert offset % ALIGNMENT == 0
            assert end <= offset <= slab.size - size
            end = offset + size
    pool.close()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "array": lambda window: window,
    "slice": lambda window: window[64:][1:9:2],
    "typed array": lambda window: np.ndarray((4, 4), np.float32, window, 64)[1:, 2].T,
    "array subclass": lambda window: np.ndarray((4, 4), np.float32, window, 64).view(np.recarray)[1:],
    "memoryview": lambda window: memoryview(window)[64:128].cast("f"),
    "frombuffer": lambda window: torch.frombuffer(window, dtype=torch.float32, count=16, offset=64),
    "tensor slice": lambda window: torch.frombuffer(window, dtype=torch.int32, count=16).view(4, 4)[1:].t(),
    "numpy of tensor": lambda window: torch.frombuffer(window, dtype=torch.float32, count=16, offset=64).numpy()[3:],
    "storage": lambda window: torch.frombuffer(window, dtype=torch.float32, count=16, offset=64).untyped_storage(),
    "dtype view": lambda window: torch.frombuffer(window, dtype=torch.int32, count=16).view(torch.float32).detach(),
    "from_numpy": lambda window: torch.from_numpy(window[64:128])[2:],
    "dlpack": lambda window: np.from_dlpack(torch.frombuffer(window, dtype=torch.float32, count=16)),
    "autograd": lambda window: (
        torch.ones(16, requires_grad=True) * torch.frombuffer(window, dtype=torch.float32, count=16)
    ).sum(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_loan_ends_with_its_last_view_of_any_kind(view: Callable[[Any], Any]) -> None:
    pool, loans = SlabPool(), Loans()
    loan, window = lend(pool, loans)
    held = view(window)
    del window
    assert loans.returned() == []
    del held
    assert loans.returned() == [loan]
    pool.close()


def test_views_that_do_not_look_at_the_slab_do_not_hold_it() -> None:
    pool, loans = SlabPool(), Loans()
    loan, window = lend(pool, loans)
    copies = [window.copy(), torch.from_numpy(window).clone(), window[::2].reshape(2, -1).sum()]
    del window
    assert loans.returned() == [loan]
    assert len(copies) == 3
    pool.close()


def test_a_slab_is_filled_again_only_when_nobody_looks_at_it() -> None:
    pool, loans = SlabPool(), Loans()
    first = pool.open(NBYTES)
    kept = torch.from_numpy(first.window()[:100])
    loan = pool.lend(first)
    assert not first.free
    pool.take_back([loan])
    assert pool.open(NBYTES) is not first
    del kept
    first.last_use = 1_000
    assert pool.open(NBYTES) is first
    assert loans.returned() == []
    pool.close()


def test_a_slab_is_in_use_while_any_window_of_it_lives() -> None:
    pool = SlabPool()
    slab = pool.open(NBYTES)
    first = slab.window()
    second = slab.window()
    del second
    assert pool.open(NBYTES) is not slab
    del first
    slab.last_use = 1_000
    assert pool.open(NBYTES) is slab
    pool.close()


def test_find_knows_only_slabs_that_were_not_lent_yet() -> None:
    pool = SlabPool()
    slab = pool.open(NBYTES)
    window = slab.window()
    slab.allocate(1000)
    low = slab.address
    assert pool.find(low, low + 1000) is slab
    assert pool.find(low, low + 1001) is None
    assert pool.find(low - 1, low + 10) is None
    pool.lend(slab)
    assert pool.find(low, low + 1000) is None
    del window
    pool.close()


def test_loans_of_another_generation_or_twice_returned_are_ignored() -> None:
    old, new = SlabPool(generation=1), SlabPool(generation=2)
    stale = old.lend(old.open(NBYTES))
    slab = new.open(NBYTES)
    loan = new.lend(slab)
    assert stale != loan
    new.take_back([stale])
    assert slab.loan == loan
    new.take_back([loan, loan])
    assert new.open(NBYTES) is slab
    again = new.lend(slab)
    new.take_back([loan])
    assert slab.loan == again
    old.close()
    new.close()


def test_a_slab_whose_loan_has_just_ended_is_filled_from_its_front_and_is_not_idle() -> None:
    ended: list[int] = []
    pool = SlabPool(ended=lambda: [ended.pop()] if ended else [], idle_uses=10, idle_seconds=0)
    slab = pool.open(NBYTES)
    for _ in range(30):
        assert slab.allocate(NBYTES) == 0
        ended.append(pool.lend(slab))
        assert pool.open(NBYTES) is slab
    assert pool.retired() == []
    pool.close()


def test_batches_of_varying_size_reuse_slabs() -> None:
    pool, loans = SlabPool(), Loans()
    rng = np.random.default_rng(0)
    for nbytes in rng.integers(1_000_000, 4_000_000, 500):
        window = lend(pool, loans, int(nbytes))[1]
        del window
        pool.take_back(loans.returned())
    assert len(pool) <= 9
    assert pool.nbytes < 30_000_000
    pool.close()


def test_slabs_that_fall_idle_are_given_up_on_both_sides() -> None:
    pool, loans = SlabPool(idle_uses=10, idle_seconds=0), Loans()
    before = mapped_bytes()
    both = [lend(pool, loans)[1], lend(pool, loans, 50_000_000)[1]]
    both.clear()
    pool.take_back(loans.returned())
    for _ in range(30):
        window = lend(pool, loans)[1]
        del window
        pool.take_back(loans.returned())
        loans.forget(pool.retired())
    assert len(pool) == 1
    assert loans.nbytes == pool.nbytes < 2_000_000
    assert mapped_bytes() - before == 2 * pool.nbytes
    pool.close()


def test_free_slabs_above_the_byte_cap_are_given_up_oldest_first() -> None:
    pool, loans = SlabPool(max_free_bytes=3 << 20), Loans()
    windows = [lend(pool, loans)[1] for _ in range(8)]
    assert pool.nbytes == 8 << 20
    windows.clear()
    pool.take_back(loans.returned())
    pool.open(NBYTES)
    assert pool.nbytes == 3 << 20
    assert pool.retired() == [0, 1, 2, 3, 4]
    assert pool.retired() == []
    pool.close()


def test_views_outlive_pool_and_loans_and_the_mapping_ends_with_them() -> None:
    pool, loans = SlabPool(), Loans()
    before = mapped_bytes()
    window = lend(pool, loans)[1]
    tensor = torch.from_numpy(window[:100])
    del window
    pool.close()
    del pool, loans
    gc.collect()
    tensor += 1
    assert tensor.sum() == 200
    assert mapped_bytes() - before == size_class(NBYTES)
    del tensor
    assert mapped_bytes() == before


def test_a_device_sees_each_mapping_once_and_its_end_before_it_is_unmapped() -> None:
    seen: list[tuple[str, int, int]] = []
    mapped: list[int] = []
    before = mapped_bytes()

    class Watching(HostDevice):
        def page_lock(self, address: int, nbytes: int) -> None:
            seen.append(("map", address, nbytes))

        def page_unlock(self, address: int, nbytes: int) -> None:
            seen.append(("unmap", address, nbytes))
            mapped.append(mapped_bytes() - before)

    pool = SlabPool()
    loans = Loans(Watching("pageable"))
    for _ in range(3):
        loan, window = lend(pool, loans)
        address = window.ctypes.data
        del window
        pool.take_back([loan])
    del loans
    assert seen == [("map", address, size_class(NBYTES)), ("unmap", address, size_class(NBYTES))]
    assert mapped == [2 * size_class(NBYTES)]
    pool.close()


def test_a_loan_that_the_device_still_reads_is_not_returned() -> None:
    reading = [True]

    class Reading:
        def query(self) -> bool:
            return not reading

        def synchronize(self) -> None:
            reading.clear()

    class Late(HostDevice):
        def used(self) -> Mark:
            return Reading()

    pool, loans = SlabPool(), Loans(Late("pageable"))
    loan, window = lend(pool, loans)
    del window
    assert loans.returned() == []
    reading.clear()
    assert loans.returned() == [loan]
    pool.close()


def test_a_forked_child_of_main_returns_nothing_and_may_write() -> None:
    pool, loans = SlabPool(), Loans()
    loan, window = lend(pool, loans)
    pid = os.fork()
    if pid == 0:
        window[0] = 7
        del window
        gc.collect()
        os._exit(0 if loans.returned() == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert window[0] == 7
    del window
    assert loans.returned() == [loan]
    pool.close()


def test_many_slabs_need_no_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool, loans = SlabPool(), Loans()
    windows = []
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        windows += [lend(pool, loans, 100)[1] for _ in range(500)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(windows) == len(pool) == 500
    pool.close()


def test_memory_of_a_killed_worker_stays_readable_and_writable() -> None:
    left, right = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        slab = SlabPool().open(NBYTES)
        slab.window()[:] = 5
        fd = slab.take_fd()
        assert fd is not None
        socket.send_fds(right, [b"x"], [fd])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    fds = socket.recv_fds(left, 1, 1)[1]
    loans = Loans()
    loans.map(0, size_class(NBYTES), fds[0])
    tensor = torch.from_numpy(loans.borrow(0, 1, NBYTES))
    tensor *= 2
    assert tensor.sum(dtype=torch.int64) == 10 * NBYTES
    left.close()
    right.close()


def test_slabs_of_a_burst_go_although_later_batches_need_none() -> None:
    pool, loans = SlabPool(idle_uses=10, idle_seconds=0), Loans()
    windows = [lend(pool, loans, 50_000_000)[1] for _ in range(4)]
    windows.clear()
    pool.take_back(loans.returned())
    given_up = [slab for _ in range(20) for slab in pool.retired()]
    loans.forget(given_up)
    assert sorted(given_up) == [0, 1, 2, 3]
    assert len(pool) == loans.nbytes == 0
    pool.close()


def test_a_descriptor_that_cannot_be_mapped_is_closed() -> None:
    read, write = os.pipe()
    with pytest.raises(OSError, match="cannot map a slab of 4096 bytes"):
        Loans().map(0, 4096, read)
    os.close(write)


def test_a_slab_that_a_burst_needed_stays_for_the_next_burst() -> None:
    pool, loans = SlabPool(idle_uses=10), Loans()
    for _ in range(5):
        both = [lend(pool, loans)[1], lend(pool, loans)[1]]
        both.clear()
        pool.take_back(loans.returned())
        for _ in range(30):
            window = lend(pool, loans)[1]
            del window
            pool.take_back(loans.returned())
    assert len(pool) == 2
    assert pool.retired() == []
    pool.close()
