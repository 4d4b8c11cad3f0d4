from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stage_contract import check_stage

from pipes import MapDataPipe
from pipes.errors import ErrorBudgetExceeded, GraphError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


def squares(count: int = 5) -> MapDataPipe[Any]:
    return IterableWrapper(range(count)).map(lambda x: (x, x * x)).to_map_datapipe()


def test_contract() -> None:
    check_stage(lambda: squares().to_iter_datapipe(), [0, 1, 4, 9, 16])
    check_stage(lambda: squares(9).map(str).shuffle().batch(2))
    check_stage(lambda: squares(9).batch(2).to_iter_datapipe().sharding_filter().shuffle(3), streams=(1, 2))


def test_it_is_read_once_when_it_is_first_used() -> None:
    read: list[int] = []
    pipe = IterableWrapper("abc").to_map_datapipe(lambda x: read.append(1) or (x, x * 2))
    assert len(pipe) == 3
    assert (read, pipe._map) == ([], None)
    assert (pipe["b"], pipe["c"], len(read)) == ("bb", "cc", 3)


def test_what_it_read_does_not_travel() -> None:
    pipe = IterableWrapper(range(300)).enumerate().to_map_datapipe()
    before = pickle.dumps(pipe)
    assert pipe[200] == 200
    assert pickle.dumps(pipe) == before
    assert pickle.loads(before)[200] == 200


def test_keys() -> None:
    pipe = IterableWrapper([("a", 1), ["b", 2]]).to_map_datapipe()
    assert list(pipe.to_iter_datapipe(["b", "a"])) == [2, 1]
    with pytest.raises(IndexError, match=r"IterToMapConverter \(built at .*\) has no key 'q'"):
        pipe["q"]
    twice = IterableWrapper([("a", 1), ("a", 2), ("a", 3)]).to_map_datapipe()
    with pytest.warns(UserWarning, match="'a' and 1 more keys came again; the last element"):
        assert twice["a"] == 3
    assert len(twice) == 1


def test_length_where_the_source_has_none() -> None:
    assert len(IterableWrapper(range(9)).filter(lambda x: x > 3).to_map_datapipe(lambda x: (x, x))) == 5


def test_what_is_no_pair() -> None:
    with pytest.raises(TypeError, match=r"needs pairs \(key, value\), not a int: 5; give key_value_fn="):
        IterableWrapper([5]).to_map_datapipe()[0]
    with pytest.raises(ValueError, match="not 3 items"):
        IterableWrapper([(1, 2, 3)]).to_map_datapipe()[1]
    with pytest.raises(TypeError, match="expected a function, got 7"):
        IterableWrapper([5]).to_map_datapipe(7)  # type: ignore[arg-type]


def test_a_sharding_filter_in_it_is_refused() -> None:
    with pytest.raises(GraphError, match=r"ShardingFilter \(built at .*test_gathering.py:\d+\) splits them"):
        IterableWrapper(range(9)).sharding_filter().enumerate().to_map_datapipe()


def test_draws_in_it_are_the_same_everywhere_and_move_no_others() -> None:
    def pipe() -> MapDataPipe[Any]:
        drawn = IterableWrapper(range(6)).map(lambda x, rng: (x, rng.random()), rng=True)
        return drawn.map(lambda pair: (pair[0], (pair[1], random.random(), torch.rand(1).item()))).to_map_datapipe()

    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    whole = list(pipe().to_iter_datapipe())
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(2)
    assert list(pipe().to_iter_datapipe()) == whole
    service = MultiProcessingReadingService(num_workers=2, multiprocessing_context="fork")
    for graph in (pipe().to_iter_datapipe(), pipe().to_iter_datapipe().sharding_filter()):
        with DataLoader2(graph, reading_service=service) as loader:
            assert list(loader) == list(loader) == whole
            assert len(loader) == 6


def test_errors_of_what_it_reads() -> None:
    def fail(x: int) -> Any:
        raise OSError(f"no {x}")

    with pytest.raises(OSError, match="no 0") as caught:
        IterableWrapper(range(3)).map(fail).to_map_datapipe()[0]
    assert "in stage 1:Mapper" in caught.value.__notes__[0]
    with pytest.raises(ErrorBudgetExceeded):
        IterableWrapper(range(3)).map(fail, on_error="skip").to_map_datapipe()[0]


def test_a_generator_is_kept() -> None:
    def pairs() -> Iterator[tuple[int, str]]:
        yield from enumerate("abc")

    pipe = IterableWrapper(pairs()).to_map_datapipe()
    with pytest.warns(UserWarning, match="can be read once"):
        assert pipe[2] == "c"
    assert (pipe[0], len(pipe)) == ("a", 3)
