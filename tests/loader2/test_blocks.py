"""Blocks: a long sequence in shared memory, read by position from any process."""

from __future__ import annotations

import os
import pickle
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipes.errors import GraphError
from pipes.loader2 import blocks, whereabouts
from pipes.loader2.blocks import BY_POSITION, IN_ORDER, Block, SharedList, is_long
from pipes.loader2.segments import map_segment
from pipes.loader2.whereabouts import Page

pytestmark = pytest.mark.usefixtures("no_residue")

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.lists(PLAIN, max_size=60), st.integers(1, 200), st.data())
def test_a_block_is_read_as_the_list_it_was_written_from(elements: list[Any], chunk: int, data: st.DataObject) -> None:
    block = Block.write(elements, chunk)
    assert block is not None
    other = Block.attach(block.descriptor())
    block.close()
    for each in (block, other):
        assert list(each) == elements
        assert len(each) == len(elements)
        start = data.draw(st.integers(0, len(elements)))
        assert list(each.from_position(start)) == elements[start:]
        cut = slice(*data.draw(st.tuples(*[st.none() | st.integers(-70, 70)] * 2)))
        assert each[cut] == elements[cut]
        assert each[:: data.draw(st.sampled_from([-3, -1, 2]))] is not None
        if elements:
            place = data.draw(st.integers(-len(elements), len(elements) - 1))
            assert each[place] == elements[place]
        places = sorted(data.draw(st.sets(st.integers(0, max(0, len(elements) - 1)), max_size=len(elements))))
        assert each.take(places) == [elements[place] for place in places]


def test_a_slice_with_a_step_is_that_of_the_list() -> None:
    block = Block.write(list(range(1000)), 64)
    assert block is not None
    assert block[900:3:-7] == list(range(900, 3, -7))
    assert block[3:900:7] == list(range(3, 900, 7))
    with pytest.raises(IndexError):
        block[1000]
    block.close()


@pytest.mark.parametrize("chunk", [IN_ORDER, BY_POSITION])
def test_elements_of_any_size_share_chunks_of_about_one_size(chunk: int) -> None:
    elements: list[bytes] = [os.urandom(size) for size in [10] * 3000 + [100_000] * 3 + [10] * 3000]
    block = Block.write(elements, chunk)
    assert block is not None
    assert list(block) == elements
    assert block.nbytes < 1.3 * sum(len(element) + 4 for element in elements)
    block.close()


def test_objects_of_importable_classes_travel_and_are_fresh_copies() -> None:
    elements = [(PurePosixPath(f"a/{i}"), Fraction(i, 3), np.full(2, i)) for i in range(500)]
    block = Block.write(elements)
    assert block is not None
    assert [(path, value, array.tolist()) for path, value, array in block] == [
        (path, value, array.tolist()) for path, value, array in elements
    ]
    assert block[3][2] is not block[3][2]
    block.close()


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint32, torch.bfloat16, torch.complex64])
def test_tensors_that_torch_cannot_pickle_travel_too(dtype: torch.dtype) -> None:
    elements = [torch.full((3,), number % 4).to(dtype) for number in range(300)]
    block = Block.write(elements)
    assert block is not None
    assert [(each.dtype, each.shape) for each in block] == [(dtype, (3,))] * 300
    assert [each.to(torch.complex64).tolist() for each in block] == [
        each.to(torch.complex64).tolist() for each in elements
    ]
    block.close()


class OnlyHere:
    """Of the script that runs, which no other process can import."""

    __module__ = "__main__"


def test_what_another_process_could_not_import_makes_no_block() -> None:
    assert Block.write([1, 2, OnlyHere()]) is None
    assert Block.write([lambda: 1]) is None
    assert Block.write([(x for x in "ab")]) is None
    assert not is_long([OnlyHere()] * 1_000_000)


def test_long_is_a_matter_of_bytes() -> None:
    assert is_long([bytes(1 << 19), bytes(1 << 19), bytes(1 << 19)])
    assert is_long([f"{i:09}" for i in range(200_000)])
    assert not is_long([f"{i:09}" for i in range(1000)])
    assert not is_long([])
    assert not is_long([bytes(1 << 22)])


def test_a_shared_list_reads_the_block_of_its_process() -> None:
    block = Block.write(list("abc"))
    assert block is not None
    SharedList.attached["key"] = block
    shared = SharedList("key", 3)
    try:
        assert list(shared) == ["a", "b", "c"]
        assert (shared[1], shared[:2], len(shared)) == ("b", ["a", "b"], 3)
        assert list(shared.from_position(2)) == ["c"]
        assert shared.take([0, 2]) == ["a", "c"]
        assert pickle.loads(pickle.dumps(shared)) == ["a", "b", "c"]
    finally:
        del SharedList.attached["key"]
        block.close()


def test_a_shared_list_elsewhere_says_where_its_elements_are() -> None:
    shared = pickle.loads(pickle.dumps(SharedList("other", 3)))
    assert len(shared) == 3
    with pytest.raises(GraphError, match=r"a list of 3 elements .* lies in memory that the workers"):
        list(shared)


@pytest.mark.parametrize("mapped", [0, 1])
def test_what_cannot_be_mapped_is_closed(mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def map_some(fd: int, size: int) -> Any:
        nonlocal mapped
        mapped -= 1
        if mapped < 0:
            raise OSError("no room for a map")
        return map_segment(fd, size)

    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(blocks, "map_segment", map_some)
    with pytest.raises(OSError, match="no room"):
        Block.write([1, 2])
    monkeypatch.setattr(whereabouts, "map_segment", map_some)
    with pytest.raises(OSError, match="no room"):
        Page.create()
    assert len(os.listdir("/proc/self/fd")) == opened
