"""What a user's pipe keeps on itself from one iteration to the next, so that the order is a function of the epoch.

`random.shuffle(self.files)` in `__iter__` leaves the list in another order, and a generator that was made in `__init__`
goes on where it stood. Who resumes in a later epoch, or takes the place of a dead worker, has neither: there, the pipe
is as it was built. So every iteration begins alike, wherever it runs.

Contract
- A list, array or tensor that an iteration shuffled, in place or into a new one, is put back by the next. That is one
  whose elements stand in another order when the first element comes, by code that drew random numbers; one that is
  sorted, or rotated from epoch to epoch, stays as it is.
- A generator (`random.Random`, numpy's, torch's) stands where it was built in the first iteration of epoch 0, and is
  seeded anew, from there and by a key, for every other.
- What the user changes between two iterations counts as built from then on.
- Numbers, as a count of epochs, stay as the last iteration left them, and a saved state has them.
- All else stays as the last iteration left it, and so do lists of more than `MOST` elements and arrays of more than
  `LARGE` bytes.
"""

from __future__ import annotations

import copy
import operator
import pickle
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pipes.seeds import derive_key, drawn
from pipes.state import damaged

__all__ = [
    "LARGE",
    "MOST",
    "_NUMBERS",
    "_OURS",
    "AsBuilt",
    "as_built",
    "attributes_to_send",
    "check_numbers",
    "numbers_of",
]

# The types of numbers that are carried from epoch to epoch.
_NUMBERS = (bool, int, float)
# The names of numbers that the library keeps on pipes.
_OURS = frozenset({"_seed", "_seed_epoch", "_pipes_seed", "_pipes_epoch"})
#: Elements of the longest list whose order is kept.
MOST = 1 << 22
#: Bytes of the largest array or tensor whose order is kept.
LARGE = 64 << 20


class AsBuilt:
    """The order of the sequences and the state of the generators that a pipe has on itself, as it was built.

    >>> class Pipe:
    ...     def __init__(self): self.files = list("abcdef")
    >>> pipe, built = Pipe(), AsBuilt()
    >>> def shuffled():
    ...     random.seed(1); random.shuffle(pipe.files); yield from pipe.files
    >>> list(built.elements(pipe, None, shuffled)) == list(built.elements(pipe, None, shuffled))
    True
    """

    def __init__(self) -> None:
        self._known: dict[str, _Order | _Generator] = {}
        self._numbers: dict[str, Any] | None = None
        self._before: Any = None

    def elements(self, pipe: Any, key: Callable[[], int] | None, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Give the elements of `make()`, for which the pipe is as built; its generators are seeded by `key()`."""
        self.begin(pipe, key)
        elements: Iterator[Any] = iter(())
        try:
            elements = make()
            for element in elements:
                self.began(pipe)
                yield element
                break
            yield from elements
        finally:
            try:
                if isinstance(elements, Generator):
                    elements.close()
            finally:
                self.end(pipe)

    def begin(self, pipe: Any, key: Callable[[], int] | None) -> None:
        """Set the pipe's attributes to what they were when built; its generators by `key()`, if there is one."""
        attributes = vars(pipe)
        known: dict[str, _Order | _Generator] = {}
        for name, value in attributes.items():
            found = self._known.get(name)
            if found is None or not found.was_left(value):
                found = _Order.of(value) or _Generator.of(value)
            if found is not None:
                known[name] = found
        for name, found in known.items():
            attributes[name] = found.restored(name, key)
        self._known = known
        self._before = self._drawn() if any(isinstance(each, _Order) for each in known.values()) else None

    def numbers(self, pipe: Any) -> dict[str, Any]:
        """Return the numbers that are not what they were before the first iteration, as a count of epochs."""
        now = numbers_of(pipe)
        if self._numbers is None:
            self._numbers = now
        built = self._numbers
        return {name: value for name, value in now.items() if name not in built or built[name] != value}

    def set_numbers(self, pipe: Any, numbers: Mapping[str, Any]) -> None:
        """Set the pipe's numbers to what `numbers` gave then."""
        self.numbers(pipe)
        vars(pipe).update({**(self._numbers or {}), **numbers})

    def copies(self, pipe: Any) -> dict[str, Any]:
        """Return copies of what the last iteration left, as it was built."""
        attributes = vars(pipe)
        return {
            name: known.copy()
            for name, known in self._known.items()
            if name in attributes and known.was_left(attributes[name])
        }

    def _drawn(self) -> tuple[Any, ...]:
        return drawn(), *(each.now() for each in self._known.values() if isinstance(each, _Generator))

    def began(self, pipe: Any) -> None:
        """See what making the first element shuffled."""
        if self._before is not None and self._drawn() != self._before:
            for name, known in self._known.items():
                known.look(vars(pipe).get(name))

    def end(self, pipe: Any) -> None:
        """Remember what the iteration leaves, to tell it from what the user changes."""
        for name, known in self._known.items():
            known.leave(vars(pipe).get(name))


def as_built(pipe: Any) -> AsBuilt:
    """Return what is known of what a pipe, or what it iterates, keeps on itself."""
    known: AsBuilt = vars(pipe).setdefault("_as_built", AsBuilt())
    return known


def numbers_of(pipe: Any) -> dict[str, Any]:
    """Return the numbers that a user's pipe keeps on itself, but for infinite ones."""
    return {name: value for name, value in vars(pipe).items() if name not in _OURS and _is_number(value)}


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS and value - value == 0


def check_numbers(pipe: Any, numbers: Any, stage: str) -> None:
    """Refuse what no pipe of the class can have counted: a state sets the user's numbers, and nothing else."""
    if pipe is None or not isinstance(numbers, dict):
        raise damaged(f"stage {stage[:40]} keeps no such numbers on itself")
    known = vars(pipe)
    for name, value in numbers.items():
        new = name.isidentifier() and not name.startswith("_") and not hasattr(type(pipe), name)
        fits = type(known[name]) in _NUMBERS and name not in _OURS if name in known else new
        if not _is_number(value) or not fits:
            raise damaged(f"stage {stage} keeps no number {name!r} on itself")


def attributes_to_send(pipe: Any, without: frozenset[str]) -> dict[str, Any]:
    """Return the attributes that a copy of the pipe gets, in this process or another: as it was built."""
    known: AsBuilt | None = vars(pipe).get("_as_built")
    kept = {name: value for name, value in vars(pipe).items() if name not in without}
    return kept if known is None else kept | known.copies(pipe)


class _Order:
    """A list, array or tensor, and the order of its elements."""

    def __init__(self, value: Any) -> None:
        self._value, self._order = value, _copy(value)
        self._shuffled = False
        self._left, self._left_order = value, self._order

    @classmethod
    def of(cls, value: Any) -> _Order | None:
        """Return the order of a sequence; None for anything else, and for what is too large."""
        if type(value) is list:
            return cls(value) if 1 < len(value) <= MOST else None
        if type(value) is np.ndarray:
            fits = value.flags.writeable
        elif type(value) is torch.Tensor:
            plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
            fits = plain and not value.requires_grad and not value.is_conj()
        else:
            return None
        return cls(value) if fits and value.ndim and 0 < value.nbytes <= LARGE else None

    def was_left(self, value: Any) -> bool:
        """Return whether `value` is what the last iteration left."""
        return value is self._left and _same(value, self._left_order)

    def look(self, value: Any) -> None:
        """See whether the elements stand in another order."""
        self._shuffled = not self._is_in_order(value) and _reordered(value, self._order)

    def leave(self, value: Any) -> None:
        """Remember what an iteration leaves; what it did not shuffle stays so."""
        same = self._is_in_order(value)
        self._left = value if same or self._shuffled else None
        self._left_order = self._order if same or not self._shuffled else _copy(value)
        self._shuffled = False

    def _is_in_order(self, value: Any) -> bool:
        return value is self._value and _same(value, self._order)

    def copy(self) -> Any:
        """Return a copy of the sequence in its order."""
        return _copy(self._order)

    def restored(self, name: str, key: Callable[[], int] | None) -> Any:
        """Return the sequence in its order."""
        if not _same(self._value, self._order):
            self._value[:] = self._order
        return self._value


class _Generator:
    """A generator of random numbers, and where it stood."""

    def __init__(self, value: Any, kind: _Kind) -> None:
        self._value, self._kind = value, kind
        self._state = kind.get(value)
        self._left = value, self.now()

    @classmethod
    def of(cls, value: Any) -> _Generator | None:
        """Return the state of a generator; None for anything else."""
        kind = next((kind for kind in _KINDS if type(value) is kind.type), None)
        return None if kind is None else cls(value, kind)

    def now(self) -> bytes:
        """Return what every draw changes."""
        return pickle.dumps(self._kind.get(self._value))

    def was_left(self, value: Any) -> bool:
        """Return whether `value` is what the last iteration left."""
        return value is self._left[0] and self.now() == self._left[1]

    def look(self, value: Any) -> None:
        """Draws are seen by the state."""

    def leave(self, value: Any) -> None:
        """Remember where an iteration leaves the generator; another one in its place counts as built."""
        self._left = (value if value is self._value else None), self.now()

    def copy(self) -> Any:
        """Return another generator, where this one stood."""
        copied = copy.deepcopy(self._value)
        self._kind.set(copied, self._state)
        return copied

    def restored(self, name: str, key: Callable[[], int] | None) -> Any:
        """Return the generator where it stood, or seeded from there by `key()`."""
        self._kind.set(self._value, self._state)
        if key is not None:
            self._kind.seed(self._value, derive_key(self._kind.draw(self._value), key(), name))
        return self._value


class _Kind:
    """How the generators of one type are read, set, asked and seeded (by 128 bits)."""

    def __init__(
        self,
        type_: type,
        get: Callable[[Any], Any],
        set_: Callable[[Any, Any], Any],
        draw: Callable[[Any], int],
        seed: Callable[[Any, int], Any],
    ) -> None:
        self.type, self.get, self.set, self.draw, self.seed = type_, get, set_, draw, seed


def _set_bits(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


_KINDS = (
    _Kind(
        random.Random,
        random.Random.getstate,
        random.Random.setstate,
        lambda generator: generator.getrandbits(62),
        random.Random.seed,
    ),
    _Kind(
        np.random.Generator,
        lambda generator: generator.bit_generator.state,
        _set_bits,
        lambda generator: int(generator.integers(1 << 62)),
        lambda generator, seed: _set_bits(generator, type(generator.bit_generator)(seed).state),
    ),
    _Kind(
        np.random.RandomState,
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
        lambda generator: int(generator.randint(1 << 30)),
        lambda generator, seed: generator.seed([seed >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]),
    ),
    _Kind(
        torch.Generator,
        lambda generator: generator.get_state().numpy().tobytes(),
        lambda generator, state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        lambda generator: int(torch.randint(1 << 62, (), generator=generator, device=generator.device)),
        lambda generator, seed: generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF),
    ),
)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _same(value: Any, order: Any) -> bool:
    """Return whether two sequences have the same elements at the same places."""
    if isinstance(value, list):
        return len(value) == len(order) and all(map(operator.is_, value, order))
    if value.dtype != order.dtype or value.shape != order.shape:
        return False
    if _of_objects(value):
        return all(map(operator.is_, value.ravel(), order.ravel()))
    return bool(_rows(value).data == _rows(order).data)


def _reordered(value: Any, order: Any) -> bool:
    """Return whether `value` has the elements, or rows, of `order`, each as often."""
    if type(value) is type(order) is not list and not _of_objects(order):
        if value.dtype != order.dtype or value.shape != order.shape:
            return False
        # By their bytes, as NaN equals nothing.
        return Counter(map(bytes, _rows(value))) == Counter(map(bytes, _rows(order)))
    if not isinstance(value, list | tuple | np.ndarray):
        return False
    # A list becomes an array where numpy permutes it.
    found, expected = (each.tolist() if isinstance(each, np.ndarray) else list(each) for each in (value, order))
    try:
        return Counter(found) == Counter(expected)
    except TypeError:
        return Counter(map(id, found)) == Counter(map(id, expected))


def _of_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def _rows(value: Any) -> Any:
    """Return the rows of an array or tensor as bytes, uint8 of shape `(len(value), bytes of a row)`."""
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(len(value), -1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(len(value), -1).view(np.uint8)
