"""Outputs to a device, ahead of the user: order, reuse, bounds, state, failures and the end, on a fake device."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loading import through_json

from pipes.devices import HostDevice
from pipes.errors import DeviceError, GraphError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.loader2.fake_device import FakeDevice, Reading
from pipes.moving import Sender

pytestmark = [pytest.mark.race, pytest.mark.usefixtures("no_residue")]

COUNT = 24
#: Numbers of a batch: 256 KiB.
SIZE = 32_768


def batch_of(number: int) -> dict[str, Any]:
    return {"x": torch.full((SIZE,), number), "label": torch.tensor([number]), "name": str(number)}


def loader_to(device: Any, workers: int = 1, *, count: int = COUNT, make: Any = batch_of, **options: Any) -> Any:
    service = MultiProcessingReadingService(workers, **options)
    pipe = IterableWrapper(range(count)).shuffle().sharding_filter().map(make)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service, device=device, num_streams=2)
    loader.seed(5)
    return loader


def order_of(count: int = COUNT) -> list[int]:
    with loader_to(None, 0, count=count) as loader:
        return [int(batch["name"]) for batch in loader]


def read_all(device: FakeDevice, batches: Iterator[Any]) -> list[int]:
    """Read each batch by a kernel that runs at the end, dropping it at once; return the one value each held."""
    readings: list[Reading] = []
    for batch in batches:
        readings.append(device.read(batch["x"]))
        assert batch["name"] == str(int(batch["name"]))
        del batch
    device.synchronize()
    values = [reading.value for reading in readings]
    assert all(value is not None and bool((value == value[0]).all()) for value in values)
    return [int(value[0]) for value in values if value is not None]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_come_in_order_and_are_what_they_were(workers: int) -> None:
    device = FakeDevice(latency=0.002)
    with loader_to(device, workers) as loader:
        assert read_all(device, iter(loader)) == order_of()
        stats = loader.stats()
        assert (stats["batches"], stats["device"], stats["memory"]) == (COUNT, "fake", "pinned")
    large = COUNT * SIZE * 8
    # With workers the slabs are page-locked: the calling process copies nothing.
    assert (device.sent, device.staged) == ((large, 0) if workers else (0, large))
    assert device.locked == 0


def test_copies_slower_than_the_user_are_waited_for_and_host_memory_stays_bounded() -> None:
    device = FakeDevice(bandwidth=SIZE * 8 / 0.03)  # also slower than a worker of a busy machine
    under_way = []
    with loader_to(device, prefetch=2) as loader:
        readings = []
        for batch in loader:
            readings.append(device.read(batch["x"]))
            under_way.append(device.under_way)
            del batch
        most = device.most_locked
    assert max(under_way) >= 3
    # Each of the few batches under way is two copies; slabs: those, the worker's own, and the user's.
    assert max(under_way) <= 2 * 3
    assert most <= 12 * SIZE * 8
    assert len(readings) == COUNT


class Unhurried(FakeDevice):
    """Its copies happen when they are waited for, and not before."""

    def run_due(self) -> None:
        pass


def test_an_output_that_was_sent_is_given_without_waiting_for_other_copies() -> None:
    device = Unhurried()
    with loader_to(device, prefetch=2) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
            # Each output is two copies; none of them was waited for.
            assert device.under_way == 2 * device.sent // (SIZE * 8)
        # All that may be under way is, so that the next one waits for the oldest.
        before = device.under_way
        next(iterator)
        assert (before, device.under_way) == (6, 6)
        device.synchronize()


def careless_about_host_memory(patch: pytest.MonkeyPatch) -> None:
    send = Sender.send

    def forgetting(sender: Sender, batch: Any) -> Any:
        sent = send(sender, batch)
        sender._reading.clear()
        return sent

    patch.setattr(Sender, "send", forgetting)


def careless_about_the_allocator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeDevice, "keep", lambda self, tensors: None)


def careless_about_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeDevice, "wait", lambda self, mark: None)


@pytest.mark.parametrize("careless", [careless_about_host_memory, careless_about_the_allocator, careless_about_streams])
def test_the_fake_device_notices_what_is_done_too_early(
    careless: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    careless(monkeypatch)
    device = FakeDevice(latency=0.01)
    with loader_to(device, prefetch=1) as loader:
        try:
            values = read_all(device, iter(loader))
        except AssertionError:
            return
    assert values != order_of()


def test_what_is_ready_is_copied_ahead() -> None:
    device = FakeDevice()
    with loader_to(device, prefetch=8) as loader:
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + 30
        while device.sent < 8 * 8 * SIZE and time.monotonic() < deadline:
            before = device.sent
            time.sleep(0.05)
            next(iterator)
            if device.sent - before >= 3 * 8 * SIZE:
                break
        # From one ahead to three in a single call, or three ahead all the time.
        given = loader.stats()["batches"]
        assert device.sent == (given + 2) * 8 * SIZE


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_that_after_the_last_batch_given(workers: int) -> None:
    expected = order_of()
    for stop in (0, 7, COUNT):
        device = FakeDevice(latency=0.001)
        with loader_to(device, workers) as loader:
            iterator = iter(loader)
            begun = [int(next(iterator)["name"]) for _ in range(stop)]
            time.sleep(0.05 if stop == 7 else 0)
            state = through_json(loader.state_dict())
        with loader_to(None, 1) as other:
            other.load_state_dict(state)
            assert begun + [int(batch["name"]) for batch in other] == expected


def note_all(loader: Any, given: list[int], then: Callable[[Any], None] = lambda batch: None) -> None:
    """Iterate, slowly enough for batches to be ahead."""
    for batch in loader:
        given.append(int(batch["name"]))
        time.sleep(0.02)
        then(batch)
        del batch


def fail_at_five(number: int) -> dict[str, Any]:
    if number == 5:
        raise ValueError("five is wrong")
    return batch_of(number)


def test_an_error_of_a_worker_comes_in_its_place() -> None:
    expected = order_of()
    with loader_to(FakeDevice(), make=fail_at_five) as loader:
        given: list[int] = []
        with pytest.raises(ValueError, match="five is wrong"):
            note_all(loader, given)
    assert given == expected[: expected.index(5)]


class Immovable:
    def to(self, device: Any) -> Any:
        raise ValueError("it stays where it is")


def immovable_five(number: int) -> dict[str, Any]:
    return {"name": str(number), "more": [Immovable()]} if number == 5 else batch_of(number)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_moved_is_an_error_in_its_place_that_names_the_path(workers: int) -> None:
    expected = order_of()
    with loader_to(FakeDevice(), workers, make=immovable_five) as loader:
        given: list[int] = []
        with pytest.raises(DeviceError, match=r"batch\['more'\]\[0\] \(Immovable\) cannot be moved to fake: Value"):
            note_all(loader, given)
        state = loader.state_dict()
    assert given == expected[: expected.index(5)]
    with loader_to(None, 0, make=immovable_five) as other:
        other.load_state_dict(state)
        assert [int(batch["name"]) for batch in other] == expected[expected.index(5) :]


def test_no_room_on_the_device_for_what_is_ahead_is_no_error_until_its_turn() -> None:
    expected = order_of()
    device = FakeDevice(room=2 * (8 * SIZE + 8))
    with loader_to(device) as loader:
        kept: list[Any] = []
        given: list[int] = []

        def keep_from_the_tenth(batch: Any) -> None:
            device.synchronize()
            if len(given) > 10:
                kept.append(batch)

        with pytest.raises(torch.OutOfMemoryError) as raised:
            note_all(loader, given, keep_from_the_tenth)
        assert [note.partition(":")[0] for note in raised.value.__notes__] == [
            "while batch['x'] (torch.int64 tensor) was copied to fake"
        ]
        assert len(given) == 12
        state = loader.state_dict()
    assert given == expected[:12]
    with loader_to(None, 0) as other:
        other.load_state_dict(state)
        assert [int(batch["name"]) for batch in other] == expected[12:]


class Failing(FakeDevice):
    """Each question about its copies raises once it is broken, as CUDA's do after an illegal access."""

    broken = False

    def run_due(self) -> None:
        self.run_until(0)
        super().run_due()

    def run_until(self, number: int) -> None:
        if self.broken:
            raise RuntimeError("the device fell off the bus")
        super().run_until(number)


def test_a_device_that_fails_is_an_error_in_the_users_call_and_the_loader_can_be_closed() -> None:
    expected = order_of()
    device = Failing(latency=0.001)
    with loader_to(device) as loader:
        given: list[int] = []

        def break_at_the_fifth(batch: Any) -> None:
            device.broken = len(given) >= 5

        with pytest.raises(RuntimeError, match="fell off the bus"):
            note_all(loader, given, break_at_the_fifth)
        state = loader.state_dict()
    assert given == expected[: len(given)]
    assert 5 <= len(given) < COUNT
    with loader_to(None, 0) as other:
        other.load_state_dict(state)
        assert [int(batch["name"]) for batch in other] == expected[len(given) :]


def test_the_kind_of_memory_is_told_before_the_first_batch() -> None:
    with loader_to("cpu", 0) as loader:
        assert (loader.stats()["device"], loader.stats()["memory"]) == ("cpu", "pageable")
        assert "device=cpu, memory=pageable" in repr(loader)
    with loader_to(FakeDevice(), 0) as loader:
        assert (loader.stats()["device"], loader.stats()["memory"]) == ("fake", "pinned")
        assert "device=fake, memory=pinned" in repr(loader)


def test_where_memory_cannot_be_page_locked_batches_pass_through_the_calling_process() -> None:
    # Also slower than a worker of a busy machine.
    device = FakeDevice(bandwidth=SIZE * 8 / 0.03, lockable=0)
    with loader_to(device) as loader, pytest.warns(RuntimeWarning, match="cannot be page-locked") as told:
        assert read_all(device, iter(loader)) == order_of()
    assert [warning.filename for warning in told] == [__file__]
    assert (device.sent, device.staged) == (0, COUNT * SIZE * 8)
    # The copies of prefetch + 1 batches are under way at most, each with a tensor of 8 bytes beside the large one.
    assert 2 * SIZE * 8 < device.most_staged <= 3 * (SIZE * 8 + 8)


def test_page_locked_batches_wait_for_the_users_own_copies() -> None:
    accelerator = FakeDevice()
    device = HostDevice("pinned", accelerator)
    with loader_to(device, prefetch=2) as loader:
        readings = []
        for place, batch in enumerate(loader):
            assert accelerator.is_pinned(batch["x"])
            # A copy of the user's own, which happens at the next synchronize.
            readings.append(accelerator.read(batch["x"]))
            del batch
            if place % 8 == 7:
                accelerator.synchronize()
        accelerator.synchronize()
        assert loader.stats()["device"] == "cpu"
        assert loader.stats()["memory"] == "pinned"
    assert [int(reading.value[0]) for reading in readings if reading.value is not None] == order_of()
    assert accelerator.locked == 0


@pytest.mark.parametrize("how", ["break", "shutdown", "del"])
def test_the_end_waits_for_copies_under_way(how: str) -> None:
    device = FakeDevice(latency=0.05)
    loader = loader_to(device)
    iterator = iter(loader)
    readings = [device.read(next(iterator)["x"]) for _ in range(3)]
    if how == "shutdown":
        loader.shutdown()
    del iterator, loader
    device.synchronize()
    assert [int(reading.value[0]) for reading in readings if reading.value is not None] == order_of()[:3]
    assert device.locked == 0


def test_a_worker_that_dies_loses_nothing_that_was_ahead() -> None:
    device = FakeDevice(latency=0.005)
    with loader_to(device) as loader:
        iterator = iter(loader)
        readings = [device.read(next(iterator)["x"]) for _ in range(10)]
        os.kill(loader.stats()["workers"][0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="SIGKILL"):
            readings += [device.read(batch["x"]) for batch in iterator]
        device.synchronize()
    assert [int(reading.value[0]) for reading in readings if reading.value is not None] == order_of()


def halved(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"].view(torch.int16)[:8].clone()}


def test_a_stage_at_the_end_says_the_same_and_more() -> None:
    device = FakeDevice()
    pipe = IterableWrapper(range(4)).sharding_filter().map(batch_of).to_device(device, prefetch=1, on_device=halved)
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(1)) as loader:
        assert "device=fake, memory=pinned" in repr(loader)
        batches = list(loader)
        device.synchronize()
    assert [batch["x"].shape for batch in batches] == [(8,)] * 4
    assert len(pipe) == 4


def test_stages_and_devices_that_do_not_go_together() -> None:
    pipe = IterableWrapper(range(4)).map(batch_of).to_device("cpu")
    with pytest.raises(GraphError, match="DeviceMover belongs at the end"):
        DataLoader2(pipe.map(str), reading_service=MultiProcessingReadingService(1))
    assert len(list(DataLoader2(pipe.map(str)))) == 4
    with pytest.raises(ValueError, match="names the device; leave device= and memory= out"):
        DataLoader2(pipe, device="cpu")
    with pytest.raises(ValueError, match="memory must be one of auto, pinned"):
        DataLoader2(IterableWrapper(range(4)), memory="pinnned")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="'meta' was asked for"):
        DataLoader2(IterableWrapper(range(4)), device="meta")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_fits_the_graph_with_and_without_the_stage(workers: int) -> None:
    plain = IterableWrapper(range(12)).shuffle().sharding_filter().map(batch_of)
    service = MultiProcessingReadingService(workers)
    with DataLoader2(plain.to_device("cpu"), reading_service=service) as loader:
        loader.seed(1)
        iterator = iter(loader)
        begun = [next(iterator)["name"] for _ in range(5)]
        state = loader.state_dict()
    with DataLoader2(plain, reading_service=service) as other:
        other.load_state_dict(state)
        rest = [batch["name"] for batch in other]
    assert sorted(begun + rest, key=int) == [str(number) for number in range(12)]
