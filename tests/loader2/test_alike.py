"""Users' code above the split runs alike in all streams: what it builds, draws or keeps loses and doubles nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import loader_of, take, through_json

from pipes import IterDataPipe
from pipes.errors import StateError
from pipes.iter import IterableWrapper
from pipes.saved import sealed

pytestmark = [
    pytest.mark.usefixtures("no_residue"),
    pytest.mark.filterwarnings("ignore:the graph has no sharding_filter"),
    pytest.mark.filterwarnings("ignore:.* above .*ShardingFilter"),
    pytest.mark.filterwarnings("ignore:stage .* has no state of its own"),
]

N = 24


def numbers() -> IterDataPipe[int]:
    return IterableWrapper(range(N))


def rows(start: int) -> IterDataPipe[int]:
    """What a file of four rows holds, in an order of its own."""
    return IterableWrapper(range(start, start + 4)).shuffle()


class Shuffled(IterDataPipe[int]):
    """Shuffles its list in place, each epoch."""

    def __init__(self) -> None:
        self.paths = list(range(N))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.paths)
        yield from self.paths


class Generating(IterDataPipe[int]):
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(N), N))


class Permuted(IterDataPipe[int]):
    """Draws before it returns an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())


class Files(IterDataPipe[int]):
    """Shuffles the rows of each file as it comes to it."""

    def __iter__(self) -> Iterator[int]:
        for start in range(0, N, 4):
            lines = list(range(start, start + 4))
            random.shuffle(lines)
            yield from lines


class Unlike:
    """No pipe, and shuffles all the same."""

    def __init__(self) -> None:
        self.numbers = list(range(N))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.numbers)
        return iter(self.numbers)


class Built(IterDataPipe[int]):
    """Builds all of its graph when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        yield from numbers().shuffle().sharding_filter()


class Splitting(IterDataPipe[int]):
    """Builds a split on what it reads, which nobody sees from outside."""

    def __init__(self, source: IterDataPipe[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        yield from self.source.map(int).sharding_filter()


class Shuffling(Splitting):
    def __iter__(self) -> Iterator[int]:
        yield from self.source.shuffle(buffer_size=5)


def one_in_two(number: int) -> list[int]:
    """Give one of two numbers, as a draw decides; which of them shows that two streams drew alike."""
    return [number + random.choice((0, 100))]


GRAPHS: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "shuffled": lambda: Shuffled().sharding_filter(),
    "generating": lambda: Generating().sharding_filter(),
    "permuted": lambda: Permuted().map(int),
    "files": lambda: Files().shuffle(3).sharding_filter(),
    "no pipe": lambda: IterableWrapper(Unlike(), deepcopy=False).sharding_filter(),
    "built": lambda: Built(),
    "built above": lambda: Built().sharding_filter(),
    "splitting": lambda: Splitting(numbers()),
    "splitting below": lambda: Splitting(numbers().sharding_filter()),
    "shuffling": lambda: Shuffling(numbers()).sharding_filter(),
    "rows": lambda: IterableWrapper(range(0, N, 4)).flatmap(rows).sharding_filter(),
    "drawn": lambda: numbers().flatmap(one_in_two).sharding_filter(),
}


@pytest.mark.filterwarnings("ignore:worker .* died")
@pytest.mark.parametrize("name", GRAPHS)
def test_each_element_comes_once_in_one_order(name: str) -> None:
    graph = GRAPHS[name]
    with loader_of(graph(), 0, 3) as loader:
        first, second = list(loader), list(loader)
        for epoch in (first, second):
            assert sorted(number % 100 for number in epoch) == list(range(N))
        assert (first == second) is name.startswith("splitting")
        iterator = iter(loader)
        third = take(iterator, 10)
        state, rest = through_json(loader.state_dict()), list(iterator)
        third += rest
    # One worker with all three streams, which begin one after the other, and one for each.
    for workers in (1, 3):
        with loader_of(graph(), workers, 3) as loader:
            next(iter(loader))
            assert list(loader) == second
            iterator = iter(loader)
            before = take(iterator, 5)
            os.kill(loader.stats()["workers"][0], signal.SIGKILL)
            assert before + list(iterator) == third
            loader.load_state_dict(state)
            assert list(loader) == rest
    with loader_of(graph(), 0) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


def test_a_function_that_draws_is_repeated_by_a_resume_below_a_buffer() -> None:
    graph = numbers().filter(lambda number: random.random() < 0.5).map(str).sharding_filter().shuffle(4).batch(2)
    with loader_of(graph, 0, 2) as loader:
        iterator = iter(loader)
        before = take(iterator, 2)
        state, rest = through_json(loader.state_dict()), list(iterator)
        assert len({number for batch in before + rest for number in batch}) == sum(map(len, before + rest))
    with loader_of(graph, 1, 2) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


class Windows(IterDataPipe[tuple[int, ...]]):
    """Keeps what it has not given yet on itself."""

    def __init__(self, source: IterDataPipe[int]) -> None:
        self.source, self.kept = source, list[int]()

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        for number in self.source:
            self.kept.append(number)
            if len(self.kept) == 3:
                yield tuple(self.kept)
                self.kept.clear()


class Itself(IterDataPipe[int]):
    """Is its own iterator."""

    def __init__(self, source: IterDataPipe[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        self.numbers = iter(self.source)
        return self

    def __next__(self) -> int:
        return next(self.numbers)


class Counting(IterDataPipe[int]):
    """Counts its epochs on itself."""

    def __init__(self, source: IterDataPipe[int]) -> None:
        self.source, self.epochs = source, 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        for number in self.source:
            yield number + 100 * self.epochs


class Epochs(IterDataPipe[int]):
    """Shuffles by the number of the epoch, which it counts; it may die once, before it gives anything."""

    def __init__(self, dies: Path | None = None) -> None:
        self.epoch, self.dies = 0, dies

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        if self.epoch == 3 and self.dies is not None:
            with suppress(FileNotFoundError):  # of several workers, the one that finds it
                self.dies.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        yield from order


@pytest.mark.filterwarnings("ignore:worker .* died")
def test_a_stage_that_counts_epochs_is_replayed_by_its_count(tmp_path: Path) -> None:
    def epochs(killed: tuple[int, ...], dies: Path | None = None) -> list[list[int]]:
        found = []
        with loader_of(Epochs(dies).sharding_filter(), 2, 3) as loader:
            for epoch in range(3):
                iterator = iter(loader)
                found.append(take(iterator, 5))
                if epoch in killed:
                    os.kill(loader.stats()["workers"][0], signal.SIGKILL)
                found[-1] += iterator
        return found

    expected = epochs(())
    assert expected[0] != expected[1] != expected[2]
    assert epochs((1, 2)) == expected
    (tmp_path / "dies").touch()
    assert epochs((), tmp_path / "dies") == expected
    assert not (tmp_path / "dies").exists()
    with loader_of(Epochs().sharding_filter(), 0, 3) as loader:
        assert list(loader) == expected[0]
        iterator = iter(loader)
        assert take(iterator, 7) == expected[1][:7]
        state = through_json(loader.state_dict())
    with loader_of(Epochs().sharding_filter(), 0) as loader:
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == [expected[1][7:], expected[2]]


def test_a_state_sets_no_numbers_where_nothing_counts() -> None:
    with loader_of(numbers().batch(2)) as loader:
        next(iter(loader))
        state = through_json(loader.state_dict())
        state["streams"]["0"]["table"]["0:IterableWrapper"]["numbers"] = {"deepcopy": 0}
        with pytest.raises(StateError, match="0:IterableWrapper keeps no such numbers"):
            loader.load_state_dict(sealed(state))


class Turns:
    """No pipe, and counts its epochs all the same."""

    def __init__(self) -> None:
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        yield from random.Random(self.turn).sample(range(N), N)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", [Epochs, lambda: IterableWrapper(Turns(), deepcopy=False)])
def test_a_state_says_which_epoch_it_is_of(source: Callable[[], Any], workers: int) -> None:
    """In a loader that has gone on since, in a new one, and between two epochs."""
    with loader_of(source().sharding_filter(), workers, 3) as loader:
        expected, states = [], []
        for _ in range(3):
            between = through_json(loader.state_dict())
            iterator = iter(loader)
            first = take(iterator, 7)
            states.append((between, through_json(loader.state_dict())))
            expected.append((first, list(iterator)))
        assert expected[0] != expected[1] != expected[2]
        # The last one gives up the epoch that it is loaded in.
        for (between, within), (first, rest) in (*zip(states, expected, strict=True), (states[0], expected[0])):
            loader.load_state_dict(within)
            assert list(loader) == rest
            loader.load_state_dict(between)
            assert take(iter(loader), 7) == first
    for (between, within), (first, rest) in zip(states, expected, strict=True):
        for state, outputs in ((between, first + rest), (within, rest)):
            with loader_of(source().sharding_filter(), 0) as loader:
                loader.load_state_dict(state)
                assert list(loader) == outputs


@pytest.mark.parametrize(
    "numbers",
    [
        {"order": 1},
        {"__iter__": 1},
        {"epoch": "2"},
        {"batch": 1},
        [1],
        {"_x": 1},
        {"_pipes_epoch": 1},
        {"_built": 1},
    ],
)
def test_a_state_sets_numbers_only(numbers: Any) -> None:
    with loader_of(Epochs().batch(2)) as loader:
        list(loader)
        next(iter(loader))
        state = through_json(loader.state_dict())
    (stream,) = state["streams"].values()
    table = stream["table"]
    stage = next(name for name in table if "Epochs" in name)
    assert table[stage]["numbers"] == {"epoch": 1}
    table[stage]["numbers"] = numbers
    state = sealed(state)
    with loader_of(Epochs().batch(2)) as loader:
        if numbers == {"order": 1}:  # made in a later epoch, it may be
            loader.load_state_dict(state)
        else:
            with pytest.raises(StateError):
                loader.load_state_dict(state)


def test_a_pipe_inside_an_element_is_a_draw_only_if_it_draws() -> None:
    for inner, drew in ((rows, True), (lambda start: IterableWrapper(range(start, start + 4)).map(int), False)):
        # A batch is a unit of draws, so the state is that after it.
        graph = IterableWrapper(range(0, N, 4)).flatmap(inner).sharding_filter().batch(1)
        with loader_of(graph, 0, 2) as loader:
            next(iter(loader))
            table = through_json(loader.state_dict())
        assert ("drew" in str(table)) is drew


@pytest.mark.parametrize("stage", [Windows, Itself, Counting])
def test_streams_of_one_process_do_not_meet_in_a_user_s_pipe(stage: Callable[[IterDataPipe[int]], Any]) -> None:
    found = []
    for workers in (0, 1, 2, 4):
        with loader_of(stage(numbers().sharding_filter()), workers, 4) as loader:
            found.append([list(loader), list(loader)])
    assert found[0] == found[1] == found[2] == found[3]
    first, second = found[0]
    numbers_found = [number for each in first for number in (each if isinstance(each, tuple) else (each % 100,))]
    assert sorted(numbers_found) == list(range(N))
    if stage is Counting:
        assert [number + 100 for number in first] == second
