"""From (seed, epoch, stage, stream, number) to random draws: counter-based, so draw t depends on t alone.

The library draws from Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in NumPy's
implementation, whose stream NumPy promises to keep. Keys are BLAKE2b digests of their parts, so neighbouring
seeds, epochs and stages give unrelated streams.

Users' functions draw from the global generators of `random`, `numpy` and `torch`; `seed_globals` sets all three
from one key, and `GlobalGenerators` puts the caller's own back afterwards.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Draws", "GlobalGenerators", "KeyedGenerator", "derive_key", "seed_globals"]

Part = int | str


def derive_key(*parts: Part) -> int:
    """Return the 128-bit key of `parts`; equal parts give equal keys, in any process and release.

    >>> derive_key(7, 0, "1:Shuffler", 0) == derive_key(7, 0, "1:Shuffler", 0)
    True
    >>> derive_key(7, 0, "1:Shuffler", 0) == derive_key(7, 1, "1:Shuffler", 0)
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little"))
        digest.update(text)
    return int.from_bytes(digest.digest(), "little")


class Draws:
    """Read the random stream of one key from any place, in order, a block at a time.

    >>> draws = Draws(derive_key(1, "doc"))
    >>> first = draws.below(10, 6)
    >>> draws.seek(4)
    >>> draws.below(10, 2) == first[4:]
    True
    """

    __slots__ = ("_bits", "_key")

    def __init__(self, key: int, start: int = 0) -> None:
        self._key = key
        self.seek(start)

    def seek(self, index: int) -> None:
        """Make `index` (from 0) the number of the next draw."""
        self._bits = np.random.Philox(key=self._key, counter=index // 4)
        if index % 4:
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


class GlobalGenerators:
    """Remember the state of the global generators and put it back.

    >>> import random
    >>> saved = GlobalGenerators.capture(); before = random.random()
    >>> saved.restore(); random.random() == before
    True
    """

    __slots__ = ("_numpy", "_random", "_torch")

    def __init__(self, python: Any, numpy: Any, torch_state: torch.Tensor) -> None:
        self._random, self._numpy, self._torch = python, numpy, torch_state

    @classmethod
    def capture(cls) -> GlobalGenerators:
        """Return the state of the three generators as it is now."""
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state())

    def restore(self) -> None:
        """Set the three generators to the remembered state."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
