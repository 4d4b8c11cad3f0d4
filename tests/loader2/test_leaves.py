"""Every kind of content crosses unchanged, and what cannot is named by its path."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from contents import CONTENTS, DTYPES, NOTED_BY_TORCH, REFUSED, big, of_dtype, package_of, table, tagged
from hypothesis import given
from structures import structures
from wire import Wire, same

from pipes.loader2.leaves import LARGE, collect
from pipes.loader2.packing import pack
from pipes.loader2.slabs import ALIGNMENT
from pipes.utils import StreamWrapper

pytestmark = pytest.mark.usefixtures("closes_descriptors")


@pytest.mark.filterwarnings(NOTED_BY_TORCH)
@pytest.mark.parametrize("name", CONTENTS)
def test_every_content(wire: Wire, name: str) -> None:
    package = package_of(name)
    if package is not None:
        pytest.importorskip(package)
    got = wire.carry({"it": CONTENTS[name]()})["it"]
    same(got, CONTENTS[name]())


def test_large_tensors_are_aligned_views_of_the_slab(wire: Wire) -> None:
    for dtype in DTYPES.values():
        got = wire.carry([torch.zeros(3), of_dtype(dtype, LARGE + 1, 1)])
        assert got[1].data_ptr() % ALIGNMENT == 0
        assert wire.lent == 1


@pytest.mark.parametrize("name", [name for name in CONTENTS if "layout" in name and "expan" not in name])
def test_dense_tensors_may_be_written(wire: Wire, name: str) -> None:
    got = wire.carry(CONTENTS[name]())
    if "overlapping" not in name:
        assert (got.fill_(1) == 1).all()


@pytest.mark.parametrize("size", [3, 1_000_000])
def test_what_repeats_its_elements_travels_once(wire: Wire, size: int) -> None:
    tensor, array = torch.arange(3.0)[:, None].expand(3, size), np.broadcast_to(np.arange(3), (size, 3))
    packed = pack([tensor, array], wire.pool)
    assert packed.nbytes < 1_000
    got = wire.receiver.unpack(packed.parts[0], packed.fds)
    same(got, [tensor, array])
    assert (got[0].stride(), got[1].strides) == (tensor.stride(), array.strides)


def test_what_is_on_another_device_is_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda:1")), raising=False)
    for tensor in (torch.ones(3), torch.eye(3).to_sparse(), tagged(torch.ones(3))):
        with pytest.raises(TypeError, match=r'batch\["x"\].*on cuda:1.*main process'):
            pack({"x": tensor}, wire.pool)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_not_kept_by_torch(wire: Wire) -> None:
    before = len(torch._utils._sparse_tensors_to_validate)
    wire.carry([CONTENTS["tensor: sparse coo"](), CONTENTS["tensor: sparse csr"]()])
    assert len(torch._utils._sparse_tensors_to_validate) == before


def test_pyarrow_tables_travel_without_a_copy(wire: Wire) -> None:
    pytest.importorskip("pyarrow")
    got = wire.carry({"t": table()})["t"]
    assert got.equals(table())
    assert wire.lent == 1
    column = got["a"]
    del got
    assert wire.lent == 1
    del column
    gc.collect()
    assert wire.lent == 0


@given(structures)
def test_any_structure(value: Any) -> None:
    wire = Wire()
    same(wire.carry(value), value)
    wire.pool.close()


class FailsWithNotes:
    def __reduce__(self) -> Any:
        error = ValueError("no way")
        error.add_note("and more")
        raise error


def test_the_reason_is_the_error_and_not_its_notes(wire: Wire) -> None:
    with pytest.raises(
        TypeError, match=r"batch\[0\] \(FailsWithNotes\) cannot travel from a worker: ValueError: no way$"
    ):
        pack([FailsWithNotes()], wire.pool)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings(NOTED_BY_TORCH)
def test_what_cannot_travel_is_named_by_its_path(wire: Wire, name: str) -> None:
    make, path, cause = REFUSED[name]
    with pytest.raises(TypeError, match=path) as caught:
        pack(make(), wire.pool)
    assert isinstance(caught.value.__cause__, cause)
    assert len(str(caught.value)) < 500
    assert wire.lent == 0


def test_collect_keeps_a_bare_stream_small() -> None:
    content = collect({"x": big(), "b": bytes(1 << 20), "n": [1] * 10})
    assert sum(len(piece) for piece in content.stream if len(piece) < LARGE) < 400


def test_what_to_do_about_what_cannot_travel() -> None:
    with pytest.raises(TypeError, match=r"batch\[0\] \(generator\) .*use \.flatmap"):
        collect([(x for x in "ab")])
    with tempfile.TemporaryFile() as file:
        for stream in (file, StreamWrapper(file)):
            with pytest.raises(TypeError, match=r'batch\["f"\].* by \.map or \.read_from_stream'):
                collect({"f": stream})
