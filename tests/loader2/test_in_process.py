"""The engine without workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from loading import global_state, loader_of, take, through_json, with_draws

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, InProcessReadingService
from pipes.loader2.in_process import InProcessEngine
from pipes.loader2.streams import Plan, StreamState


def graph() -> Any:
    return IterableWrapper(range(40)).sharding_filter().map(with_draws)


def engine_at(states: dict[int, StreamState] | None = None) -> InProcessEngine:
    engine = InProcessEngine(graph())
    engine.begin(Plan(seed=1, epoch=0, streams=2), states or {0: StreamState(), 1: StreamState()}, None)
    return engine


def drain(engine: InProcessEngine) -> list[Any]:
    found = []
    while True:
        try:
            found.append(engine.next())
        except StopIteration:
            return found


def test_states_tell_of_streams_that_were_never_asked() -> None:
    engine = engine_at()
    whole = drain(engine_at())
    assert engine.states() == {0: StreamState(), 1: StreamState()}
    for given in range(1, 9):
        assert engine.next() == whole[given - 1]
        states = engine.states()
        assert [states[0].given, states[1].given] == [(given + 1) // 2, given // 2]
        assert drain(engine_at(states)) == whole[given:]
    drain(engine)
    assert engine.states() == {0: StreamState(given=20, ended=True), 1: StreamState(given=20, ended=True)}
    assert drain(engine_at(engine.states())) == []


def test_the_caller_may_draw_between() -> None:
    whole = drain(engine_at())
    engine = engine_at()
    own = random.Random(4)
    random.seed(4)
    for expected in whole:
        assert random.random() == own.random()
        before = global_state()
        assert engine.next() == expected
        assert global_state() == before


def test_generators_are_put_back_after_an_error() -> None:
    def fail(element: int) -> int:
        random.random()
        return 1 // (3 - element)

    before = global_state()
    loader = loader_of(IterableWrapper(range(9)).map(fail))
    with pytest.raises(ZeroDivisionError):
        list(loader)
    assert global_state() == before


def test_a_graph_without_user_functions_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("touched")

    loader = loader_of(IterableWrapper(range(9)).shuffle().batch(2))
    monkeypatch.setattr(random, "seed", refuse)
    monkeypatch.setattr(random, "getstate", refuse)
    assert len(list(loader)) == 5
    loader.state_dict()


def test_the_state_after_an_error_is_before_the_failing_unit() -> None:
    fails = [True]

    def fail(element: int) -> int:
        return 1 // (0 if fails[0] and element == 21 else 1) and element

    pipe = IterableWrapper(range(40)).sharding_filter().map(fail).map(with_draws).batch(3)
    loader = loader_of(pipe, 0, 2)
    given = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for batch in loader:
            given.append(batch)
    state = through_json(loader.state_dict())
    fails[0] = False
    whole = list(loader_of(pipe, 0, 2))
    loader.load_state_dict(state)
    assert given + list(loader) == whole


def test_hooks() -> None:
    seeds = []

    def reset(pipe: Any, info: Any, generator: Any) -> Any:
        assert (info.num_workers, info.worker_id) == (1, 0)
        seeds.append((generator.generate_shared_seed(), generator.generate_seed()))
        return pipe.map(lambda x: (len(seeds), x))

    service = InProcessReadingService(init_fn=lambda pipe, info: pipe.batch(2), reset_fn=reset)
    loader = DataLoader2(IterableWrapper(range(4)), reading_service=service)
    loader.seed(2**64 - 1)
    assert list(loader) == [(1, [0, 1]), (1, [2, 3])]
    take(iter(loader), 1)
    state = through_json(loader.state_dict())
    loader.load_state_dict(state)
    assert list(loader) == [(3, [2, 3])]
    assert len(set(seeds)) == 2
    assert seeds[1] == seeds[2]


def test_prefetch_warns() -> None:
    with pytest.warns(UserWarning, match="no effect in one process"):
        InProcessReadingService(prefetch_cnt=4)
