from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stage_contract import check_everywhere, check_stage, saved, start

from pipes.context import Context
from pipes.errors import StateError
from pipes.iter import IterableWrapper
from pipes.seeds import Draws, derive_key
from pipes.stages.shuffling import held_inputs


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


def shuffled(size: int, buffer: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return list(Context(numbers(size).shuffle(buffer), seed=seed, epoch=epoch).start())


def test_contract() -> None:
    check_stage(lambda: numbers(30).shuffle(7))
    check_stage(lambda: numbers(30).shuffle(7).shuffle(5))
    check_stage(lambda: numbers(5).shuffle(7))
    check_stage(lambda: numbers(7).shuffle(7))
    check_stage(lambda: numbers(0).shuffle(7), [])
    check_stage(lambda: numbers(6).shuffle(1), list(range(6)))
    check_everywhere(lambda source: source.shuffle(5))


def test_contract_over_many_blocks_of_draws() -> None:
    check_stage(lambda: numbers(200).shuffle(3), epochs=1, streams=(1,))


@settings(max_examples=60)
@given(st.integers(0, 400), st.integers(1, 90), st.integers(0, 2**64 - 1))
# A slot that was last hit more than a block of draws ago, also at the end of the input.
@example(5000, 300, 1)
def test_held_inputs_agree_with_a_shuffle_that_runs(inputs: int, buffer: int, seed: int) -> None:
    key = derive_key(seed)
    draws = Draws(key)
    slots = list(range(min(buffer, inputs)))
    taken, given_ = len(slots), 0
    states = [(taken, given_, list(slots))]
    for slot in draws.below(buffer, max(0, inputs - buffer)):
        slots[slot] = taken
        taken, given_ = taken + 1, given_ + 1
        states.append((taken, given_, list(slots)))
    for slot in draws.below(np.arange(len(slots), 0, -1), len(slots)):
        last = slots.pop()
        if slot < len(slots):
            slots[slot] = last
        given_ += 1
        states.append((taken, given_, list(slots)))
    for taken, given_, held in states[:: max(1, len(states) // 17)]:
        assert held_inputs(Draws(key), buffer, taken, given_) == held


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = {tuple(shuffled(100, 100, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert shuffled(100, 100, 2, 1) == shuffled(100, 100, 2, 1)


def test_plain_iteration_reshuffles_each_epoch_and_follows_torchs_seed() -> None:
    torch.manual_seed(5)
    pipe = numbers(50).shuffle(50)
    first = [list(pipe) for _ in range(3)]
    torch.manual_seed(5)
    pipe = numbers(50).shuffle(50)
    assert [list(pipe) for _ in range(3)] == first
    torch.manual_seed(6)
    assert list(numbers(50).shuffle(50)) not in first
    assert first[0] != first[1] != first[2] != first[0]


def test_iterating_moves_no_global_generator() -> None:
    import random

    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    list(numbers(50).shuffle(5).map(lambda x, rng: rng.random(), rng=True))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_set_seed_restarts_the_sequence_of_epochs() -> None:
    pipe = numbers(30).shuffle(30)
    list(pipe)
    assert pipe.set_seed(3) is pipe
    first = [list(pipe) for _ in range(3)]
    list(pipe)
    pipe.set_seed(3)
    assert [list(pipe) for _ in range(3)] == first
    pipe.set_seed(4)
    assert list(pipe) != first[0]


def test_a_shuffle_can_be_switched_off() -> None:
    pipe = numbers(30).shuffle(30)
    assert pipe.set_shuffle(False) is pipe
    assert list(pipe) == list(range(30))
    pipe.set_shuffle(True)
    assert list(pipe) != list(range(30))
    check_stage(lambda: numbers(9).shuffle(4).set_shuffle(False).shuffle(3))


def test_batches_can_be_opened_first() -> None:
    pipe = numbers(20).batch(4).shuffle(5, unbatch_level=1)
    assert sorted(pipe) == list(range(20))
    check_stage(lambda: numbers(12).batch(4).shuffle(5, unbatch_level=1), epochs=1)


def test_length_and_refusals() -> None:
    assert len(numbers(9).shuffle()) == 9
    for size in (0, -1):
        with pytest.raises(AssertionError, match="at least 1"):
            numbers(9).shuffle(size)


def test_an_element_is_given_as_soon_as_the_buffer_is_full() -> None:
    taken: list[int] = []
    iterator = iter(numbers(100).map(lambda x: taken.append(x) or x).shuffle(10))
    next(iterator)
    assert len(taken) <= 12


# D10 of the cases; the bounds are its own.


def test_six_streams_give_every_element_once_in_an_order_of_each_epoch() -> None:
    pipe = numbers(1000).shuffle(1000).sharding_filter()

    def run(seed: int, epoch: int) -> list[list[int]]:
        return [list(Context(pipe, seed=seed, epoch=epoch, stream=s, streams=6).start()) for s in range(6)]

    first = run(1, 0)
    assert sorted(chain(*first)) == list(range(1000))
    assert run(1, 0) == first
    assert run(1, 1) != first
    assert run(2, 0) != first


def test_every_element_is_as_likely_to_come_first() -> None:
    counts = np.bincount([shuffled(10, 10, seed)[0] for seed in range(5000)], minlength=10)
    assert float(((counts - 500) ** 2 / 500).sum()) < 27.9


def test_a_small_buffer_shuffles_within_its_reach() -> None:
    order = shuffled(10_000, 100)
    assert sorted(order) == list(range(10_000))
    assert max(element - place for place, element in enumerate(order)) <= 100
    assert sum(b == a + 1 for a, b in pairwise(order)) < 120


def test_the_order_of_shards_differs_over_epochs() -> None:
    assert len({tuple(shuffled(10, 10, 0, epoch)) for epoch in range(3)}) == 3


def test_epochs_are_uncorrelated() -> None:
    first, second = (np.argsort(shuffled(10_000, 10_000, 0, epoch)) for epoch in (0, 1))
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.05


# State.


def big(calls: list[int]) -> Any:
    def counted(x: int) -> int:
        calls[0] += 1
        return x

    return IterableWrapper(range(1_000_000)).map(counted).shuffle(1000)


def test_a_restore_at_ninety_percent_of_a_million_reads_a_few_thousand() -> None:
    calls = [0]
    run = start(big(calls))
    iterator = iter(run)
    for _ in range(900_000):
        element = next(iterator)
    state = saved(run)
    expected = [next(iterator) for _ in range(5000)]
    assert element is not None
    run.context.close()
    calls[0] = 0
    again = start(big(calls), state)
    assert calls[0] <= 1000
    assert [element for element, _ in zip(again, range(5000), strict=False)] == expected
    assert calls[0] <= 15_000
    assert len(str(state)) < 1000
    assert state["2:Shuffler"]["anchor"]["taken"] > 885_000


def test_the_counts_of_a_state_are_few_and_hold_no_elements() -> None:
    run = start(IterableWrapper(["secret"] * 100).shuffle(10))
    iterator = iter(run)
    for _ in range(50):
        next(iterator)
    assert saved(run) == {"1:Shuffler": {"taken": 60, "given": 50, "anchor": {"taken": 10, "table": {
        "0:IterableWrapper": {"at": 10}}}}}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"given": 61},
        {"given": 2**70},
        {"taken": 55, "given": 3},
        {"taken": None},
        {"anchor": None},
        {"anchor": {"taken": 61, "table": {}}},
        # Of what it holds, only the newest lies behind it.
        {"anchor": {"taken": 59, "table": {"0:IterableWrapper": {"at": 59}}}},
        {"anchor": {"taken": 10, "table": []}},
    ],
)
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    run = start(numbers(100).shuffle(10))
    iterator = iter(run)
    for _ in range(50):
        next(iterator)
    state = saved(run)
    state["1:Shuffler"].update(change)
    with pytest.raises(StateError, match="1:Shuffler"):
        start(numbers(100).shuffle(10), state)


def test_data_that_became_shorter_or_longer_is_refused() -> None:
    run = start(numbers(100).shuffle(10))
    iterator = iter(run)
    for _ in range(80):
        next(iterator)
    with pytest.raises(StateError, match=r"(fewer elements|has 50 elements)"):
        list(start(numbers(50).shuffle(10), saved(run)))
    for _ in range(15):
        next(iterator)
    with pytest.raises(StateError, match=r"1:Shuffler has more elements than .* \(after 100\)"):
        list(start(numbers(101).shuffle(10), saved(run)))


def test_the_tables_of_anchors_are_checked_to_the_last() -> None:
    run = start(numbers(100).shuffle(10).shuffle(5))
    for _ in zip(range(50), run, strict=False):
        pass
    state = saved(run)
    run.check_table(state, "the state")
    state["2:Shuffler"]["anchor"]["table"]["1:Shuffler"]["anchor"]["table"] = {}
    with pytest.raises(StateError, match=r"the anchor of 1:Shuffler holds positions of .*, where .*0:IterableWrapper"):
        run.check_table(state, "the state")


def test_a_shuffle_inside_batches() -> None:
    check_stage(lambda: numbers(11).batch(4).in_batch_shuffle())
    check_everywhere(lambda source: source.batch(3).in_batch_shuffle())
    pipe = numbers(100).batch(50).in_batch_shuffle().set_seed(2)
    first, second = pipe
    assert sorted(first) == list(range(50)) != first
    assert [n - 50 for n in second] != first
    assert list(pipe) != [first, second]
    assert list(pipe.set_seed(2)) == [first, second]
    assert list(pipe.set_shuffle(False)) == [list(range(50)), list(range(50, 100))]
    assert len(pipe) == 2
    made: list[int] = []
    run = Context(numbers(9).map(lambda n: made.append(n) or n).batch(3).in_batch_shuffle(), seed=1).start()
    whole = list(Context(numbers(9).map(abs).batch(3).in_batch_shuffle(), seed=1).start())
    assert run.replay(2, [1]) == whole[1:2]
    assert made[-3:] == [3, 4, 5]
    assert list(run) == whole[2:]
    with pytest.raises(TypeError, match="not iterable") as caught:
        list(numbers(2).in_batch_shuffle())
    assert "1:InBatchShuffler" in caught.value.__notes__[0]
