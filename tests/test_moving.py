"""Any batch to a device and back out of it: containers, dtypes, objects that move themselves, and what refuses."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pipes.devices import AcceleratorDevice, BlockingDevice, HostDevice
from pipes.errors import DeviceError
from pipes.loader2.fake_device import FakeDevice
from pipes.moving import Sender, moved, tensors_in

Pair = namedtuple("Pair", "x y")


class Typed(NamedTuple):
    x: Any
    name: str = "n"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    tag: str = "t"
    made: list[int] = dataclasses.field(default_factory=list, init=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class Listed(list[Any]):
    tag: str


class Tagged(dict[str, Any]):
    tag: str


class Encoding(UserDict[str, Any]):
    """As a tokenizer's output: a mapping that moves itself, and takes no other argument."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()})


def to_meta(batch: Any, **options: Any) -> Any:
    """Move to torch's device without memory: real device semantics of `.to` and of `Tensor.device`."""
    return moved(batch, BlockingDevice(torch.device("meta"), "pageable"), **options)[0]


def through_fake(batch: Any, **options: Any) -> Any:
    device = FakeDevice()
    sender = Sender(device, **options)
    output = sender.hand_over(sender.send(batch))
    device.synchronize()
    return output


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("batch", "pick"),
    [
        (X, lambda b: b),
        ([X, "s"], lambda b: b[0]),
        ((X, 1), lambda b: b[0]),
        ({"x": {"y": [X]}}, lambda b: b["x"]["y"][0]),
        (Pair(X, 2), lambda b: b.x),
        (Typed(X), lambda b: b.x),
        (Frozen(X), lambda b: b.x),
        (Slotted(X), lambda b: b.x),
        (OrderedDict(b=X, a=1), lambda b: b["b"]),
        (defaultdict(list, x=X), lambda b: b["x"]),
        (Listed([X]), lambda b: b[0]),
        (Tagged(x=X), lambda b: b["x"]),
        (Encoding({"x": X}), lambda b: b["x"]),
        (UserDict({"x": X}), lambda b: b["x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_come_back_in_their_own_type(batch: Any, pick: Any) -> None:
    there = to_meta(batch)
    assert type(there) is type(batch)
    assert pick(there).device.type == "meta"
    assert pick(batch).device.type == "cpu"
    if not hasattr(batch, "to"):
        assert torch.equal(pick(through_fake(batch)), X)


def test_what_a_container_has_beside_its_elements_comes_along() -> None:
    listed, tagged = Listed([X]), Tagged(x=X)
    listed.tag = tagged.tag = "kept"
    frozen = Frozen(X, "other")
    frozen.made.append(3)
    assert (to_meta(listed).tag, to_meta(tagged).tag) == ("kept", "kept")
    assert (to_meta(frozen).tag, to_meta(frozen).made) == ("other", [3])
    assert list(to_meta(OrderedDict(b=X, a=X))) == ["b", "a"]
    assert to_meta(defaultdict(list, x=X)).default_factory is list


def test_what_is_no_tensor_stays_the_object_it_is() -> None:
    array, text = np.arange(3), "text"
    thing = object()
    batch = {"a": array, "t": text, "o": thing, "n": None, "b": b"bytes", "c": Counter("aab"), "k": int}
    there = to_meta(batch)
    assert all(there[key] is batch[key] for key in "aton")
    assert there["c"] == Counter("aab")
    assert there["k"] is int


def test_arrays_become_tensors_by_choice() -> None:
    fixed = np.broadcast_to(np.float32(2), (3,))
    batch = {
        "a": np.arange(3),
        "s": np.array(["x"]),
        "f": fixed,
        "o": np.array([None]),
        "big": np.arange(2, dtype=">i4"),
    }
    there = to_meta(batch, arrays=True)
    assert (there["a"].device.type, there["f"].device.type) == ("meta", "meta")
    assert all(there[key] is batch[key] for key in ("s", "o", "big"))
    assert through_fake(batch, arrays=True)["f"].tolist() == [2, 2, 2]


def test_arrays_that_torch_does_not_take_as_they_are_are_copied_first() -> None:
    record = np.zeros(3, dtype=[("x", "i1"), ("y", "<i4")])
    record["y"] = [1, 2, 3]
    batch = {"backward": np.arange(4)[::-1], "field": record["y"], "image": np.arange(12).reshape(3, 4)[:, ::-1]}
    there = through_fake(batch, arrays=True)
    assert all(there[key].tolist() == batch[key].tolist() for key in batch)
    assert moved(batch["backward"], FakeDevice(), arrays=True)[0].tolist() == [3, 2, 1, 0]


class Numbered:
    def __init__(self, number: int) -> None:
        self.number = number

    def to(self, device: Any) -> int:
        return self.number


class Made(Mapping[str, Any]):
    """Makes its values when it is asked for them, as a batch over columns or files does."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.kept = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.kept[key] or Numbered(int(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def test_values_that_a_mapping_makes_when_asked_are_not_taken_for_one_another() -> None:
    assert dict(to_meta(Made({str(number): None for number in range(1, 50)}))) == {
        str(number): number for number in range(1, 50)
    }


def test_objects_move_themselves() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    there = to_meta({"p": packed})["p"]
    assert isinstance(there, PackedSequence)
    assert (there.data.device.type, there.batch_sizes.device.type) == ("meta", "cpu")
    output, tensors = moved(packed, BlockingDevice(torch.device("meta"), "pageable"))
    assert any(tensor is output.data for tensor in tensors)


def test_a_real_tensordict_moves_itself_without_the_process_waiting() -> None:
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": X, "more": {"y": torch.ones(2)}}, batch_size=[2])
    device = AcceleratorDevice(torch.device("meta"), "pinned")
    [there], tensors = moved([batch], device)
    assert (type(there), there.batch_size, there.device.type) == (type(batch), batch.batch_size, "meta")
    assert {id(there["x"]), id(there["more", "y"])} <= {id(tensor) for tensor in tensors}


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    tensor = torch.arange(48, dtype=torch.uint8).view(dtype) if dtype is not torch.bool else torch.ones(3, dtype=dtype)
    there = through_fake([tensor, tensor[:0], tensor[0]])
    assert [each.dtype for each in there] == [dtype] * 3
    assert bytes(there[0].view(torch.uint8).tolist()) == bytes(tensor.view(torch.uint8).tolist())
    assert to_meta(tensor).dtype is dtype


def test_strided_and_sparse_tensors_travel() -> None:
    wide = torch.arange(12).view(3, 4)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through_fake(wide.t()), wide.t())
    assert torch.equal(through_fake(wide[:, ::2]), wide[:, ::2])
    there = to_meta({"s": sparse, "c": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)})
    assert there["s"].layout is torch.sparse_coo
    assert there["c"].is_contiguous(memory_format=torch.channels_last)


def test_one_tensor_twice_is_moved_once() -> None:
    device = FakeDevice()
    there, tensors = moved([X, {"again": X}], device)
    assert there[0] is there[1]["again"]
    assert len(tensors) == 1
    assert device.small == X.nbytes


class Refusing:
    def to(self, device: Any) -> Any:
        raise RuntimeError("no")


class Strict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise KeyError("closed")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": [1, Refusing()]}, r"batch\['x'\]\[1\] \(Refusing\) cannot be moved to meta: RuntimeError: no"),
        (Frozen((Refusing(),)), r"batch\.x\[0\] \(Refusing\) cannot be moved"),
        (
            [Strict(x=X)],
            r"batch\[0\] \(Strict\) cannot be rebuilt around tensors on meta: KeyError.*to\(device\)",
        ),
    ],
)
def test_what_cannot_be_moved_is_named_by_its_path(batch: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        to_meta(batch)
    assert caught.value.__cause__ is not None


def test_a_batch_that_holds_itself_is_refused() -> None:
    batch: list[Any] = [X]
    batch.append(batch)
    with pytest.raises(DeviceError, match=r"batch\[1\] holds itself"):
        to_meta(batch)


def test_a_function_on_the_device_sees_the_moved_batch_and_its_result_is_kept() -> None:
    device = FakeDevice()
    sender = Sender(device, on_device=lambda batch: {"y": batch["x"]})
    sent = sender.send({"x": X})
    assert [tensor.data_ptr() for tensor in sent.tensors] == [sent.output["y"].data_ptr()] * 2


def test_tensors_are_found_in_any_object() -> None:
    class Holder:
        __slots__ = ("deep",)

    holder = Holder()
    holder.deep = {"a": [X], "n": 1}
    assert [tensor is X for tensor in tensors_in((holder, "s", len))] == [True]


def test_page_locked_memory_is_asked_for_once_and_small_tensors_are_left_alone() -> None:
    device = FakeDevice()
    large = torch.zeros(1 << 16, dtype=torch.uint8)
    device.page_lock(large.data_ptr(), large.nbytes)
    moved([large, X], device)
    moved([torch.zeros(1 << 16, dtype=torch.uint8)], device)
    assert (device.sent, device.small, device.staged) == (1 << 16, X.nbytes + (1 << 16), 1 << 16)
    device.page_unlock(large.data_ptr(), large.nbytes)
    assert device.locked == 0


def test_on_the_host_small_tensors_are_page_locked_too() -> None:
    accelerator = FakeDevice()
    host = HostDevice("pinned", accelerator)
    there = moved({"x": X, "s": torch.eye(2).to_sparse(), "n": 1}, host)[0]
    assert torch.equal(there["x"], X)
    assert accelerator.staged == X.nbytes
    assert isinstance(accelerator, AcceleratorDevice)


class Pinnable:
    """As torch's DataLoader asks for it: it has no method `to`."""

    pinned = False

    def pin_memory(self) -> Pinnable:
        result = Pinnable()
        result.pinned = True
        return result


def test_on_the_host_objects_page_lock_themselves_and_others_are_looked_into() -> None:
    accelerator = FakeDevice()
    there = moved([Pinnable(), Encoding({"x": X})], HostDevice("pinned", accelerator))[0]
    assert there[0].pinned
    assert type(there[1]) is Encoding
    assert accelerator.staged == X.nbytes
    left = [Pinnable()]
    assert moved(left, HostDevice("pageable"))[0][0] is left[0]
    assert to_meta(left)[0] is left[0]
