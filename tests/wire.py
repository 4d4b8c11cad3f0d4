"""A worker's side and main's side of the transport in one process, and equality of what went through it."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    """Equal in type, structure, dtype, shape, strides (of what is dense) and value."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape, got.layout) == (sent.dtype, sent.shape, sent.layout)
        assert vars(got) == vars(sent)
        if sent.is_nested:
            same(list(got.unbind()), list(sent.unbind()))
        elif sent.layout is torch.strided and not sent.is_quantized:
            assert bytes(got.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
                sent.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
            )
        elif sent.is_quantized:
            assert torch.equal(got.int_repr(), sent.int_repr())
            assert got.qscheme() == sent.qscheme()
            assert torch.equal(got.dequantize(), sent.dequantize())
        else:
            assert torch.equal(got.to_dense(), sent.to_dense())
    elif isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.flags.writeable
        same(got.tolist(), sent.tolist()) if sent.dtype.hasobject else np.testing.assert_array_equal(got, sent)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        assert vars(got) == vars(sent) if hasattr(sent, "__dict__") else True
        for key in sent:
            same(got[key], sent[key])
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            same(one, other)
    elif dataclasses.is_dataclass(sent) and not isinstance(sent, type):
        for item in dataclasses.fields(sent):
            same(getattr(got, item.name), getattr(sent, item.name))
    elif isinstance(sent, memoryview):
        assert (got.format, got.shape, got.readonly) == (sent.format, sent.shape, sent.readonly)
        assert got.tolist() == sent.tolist()
    else:
        assert got == sent or got != got
