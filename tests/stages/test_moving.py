"""`.to_device` and `.pin_memory` without a loader, and as plain data."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from pipes.errors import DeviceError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.loader2.fake_device import FakeDevice


def test_without_a_loader_batches_come_to_the_device_one_by_one() -> None:
    device = FakeDevice(latency=0.001)
    pipe = IterableWrapper(range(6)).batch(2).collate().to_device(device)
    readings = [device.read(batch) for batch in pipe]
    device.synchronize()
    assert [reading.value.tolist() for reading in readings if reading.value is not None] == [[0, 1], [2, 3], [4, 5]]
    assert len(pipe) == 3


class Refusing:
    def to(self, device: Any) -> Any:
        raise RuntimeError("no")


def test_an_error_names_the_stage_and_the_place_in_the_batch() -> None:
    with pytest.raises(DeviceError, match=r"batch\[0\] \(Refusing\)") as caught:
        list(IterableWrapper([[Refusing()]], deepcopy=False).to_device(FakeDevice()))
    assert "in stage 1:DeviceMover" in caught.value.__notes__[0]


def test_pin_memory_takes_a_function_of_the_users_own() -> None:
    seen: list[Any] = []

    def pin(batch: Any, device: Any) -> Any:
        seen.append(device)
        return batch + 1

    pipe = IterableWrapper(range(2)).pin_memory("cuda:0", pin_memory_fn=pin)
    assert list(pipe) == [1, 2]
    with DataLoader2(pipe) as loader:
        assert list(loader) == [1, 2]
    assert seen == ["cuda:0"] * 4


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_pin_memory_without_an_accelerator_is_an_error_where_it_would_run() -> None:
    pipe = IterableWrapper(range(2)).pin_memory()
    with pytest.raises(DeviceError, match="sees none here"):
        list(pipe)
    with pytest.raises(DeviceError, match="sees none here"):
        DataLoader2(pipe)


def test_bad_arguments() -> None:
    pipe = IterableWrapper(range(2))
    with pytest.raises(ValueError, match="prefetch must lie in 0 to 32, not 33"):
        pipe.to_device("cpu", prefetch=33)
    with pytest.raises(TypeError, match="on_device must be a function"):
        pipe.to_device("cpu", on_device="f")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory must be one of"):
        pipe.to_device("cpu", memory="fast")


def test_it_travels_as_settings() -> None:
    pipe = pickle.loads(pickle.dumps(IterableWrapper(range(4)).to_device("cpu", prefetch=1)))
    assert (pipe.device, pipe.prefetch, list(pipe)) == ("cpu", 1, [0, 1, 2, 3])
