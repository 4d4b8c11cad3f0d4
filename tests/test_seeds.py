from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loading import global_state

from pipes import seeds
from pipes.loader2 import SeedGenerator
from pipes.seeds import (
    Draws,
    GlobalGenerators,
    KeyedGenerator,
    KeyFamily,
    derive_key,
    drawing_alike,
    drawn_alike,
    seed_globals,
)

parts = st.lists(st.integers() | st.text(), max_size=5)


@given(parts, parts)
def test_keys_are_equal_for_equal_parts_only(first: list[int | str], second: list[int | str]) -> None:
    assert 0 <= derive_key(*first) < 2**128
    assert (derive_key(*first) == derive_key(*second)) == (first == second)


def test_keys_tell_numbers_texts_and_their_borders_apart() -> None:
    keys = [derive_key(1, 2), derive_key("1", 2), derive_key(12), derive_key("12"), derive_key("1", "2"), derive_key()]
    assert len(set(keys)) == len(keys)


def test_keys_and_draws_are_the_same_in_every_release() -> None:
    assert derive_key(7, 0, "1:Shuffler", 0) == 215416994396369038431385196515357451937
    assert Draws(derive_key("fixed")).below(1000, 6) == [133, 924, 179, 110, 246, 936]


@given(st.integers(0, 2**128 - 1), st.integers(0, 200), st.integers(1, 50))
def test_draw_number_t_depends_on_t_alone(key: int, start: int, count: int) -> None:
    whole = Draws(key).uniforms(start + count)
    assert np.array_equal(Draws(key, start).uniforms(count), whole[start:])
    draws = Draws(key)
    pieces = [draws.uniforms(1) for _ in range(start + count)]
    assert np.array_equal(np.concatenate(pieces), whole)


@given(st.integers(0, 2**64), st.integers(1, 10_000), st.integers(0, 300))
def test_integers_lie_below_their_bound(key: int, bound: int, count: int) -> None:
    drawn = Draws(key).below(bound, count)
    assert len(drawn) == count
    assert all(type(each) is int and 0 <= each < bound for each in drawn)
    bounds = np.arange(count, 0, -1)
    assert all(each < limit for each, limit in zip(Draws(key).below(bounds, count), bounds, strict=True))


def test_integers_are_evenly_spread() -> None:
    counts = np.bincount(Draws(derive_key("even")).integers(10, 50_000), minlength=10)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 27.9


def test_a_keyed_generator_depends_on_key_and_number_alone() -> None:
    keyed = KeyedGenerator(derive_key("k"))
    first = keyed.at(3).random(5)
    keyed.at(9).normal(size=100)
    assert np.array_equal(keyed.at(3).random(5), first)
    assert np.array_equal(KeyedGenerator(derive_key("k")).at(3).random(5), first)
    # one bounded integer leaves half a word behind, which must not reach the next element
    keyed.at(9).integers(5, dtype=np.uint32)
    fresh = KeyedGenerator(derive_key("k"))
    ours, theirs = (each.at(3).integers(1000, size=5, dtype=np.uint32) for each in (keyed, fresh))
    assert np.array_equal(ours, theirs)
    values = {float(keyed.at(number).random()) for number in range(1000)}
    assert len(values) == 1000
    assert not values & {float(KeyedGenerator(derive_key("l")).at(number).random()) for number in range(1000)}


def globals_now() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_global_generators_are_seeded_together() -> None:
    saved = GlobalGenerators.set_aside()
    seed_globals(derive_key(1))
    first = globals_now()
    seed_globals(derive_key(1))
    assert globals_now() == first
    seed_globals(derive_key(2))
    assert all(a != b for a, b in zip(globals_now(), first, strict=True))
    saved.restore()


DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    # Legacy normal draws come in pairs, and the second one waits for the next call.
    "numpy normal": lambda: float(np.random.randn()),
    "numpy int": lambda: float(np.random.randint(1000)),
    "numpy, a whole block": lambda: float(np.random.rand(312).sum()),
    "torch": lambda: torch.rand(1).item(),
    "torch normal": lambda: torch.randn(1).item(),
}


@given(
    st.lists(st.tuples(st.sampled_from(list(DRAWS)), st.lists(st.sampled_from(list(DRAWS)), max_size=3)), max_size=12),
    st.sampled_from(["MT19937", "PCG64"]),
)
def test_draws_go_on_as_if_nobody_had_drawn_meanwhile(steps: list[tuple[str, list[str]]], bits: str) -> None:
    mine = GlobalGenerators.set_aside()
    own_numpy: Any = np.random
    before = own_numpy.get_bit_generator()
    try:
        found = []
        for again in (False, True):
            random.seed(5)
            own_numpy.set_bit_generator(getattr(np.random, bits)(7))
            torch.manual_seed(5)
            drawn = []
            for name, meanwhile in steps:
                drawn.append(DRAWS[name]())
                if again:
                    saved = GlobalGenerators.set_aside()
                    seed_globals(derive_key(name))
                    inner = GlobalGenerators.set_aside() if meanwhile else None
                    for other in meanwhile:
                        DRAWS[other]()
                    if inner is not None:
                        inner.restore()
                    saved.restore()
            found.append(drawn)
        assert found[0] == found[1]
    finally:
        own_numpy.set_bit_generator(before)
        mine.restore()


def test_a_stream_of_draws_goes_on_after_it_was_set_aside() -> None:
    mine = GlobalGenerators.set_aside()
    seed_globals(derive_key(3))
    expected = [(*globals_now(), float(np.random.randn())) for _ in range(6)]
    seed_globals(derive_key(3))
    found = []
    for _ in range(6):
        found.append((*globals_now(), float(np.random.randn())))
        stream = GlobalGenerators.set_aside()
        mine.restore()
        mine = GlobalGenerators.set_aside()
        stream.restore()
    mine.restore()
    assert found == expected


@pytest.mark.parametrize("key", [0, 2**128 - 1])
def test_any_key_seeds(key: int) -> None:
    saved = GlobalGenerators.set_aside()
    try:
        seed_globals(key)
    finally:
        saved.restore()


def drawing(count: int, every: int = 1) -> Iterator[float]:
    """Give draws from all three generators, or zeros in between."""
    for number in range(count):
        if number % every:
            yield 0.0
        else:
            yield random.random() + float(np.random.normal()) + torch.rand(1).item()


class Teller:
    drew = False


class TestAlike:
    def test_it_draws_the_same_whatever_others_draw_between(self) -> None:
        found = list[list[float]]()
        for seed, between in ((1, 0), (2, 3)):
            seed_globals(seed)
            elements = []
            for element in drawing_alike(lambda: drawing(40), 5):
                elements.append(element)
                for _ in range(between):
                    for draw in DRAWS.values():
                        draw()
            found.append(elements)
        assert found[0] == found[1]
        assert len(set(found[0])) == 40

    def test_the_generators_of_others_stay_where_they_were(self) -> None:
        seed_globals(1)
        np.random.normal()  # and keeps another one back
        before = global_state()
        assert len(list(drawing_alike(lambda: drawing(20), 5))) == 20
        assert len(list(drawn_alike(drawing(20), KeyFamily(5), 0, Teller()))) == 20
        assert global_state() == before

    @pytest.mark.parametrize(("draws", "alone"), [(0, 16), (1, 1025)])
    def test_it_ends_where_nothing_is_drawn(self, draws: int, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
        set_aside, calls = GlobalGenerators.set_aside, list[int]()

        def counted() -> GlobalGenerators:
            calls.append(1)
            return set_aside()

        def source() -> Iterator[float]:
            yield from (*drawing(draws), *[0.0] * 2000)

        monkeypatch.setattr(GlobalGenerators, "set_aside", counted)
        assert len(list(drawing_alike(source, 5))) == 2000 + draws
        # For each element that of others and its own.
        assert len(calls) == 2 * alone

    def test_an_element_s_draws_depend_on_its_number_alone(self) -> None:
        teller = Teller()
        whole = list(drawn_alike(drawing(60, every=7), KeyFamily(5), 0, teller))
        assert teller.drew
        later = Teller()
        later.drew = True
        source = drawing(60, every=7)
        for _ in range(30):
            next(source)
        assert list(drawn_alike(source, KeyFamily(5), 30, later)) == whole[30:]

    def test_code_that_does_not_draw_is_soon_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = list[int]()
        monkeypatch.setattr(seeds, "seed_globals", calls.append)
        teller = Teller()
        assert list(drawn_alike(iter(range(50)), KeyFamily(5), 0, teller)) == list(range(50))
        assert len(calls) == 16
        assert not teller.drew

    def test_the_end_closes_what_was_begun(self) -> None:
        closed = list[bool]()

        def source() -> Iterator[int]:
            try:
                yield from range(100)
            finally:
                closed.append(True)

        elements: Any = drawing_alike(source, 5)
        next(elements)
        elements.close()
        assert closed == [True]


def test_the_seeds_that_hooks_get() -> None:
    torch.manual_seed(5)
    generator, same = SeedGenerator(), SeedGenerator(5)
    first, again = (
        [each.generate_shared_seed(), each.generate_shared_seed(), each.generate_seed(), each.generate_seed()]
        for each in (generator, same)
    )
    assert first == again
    workers = [generator.spawn(number) for number in range(2)]
    # All go on with the shared sequence from here, each with one of its own.
    assert {each.generate_shared_seed() for each in (generator, *workers)} == {same.generate_shared_seed()}
    own = [each.generate_seed() for each in (generator, *workers) for _ in range(2)]
    assert len({*first, *own}) == 10
    assert generator.spawn(1, inplace=True) is generator
    assert [generator.generate_seed() for _ in range(2)] == own[4:]
    generator.seed(5)
    assert [generator.generate_shared_seed(), generator.generate_seed()] == first[::2]
    assert SeedGenerator(0).generate_seed() != SeedGenerator(2**64 - 1).generate_seed()
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=rf"a seed lies in \[0, 2\*\*64\), not {seed}"):
            SeedGenerator(seed)
    with pytest.raises(ValueError, match="worker_id must be 0 or more, not -1"):
        generator.spawn(-1)
