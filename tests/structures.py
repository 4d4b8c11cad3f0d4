"""Random nested containers with all kinds of leaves, small and large."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from contents import Frozen, Measured, NamedDict, NamedList, Point, Sample
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

_SIZES = st.sampled_from([0, 1, 5, 100, 20_000, 70_000])
_DTYPES = st.sampled_from([torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e5m2])
# numpy's own pickling, which carries them to the worker, forgets the byte order of dates.
_SCALARS = hnp.scalar_dtypes().filter(lambda dtype: dtype.kind not in "mM" or dtype.isnative)


def _tensor(size: int, dtype: torch.dtype, step: int) -> torch.Tensor:
    return torch.arange(size * step * dtype.itemsize).to(torch.uint8).view(dtype)[::step]


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_name = st.dictionaries(st.text(max_size=3), inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        by_name,
        by_name.map(NamedDict),
        by_name.map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(NamedList),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Sample, inner, st.integers()),
        st.builds(Frozen, inner),
        st.builds(Measured, inner),
        inner.map(lambda value: [value, value]),
    )


structures: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.builds(bytes, _SIZES),
        st.builds(_tensor, _SIZES, _DTYPES, st.integers(1, 3)),
        hnp.arrays(_SCALARS, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
        st.builds(lambda size, step: np.arange(size * abs(step))[::step], _SIZES, st.sampled_from([1, 2, -1, -3])),
    ),
    _containers,
    max_leaves=12,
)
