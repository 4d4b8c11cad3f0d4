"""What a user's pipe keeps on itself: every iteration begins alike, whatever came before it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipes import IterDataPipe

N = 30
Shuffle = Callable[[Any], Any]


def nothing(pipe: Any) -> None:
    pass


class Kept(IterDataPipe[Any]):
    """Gives its items after `shuffle(self)`, or what that returns, and does `last(self)` at the end."""

    def __init__(self, items: Any, shuffle: Shuffle, last: Shuffle = nothing, rng: Any = None) -> None:
        self.items, self.shuffle_by, self.last, self.rng = items, shuffle, last, rng

    def __iter__(self) -> Iterator[Any]:
        order = self.shuffle_by(self)
        yield from map(str, self.items if order is None else order)
        self.last(self)


def in_place(pipe: Any) -> None:
    random.shuffle(pipe.items)


def anew(pipe: Any) -> None:
    pipe.items = random.sample(pipe.items, len(pipe.items))


def into_an_array(pipe: Any) -> None:
    pipe.items = np.random.permutation(pipe.items)


def into_a_list(pipe: Any) -> None:
    pipe.items = random.sample(list(pipe.items), N)


def numpy_in_place(pipe: Any) -> None:
    np.random.shuffle(pipe.items)


def by_index(pipe: Any) -> None:
    pipe.items = pipe.items[torch.randperm(len(pipe.items))]


def words() -> list[str]:
    return [f"file {number}" for number in range(N)]


SHUFFLES: dict[str, tuple[Callable[[], Any], Shuffle]] = {
    "in place": (words, in_place),
    "anew": (words, anew),
    "into an array": (words, into_an_array),
    "lists": (lambda: [[number] for number in range(N)], in_place),
    "array": (lambda: np.arange(N) * 0.5, numpy_in_place),
    "rows": (lambda: np.arange(2 * N).reshape(N, 2), numpy_in_place),
    "with gaps": (lambda: np.where(np.arange(2 * N) % 3, np.arange(2 * N), np.nan).reshape(N, 2), numpy_in_place),
    "gaps": (lambda: torch.arange(N) / (torch.arange(N) % 3), by_index),
    "bits": (lambda: torch.arange(N) % 2 > 0, by_index),
    "transposed": (lambda: np.arange(2 * N).reshape(2, N).T, numpy_in_place),
    "texts": (lambda: np.array(words()), numpy_in_place),
    "dates": (lambda: np.arange(N).astype("datetime64[D]"), numpy_in_place),
    "drawn": (lambda: np.arange(N), in_place),
    "into a list": (lambda: np.arange(N), into_a_list),
    "objects": (lambda: np.array(words(), dtype=object), numpy_in_place),
    "tensor": (lambda: torch.arange(N), by_index),
    "tensor's rows": (lambda: torch.arange(2 * N).view(N, 2).to(torch.bfloat16), by_index),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_a_shuffle_begins_with_the_order_as_built(name: str) -> None:
    make, shuffle = SHUFFLES[name]
    pipe = Kept(make(), shuffle)

    def epoch(pipe: Kept = pipe) -> list[Any]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        return list(pipe)

    first = epoch()
    assert first != list(map(str, make()))
    assert first == epoch() == epoch()
    next(iter(pipe))  # somebody looks at it
    assert first == epoch()
    next(iter(pipe))
    assert first == epoch(pickle.loads(pickle.dumps(pipe))) == epoch(copy.deepcopy(pipe))


def test_what_the_last_iteration_gave_can_be_looked_up() -> None:
    pipe = Kept(words(), in_place)
    for _ in range(3):
        assert list(pipe) == pipe.items


def rotated(pipe: Any) -> None:
    pipe.items.append(pipe.items.pop(0))


def backwards(pipe: Any) -> None:
    pipe.items.reverse()


@pytest.mark.parametrize(
    ("shuffle", "last"),
    [(rotated, nothing), (nothing, rotated), (nothing, in_place), (backwards, nothing)],
)
def test_what_is_not_shuffled_at_the_start_stays(shuffle: Shuffle, last: Shuffle) -> None:
    """A rotation from epoch to epoch, or a shuffle at the end, is for the next epoch."""
    items, other = list(range(N)), type("Plain", (), {})()
    other.items = list(items)
    pipe = Kept(items, shuffle, last)
    for _ in range(3):
        random.seed(4)
        shuffle(other)
        assert list(pipe) == list(map(str, other.items))
        random.seed(4)
        last(other)
        assert pipe.items == other.items


def test_what_the_user_changes_between_two_iterations_counts() -> None:
    pipe = Kept(list(range(N)), in_place)
    list(pipe)
    pipe.items.sort(reverse=True)
    random.seed(5)
    expected = list(range(N))[::-1]
    random.shuffle(expected)
    random.seed(5)
    assert list(pipe) == list(map(str, expected))
    pipe.items = ["another"] * 3
    assert list(pipe) == list(pipe) == ["another"] * 3
    pipe.items.append("more")
    assert sorted(pickle.loads(pickle.dumps(pipe))) == [*["another"] * 3, "more"]


def own(pipe: Any) -> list[int]:
    order = list(range(N))
    if isinstance(pipe.rng, torch.Generator):
        return torch.randperm(N, generator=pipe.rng).tolist()  # type: ignore[no-any-return]
    pipe.rng.shuffle(order)
    return order


GENERATORS: dict[str, Callable[[int], Any]] = {
    "random": random.Random,
    "numpy": np.random.default_rng,
    "numpy's older": np.random.RandomState,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


@pytest.mark.filterwarnings("ignore:stage .* has no state of its own")
@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_stands_where_the_epoch_says(name: str) -> None:
    def made(seed: int = 1) -> Kept:
        return Kept((), own, rng=GENERATORS[name](seed))

    pipe = made()
    epochs = [list(pipe) for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    assert epochs[0] == list(made())  # as the user seeded it
    assert epochs[0] == list(map(str, own(made())))
    # A look at it, or an epoch that is given up, changes nothing.
    looked = made()
    for expected in epochs:
        iterator = iter(looked)
        assert [next(iterator) for _ in range(3)] == expected[:3]
    assert list(pickle.loads(pickle.dumps(pipe))) == list(copy.deepcopy(pipe)) == epochs[0]
    # A resume in a later epoch.
    pipe = made()
    list(pipe)
    iterator = iter(pipe)
    before = [next(iterator) for _ in range(7)]
    state = pipe.state_dict()
    again = made()
    again.load_state_dict(state)
    assert before + list(again) == epochs[1]
    # The user's own seed counts in every epoch.
    other = made(2)
    assert not {tuple(other) for _ in range(3)} & set(map(tuple, epochs))


def test_a_generator_that_the_user_seeds_for_an_epoch() -> None:
    orders = []
    for _ in range(2):
        pipe = Kept((), own, rng=random.Random(1))
        list(pipe)
        pipe.rng.seed(7)
        orders.append(list(pipe))
        pipe.rng = random.Random(8)
        orders.append(list(pipe))
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]


def test_a_pipe_that_is_read_twice_in_an_epoch_draws_anew() -> None:
    class Twice(IterDataPipe[Any]):
        def __init__(self, source: IterDataPipe[Any]) -> None:
            self.source = source

        def __iter__(self) -> Iterator[Any]:
            yield from self.source
            yield from self.source

    elements = list(Twice(Kept((), own, rng=random.Random(1))))
    assert sorted(elements[:N]) == sorted(elements[N:])
    assert elements[:N] != elements[N:]


def test_what_is_large_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipes.as_built.MOST", N - 1)
    monkeypatch.setattr("pipes.as_built.LARGE", 8 * N - 1)
    for items, shuffle in ((list(range(N)), in_place), (np.arange(N), numpy_in_place)):
        pipe = Kept(items, shuffle)
        random.seed(3)
        np.random.seed(3)
        first = list(pipe)
        random.seed(3)
        np.random.seed(3)
        assert list(pipe) != first


def test_arrays_that_are_no_order_stay() -> None:
    def count(pipe: Any) -> None:
        random.random()
        pipe.items[int(pipe.items.sum())] += 1

    pipe = Kept(np.zeros(3, np.int64), count)
    assert [list(pipe) for _ in range(3)] == [["1", "0", "0"], ["1", "1", "0"], ["1", "1", "1"]]


@pytest.mark.filterwarnings("ignore:stage .* has no state of its own")
def test_a_count_may_have_a_private_name() -> None:
    class Counting(IterDataPipe[int]):
        def __init__(self) -> None:
            self._epoch = 0

        def __iter__(self) -> Iterator[int]:
            self._epoch += 1
            yield self._epoch
            yield self._epoch

    pipe = Counting()
    assert list(pipe) == [1, 1]
    assert next(iter(pipe)) == 2
    again = Counting()
    again.load_state_dict(pipe.state_dict())
    assert list(again) == [2]
