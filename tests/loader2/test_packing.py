"""Batches as messages: what shares memory, what is held and for how long, and what is not copied."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wire import Wire, same

from pipes.loader2.packing import pack
from pipes.loader2.slabs import ALIGNMENT

pytestmark = pytest.mark.usefixtures("closes_descriptors")

BIG = torch.arange(270_000, dtype=torch.float32).view(300, 300, 3)
ARRAY = np.arange(100_000.0)

axes = st.tuples(
    st.integers(0, 120), st.integers(0, 120), st.integers(-4, 4).filter(bool), st.integers(-4, 4).filter(bool)
)


@given(st.lists(axes, min_size=1, max_size=5), st.booleans())
def test_views_of_one_array_keep_their_values_and_what_they_share(views: list[Any], transpose: bool) -> None:
    base = np.arange(14_400.0).reshape(120, 120)
    batch = [base[top::down, left::right] for top, left, down, right in views]
    batch = [view.T if transpose else view for view in batch]
    wire = Wire()
    got = wire.carry(batch)
    same(got, batch)
    for i in range(len(batch)):
        for j in range(i):
            # Sharing may be given up only where the views touch little of the memory between them.
            if np.shares_memory(got[i], got[j]):
                assert np.shares_memory(batch[i], batch[j])
    wire.pool.close()


@pytest.mark.parametrize("size", [10, 100_000])
def test_overlapping_views_share_memory_again(wire: Wire, size: int) -> None:
    base = torch.arange(float(size))
    got = wire.carry({"low": base[: size - 3], "high": base[3:], "again": base.numpy(), "other": torch.zeros(size)})
    got["low"][5] = -1
    assert got["high"][2] == -1
    assert got["again"][5] == -1
    assert base[5] == 5
    assert got["other"].sum() == 0


def test_the_same_object_stays_one_object(wire: Wire) -> None:
    shared: dict[str, Any] = {"t": BIG, "a": ARRAY, "b": b"z" * 70_000}
    got = wire.carry([shared, shared, BIG, ARRAY])
    assert got[0] is got[1]
    assert got[2] is got[0]["t"]
    assert got[3] is got[0]["a"]
    cycle: list[Any] = [BIG]
    cycle.append(cycle)
    got = wire.carry(cycle)
    assert got[1] is got


def test_rows_of_one_large_array_do_not_drag_it_along(wire: Wire) -> None:
    data = torch.zeros(1_000, 30_000)
    packed = pack([data[3], data[500], data[3, :20_000], data[:, 7], data[:, 9]], wire.pool)
    assert packed.nbytes < 500_000
    got = wire.receiver.unpack(packed.parts[0], packed.fds)
    assert [tuple(tensor.shape) for tensor in got] == [(30_000,), (30_000,), (20_000,), (1_000,), (1_000,)]


def test_small_leaves_do_not_hold_the_slab(wire: Wire) -> None:
    batch = wire.carry({"x": BIG.clone(), "y": torch.arange(64), "z": np.arange(64), "b": b"w" * 100_000})
    kept = [batch["y"], batch["z"], batch["b"]]
    assert wire.lent == 1
    del batch
    assert wire.lent == 0
    assert kept[0].sum() == 2016


def test_a_batch_of_bytes_holds_no_slab(wire: Wire) -> None:
    batch = wire.carry([b"w" * 100_000, "t" * 100_000, list(range(100_000))])
    assert wire.lent == 0
    assert wire.receiver.held == 0
    assert len(batch[0]) == 100_000


def test_one_slab_and_one_descriptor_a_batch(wire: Wire) -> None:
    batch = [BIG, ARRAY, b"w" * 100_000, BIG[::2, ::3], torch.zeros(100_000)]
    packed = pack(batch, wire.pool)
    assert len(wire.pool) == len(packed.fds) == 1
    got = wire.receiver.unpack(packed.parts[0], packed.fds)
    same(got, batch)
    del got
    wire.settle()
    packed = pack(batch, wire.pool)
    assert len(wire.pool) == 1
    assert packed.fds == []
    same(wire.receiver.unpack(memoryview(packed.parts[0]), packed.fds), batch)


def test_beyond_max_held_batches_are_copied_and_slabs_go_back() -> None:
    wire = Wire(max_held=3)
    kept = []
    for number in range(50):
        kept.append(wire.carry({"x": torch.full((50_000,), float(number)), "n": number}))
        assert wire.lent == min(number + 1, 3)
    assert len(wire.pool) == 4
    assert (wire.receiver.copied_batches, wire.receiver.batches, wire.receiver.held) == (47, 50, 3)
    assert all((batch["x"] == batch["n"]).all() for batch in kept)
    assert all(batch["x"].data_ptr() % ALIGNMENT == 0 for batch in kept)
    kept.clear()
    assert wire.lent == wire.receiver.held == 0
    wire.carry(BIG)
    assert wire.receiver.copied_batches == 47
    wire.pool.close()


def test_max_held_zero_copies_every_batch() -> None:
    wire = Wire(max_held=0)
    batch = wire.carry(BIG)
    assert wire.lent == 0
    same(batch, BIG)
    wire.pool.close()


def test_a_parcel_keeps_its_slab_until_it_is_unpacked_or_dropped(wire: Wire) -> None:
    packed = pack(BIG, wire.pool)
    parcel = wire.receiver.accept(packed.parts[0], packed.fds)
    assert parcel.nbytes >= BIG.nbytes
    assert (wire.lent, wire.receiver.held) == (1, 0)
    batch = parcel.unpack()
    assert (wire.lent, wire.receiver.held) == (1, 1)
    with pytest.raises(RuntimeError, match="once only"):
        parcel.unpack()
    del batch
    assert wire.lent == 0
    packed = pack(BIG, wire.pool)
    parcel = wire.receiver.accept(packed.parts[0], packed.fds)
    del parcel
    assert wire.lent == 0


def test_batches_outlive_everything_and_gradients_pass_through_them() -> None:
    wire = Wire()
    batch = wire.carry({"x": torch.ones(50_000)})
    weight = torch.ones(50_000, requires_grad=True)
    loss = (weight * batch["x"]).pow(2).sum()
    del batch
    wire.pool.close()
    receiver = wire.receiver
    del wire
    gc.collect()
    assert receiver.returned() == []
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((50_000,), 2.0))
    del loss
    assert len(receiver.returned()) == 1


def test_what_is_in_an_open_slab_is_not_copied(wire: Wire) -> None:
    slab = wire.pool.open(1 << 20)
    window = slab.window()
    offset = slab.allocate(400_000)
    assert offset is not None
    inside = torch.frombuffer(window, dtype=torch.float32, count=100_000, offset=offset)
    inside.fill_(1)
    batch = {"all": inside.view(100, 1000).t(), "half": inside[::2], "few": inside[:10].clone(), "new": BIG[:100]}
    packed = pack(batch, wire.pool)
    assert (len(wire.pool), len(packed.fds)) == (1, 1)
    got = wire.receiver.unpack(packed.parts[0], packed.fds)
    inside[7] = 5
    assert got["all"][7, 0] == 5
    assert got["all"].stride() == (1, 1000)
    same(got["new"], BIG[:100])
    again = wire.carry(inside)
    inside[8] = 6
    assert got["half"][4] == 6
    assert again[8] == 1, "what was sent once must be copied when it is sent again"


def test_small_views_into_an_open_slab_travel_inline(wire: Wire) -> None:
    slab = wire.pool.open(1 << 20)
    window = slab.window()
    slab.allocate(1 << 20)
    table = torch.from_numpy(window).view(1024, 1024)
    packed = pack({"label": table[:, 0], "row": table[3]}, wire.pool)
    assert packed.fds == []
    got = wire.receiver.unpack(packed.parts[0], packed.fds)
    same(got["row"], table[3])
    assert wire.lent == 0
    del window, table


def test_new_leaves_that_do_not_fit_beside_the_stacked_ones_get_a_second_slab(wire: Wire) -> None:
    slab = wire.pool.open(200_000)
    inside = torch.from_numpy(slab.window()[:200_000])
    slab.allocate(200_000)
    inside.fill_(3)
    batch = [inside, torch.zeros(500_000)]
    packed = pack(batch, wire.pool)
    assert len(packed.fds) == 2
    assert wire.pool.headroom >= 2_000_000, "the next collate leaves room for both"
    got = wire.receiver.unpack(packed.parts[0], packed.fds)
    same(got, batch)
    del got[0]
    assert wire.lent == 1
    del got
    assert wire.lent == 0


def test_a_failed_pack_lends_nothing(wire: Wire) -> None:
    for _ in range(5):
        with pytest.raises(TypeError):
            pack([BIG, threading.Lock()], wire.pool)
    assert len(wire.pool) == 0


def test_what_cannot_be_rebuilt_raises_and_gives_the_slab_back(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_in_the_worker")
    module.Thing = type("Thing", (), {"__module__": "only_in_the_worker"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_in_the_worker", module)
    packed = pack([BIG, module.Thing()], wire.pool)
    monkeypatch.delitem(sys.modules, "only_in_the_worker")
    with pytest.raises(ModuleNotFoundError, match="only_in_the_worker"):
        wire.receiver.unpack(packed.parts[0], packed.fds)
    gc.collect()
    assert wire.lent == 0


def test_classes_of_main_resolve_to_mains_own(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Thing", (), {"__module__": "__main__", "__qualname__": "Thing"})
    ours = type("Thing", (), {"__module__": "__main__", "__qualname__": "Thing"})
    monkeypatch.setattr(sys.modules["__main__"], "Thing", theirs, raising=False)
    packed = pack(theirs(), wire.pool)
    monkeypatch.setattr(sys.modules["__main__"], "Thing", ours)
    assert type(wire.receiver.unpack(packed.parts[0], packed.fds)) is ours


def test_a_long_text_is_copied_once_on_its_way_to_the_unpickler(wire: Wire) -> None:
    size = 40_000_000
    packed = pack("x" * size, wire.pool)
    parcel = wire.receiver.accept(b"".join(packed.parts), packed.fds)
    tracemalloc.start()
    try:
        text = parcel.unpack()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "x" * size
    # the text and the bytes that it is decoded from
    assert peak < 2.5 * size
