from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import pytest
from stage_contract import check_everywhere, check_stage, start

from pipes import IterDataPipe
from pipes.config import dump_graph, load_graph
from pipes.errors import StaleIteratorError
from pipes.iter import Demultiplexer, Forker, IterableWrapper


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


def fork_and_zip() -> IterDataPipe[Any]:
    left, right = numbers(20).fork(2)
    return left.zip(right.map(lambda x: -x))


def fork_between_shuffles() -> IterDataPipe[Any]:
    left, right = numbers(40).shuffle(6).fork(2)
    return left.shuffle(5).zip(right)


def fork_of_fork() -> IterDataPipe[Any]:
    left, right = numbers(15).shuffle(4).fork(2)
    first, second = left.fork(2)
    return first.zip(second.shuffle(3), right)


def fork_read_one_after_the_other() -> IterDataPipe[Any]:
    left, right = numbers(12).shuffle(4).fork(2)
    return left.concat(right.shuffle(3))


def demux_and_concat() -> IterDataPipe[Any]:
    first, second, third = numbers(40).shuffle(4).demux(3, lambda x: x % 3)
    return first.concat(second.shuffle(3), third)


def demux_uneven() -> IterDataPipe[Any]:
    most, few = numbers(50).demux(2, lambda x: int(x % 5 == 0))
    return most.shuffle(4).zip(few.batch(1))


@pytest.mark.parametrize("make", [fork_and_zip, fork_between_shuffles])
def test_fork_contract(make: Any) -> None:
    check_stage(make)


# The zip ends with its shortest input, so the next epoch begins before the other child was read to its end.
@pytest.mark.filterwarnings("ignore:.*DemultiplexerSource starts again although")
@pytest.mark.parametrize(
    "make",
    [fork_of_fork, fork_read_one_after_the_other, demux_and_concat, demux_uneven],
    ids=lambda make: make.__name__,
)
def test_contract_of_uneven_readers(make: Any) -> None:
    check_stage(make, epochs=1, streams=(1, 2), equal_state=False)


def test_demux_everywhere() -> None:
    def both(source: IterDataPipe[Any]) -> IterDataPipe[Any]:
        even, odd = source.demux(2, lambda x: x % 2)
        return even.concat(odd)

    check_everywhere(both, 14, equal_state=False)


def test_children_give_all_elements_and_the_same_objects() -> None:
    items = [[1], [2]]
    left, right = IterableWrapper(items, deepcopy=False).fork(2)
    assert all(a is b for a, b in left.zip(right))
    left, right = IterableWrapper(items, deepcopy=False).fork(2, copy="shallow")
    assert all(a == b and a is not b for a, b in left.zip(right))
    left, right = IterableWrapper([[[1]]], deepcopy=False).fork(2, copy="deep")
    assert all(a == b and a[0] is not b[0] for a, b in left.zip(right))


def test_fork_of_one_is_the_pipe_and_demux_of_one_a_list() -> None:
    source = numbers(3)
    assert source.fork(1) is source
    [only] = source.demux(1, lambda x: 0)
    assert list(only) == [0, 1, 2]


@pytest.mark.parametrize("stage", [lambda n: numbers(3).fork(n), lambda n: numbers(3).demux(n, lambda x: 0)])
def test_refusals(stage: Any) -> None:
    for count in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            stage(count)
    with pytest.raises(ValueError, match="'shallow' or 'deep'"):
        numbers(3).fork(2, copy="other")
    with pytest.raises(ValueError, match="buffer_size"):
        numbers(3).fork(2, buffer_size=-2)
    with pytest.raises(TypeError, match="expected a function"):
        numbers(3).demux(2, 5)  # type: ignore[arg-type]


def test_a_child_too_far_ahead_is_an_error_for_all() -> None:
    pipes = numbers(30).fork(2, buffer_size=5)
    ahead = iter(pipes[0])
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(BufferError, match=r"ForkerSource buffer overflow .* more than 5 elements"):
        next(ahead)


def test_the_buffer_of_demux_counts_all_children_together() -> None:
    pipes = numbers(30).demux(3, lambda x: x % 3, buffer_size=4)
    iterator = iter(pipes[0])
    assert [next(iterator) for _ in range(3)] == [0, 3, 6]
    with pytest.raises(BufferError, match="DemultiplexerSource buffer overflow"):
        next(iterator)


def test_unlimited_buffers_warn() -> None:
    with pytest.warns(UserWarning, match="without limit"):
        left, right = numbers(2000).fork(2, buffer_size=-1)
    assert list(left) == list(right) == list(range(2000))
    with pytest.warns(UserWarning, match="without limit"):
        numbers(3).demux(2, lambda x: 0, buffer_size=-1)


@pytest.mark.parametrize("answer", [2, -1, None])
def test_a_number_out_of_range_is_an_error(answer: Any) -> None:
    first, _ = numbers(3).demux(2, lambda x: answer)
    with pytest.raises(ValueError, match=f"gave {answer!r}, but the children are numbered 0 to 1") as caught:
        list(first)
    assert "on element 0" in caught.value.__notes__[0]


def test_demux_can_drop_none() -> None:
    even, other = numbers(9).demux(2, lambda x: None if x % 3 == 0 else x % 2, drop_none=True)
    assert list(even) == [2, 4, 8]
    assert list(other) == [1, 5, 7]


def test_lengths() -> None:
    left, _ = numbers(7).fork(2)
    assert len(left) == 7
    first, _ = numbers(7).demux(2, lambda x: 0)
    with pytest.raises(TypeError, match="has no length"):
        len(first)


# Generations: the children read one run of what they share.


def test_children_can_be_read_one_after_the_other_and_again() -> None:
    left, right = numbers(10).shuffle(10).fork(2)
    first = list(left)
    assert list(right) == first
    second = list(left)
    assert list(right) == second
    assert sorted(second) == list(range(10))
    assert second != first


def test_children_in_step() -> None:
    left, right = numbers(5).fork(2)
    assert list(zip(left, right, strict=True)) == [(i, i) for i in range(5)]
    assert list(zip(left, right, strict=True)) == [(i, i) for i in range(5)]


def test_starting_a_child_again_resets_all_children_and_warns() -> None:
    left, right = numbers(10).fork(2)
    old_left, old_right = iter(left), iter(right)
    assert next(old_left) == next(old_right) == 0
    with pytest.warns(UserWarning, match="not exhausted"):
        new_left = iter(left)
    assert next(new_left) == 0
    for old in (old_left, old_right):
        with pytest.raises(StaleIteratorError, match="took over"):
            next(old)
    assert list(right) == list(range(10))


def test_starting_again_after_the_end_does_not_warn() -> None:
    left, right = numbers(4).fork(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert list(left) == list(right) == [0, 1, 2, 3]


def test_a_graph_over_both_children_can_be_iterated_again_and_again() -> None:
    left, right = numbers(4).fork(2)
    both = left.zip(right)
    for _ in range(3):
        assert list(both) == [(i, i) for i in range(4)]


def test_an_abandoned_generation_is_freed_with_its_pipes() -> None:
    import gc
    import weakref

    class Data(list[int]):
        pass

    data = Data(range(100))
    gone = weakref.ref(data)
    left, right = IterableWrapper(data, deepcopy=False).fork(2)
    iterator = iter(left)
    next(iterator)
    del iterator, left, right, data
    gc.collect()
    assert gone() is None


def test_children_and_their_makers_print_without_private_names() -> None:
    left, right = numbers(4).fork(2)
    assert "_" not in repr(left.zip(right)).replace("num_instances", "")
    assert isinstance(Forker, type)
    assert isinstance(Demultiplexer, type)


def test_each_stream_reads_a_forks_shuffle_in_the_same_order_above_the_shard_point() -> None:
    left, right = numbers(30).shuffle(10).fork(2)
    pipe = left.zip(right).sharding_filter()
    shards = [list(start(pipe, stream=s, streams=3)) for s in range(3)]
    assert sorted(chain(*shards)) == [(i, i) for i in range(30)]


def test_a_buffer_of_nothing_lets_children_go_in_step() -> None:
    even, odd = numbers(6).demux(2, lambda x: x % 2, buffer_size=0)
    one, two = iter(even), iter(odd)
    assert [next(one), next(two), next(one), next(two)] == [0, 1, 2, 3]


def dealt(size: int, count: int, **given: int) -> list[IterDataPipe[int]]:
    return numbers(size).round_robin_demux(count, **given)


def test_round_robin_gives_element_i_to_child_i_modulo_their_number() -> None:
    assert [list(child) for child in dealt(7, 3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [len(child) for child in dealt(7, 3)] == [3, 2, 2]
    assert [len(child) for child in dealt(2, 3)] == [1, 1, 0]
    source = numbers(3)
    assert source.round_robin_demux(1) == [source]
    with pytest.raises(ValueError, match="num_instances must be at least 1"):
        dealt(3, 0)


def test_round_robin_limits_what_waits_in_all_other_children() -> None:
    first, second, third = dealt(20, 3, buffer_size=4)
    assert list(first.zip(second, third))[-1] == (15, 16, 17)
    with pytest.raises(BufferError, match=r"RoundRobinDemultiplexerSource buffer overflow .* more than 4 elements"):
        list(dealt(20, 3, buffer_size=4)[0])


def test_round_robin_in_yaml_takes_the_number_from_the_names() -> None:
    text = """
    version: 1
    pipes:
      "a, b":
        - IterableWrapper: !range 5
        - round_robin_demux: {buffer_size: 3}
      "c, d":
        - IterableWrapper: [[1, 10], [2, 20]]
        - unzip: 2
    pipe:
      - zip: [$a, $b, $c, $d]
    """
    pipe = load_graph(text)
    assert list(pipe) == [(0, 1, 1, 10), (2, 3, 2, 20)]
    assert list(load_graph(dump_graph(pipe))) == list(pipe)
