"""Every kind of content crosses from a real worker unchanged; what cannot is refused by name, and the worker lives."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
from contents import CONTENTS, NOTED_BY_TORCH, REFUSED, big, package_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from loading import loader_of
from structures import structures
from wire import same

from pipes.iter import IterableWrapper

pytestmark = pytest.mark.filterwarnings(NOTED_BY_TORCH)


def installed(name: str) -> bool:
    package = package_of(name)
    return package is None or importlib.util.find_spec(package) is not None


@pytest.fixture(scope="module")
def arrived() -> dict[str, Any]:
    """What came out of a worker for each name: the value, or the error of sending it."""
    names = [name for name in CONTENTS if installed(name)]
    found: dict[str, Any] = {}
    while len(found) < len(names):
        pipe = IterableWrapper(names[len(found) :]).map(lambda name: CONTENTS[name]())
        with loader_of(pipe, 1, max_held=10_000) as loader:
            iterator = iter(loader)
            for name in names[len(found) :]:
                try:
                    found[name] = next(iterator)
                except Exception as error:
                    found[name] = error
                    break
    return found


@pytest.mark.parametrize("name", CONTENTS)
def test_it_arrives_unchanged(name: str, arrived: dict[str, Any]) -> None:
    if not installed(name):
        pytest.skip(f"{package_of(name)} is not installed")
    if isinstance(arrived[name], Exception):
        raise arrived[name]
    same(arrived[name], CONTENTS[name]())


def test_what_shares_memory_or_identity_in_the_worker_does_so_in_main() -> None:
    def make(size: int) -> dict[str, Any]:
        base, shared = torch.arange(float(size)), {"a": np.arange(size)}
        cycle: list[Any] = [base]
        cycle.append(cycle)
        views = {"low": base[: size - 3], "high": base[3:], "array": base.numpy(), "same": base, "again": base}
        return {**views, "one": shared, "two": shared, "cycle": cycle}

    with loader_of(IterableWrapper([10, 100_000]).map(make), 1) as loader:
        for batch in loader:
            size = len(batch["same"])
            batch["low"][5] = -1
            assert [batch["high"][2], batch["array"][5], batch["same"][5]] == [-1, -1, -1]
            assert batch["again"] is batch["same"] is batch["cycle"][0]
            assert batch["one"] is batch["two"]
            assert batch["cycle"][1] is batch["cycle"]
            assert batch["high"].sum() == sum(range(3, size)) - 6
        assert size == 100_000


def test_what_cannot_travel_is_named_and_the_worker_lives_on() -> None:
    left = iter(REFUSED)

    def make(element: int) -> Any:
        return big() if element == 0 else REFUSED[next(left)][0]()

    with loader_of(IterableWrapper(range(2)).map(make), 1) as loader:
        pids = []
        for _, words, cause in REFUSED.values():
            iterator = iter(loader)
            assert torch.equal(next(iterator), big())
            with pytest.raises(TypeError, match=f"(?s){words}") as caught:
                next(iterator)
            assert cause.__name__ in str(caught.value) or cause in (TypeError, Exception)
            pids.append(loader.stats()["workers"])
        assert len(pids) == len(REFUSED)
        assert all(pid == pids[0] for pid in pids)
        assert loader.stats()["restarts"] == 0


class OnlyInWorkers:
    """Can be sent, and cannot be made again in the process that has this number."""

    def __init__(self, main: int) -> None:
        self.main = main

    def __setstate__(self, state: dict[str, int]) -> None:
        if os.getpid() == state["main"]:
            raise LookupError("not here")
        vars(self).update(state)


def test_what_main_cannot_rebuild_is_an_error_at_its_place() -> None:
    main, fine = os.getpid(), [True]

    def make(element: int) -> Any:
        return [big(), OnlyInWorkers(main)] if element == 2 and fine and fine.pop() else element

    with loader_of(IterableWrapper(range(5)).map(make), 1) as loader:
        iterator = iter(loader)
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(LookupError, match="not here") as caught:
            next(iterator)
        assert any("main process" in note for note in caught.value.__notes__)
        assert loader.state_dict()["epoch"] == 0
        assert list(loader) == list(range(5))


@settings(max_examples=5, phases=[Phase.generate])
@given(st.lists(structures, min_size=5, max_size=20))
def test_any_structures_arrive_in_order(values: list[Any]) -> None:
    with loader_of(IterableWrapper(values), 1) as loader:
        got = list(loader)
    assert len(got) == len(values)
    for one, other in zip(got, values, strict=True):
        same(one, other)
