"""A worker's side and main's side of the transport in one process, and equality of what went through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from pipes.loader2.packing import Receiver, pack
from pipes.loader2.slabs import SlabPool


class Wire:
    """A worker's pool and main's receiver in one process; `carry` packs, unpacks, and passes releases on."""

    def __init__(self, max_held: int = 100) -> None:
        self.pool = SlabPool()
        self.receiver = Receiver(max_held)

    def carry(self, batch: Any) -> Any:
        packed = pack(batch, self.pool)
        del batch
        result = self.receiver.unpack(b"".join(packed.parts), packed.fds)
        self.settle()
        return result

    def settle(self) -> None:
        self.pool.take_back(self.receiver.returned())

    @property
    def lent(self) -> int:
        self.settle()
        return sum(slab.loan is not None for slab in self.pool._slabs)


def same(got: Any, sent: Any) -> None:
    """Equal in type, structure, dtype, shape, strides (of what has no gaps) and value."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        if sent.is_nested:
            assert (got.is_nested, got.layout) == (True, sent.layout)
            same(list(got.unbind()), list(sent.unbind()))
            return
        assert (got.dtype, got.shape, got.layout, got.device) == (sent.dtype, sent.shape, sent.layout, sent.device)
        assert got.requires_grad == sent.requires_grad
        assert vars(got) == vars(sent)
        _same_values(got.detach(), sent.detach())
    elif isinstance(sent, np.ndarray):
        _same_arrays(got, sent)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        assert vars(got) == vars(sent) if hasattr(sent, "__dict__") else True
        for key in sent:
            same(got[key], sent[key])
    elif isinstance(sent, Mapping):
        assert getattr(got, "batch_size", None) == getattr(sent, "batch_size", None)
        same(dict(got.items()), dict(sent.items()))
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            same(one, other)
    elif dataclasses.is_dataclass(sent) and not isinstance(sent, type):
        for item in dataclasses.fields(sent):
            same(getattr(got, item.name), getattr(sent, item.name))
    elif attrs.has(type(sent)):
        same(attrs.asdict(got, recurse=False), attrs.asdict(sent, recurse=False))
    elif isinstance(sent, memoryview):
        assert (got.format, got.shape, got.readonly) == (sent.format, sent.shape, sent.readonly)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(sent))
    else:
        assert got == sent or got != got


def _same_values(got: torch.Tensor, sent: torch.Tensor) -> None:
    if sent.is_meta:
        return
    if sent.is_quantized:
        assert torch.equal(got.int_repr(), sent.int_repr())
        assert got.qscheme() == sent.qscheme()
        assert torch.equal(got.dequantize(), sent.dequantize())
    elif sent.layout is torch.sparse_coo:
        assert got.is_coalesced() == sent.is_coalesced()
        assert torch.equal(got._indices(), sent._indices())
        assert torch.equal(got._values(), sent._values())
    elif sent.layout is not torch.strided:
        assert torch.equal(got.to_dense(), sent.to_dense())
    else:
        assert (got.is_conj(), got.is_neg(), got._is_zerotensor()) == (False, False, False)
        span = 1 + sum((size - 1) * step for size, step in zip(sent.shape, sent.stride(), strict=True))
        if sent.numel() >= span:
            assert got.stride() == sent.stride() or sent.is_contiguous()
        assert _bytes(got) == _bytes(sent)


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.resolve_conj().resolve_neg()
    plain = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor._is_zerotensor() else tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.as_subclass(torch.Tensor).view(integers.get(tensor.itemsize, tensor.dtype)).numpy().tobytes()


def _same_arrays(got: Any, sent: Any) -> None:
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.dtype.metadata == sent.dtype.metadata
    repeats = not sent.flags.writeable and 0 in sent.strides
    assert got.flags.writeable != repeats
    assert got.flags.c_contiguous or got.flags.f_contiguous == sent.flags.f_contiguous
    if isinstance(sent, np.ma.MaskedArray):
        np.testing.assert_array_equal(got.mask, sent.mask)
        assert got.fill_value == sent.fill_value
    same(got.tolist(), sent.tolist()) if sent.dtype.hasobject else np.testing.assert_array_equal(got, sent)
