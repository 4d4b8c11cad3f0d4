"""From (seed, epoch, stage, stream, number) to random draws: counter-based, so draw t depends on t alone.

The library draws from Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in NumPy's
implementation, whose stream NumPy promises to keep. Keys are BLAKE2b digests of their parts, so neighbouring
seeds, epochs and stages give unrelated streams.

Users' functions draw from the global generators of `random`, `numpy` and `torch`; `seed_globals` sets all three
from one key, and `GlobalGenerators` puts the caller's own back afterwards. Code that several streams run alike, as a
source that shuffles its list, draws from generators of its own (`drawing_alike`), or from such as are seeded for each
element (`drawn_alike`).
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "Draws",
    "GlobalGenerators",
    "KeyFamily",
    "KeyedGenerator",
    "derive_key",
    "drawing_alike",
    "drawn",
    "drawn_alike",
    "seed_globals",
    "seed_was_asked",
    "watched",
]

# Elements without a draw, after which code is taken not to draw, or to draw no more.
_WATCHED, _QUIET = 16, 1024
# How often a pipe that a function iterates drew by the seed of torch's generator.
_asked = 0

Part = int | str


def derive_key(*parts: Part) -> int:
    """Return the 128-bit key of `parts`; equal parts give equal keys, in any process and release.

    >>> derive_key(7, 0, "1:Shuffler", 0) == derive_key(7, 0, "1:Shuffler", 0)
    True
    >>> derive_key(7, 0, "1:Shuffler", 0) == derive_key(7, 1, "1:Shuffler", 0)
    False
    """
    return KeyFamily(*parts).key()


class KeyFamily:
    """The keys whose first parts are the same, which are digested once.

    >>> KeyFamily(7, 0, "unit").key(5) == derive_key(7, 0, "unit", 5)
    True
    """

    __slots__ = ("_digest",)

    def __init__(self, *parts: Part) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        _update(self._digest, parts)

    def key(self, *parts: Part) -> int:
        """Return `derive_key` of the first parts and these."""
        digest = self._digest.copy()
        _update(digest, parts)
        return int.from_bytes(digest.digest(), "little")


def _update(digest: hashlib.blake2b, parts: tuple[Part, ...]) -> None:
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little"))
        digest.update(text)


class Draws:
    """Read the random stream of one key from any place, in order, a block at a time.

    >>> draws = Draws(derive_key(1, "doc"))
    >>> first = draws.below(10, 6)
    >>> draws.seek(4)
    >>> draws.below(10, 2) == first[4:]
    True
    """

    __slots__ = ("_bits",)

    def __init__(self, key: int, start: int = 0) -> None:
        self._bits = np.random.Philox(key=key, counter=start // 4)
        self._bits.random_raw(start % 4)

    def seek(self, index: int) -> None:
        """Make `index` (from 0) the number of the next draw."""
        # a third of the time of a new generator, which asks the system for a seed that it then does not use
        state: Any = self._bits.state
        state["state"]["counter"] = np.array([index // 4, 0, 0, 0], dtype=np.uint64)
        state["buffer_pos"] = 4  # nothing is left over from the block before
        self._bits.state = state
        self._bits.random_raw(index % 4)

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Return the next `count` draws as float64 in [0, 1), 53 bits each; shape `(count,)`."""
        draws: npt.NDArray[np.float64] = (self._bits.random_raw(count) >> np.uint64(11)) * np.float64(2.0**-53)
        return draws

    def below(self, bound: int | npt.NDArray[np.int64], count: int) -> list[int]:
        """Return the next `count` draws as ints in [0, bound); `bound` may be an array of one bound a draw."""
        return self.integers(bound, count).tolist()  # type: ignore[no-any-return]

    def integers(self, bound: int | npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Return what `below` returns as an int64 array of shape `(count,)`."""
        return (self.uniforms(count) * bound).astype(np.int64)


class KeyedGenerator:
    """Hand out one `numpy.random.Generator`, re-keyed for every element: what `map(fn, rng=True)` passes.

    >>> keyed = KeyedGenerator(derive_key(1, "doc"))
    >>> a = keyed.at(5).random()
    >>> b = keyed.at(6).random()
    >>> a == keyed.at(5).random() and a != b
    True
    """

    __slots__ = ("_bits", "_generator", "_state")

    def __init__(self, key: int) -> None:
        self._bits = np.random.Philox(key=key)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state

    def at(self, ordinal: int) -> np.random.Generator:
        """Return the generator set to the stream of element `ordinal` (2**64 elements of 2**66 draws each)."""
        self._state["state"]["counter"] = np.array([0, 0, ordinal, 0], dtype=np.uint64)
        self._bits.state = self._state
        return self._generator


def seed_globals(key: int) -> None:
    """Seed the global generators of `random`, `numpy` and `torch` (CPU) from `key`.

    NumPy gets 32 bits of it: its seeding by more words takes ten times as long as the other two together.
    """
    random.seed(key)
    np.random.seed(key >> 96)
    torch.default_generator.manual_seed((key ^ (key >> 64)) & 0xFFFFFFFFFFFFFFFF)
    _remember()


class GlobalGenerators:
    """Set the state of the global generators aside, while others seed and use them, and put it back.

    Numpy's state stays where it is: its global functions get another bit generator meanwhile, which costs a hundredth
    of copying. What they draw before they are seeded is not defined.

    >>> import random
    >>> saved = GlobalGenerators.set_aside(); before = random.random()
    >>> saved.restore(); random.random() == before
    True
    """

    __slots__ = ("_bits", "_gauss", "_random", "_torch")

    def __init__(self, python: Any, bits: Any, gauss: float | None, torch_state: torch.Tensor) -> None:
        self._random, self._bits, self._gauss, self._torch = python, bits, gauss, torch_state

    @classmethod
    def set_aside(cls) -> GlobalGenerators:
        """Return the state of the three generators as it is now."""
        bits = _numpy.get_bit_generator()
        saved = cls(random.getstate(), bits, _waiting_gauss(bits), torch.default_generator.get_state())
        _numpy.set_bit_generator(_spare.pop() if _spare else np.random.MT19937(0))
        return saved

    def restore(self) -> None:
        """Set the three generators to the remembered state; once only."""
        random.setstate(self._random)
        torch.default_generator.set_state(self._torch)
        _spare.append(_numpy.get_bit_generator())
        _numpy.set_bit_generator(self._bits)
        if self._gauss is None:
            _remember()
        else:
            state = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": self._gauss})


# numpy's stubs lack the functions that change its bit generator.
_numpy: Any = np.random
# Bit generators that nobody uses now.
_spare: list[Any] = []
# A bit generator, and its memory at a moment when numpy kept no normal draw back.
_quiet: tuple[Any, bytes] = (None, b"")


def _memory(bits: Any) -> bytes:
    """Return what every draw changes: the 624 words and the position of numpy's MT19937, nothing for any other."""
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4) if type(bits) is np.random.MT19937 else b""


def _remember() -> None:
    global _quiet
    bits = _numpy.get_bit_generator()
    _quiet = bits, _memory(bits)


def _waiting_gauss(bits: Any) -> float | None:
    """Return the normal draw that numpy keeps back for its next call; a change of bit generators loses it.

    To ask numpy copies all of its state, so it is asked only when something was drawn since nothing was kept back.
    """
    known, memory = _quiet
    if bits is known and memory and memory == _memory(bits):
        return None
    state = np.random.get_state(legacy=False)
    return state["gauss"] if state["has_gauss"] else None


def seed_was_asked() -> None:
    """Count it as a draw that something is drawn by torch's seed."""
    global _asked
    _asked += 1


def drawn() -> tuple[Any, ...]:
    """Return what draws from the global generators change."""
    numpy = _memory(_numpy.get_bit_generator()) or repr(np.random.get_state(legacy=False))
    return _asked, random.getstate(), numpy, torch.default_generator.get_state().numpy().tobytes()


def watched(elements: Iterator[Any], tell: Callable[[], object]) -> Iterator[Any]:
    """Give `elements`; call `tell`, once, if the code that makes the first 16 draws from the global generators.

    >>> list(watched((random.random() < 2 for _ in range(2)), lambda: print("it draws")))
    it draws
    [True, True]
    """
    told = False
    try:
        before = drawn()
        for element in islice(elements, _WATCHED):
            if not told and drawn() != before:
                told = True
                tell()
            yield element
            before = drawn()
        yield from elements
    finally:
        if isinstance(elements, Generator):
            elements.close()


def drawing_alike(make: Callable[[], Iterator[Any]], key: int) -> Iterator[Any]:
    """Give the elements of the iterator that `make` returns, which draws from global generators of its own.

    These are seeded once, by `key`. That takes 60 us an element, so it ends with the first 16 elements if none came
    with a draw, else after 1024 without one; what is drawn later still is drawn from the generators of all.

    >>> def shuffled():
    ...     numbers = list(range(9)); random.shuffle(numbers); yield from numbers
    >>> random.seed(1); first = list(drawing_alike(shuffled, key=5))
    >>> random.seed(2); list(drawing_alike(shuffled, key=5)) == first
    True
    """
    elements: Iterator[Any] | None = None
    own: GlobalGenerators | None = None
    quiet, enough = 0, _WATCHED
    before: tuple[Any, ...] = ()
    try:
        while quiet < enough:
            others = GlobalGenerators.set_aside()
            try:
                if own is not None:
                    own.restore()
                if elements is None:
                    seed_globals(key)
                    before = drawn()
                    elements = make()
                try:
                    element = next(elements)
                except StopIteration:
                    return
                quiet, after = quiet + 1, drawn()
                if after != before:
                    quiet, enough, before = 0, _QUIET, after
                own = GlobalGenerators.set_aside()
            finally:
                others.restore()
            yield element
        assert elements is not None
        yield from elements
    finally:
        if isinstance(elements, Generator):
            elements.close()


class Drawing(Protocol):
    """Whoever wants to know whether code drew."""

    drew: bool


def drawn_alike(elements: Iterator[Any], keys: KeyFamily, number: int, teller: Drawing) -> Iterator[Any]:
    """Give `elements`, of which the next has this number, each made with global generators seeded by its number.

    When one of the first 16 came with a draw, that is told, and goes on to the end, at 40 us an element.
    """
    quiet = 0
    while teller.drew or quiet < _WATCHED:
        others = GlobalGenerators.set_aside()
        try:
            seed_globals(keys.key(number))
            before = () if teller.drew else drawn()
            try:
                element = next(elements)
            except StopIteration:
                return
            quiet, number = quiet + 1, number + 1
            teller.drew = teller.drew or drawn() != before
        finally:
            others.restore()
        yield element
    yield from elements
