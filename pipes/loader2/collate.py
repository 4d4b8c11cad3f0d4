"""torch's default collate, stacking straight into the slab in which the batch will travel.

Values and types are those of `torch.utils.data.default_collate`, whose own recursion does the work; only the stacking
of equal tensors and arrays is replaced. Stacks below 64 KiB get memory of their own, because they travel inline.

The memory belongs to the batch that is about to be sent. Whatever comes after the collate in the worker may look at it
and replace it, but must not keep it and change it after the batch was sent: it is shared with the main process then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from pipes.loader2.leaves import LARGE
from pipes.loader2.segments import Window
from pipes.loader2.slabs import ALIGNMENT, Slab, SlabPool

__all__ = ["collate_into", "collating_into", "default_collate"]

_pool: ContextVar[SlabPool | None] = ContextVar("pipes_collate_pool", default=None)


class collating_into:
    """Let `default_collate` stack into slabs of `pool` inside the `with` block, in this thread or task only.

    >>> pool = SlabPool()
    >>> with collating_into(pool):
    ...     batch = default_collate([torch.zeros(64, 512)] * 2)
    >>> batch.shape, len(pool)
    (torch.Size([2, 64, 512]), 1)
    >>> pool.close()
    """

    __slots__ = ("_pool", "_token")

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._token = _pool.set(self._pool)

    def __exit__(self, *_: object) -> None:
        _pool.reset(self._token)


def default_collate(samples: Sequence[Any]) -> Any:
    """Stack samples into one batch as torch's `default_collate` does, into a slab inside `collating_into`.

    Raises what torch's raises: TypeError for types it does not know, RuntimeError for unequal sizes.

    >>> default_collate([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}])
    {'x': tensor([1, 2]), 'y': ['a', 'b']}
    """
    pool = _pool.get()
    return collate(samples, collate_fn_map=_Collators(None)) if pool is None else collate_into(pool, samples)


def collate_into(pool: SlabPool, samples: Sequence[Any]) -> Any:
    """`default_collate` with its large stacks in one slab of `pool`, where `pack` finds them.

    >>> pool = SlabPool()
    >>> batch = collate_into(pool, [torch.zeros(64, 512)] * 2)
    >>> pool.find(batch.data_ptr(), batch.data_ptr() + batch.nbytes).used
    262144
    >>> pool.close()
    """
    total = sum(_stack_sizes(samples[0], len(samples))) if len(samples) else 0
    if not total:
        return collate(samples, collate_fn_map=_Collators(None))
    return collate(samples, collate_fn_map=_Collators(_Space(pool.open(total + pool.headroom))))


def _stack_sizes(sample: Any, count: int) -> Iterator[int]:
    """What the large stacks will need, judged by the first sample."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        nbytes = sample.nbytes * count
        if nbytes >= LARGE:
            yield -(-nbytes // ALIGNMENT) * ALIGNMENT
    elif isinstance(sample, Mapping):
        for child in sample.values():
            yield from _stack_sizes(child, count)
    elif isinstance(sample, list | tuple):
        for child in sample:
            yield from _stack_sizes(child, count)


class _Space:
    """An open slab and the window that keeps it in use until the stacks do."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._window: Window = slab.window()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
        place = self._place(shape, dtype.itemsize)
        return None if place is None else np.ndarray(shape, dtype, self._window, place[0])

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        place = self._place(shape, dtype.itemsize)
        if place is None:
            return None
        return torch.frombuffer(self._window, dtype=dtype, count=place[1], offset=place[0]).view(shape)

    def _place(self, shape: tuple[int, ...], itemsize: int) -> tuple[int, int] | None:
        count = 1
        for size in shape:
            count *= size
        offset = self._slab.allocate(count * itemsize) if count * itemsize >= LARGE else None
        return None if offset is None else (offset, count)


class _Collators(dict[Any, Any]):
    """torch's table of collate functions as it is now, with ours for stacking, and the space to stack into."""

    def __init__(self, space: _Space | None) -> None:
        super().__init__(default_collate_fn_map)
        self.space = space
        for kind, (torchs, ours) in _STACKERS.items():
            # A user may have put another function there, as into the rest of the table.
            if self.get(kind) is torchs:
                self[kind] = ours


def _stack_tensors(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    if first.layout is not torch.strided or first.is_nested:
        # Raises; torch's words are the ones users search for.
        return default_collate_fn_map[torch.Tensor](batch, collate_fn_map=collate_fn_map)
    space = collate_fn_map.space
    if space is not None and _PLAIN_TYPE.issuperset(map(type, batch)) and _same_dtype(batch):
        out = space.tensor((len(batch), *first.shape), first.dtype)
        # Unequal shapes fail again below, in the same words; tensors with a gradient cannot be stacked into `out`.
        with suppress(RuntimeError):
            return torch.stack(batch, 0, out=out)
    # torch's own function would make a shared-memory file for each stack when it believes to be in a worker.
    return torch.stack(batch, 0)


def _stack_arrays(batch: Sequence[np.ndarray[Any, Any]], *, collate_fn_map: Any = None) -> Any:
    shape, dtype = batch[0].shape, batch[0].dtype
    if not _is_number(dtype) or any(array.dtype != dtype or array.shape != shape for array in batch):
        return default_collate_fn_map[np.ndarray](batch, collate_fn_map=collate_fn_map)
    space = collate_fn_map.space
    out = None if space is None else space.array((len(batch), *shape), dtype)
    # Not by way of tensors as torch does it: that warns when an array cannot be written, although nobody writes.
    return torch.from_numpy(np.stack(batch, out=out))


_dtype = attrgetter("dtype")
_PLAIN_TYPE = frozenset({torch.Tensor})


def _same_dtype(batch: list[torch.Tensor]) -> bool:
    return len(set(map(_dtype, batch))) == 1 and batch[0].is_cpu and not batch[0].is_quantized


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.isnative and dtype.isbuiltin == 1


_STACKERS = {
    torch.Tensor: (default_collate_fn_map[torch.Tensor], _stack_tensors),
    np.ndarray: (default_collate_fn_map[np.ndarray], _stack_arrays),
}
