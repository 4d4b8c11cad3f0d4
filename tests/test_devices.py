"""Which device and memory a user gets, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from pipes.devices import AcceleratorDevice, BlockingDevice, HostDevice, resolve_device
from pipes.errors import DeviceError
from pipes.loader2.fake_device import FakeDevice

HAS_NONE = not torch.accelerator.is_available()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make torch believe in an accelerator of a type, with two devices."""

    def believe(kind: str) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)

    return believe


@pytest.mark.parametrize(
    ("kind", "memory", "made", "chosen"),
    [
        ("cuda", "auto", AcceleratorDevice, "pinned"),
        ("cuda", "unified", AcceleratorDevice, "unified"),
        ("cuda:1", "pageable", BlockingDevice, "pageable"),
        ("xpu", "auto", AcceleratorDevice, "pinned"),
        ("mps", "auto", BlockingDevice, "unified"),
    ],
)
def test_memory_follows_the_device(accelerator: Any, kind: str, memory: str, made: type, chosen: str) -> None:
    accelerator(kind.split(":")[0])
    found = resolve_device(kind, memory)
    assert type(found) is made
    assert found is not None
    assert (found.memory, found.name) == (chosen, kind)


def test_a_device_without_a_number_is_the_current_one_when_it_is_used(accelerator: Any) -> None:
    accelerator("mps")
    found = resolve_device("mps")
    assert isinstance(found, BlockingDevice)
    assert found.device == torch.device("mps")
    with found.copying():
        assert found.device == torch.device("mps", 1)


def test_without_a_device_batches_stay_as_they_are_or_are_page_locked(accelerator: Any) -> None:
    assert resolve_device(None) is None
    assert resolve_device(None, "pageable") is None
    accelerator("cuda")
    found = resolve_device(None, "pinned")
    assert isinstance(found, HostDevice)
    assert (found.memory, found.name) == ("pinned", "host")
    accelerator("mps")
    unified = resolve_device(None, "pinned")
    assert unified is not None
    assert unified.memory == "unified"


def test_a_device_of_the_users_own_is_taken_as_it_is() -> None:
    device = FakeDevice()
    assert resolve_device(device) is device


@pytest.mark.skipif(not HAS_NONE, reason="this machine has an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps", "xpu", torch.device("cuda", 0)])
def test_a_device_that_is_not_there_is_an_error_that_says_what_to_do(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"sees no accelerator here: .* or use device='cpu'"):
        resolve_device(device)


@pytest.mark.skipif(not HAS_NONE, reason="this machine has an accelerator")
def test_page_locked_memory_needs_an_accelerator() -> None:
    with pytest.raises(DeviceError, match=r"memory='pinned' page-locks memory .* use memory='auto'"):
        resolve_device(None, "pinned")


def test_bad_devices_and_memories(accelerator: Any) -> None:
    accelerator("cuda")
    with pytest.raises(DeviceError, match="there are 2: 0 to 1"):
        resolve_device("cuda:2")
    with pytest.raises(DeviceError, match="sees only 'cuda' here"):
        resolve_device("xpu")
    with pytest.raises(DeviceError, match=r"not what torch.device takes"):
        resolve_device("gpu7x")
    with pytest.raises(TypeError, match=r"device must be what torch.device takes, or None, not a list"):
        resolve_device([0])
    with pytest.raises(ValueError, match="memory must be one of auto, pinned, unified, pageable, not 'fast'"):
        resolve_device("cuda", "fast")
    with pytest.raises(DeviceError, match="device='cpu' is none"):
        resolve_device("cpu", "pinned")
    accelerator("mps")
    with pytest.raises(DeviceError, match="of no use on MPS"):
        resolve_device("mps", "pinned")


def test_nothing_of_cuda_is_imported_or_initialised_without_it() -> None:
    program = (
        "import sys, torch; from pipes.iter import IterableWrapper; from pipes.loader2 import DataLoader2\n"
        "loader = DataLoader2(IterableWrapper(range(4)).batch(2).collate(), device='cpu'); print(len(list(loader)))\n"
        "print(torch.cuda.is_initialized(), 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
