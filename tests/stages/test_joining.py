from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from stage_contract import check_everywhere, check_stage, start

from pipes.errors import GraphError, StateError
from pipes.iter import Concater, IterableWrapper, Multiplexer, MultiplexerLongest, Zipper, ZipperLongest


def numbers(size: int, first: int = 0) -> IterableWrapper[int]:
    return IterableWrapper(range(first, first + size))


def test_concat_contract() -> None:
    check_stage(lambda: numbers(3).concat(numbers(0), numbers(2, 10)), [0, 1, 2, 10, 11])
    check_stage(lambda: numbers(5).concat(numbers(0), numbers(4).shuffle(2)))
    check_everywhere(lambda source: source.concat(numbers(0), numbers(4, 50).shuffle(2)))
    check_everywhere(lambda source: numbers(4, 50).shuffle(2).concat(source))


def test_zip_contract() -> None:
    check_stage(lambda: numbers(3).zip(numbers(2, 10)), [(0, 10), (1, 11)])
    check_stage(lambda: numbers(9).shuffle(3).zip(numbers(7), numbers(8).shuffle(2)))
    check_everywhere(lambda source: source.zip(numbers(13, 50).shuffle(2)))
    check_everywhere(lambda source: numbers(13, 50).shuffle(2).zip(source))


def test_mux_contract() -> None:
    check_stage(lambda: numbers(3).mux(numbers(2, 10), numbers(9, 20)), [0, 10, 20, 1, 11, 21])
    check_stage(lambda: numbers(9).shuffle(3).mux(numbers(7), numbers(12)))
    check_everywhere(lambda source: source.mux(numbers(13, 50).shuffle(2)))
    check_everywhere(lambda source: numbers(13, 50).shuffle(2).mux(source))


def test_zip_longest_contract() -> None:
    check_stage(lambda: numbers(2).zip_longest(numbers(0), numbers(1, 10)), [(0, None, 10), (1, None, None)])
    check_stage(lambda: numbers(9).shuffle(3).zip_longest(numbers(7), numbers(12).shuffle(2), fill_value=-1))
    check_everywhere(lambda source: source.zip_longest(numbers(13, 50).shuffle(2)))
    check_everywhere(lambda source: numbers(5, 50).shuffle(2).zip_longest(source))


def test_mux_longest_contract() -> None:
    check_stage(lambda: numbers(3).mux_longest(numbers(0), numbers(5, 10)), [0, 10, 1, 11, 2, 12, 13, 14])
    check_stage(lambda: numbers(9).shuffle(3).mux_longest(numbers(7), numbers(12)))
    check_everywhere(lambda source: source.mux_longest(numbers(13, 50).shuffle(2)))
    check_everywhere(lambda source: numbers(5, 50).shuffle(2).mux_longest(source))


def test_mux_longest_refuses_the_turn_of_no_input() -> None:
    with pytest.raises(StateError, match="has no input 2"):
        start(numbers(3).mux_longest(numbers(3)), {"2:MultiplexerLongest": {"turn": 2}})


def test_joins_of_joins() -> None:
    check_stage(lambda: numbers(6).zip(numbers(5).mux(numbers(5, 9))).concat(numbers(4).zip(numbers(4))).shuffle(3))


def test_plus_concatenates() -> None:
    assert list(numbers(2) + numbers(2, 5)) == [0, 1, 5, 6]


def test_zip_ends_with_the_shortest_also_beside_an_endless_one() -> None:
    endless = IterableWrapper(count(), deepcopy=False)
    assert list(numbers(2).zip(endless)) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("join", [Concater, Zipper, Multiplexer, ZipperLongest, MultiplexerLongest])
def test_no_pipes_or_none_is_a_value_error(join: Any) -> None:
    with pytest.raises(ValueError, match="needs at least one pipe"):
        join()
    if join not in (Multiplexer, MultiplexerLongest):
        with pytest.raises(ValueError, match=r"input 1 of .* is None"):
            join(numbers(1), None)


@pytest.mark.parametrize("join", [Concater, Zipper, ZipperLongest])
def test_only_mux_takes_plain_iterables(join: Any) -> None:
    with pytest.raises(TypeError, match=r"input 1 of .* is a list, not a pipe; wrap it in IterableWrapper"):
        join(numbers(1), [1, 2])
    assert list(Multiplexer(numbers(2), [7, 8])) == [0, 7, 1, 8]  # type: ignore[arg-type]
    assert list(MultiplexerLongest(numbers(2), [7])) == [0, 7, 1]  # type: ignore[arg-type]


def test_lengths() -> None:
    assert len(numbers(3).concat(numbers(4))) == 7
    assert len(numbers(3).zip(numbers(4))) == 3
    assert len(numbers(3).mux(numbers(4))) == 6
    assert len(numbers(3).zip_longest(numbers(4), numbers(1))) == 4
    assert len(numbers(3).mux_longest(numbers(4), numbers(1))) == 8
    for join in (numbers(3).concat, numbers(3).zip, numbers(3).mux, numbers(3).zip_longest, numbers(3).mux_longest):
        with pytest.raises(TypeError, match="Filter"):
            len(join(numbers(3).filter(bool)))


@pytest.mark.parametrize("join", [Concater, Zipper, Multiplexer, ZipperLongest, MultiplexerLongest])
def test_one_pipe_twice_is_refused_and_fork_is_named(join: Any) -> None:
    source = numbers(3)
    with pytest.raises(GraphError, match=r"0:IterableWrapper feeds two stages .*\.fork\(2\)"):
        list(join(source, source))
    with pytest.raises(GraphError, match=r"\.fork\(2\)"):
        list(join(source.map(str), source.map(int)))
