"""Choices among pipes by weight, and indices of samplers: both repeated by a resume."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from pipes.errors import GraphError, StateError
from pipes.iter import IterableWrapper, SampleMultiplexer, Sampler
from pipes.loader2 import DataLoader2


def mixed(weights: tuple[Any, ...] = (3, 1), size: int = 4000, **given: Any) -> SampleMultiplexer[Any]:
    return SampleMultiplexer({IterableWrapper([place] * size): weight for place, weight in enumerate(weights)}, **given)


def test_weights_and_ends() -> None:
    found = list(mixed())
    assert (found.count(0), found.count(1), len(mixed())) == (4000, 4000, 8000)
    # 750 are expected, with a standard deviation of 14.
    assert 690 < found[:1000].count(0) < 810
    assert set(found[-1000:]) == {1}
    order = list(SampleMultiplexer({IterableWrapper(range(50)): 1, IterableWrapper(range(50, 100)): 1}))
    assert [x for x in order if x < 50] == list(range(50))


def test_seeds_and_epochs() -> None:
    pipe = mixed(seed=5, size=50)
    first, second = list(pipe), list(pipe)
    assert first != second
    assert list(mixed(seed=5, size=50)) == first == list(pipe.set_seed(5))
    assert list(mixed(seed=6, size=50)) != first


def test_a_state_of_other_weights_is_refused() -> None:
    pipe = mixed(size=5)
    next(iter(pipe))
    state = pipe.state_dict()
    with pytest.raises(StateError, match=r"chooses by the weights \[2, 1\], but by \[3, 1\]"):
        mixed((2, 1), size=5).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([1], TypeError, "takes a dict of pipes, not a list"),
        ({}, ValueError, "needs at least one pipe"),
        ({IterableWrapper("a"): 0}, ValueError, "above 0, not 0"),
        ({IterableWrapper("a"): float("inf")}, ValueError, "above 0, not inf"),
        ({IterableWrapper("a"): "1"}, TypeError, "must be a number, not '1'"),
    ],
)
def test_what_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SampleMultiplexer(given)


def test_a_sampler_gives_indices() -> None:
    source = IterableWrapper("abcde")
    assert list(Sampler(source)) == [0, 1, 2, 3, 4]
    drawn = Sampler(source, RandomSampler, sampler_kwargs={"replacement": True, "num_samples": 7})
    assert len(drawn) == len(list(drawn)) == 7
    pipe = Sampler(IterableWrapper(range(30)), RandomSampler)
    assert sorted(pipe) == list(range(30))
    assert list(pipe) != list(pipe)
    with pytest.raises(TypeError, match="data_source") as caught:
        list(Sampler(source, WeightedRandomSampler))
    assert any("in stage 1:Sampler" in note for note in caught.value.__notes__)


def test_a_sampler_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    list(Sampler(IterableWrapper(range(30)), RandomSampler))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_streams_share_the_indices_of_a_sampler() -> None:
    pipe = Sampler(IterableWrapper(range(30)), RandomSampler).sharding_filter()
    assert sorted(DataLoader2(pipe, num_streams=3)) == list(range(30))
    loader = DataLoader2(Sampler(IterableWrapper(range(30)), RandomSampler), num_streams=3)
    with pytest.warns(UserWarning, match="no sharding_filter"):
        assert sorted(loader) == list(range(30))


def test_what_a_sampler_cannot_read() -> None:
    with pytest.raises(AssertionError, match=r"asks its pipe for the length: Filter .* has no length"):
        Sampler(IterableWrapper("ab").filter(bool))
    with pytest.raises(GraphError, match="would split nothing"):
        Sampler(IterableWrapper("ab").sharding_filter())
