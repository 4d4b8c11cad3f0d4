"""The default collate: equal to torch's over many structures, and stacked once, in the slab that travels."""

from __future__ import annotations

import collections
import threading
import time
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import default_collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.loader2.collate import collate_into, collating_into, default_collate
from pipes.loader2.leaves import LARGE
from pipes.loader2.packing import Receiver, pack
from pipes.loader2.slabs import SlabPool
from pipes.loader2.streams import collates_last

Point = collections.namedtuple("Point", ["x", "y"])


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    pool = SlabPool()
    yield pool
    pool.close()


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.is_contiguous() == expected.is_contiguous()
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    else:
        assert got == expected


def outcome(function: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return function(samples)
    except (TypeError, RuntimeError, ValueError) as error:
        return type(error)


numbers = st.sampled_from([np.bool_, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64, "c8"])
arrays = hnp.arrays(numbers, hnp.array_shapes(min_dims=0, min_side=0, max_side=4), fill=st.just(1))
leaves = (
    st.integers(-(2**40), 2**40)
    | st.floats(-1e6, 1e6)
    | st.booleans()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | arrays
    | arrays.map(torch.from_numpy)
    | numbers.map(lambda dtype: np.dtype(dtype).type(1))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=6,
)


@given(trees, st.integers(1, 4), st.booleans())
def test_equal_to_torch_over_structures(sample: Any, count: int, slab: bool) -> None:
    samples = [sample] * count
    expected = outcome(torch_collate, samples)
    pool = SlabPool()
    got = outcome(lambda samples: collate_into(pool, samples) if slab else default_collate(samples), samples)
    same(got, expected)
    pool.close()


MIXED: dict[str, list[Any]] = {
    "large tensors": [torch.arange(50_000.0) + i for i in range(3)],
    "large arrays": [np.arange(50_000) + i for i in range(3)],
    "large bfloat16": [torch.arange(50_000).to(torch.bfloat16)] * 3,
    "large uint16": [np.arange(50_000, dtype=np.uint16)] * 3,
    "transposed": [torch.arange(90_000).view(300, 300).t(), torch.zeros(300, 300, dtype=torch.int64)],
    "large and small": [{"x": torch.ones(200, 200), "y": i, "z": "a"} for i in range(4)],
    "mixed dtypes": [torch.ones(50_000), torch.ones(50_000, dtype=torch.float64)],
    "mixed dtypes, narrow first": [torch.ones(50_000, dtype=torch.int32), torch.ones(50_000, dtype=torch.int64) << 40],
    "mixed array dtypes": [np.ones(50_000, np.int32), np.ones(50_000, np.float32)],
    "tensor and array": [torch.ones(50_000), np.ones(50_000, np.float32)],
    "unequal shapes": [torch.ones(50_000), torch.ones(50_001)],
    "unequal array shapes": [np.ones(50_000), np.ones(50_001)],
    "later samples larger": [[torch.ones(20_000)], [torch.ones(90_000)]],
    "lists of lists": [[torch.ones(30_000), [torch.zeros(30_000)]]] * 2,
    "unequal lists": [[1, 2], [1]],
    "subclass first": [torch.nn.Parameter(torch.ones(50_000), requires_grad=False), torch.ones(50_000)],
    "strings": [np.array(["a"])] * 2,
    "objects": [np.array([None])] * 2,
    "big endian": [np.arange(50_000, dtype=">i4")] * 2,
    "zero-d arrays": [np.array(1.5), np.array(2.5)],
    "none": [None, None],
    "unknown": [object()],
    "namespaces": [types.SimpleNamespace(a=1)],
    "defaultdict": [collections.defaultdict(list, {"x": torch.ones(50_000)})] * 2,
    "ordered": [collections.OrderedDict(b=1, a=torch.ones(50_000))] * 2,
    "sparse": [torch.eye(3).to_sparse_coo()] * 2,
    "bools": [True, False],
    "many": [np.full((3, 64, 64), i, np.uint8) for i in range(64)],
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("samples", MIXED.values(), ids=MIXED.keys())
def test_equal_to_torch_for_large_and_mixed_samples(pool: SlabPool, samples: list[Any]) -> None:
    expected = outcome(torch_collate, samples)
    same(outcome(default_collate, samples), expected)
    same(outcome(lambda samples: collate_into(pool, samples), samples), expected)


def test_tensors_with_a_gradient_are_stacked_as_torch_does(pool: SlabPool) -> None:
    samples = [torch.ones(50_000), torch.ones(50_000, requires_grad=True)]
    got = collate_into(pool, samples)
    assert got.requires_grad
    with pytest.raises(TypeError, match="requires grad"):
        pack(got, pool)


def test_read_only_arrays_do_not_warn(pool: SlabPool) -> None:
    samples = [np.frombuffer(bytes(50_000), np.uint8)] * 2
    assert collate_into(pool, samples).shape == default_collate(samples).shape == (2, 50_000)


def test_a_batch_is_written_once(pool: SlabPool) -> None:
    samples = [{"x": torch.full((3, 50, 50), float(i)), "m": np.full((70, 70), i), "y": i} for i in range(16)]
    with collating_into(pool):
        batch = default_collate(samples)
    slab = pool.find(batch["x"].data_ptr(), batch["x"].data_ptr() + batch["x"].nbytes)
    assert slab is not None
    assert pool.find(batch["m"].data_ptr(), batch["m"].data_ptr() + batch["m"].nbytes) is slab
    used = slab.used
    packed = pack(batch, pool)
    assert slab.used == used, "nothing was copied into the slab"
    assert (len(pool), len(packed.fds)) == (1, 1)
    got = Receiver(4).unpack(packed.parts[0], packed.fds)
    same(got, torch_collate(samples))
    batch["x"][3] = 77
    assert (got["x"][3] == 77).all()


def test_small_stacks_take_no_slab(pool: SlabPool) -> None:
    with collating_into(pool):
        assert default_collate([torch.ones(10)] * 4).shape == (4, 10)
    assert len(pool) == 0


def test_a_batch_that_the_worker_keeps_is_not_overwritten(pool: SlabPool) -> None:
    kept = []
    receiver = Receiver(4)
    for number in range(5):
        with collating_into(pool):
            batch = default_collate([torch.full((50_000,), float(number))] * 2)
        kept.append(batch[0])
        packed = pack(batch, pool)
        receiver.unpack(packed.parts[0], packed.fds)
        pool.take_back(receiver.returned())
    assert [tensor.mean().item() for tensor in kept] == [0, 1, 2, 3, 4]


def test_steady_batches_use_one_slab_in_turn(pool: SlabPool) -> None:
    receiver = Receiver(4)
    for _ in range(50):
        with collating_into(pool):
            packed = pack(default_collate([torch.ones(50_000)] * 2), pool)
        receiver.unpack(packed.parts[0], packed.fds)
        pool.take_back(receiver.returned())
    assert len(pool) == 1


def test_the_target_is_that_of_this_thread_and_ends_with_the_block(pool: SlabPool) -> None:
    samples = [torch.ones(50_000)] * 2
    with collating_into(pool):
        thread = threading.Thread(target=default_collate, args=(samples,))
        thread.start()
        thread.join()
        assert len(pool) == 0
    with pytest.raises(RuntimeError, match="equal size"), collating_into(pool):
        default_collate([torch.ones(5), torch.ones(6)])
    default_collate(samples)
    assert len(pool) == 0


def test_no_descriptor_for_each_stack_inside_a_loader_worker(pool: SlabPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", object())
    for collated in (
        default_collate([torch.ones(10)] * 2),
        collate_into(pool, [torch.ones(50_000), torch.ones(50_000)]),
    ):
        assert not collated.is_shared()


@pytest.mark.parametrize("slab", [False, True])
def test_what_users_put_into_torchs_table_is_used(pool: SlabPool, slab: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(batch: list[Fraction], *, collate_fn_map: Any = None) -> Fraction:
        return sum(batch, Fraction(0))

    def first(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        return batch[0]

    monkeypatch.setitem(default_collate_fn_map, Fraction, join)
    samples = [{"t": torch.ones(LARGE), "f": Fraction(1, 3)}] * 3
    got = collate_into(pool, samples) if slab else default_collate(samples)
    assert got["f"] == 1
    assert got["t"].shape == (3, LARGE)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, first)
    got = collate_into(pool, samples) if slab else default_collate(samples)
    assert got["t"] is samples[0]["t"]


def test_an_empty_batch_fails_as_in_torch(pool: SlabPool) -> None:
    for collate in (torch_collate, default_collate, lambda samples: collate_into(pool, samples)):
        with pytest.raises(IndexError):
            collate([])


def test_batches_that_a_later_stage_repeats_are_not_shared_with_main() -> None:
    def twice(batch: torch.Tensor) -> Iterator[torch.Tensor]:
        yield batch
        time.sleep(0.3)  # main changes the first meanwhile
        yield batch

    samples = IterableWrapper([torch.zeros(64, 512) for _ in range(4)]).sharding_filter().batch(2).collate()
    with DataLoader2(samples.flatmap(twice), reading_service=MultiProcessingReadingService(1)) as loader:
        sums = []
        for batch in loader:
            sums.append(batch.sum().item())
            batch += 1
    assert sums == [0.0] * 4


def test_a_graph_that_ends_in_its_collate_stacks_into_shared_memory() -> None:
    batches = IterableWrapper([1, 2]).batch(2).collate()
    assert collates_last(batches)
    assert collates_last(batches.map(str).enumerate())
    assert not collates_last(batches.flatmap(lambda batch: [batch, batch]))
    assert not collates_last(batches.shuffle(2))
    assert not collates_last(IterableWrapper([1, 2]).batch(2))
