from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stage_contract import check_everywhere, check_stage, plain, saved, start

from pipes.iter import IterableWrapper, Mapper
from pipes.map import SequenceWrapper


def draw(x: int, rng: np.random.Generator) -> tuple[int, float]:
    return x, rng.random()


def test_contract() -> None:
    check_stage(lambda: IterableWrapper(range(5)).map(lambda x: 2 * x), [0, 2, 4, 6, 8])
    check_everywhere(lambda source: source.map(lambda x: x + 1))


def test_keyed_contract() -> None:
    check_stage(lambda: IterableWrapper(range(9)).map(draw, rng=True))
    check_everywhere(lambda source: source.map(draw, rng=True))
    check_stage(lambda: IterableWrapper(range(9)).map(lambda x, rng: x, rng=True).map(draw, rng=True).shuffle(3))


def test_keyed_draws_differ_by_element_epoch_stage_and_stream() -> None:
    def graph() -> Any:
        return (
            IterableWrapper(range(20))
            .sharding_filter()
            .map(draw, rng=True)
            .map(lambda x, rng: (*x, rng.random()), rng=True)
        )

    seen = [
        values
        for epoch in (0, 1)
        for stream in (0, 1)
        for _, *values in start(graph(), epoch=epoch, stream=stream, streams=2)
    ]
    flat = [value for pair in seen for value in pair]
    assert len(flat) == len(set(flat)) == 80


def test_keyed_draws_do_not_depend_on_what_the_function_draws() -> None:
    def greedy(x: int, rng: np.random.Generator) -> float:
        rng.random(x * 7)
        return rng.normal()

    def modest(x: int, rng: np.random.Generator) -> float:
        rng.random(x * 7)
        return rng.normal()

    assert list(IterableWrapper(range(9)).map(greedy, rng=True)) == list(
        IterableWrapper(range(9)).map(modest, rng=True)
    )


def test_a_restore_calls_the_function_only_for_what_is_held() -> None:
    calls: list[int] = []

    def counted(x: int) -> int:
        calls.append(x)
        return x

    def graph() -> Any:
        return IterableWrapper(range(500)).map(counted).shuffle(10)

    run = start(graph())
    iterator = iter(run)
    got = [next(iterator) for _ in range(300)]
    state = saved(run)
    calls.clear()
    rest = list(start(graph(), state))
    assert sorted(got + rest) == list(range(500))
    assert len(calls) == 200


@pytest.mark.parametrize("rng", [False, True])
def test_an_error_names_stage_line_and_element_also_in_a_restore(rng: bool) -> None:
    broken = False

    def function(x: int, rng: Any = None) -> int:
        if broken:
            raise KeyError("token=hush")
        return x

    def graph() -> Any:
        return IterableWrapper(range(30)).map(function, rng=rng).shuffle(5)

    run = start(graph())
    next(iter(run))
    state = saved(run)
    broken = True
    for go in (lambda: list(graph()), lambda: list(start(graph(), state))):
        with pytest.raises(KeyError) as caught:
            go()
        [note] = caught.value.__notes__
        assert "in stage 1:Mapper built at" in note
        assert "test_mapping.py:" in note
        assert "on element " in note


def test_length_is_the_sources() -> None:
    assert len(IterableWrapper(range(5)).map(str)) == 5


def test_plain_iterables_can_be_mapped_by_the_class() -> None:
    assert list(Mapper([1, 2], str)) == ["1", "2"]  # type: ignore[arg-type]


def test_map_pipes_are_mapped_when_asked() -> None:
    calls: list[int] = []
    pipe = SequenceWrapper([10, 20]).map(lambda x: calls.append(x) or x + 1)
    assert calls == []
    assert pipe[1] == 21
    assert calls == [20]
    assert len(pipe) == 2
    assert plain(list(pipe.to_iter_datapipe())) == [11, 21]
    with pytest.raises(TypeError, match="expected a function"):
        SequenceWrapper([1]).map(None)  # type: ignore[arg-type]
