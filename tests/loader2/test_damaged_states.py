"""Any damage to a state, at any place of it, is refused before anything changes, by loaders and by pipes.

A damaged state whose digest is made to fit is hostile: it is refused, or it is a possible place in the data, and then
iterating ends or raises an error of this package, never another.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loading import loader_of, take, through_json
from tars import make_tar
from user_pipes import Stateless, Summing

from pipes import IterDataPipe
from pipes.errors import PipesError, StateError
from pipes.iter import FileLister, IterableWrapper
from pipes.saved import sealed

N = 40


def source() -> IterDataPipe[int]:
    return IterableWrapper(range(N))


def draw(element: int, rng: Any) -> tuple[int, float]:
    return element, rng.random()


class Careful(Summing):
    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = int(state["total"])


def _forked() -> IterDataPipe[Any]:
    left, right = source().shuffle(4).fork(2)
    return left.shuffle(5).zip(right).batch(3)


GRAPHS: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "draws": lambda: source().shuffle(7).sharding_filter().map(draw, rng=True).batch(3),
    "expanding": lambda: source().sharding_filter().flatmap(lambda x: [x] * (x % 3)).enumerate().shuffle(5).batch(3),
    "joined": lambda: source().concat(source()).mux(source().shuffle(3)).shuffle(4).batch(2),
    "cycle": lambda: source().shuffle(4).cycle(3).batch(3),
    "forked": _forked,
    "users": lambda: Stateless(source().shuffle(3)).then(Careful).header(None),
}
FILES: dict[str, Callable[[str], IterDataPipe[Any]]] = {
    "tar": lambda at: FileLister(at, "*.tar").open_files("rb").load_from_tar().webdataset().map(len).batch(3),
    "csv": lambda at: FileLister(at, "*.csv").open_files("rb").parse_csv_as_dict().batch(3),
    "lines": lambda at: FileLister(at, "*.csv").open_files("rb").readlines().batch(3),
}


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], IterDataPipe[Any]]]:
    folder = tmp_path_factory.mktemp("files")
    for number in range(2):
        members = [(f"{sample:02d}.{end}", b"x" * 30) for sample in range(20) for end in ("a", "b")]
        (folder / f"{number}.tar").write_bytes(make_tar(members))
        Path(folder, f"{number}.csv").write_text("a,b\n" + "1,2\n" * 20)

    def over_files(name: str) -> Callable[[], IterDataPipe[Any]]:
        return lambda: FILES[name](str(folder))

    return {**GRAPHS, **{name: over_files(name) for name in FILES}}


NAMES = [*GRAPHS, *FILES]
NO_STATE = ("forked", "pipe")
Path_ = tuple[Any, ...]
WRONG: list[Any] = [
    None, True, -1, 0, 1, 3, 10**6, 2**61, 2**62, 2**80, 1.5, 1e300, "", "5", "x" * 2_000_000, [], [1], {},
    {"given": 1}, {"at": -1}, [[[[]]]],
]  # fmt: skip


wrong = st.sampled_from(WRONG).map(copy.deepcopy)


def places_in(value: Any, path: Path_ = ()) -> list[Path_]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inside for found in places_in(item, (*path, key)))]


def damaged(state: Any, data: st.DataObject) -> Any:
    """Return a copy of the state with one to three places changed, taken away or added."""
    bad = copy.deepcopy(state)
    for _ in range(data.draw(st.integers(1, 3))):
        places = [path for path in places_in(bad) if path]
        if not places:
            break
        path = data.draw(st.sampled_from(places))
        place = bad
        for key in path[:-1]:
            place = place[key]
        what = data.draw(st.sampled_from(["change", "change", "change", "drop", "add", "near"]))
        if what == "drop":
            del place[path[-1]]
        elif what == "add" and isinstance(place, dict):
            place[data.draw(st.sampled_from(["x", "0:IterableWrapper", "1", "given", "table"]))] = data.draw(wrong)
        elif what == "near" and type(place[path[-1]]) is int:
            place[path[-1]] += data.draw(st.integers(-3, 3))
        else:
            place[path[-1]] = data.draw(wrong)
    return bad


class Case:
    """A loader, or a pipe, in mid-epoch."""

    def __init__(self, make: Callable[[], IterDataPipe[Any]], loader: bool) -> None:
        self.make, self.loader = make, loader
        self.subject: Any = self.new()
        self.expected = [str(output) for output in self.new()]
        self.iterator = iter(self.subject)
        self.before = [str(output) for output in take(self.iterator, 5)]
        self.state = through_json(self.subject.state_dict())

    def new(self) -> Any:
        return loader_of(self.make(), 0, 1) if self.loader else self.make()

    def refuses(self, bad: Any) -> bool:
        """Load `bad` and say whether it was refused; if so, nothing may have changed."""
        try:
            self.subject.load_state_dict(bad)
        except StateError:
            assert through_json(self.subject.state_dict()) == self.state
            return True
        return False

    def goes_on(self) -> bool:
        return self.before + [str(output) for output in self.iterator] == self.expected


@pytest.fixture(params=[(name, kind) for name in NAMES for kind in ("loader", "pipe") if (name, kind) != NO_STATE])
def case(request: pytest.FixtureRequest, makers: dict[str, Callable[[], IterDataPipe[Any]]]) -> Case:
    name, kind = request.param
    return Case(makers[name], kind == "loader")


def test_damage_is_refused_and_changes_nothing(case: Case) -> None:
    @settings(max_examples=50)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        bad = damaged(case.state, data)
        assume(json.dumps(bad, sort_keys=True) != json.dumps(case.state, sort_keys=True))
        assert case.refuses(bad)

    check()
    assert case.goes_on()


def test_damage_with_a_digest_that_fits_is_refused_or_a_place_in_the_data(case: Case) -> None:
    refused = 0

    @settings(max_examples=70)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal refused
        other = case.new()
        try:
            other.load_state_dict(sealed(damaged(case.state, data)))
        except StateError:
            refused += 1
            return
        # it may be an error while reading: there is no such place in the data
        with contextlib.suppress(PipesError):
            for _ in itertools.islice(other, 50):
                pass

    check()
    assert refused > 20


def test_a_truncated_file_or_a_flipped_character_is_no_state(case: Case) -> None:
    text = json.dumps(case.state)

    @settings(max_examples=50)
    @given(st.integers(0, len(text) - 1), st.sampled_from('0123456789"{}[]:,abcxyz -.e'))
    def check(place: int, character: str) -> None:
        for changed in (text[:place], text[:place] + character + text[place + 1 :]):
            with contextlib.suppress(ValueError, RecursionError):
                bad = json.loads(changed)
                assert bad == case.state or case.refuses(bad)

    check()
    assert case.goes_on()


ran: list[str] = []


class Hostile:
    """Runs code when it is unpickled, printed, compared, hashed or iterated."""

    def __reduce__(self) -> Any:
        return ran.append, ("unpickled",)

    def __repr__(self) -> str:
        ran.append("printed")
        return "hostile"

    def __eq__(self, other: object) -> bool:
        ran.append("compared")
        return True

    def __hash__(self) -> int:
        ran.append("hashed")
        return 0

    def __iter__(self) -> Any:
        ran.append("iterated")
        return iter(())


@pytest.mark.parametrize("loader", [True, False])
def test_no_code_of_a_state_runs(loader: bool) -> None:
    case = Case(GRAPHS["draws"], loader)
    bad_ones: list[Any] = [
        pickle.dumps(Hostile()),
        pickle.dumps(case.state),
        bytearray(pickle.dumps(Hostile())),
        Hostile(),
    ]
    for path in places_in(case.state):
        if path:
            bad = copy.deepcopy(case.state)
            place = bad
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = Hostile()
            bad_ones.append(bad)
    ran.clear()
    for bad in bad_ones:
        assert case.refuses(bad)
    assert ran == []
    assert case.goes_on()
