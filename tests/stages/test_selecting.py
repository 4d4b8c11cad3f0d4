from __future__ import annotations

from typing import Any

import pytest
from stage_contract import check_everywhere, check_stage, start

from pipes.errors import GraphError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


def test_header_contract() -> None:
    check_stage(lambda: numbers(10).header(4), [0, 1, 2, 3])
    check_stage(lambda: numbers(3).header(4), [0, 1, 2])
    check_stage(lambda: numbers(3).header(0), [])
    check_stage(lambda: numbers(3).header(None), [0, 1, 2])
    check_everywhere(lambda source: source.header(10))


def test_skip_contract() -> None:
    check_stage(lambda: numbers(6).skip(4), [4, 5])
    check_stage(lambda: numbers(3).skip(4), [])
    check_everywhere(lambda source: source.skip(3))


def test_enumerate_contract() -> None:
    check_stage(lambda: IterableWrapper("abc").enumerate(), [(0, "a"), (1, "b"), (2, "c")])
    check_stage(lambda: IterableWrapper("ab").enumerate(-1), [(-1, "a"), (0, "b")])
    check_everywhere(lambda source: source.enumerate(3))


def test_cycle_contract() -> None:
    check_stage(lambda: numbers(2).cycle(3), [0, 1, 0, 1, 0, 1])
    check_stage(lambda: numbers(2).cycle(0), [])
    check_stage(lambda: numbers(0).cycle(2), [])
    check_stage(lambda: numbers(7).shuffle(3).cycle(3))
    check_stage(lambda: numbers(7).shuffle(3).cycle(2).cycle(2).shuffle(5), epochs=1)
    check_everywhere(lambda source: source.cycle(2), 9)


def test_add_index_contract() -> None:
    check_stage(lambda: IterableWrapper([{"x": 5}, {"x": 6}]).add_index(), [{"x": 5, "index": 0}, {"x": 6, "index": 1}])
    check_everywhere(lambda source: source.map(lambda x: {"x": x}).add_index("n"))


def test_add_index_keeps_class_and_input() -> None:
    class Row(dict[str, int]):
        pass

    rows = [Row(x=1), Row(x=2, n=7)]
    pipe = IterableWrapper(rows, deepcopy=False).repeat(2).add_index("n")
    assert list(pipe) == [{"x": 1, "n": 0}, {"x": 1, "n": 1}, {"x": 2, "n": 2}, {"x": 2, "n": 3}]
    assert {type(row) for row in pipe} == {Row}
    assert rows == [{"x": 1}, {"x": 2, "n": 7}]


def test_add_index_to_no_dict_names_stage_and_way_out() -> None:
    with pytest.raises(NotImplementedError, match=r"not into a int: use \.enumerate\(\)") as caught:
        list(numbers(2).add_index())
    assert "in stage 1:IndexAdder" in caught.value.__notes__[0]


def test_set_length_contract() -> None:
    check_stage(lambda: numbers(3).set_length(9), [0, 1, 2])
    check_everywhere(lambda source: source.set_length(3))


def test_set_length_is_that_of_all_streams() -> None:
    for pipe in (
        numbers(9).filter(bool).set_length(7),
        numbers(9).filter(bool).set_length(7).sharding_filter(),
        numbers(9).sharding_filter().filter(bool).set_length(7).map(str),
    ):
        assert len(pipe) == 7
        for streams in (1, 2, 3):
            loader: DataLoader2[Any] = DataLoader2(pipe, num_streams=streams)
            assert len(loader) == 7
    with pytest.raises(AssertionError, match="0 or more, not -1"):
        numbers(3).set_length(-1)


@pytest.mark.parametrize("seed", range(5))
def test_a_resume_inside_a_late_round_uses_that_rounds_draws(seed: int) -> None:
    pipe = numbers(9).shuffle(4).cycle(4).shuffle(3)
    whole = list(start(pipe, epoch=seed))
    run = start(pipe, epoch=seed)
    iterator = iter(run)
    head = [next(iterator) for _ in range(25)]
    assert head + list(start(pipe, run.table(), epoch=seed)) == whole


def test_header_takes_no_more_than_it_gives() -> None:
    taken: list[int] = []
    pipe = numbers(9).map(lambda x: taken.append(x) or x).header(3)
    assert list(pipe) == [0, 1, 2]
    assert taken == [0, 1, 2]


def test_header_of_unknown_length_has_none() -> None:
    unknown = numbers(9).filter(lambda x: x > 5)
    for limit in (20, 2, None):
        with pytest.raises(TypeError, match="Filter"):
            len(unknown.header(limit))
    # What asks for a length as a hint only gets none and goes on.
    assert list(unknown.header(20)) == [6, 7, 8]


def test_lengths() -> None:
    assert len(numbers(9).header(3)) == 3
    assert len(numbers(2).header(3)) == 2
    assert len(numbers(9).skip(3)) == 6
    assert len(numbers(2).skip(3)) == 0
    assert len(numbers(9).enumerate()) == len(numbers(9).add_index()) == 9
    assert len(numbers(9).cycle(3)) == 27
    with pytest.raises(TypeError, match=r"Cycler .* it cycles forever"):
        len(numbers(9).cycle())


@pytest.mark.parametrize("stage", ["header", "skip", "cycle"])
def test_negative_counts_are_refused(stage: str) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        getattr(numbers(3), stage)(-1)


def test_an_endless_cycle_goes_on_and_draws_anew_each_round() -> None:
    iterator = iter(numbers(20).shuffle(20).cycle())
    rounds = [[next(iterator) for _ in range(20)] for _ in range(3)]
    assert [sorted(each) for each in rounds] == [list(range(20))] * 3
    assert rounds[0] != rounds[1] != rounds[2] != rounds[0]


def test_an_endless_cycle_of_nothing_is_an_error() -> None:
    with pytest.raises(GraphError, match="repeats an empty source for ever"):
        list(numbers(0).cycle())
    with pytest.raises(GraphError, match="empty source"):
        list(numbers(5).filter(lambda x: x > 9).cycle())


def test_an_endless_cycle_after_a_resume_at_the_end_of_a_round() -> None:
    pipe = numbers(3).cycle()
    run = start(pipe)
    iterator = iter(run)
    for _ in range(3):
        next(iterator)
    again: Any = iter(start(pipe, run.table()))
    assert [next(again) for _ in range(4)] == [0, 1, 2, 0]
