"""What kills a worker each time: an element, its start, a lack of memory. Named, and given up after `max_restarts`."""

from __future__ import annotations

import os
import pickle
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from loading import loader_of, take

from pipes import IterDataPipe
from pipes.errors import WorkerDiedError
from pipes.iter import IterableWrapper

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.race]


@pytest.fixture
def _restarts_told() -> Iterator[None]:
    """Let restarts be told of, some of them at least."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "worker . .* it is started again", RuntimeWarning)
        yield
    assert caught


def numbers(count: int = 60) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


def poison(element: int) -> int:
    if element == 21:
        os._exit(9)
    return element


def poison_name(name: str) -> str:
    return name if name == "a" else str(os._exit(9))


def zipped_with_itself(pipe: IterDataPipe[int]) -> IterDataPipe[Any]:
    left, right = pipe.fork(2)
    return left.map(poison).zip(right)


class Users(IterDataPipe[int]):
    stateless = True

    def __init__(self, source: IterDataPipe[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        for element in self.source:
            yield poison(element)


def poison_batch(batch: list[int]) -> list[int]:
    return [poison(element) for element in batch]


#: graph, the stage that dies, the element it dies on, the outputs before in each of two streams at most
CASES: dict[str, tuple[Callable[[], IterDataPipe[Any]], str, str]] = {
    "map": (lambda: numbers().map(poison), "2:Mapper", "21"),
    "map of batches": (lambda: numbers().batch(4).map(poison_batch), "3:Mapper", "[17, 19, 21, 23]"),
    "map above a shuffle": (lambda: numbers().map(poison).shuffle(30).batch(2), "2:Mapper", "21"),
    "filter": (lambda: numbers().filter(lambda x: poison(x) > 3).shuffle(5), "2:Filter", "21"),
    "keyed map": (lambda: numbers().map(lambda x, rng: poison(x), rng=True).batch(2), "2:Mapper", "21"),
    "flatmap": (lambda: numbers().flatmap(lambda x: [poison(x)] * 2), "2:FlatMapper", "21"),
    "collate": (lambda: numbers().batch(4).collate(poison_batch), "3:Collator", "[17, 19, 21, 23]"),
    "fork and zip": (lambda: zipped_with_itself(numbers()), "4:Mapper", "21"),
    "demux": (lambda: numbers().demux(2, lambda x: poison(x) % 2)[1].batch(2), "2:DemultiplexerSource", "21"),
    "files": (lambda: IterableWrapper(["a", "b"]).sharding_filter().map(poison_name).batch(1), "2:Mapper", "'b'"),
    "user's class": (lambda: Users(numbers()).batch(2), "2:Users", "21"),
}


@pytest.mark.usefixtures("_restarts_told")
class TestAPoisonElement:
    @pytest.mark.parametrize("name", CASES)
    def test_it_is_named(self, name: str) -> None:
        graph, stage, element = CASES[name]
        with loader_of(graph(), 2, max_restarts=2, snapshot_every=3) as loader:
            with pytest.raises(WorkerDiedError) as caught:
                list(loader)
            error = caught.value
            assert (error.stage, error.element) == (stage, element)
            assert (error.worker, error.stream) == (1, 1)
            assert (error.exit_code, error.signal, error.restarts) == (9, None, 2)
            for part in (
                f"worker {error.worker}",
                "exit code 9",
                f"output {error.output} of stream {error.stream}",
                f"in stage {stage}, on element {element}",
                "died 3 times at this one",
                "max_restarts=2",
            ):
                assert part in str(error), part
            again = pickle.loads(pickle.dumps(error))
            assert vars(again) == vars(error)
            # the other streams go on in a later epoch; so does this one, up to the element
            assert next(iter(loader)) is not None

    def test_only_the_output_that_killed_is_traced(self, tmp_path: Path) -> None:
        class Shy:
            def __init__(self, number: int) -> None:
                self.number = number

            def __repr__(self) -> str:
                with (tmp_path / "shown").open("a") as file:
                    file.write(f"{self.number}\n")
                return "shy"

        def die_once(element: Shy) -> Shy:
            if element.number == 31 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os._exit(1)
            return element

        with loader_of(numbers().map(Shy).map(die_once).map(lambda shy: shy.number), 2, snapshot_every=4) as loader:
            assert list(loader) == list(range(60))
            assert loader.stats()["restarts"] == 1
        shown = {int(line) for line in (tmp_path / "shown").read_text().split()}
        assert 31 in shown
        assert all(number % 2 == 1 and number <= 31 for number in shown), shown


def test_the_first_death_names_the_output() -> None:
    with loader_of(numbers().map(poison), 2, on_worker_death="raise") as loader:
        with pytest.raises(WorkerDiedError, match=r"making output 10 of stream 1; .* turns recovery off") as caught:
            list(loader)
        error = caught.value
        assert (error.stream, error.output, error.stage, error.element, error.restarts) == (1, 10, "", "", 0)


@pytest.mark.usefixtures("_restarts_told")
class TestAtTheStart:
    def given_up(self, loader: Any, phase: str) -> None:
        with loader, pytest.raises(WorkerDiedError, match=rf"exit code 4; it was {phase}.*restarted 2 times") as caught:
            list(loader)
        assert caught.value.stream == -1

    def test_worker_init_fn(self) -> None:
        loader = loader_of(numbers(), 2, worker_init_fn=lambda pipe, info: os._exit(4), max_restarts=2)
        self.given_up(loader, "in worker_init_fn")

    def test_worker_reset_fn(self) -> None:
        loader = loader_of(numbers(), 2, worker_reset_fn=lambda pipe, info, seeds: os._exit(4), max_restarts=2)
        self.given_up(loader, "in worker_reset_fn")

    def test_the_graph_s_unpickling(self) -> None:
        class Deadly:
            def __reduce__(self) -> Any:
                return os._exit, (4,)

            def __call__(self, element: int) -> int:
                return element

        self.given_up(loader_of(numbers().map(Deadly()), 1, max_restarts=2), "unpickling the graph")

    def test_an_import(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        main = os.getpid()
        (tmp_path / "deadly_module.py").write_text(
            f"import os\nif os.getpid() != {main}: os._exit(4)\ndef same(x): return x\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        import deadly_module  # type: ignore[import-not-found]

        monkeypatch.setitem(sys.modules, "deadly_module", deadly_module)
        loader = loader_of(numbers().map(deadly_module.same), 1, max_restarts=2)
        self.given_up(loader, "unpickling the graph")


class TestLackOfMemory:
    def test_a_limit_is_an_ordinary_error(self) -> None:
        def hungry(element: int) -> Any:
            if element == 9:
                # Enough for the worker to go on.
                limit = psutil.Process().memory_info().vms + (1 << 30)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                return bytearray(1 << 34)
            return element

        with loader_of(numbers().map(hungry), 2) as loader:
            with pytest.raises(MemoryError) as caught:
                list(loader)
            assert any("2:Mapper" in note for note in caught.value.__notes__)
            assert loader.stats()["restarts"] == 0
            assert take(iter(loader), 8) == list(range(8))

    def test_no_room_for_a_slab_is_an_ordinary_error(self) -> None:
        def bulky(element: int) -> Any:
            import torch

            data = torch.ones(1 << 25)
            if element == 9:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 24), size + (1 << 24)))
            return data if element == 9 else element

        with loader_of(numbers().map(bulky), 2) as loader:
            with pytest.raises((MemoryError, OSError), match=r"(?i)memory"):
                list(loader)
            assert loader.stats()["restarts"] == 0
            assert take(iter(loader), 8) == list(range(8))
