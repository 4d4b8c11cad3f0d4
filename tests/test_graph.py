from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipes import IterDataPipe
from pipes.errors import GraphError
from pipes.graph import (
    apply_random_seed,
    apply_sharding,
    apply_shuffle_settings,
    clone,
    find_dps,
    get_all_graph_pipes,
    list_dps,
    remove_dp,
    replace_dp,
    set_datapipes_seed,
    set_graph_random_seed,
    traverse,
    traverse_dps,
)
from pipes.iter import IterableWrapper, Mapper, Shuffler
from pipes.map import SequenceWrapper


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


class Seeds:
    """Hands out seeds that say where they came from."""

    def __init__(self) -> None:
        self.shared, self.own = 100, 200

    def generate_shared_seed(self) -> int:
        self.shared += 1
        return self.shared

    def generate_seed(self) -> int:
        self.own += 1
        return self.own


def test_traverse_nests_inputs() -> None:
    a, b = numbers(2), numbers(3)
    mapped = a.map(str)
    joined = mapped.zip(b)
    assert traverse_dps(joined) == {
        id(joined): (joined, {id(mapped): (mapped, {id(a): (a, {})}), id(b): (b, {})}),
    }
    assert traverse_dps(a) == {id(a): (a, {})}


def test_traverse_goes_into_collections_and_map_pipes() -> None:
    class Holder(IterDataPipe[int]):
        def __init__(self, parts: Any) -> None:
            self.parts = parts

    a, b, c, d = numbers(1), numbers(2), SequenceWrapper([1]).map(str), numbers(3)
    holder = Holder({"x": [a, {"y": (b, {c})}], d: 1})
    assert {id(pipe) for pipe in list_dps(traverse_dps(holder))} == {id(x) for x in (holder, a, b, c, c.datapipe, d)}


def test_traverse_survives_cycles_and_pipes_that_cannot_be_hashed() -> None:
    class Odd(IterDataPipe[int]):
        def __init__(self, source: Any) -> None:
            self.source = source

        def __eq__(self, other: object) -> Any:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    first = Odd(None)
    second = Odd(first)
    first.source = second
    assert [id(each) for each in list_dps(traverse_dps(second))] == [id(second), id(first)]
    clone(second)


def test_the_old_name_warns() -> None:
    pipe = numbers(2).map(str)
    with pytest.warns(FutureWarning, match="traverse_dps"):
        assert traverse(pipe, only_datapipe=True).keys() == traverse_dps(pipe).keys()


@pytest.mark.parametrize("function", [traverse_dps, clone])
def test_what_is_no_pipe_is_refused(function: Any) -> None:
    with pytest.raises(RuntimeError, match="not a list"):
        function([1])


def test_list_is_breadth_first_each_once() -> None:
    source = numbers(9)
    left, right = source.fork(2)
    mapped = left.map(str)
    joined = mapped.zip(right)
    listed = list_dps(traverse_dps(joined))
    assert [id(each) for each in listed] == [id(x) for x in (joined, mapped, right, left, right.main, source)]
    assert get_all_graph_pipes(traverse_dps(joined)) == listed


def test_excluding_a_pipe_excludes_what_is_before_it() -> None:
    source = numbers(9)
    mapped = source.map(str)
    batched = mapped.batch(2)
    assert list_dps(traverse_dps(batched), mapped) == [batched]
    assert list_dps(traverse_dps(batched), [source]) == [batched, mapped]


def test_find_is_by_exact_type() -> None:
    class Own(Mapper[Any]):
        pass

    pipe = Own(numbers(3).map(str), len)
    graph = traverse_dps(pipe)
    assert find_dps(graph, Mapper) == [pipe.datapipe]
    assert find_dps(graph, Own) == [pipe]
    assert find_dps(graph, Shuffler) == []


def test_replace_everywhere_and_in_containers() -> None:
    source = numbers(3)
    left, right = source.fork(2)
    joined = left.zip(right)
    replace_dp(traverse_dps(joined), source, numbers(2))
    assert list(joined) == [(0, 0), (1, 1)]
    other = numbers(2).map(str)
    graph = replace_dp(traverse_dps(joined), left, other)
    assert list(joined) == [("0", 0), ("1", 1)]
    assert graph.keys() == {id(joined)}
    pairs = numbers(2).concat(numbers(1))
    assert type(pairs.datapipes) is tuple
    replace_dp(traverse_dps(pairs), pairs.datapipes[1], numbers(3))
    assert list(pairs) == [0, 1, 0, 1, 2]


def test_replacing_the_end_gives_the_new_graph() -> None:
    pipe = numbers(3).map(str)
    new = pipe.batch(2)
    assert replace_dp(traverse_dps(pipe), pipe, new) == traverse_dps(new)


def test_inserting_and_removing_are_inverse() -> None:
    source = numbers(4)
    last = source.batch(2)
    doubled = source.map(lambda x: 2 * x)
    graph = replace_dp(traverse_dps(last), source, doubled)
    assert list(last) == [[0, 2], [4, 6]]
    graph = remove_dp(graph, doubled)
    assert list(last) == [[0, 1], [2, 3]]
    assert list_dps(graph) == [last, source]


def test_removing_the_end_gives_what_was_before_it() -> None:
    source = numbers(4)
    last = source.batch(2)
    assert remove_dp(traverse_dps(last), last) == traverse_dps(source)


def test_sources_and_joins_cannot_be_removed() -> None:
    source = numbers(2)
    joined = source.zip(numbers(3))
    graph = traverse_dps(joined)
    with pytest.raises(RuntimeError, match="Cannot remove the source DataPipe"):
        remove_dp(graph, source)
    with pytest.raises(RuntimeError, match="Cannot remove the receiving DataPipe"):
        remove_dp(graph, joined)


def test_a_graph_of_several_ends_is_refused() -> None:
    a, b = numbers(1), numbers(2)
    with pytest.raises(GraphError, match="one end, not 2"):
        replace_dp({**traverse_dps(a), **traverse_dps(b)}, a, b)


def test_a_clone_shares_functions_and_data_but_no_pipes() -> None:
    data = [[1], [2], [3]]
    source = IterableWrapper(data)
    left, right = source.shuffle(3).set_seed(1).fork(2)
    pipe = left.zip(right.map(len))
    iterator = iter(pipe)
    first = next(iterator)
    copied = clone(pipe)
    originals = {id(each) for each in list_dps(traverse_dps(pipe))}
    copies = list_dps(traverse_dps(copied))
    assert len(copies) == len(originals)
    assert not originals & {id(each) for each in copies}
    [wrapper] = find_dps(traverse_dps(copied), IterableWrapper)
    assert wrapper.iterable is data
    assert repr(copied) == repr(pipe)
    given = list(copied)
    assert [first, *iterator] == given


def test_a_clone_may_have_other_pipes_in_places() -> None:
    source = numbers(3)
    pipe = source.map(str).batch(2)
    assert list(clone(pipe, {id(source): numbers(5)})) == [["0", "1"], ["2", "3"], ["4"]]
    assert list(pipe) == [["0", "1"], ["2"]]


# The functions of torch.utils.data.graph_settings.


def test_shuffles_are_switched_together() -> None:
    pipe = numbers(30).shuffle(30).batch(2).shuffle(9)
    assert apply_shuffle_settings(pipe, False) is pipe
    assert list(pipe.unbatch()) == list(range(30))
    apply_shuffle_settings(pipe, None)
    assert list(pipe.unbatch()) == list(range(30))
    apply_shuffle_settings(pipe, True)
    assert list(pipe.unbatch()) != list(range(30))


def test_a_shuffle_is_added_where_there_is_none() -> None:
    pipe = numbers(30)
    with pytest.warns(UserWarning, match="has no shuffle, so one is added at its end"):
        shuffled = apply_shuffle_settings(pipe, True)
    assert isinstance(shuffled, Shuffler)
    assert apply_shuffle_settings(pipe, False) is pipe


def test_a_torch_generator_seeds_every_shuffle() -> None:
    def orders(seed: int) -> list[int]:
        pipe = numbers(30).shuffle(30).shuffle(5)
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))
        return list(pipe)

    assert orders(1) == orders(1) != orders(2)


def test_seeds_are_shared_above_a_sharding_filter_only() -> None:
    above = numbers(30).shuffle()
    below = above.sharding_filter().shuffle()
    other = numbers(30).shuffle()
    joined = below.zip(other)
    assert set_graph_random_seed(joined, Seeds()) is joined
    assert above._seed == 101
    assert {below._seed, other._seed} == {201, 202}
    set_datapipes_seed([other, numbers(1)], Seeds(), distributed_shared=True)
    assert other._seed == 101


def test_sharding_is_applied_by_duck_typing() -> None:
    class TwoArguments(IterDataPipe[int]):
        told: tuple[int, ...] = ()

        def __init__(self, source: Any) -> None:
            self.source = source

        def __iter__(self) -> Iterator[int]:
            yield from self.source

        def apply_sharding(self, count: int, own: int) -> None:
            self.told = (count, own)

    pipe = TwoArguments(numbers(9))
    assert apply_sharding(pipe, 3, 1) is pipe
    assert pipe.told == (3, 1)
    both = numbers(9).sharding_filter().zip(numbers(9).sharding_filter())
    apply_sharding(both, 3, 1, 2)
    assert list(both) == [(1, 1), (4, 4), (7, 7)]


def test_sharding_twice_on_one_path_is_refused() -> None:
    pipe = numbers(9).sharding_filter().map(str).sharding_filter()
    with pytest.raises(RuntimeError, match="Sharding twice on a single pipeline"):
        apply_sharding(pipe, 2, 0)
    levels = numbers(8).sharding_filter(2).sharding_filter(3)
    apply_sharding(levels, 2, 1, 2)
    apply_sharding(levels, 2, 1, 3)
    assert list(levels) == [3, 7]
