"""Elements split at random, the same way in every epoch: `.random_split`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, ClassVar, Self, TypeVar

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of, no_length
from pipes.errors import GraphError
from pipes.node import built_at, walk
from pipes.run import Run
from pipes.seeds import Draws, derive_key
from pipes.stages.shuffling import Reshuffled
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Position, count_from, damaged

__all__ = ["RandomSplitter"]

T = TypeVar("T")

_BLOCK = 256


class _RandomSplitRun(Run):
    """Draw i decides where element i goes, by what is left for each split; the position is what each has got."""

    stateful = True

    def check(self, position: Position) -> None:
        counts = position.get("counts") if isinstance(position, dict) else None
        if not isinstance(counts, list) or len(counts) != len(self.pipe.weights):
            raise damaged(f"stage {self.stage} does not say what its {len(self.pipe.weights)} splits got")
        for count in counts:
            count_from({"counts": count}, "counts", self.stage)

    def restore(self, position: Position) -> None:
        self.counts = [0] * len(self.pipe.weights) if position is None else list(position["counts"])

    def elements(self) -> Iterator[Any]:
        counts, own = self.counts, list(self.pipe.weights).index(self.pipe.target)
        left = [float(share) - count for share, count in zip(self.pipe.shares(), counts, strict=True)]
        for element, draw in zip(self.inputs[0], self._draws(sum(counts)), strict=False):
            chosen = _chosen(left, draw)
            if chosen is None:
                error = ValueError(
                    f"stage {self.stage} has more elements than the {self.pipe.total()} that it was to split; give "
                    "random_split the right total_length"
                )
                self.note(error, element)
                raise error
            left[chosen] -= 1
            counts[chosen] += 1
            if chosen == own:
                yield element

    def _draws(self, start: int) -> Iterator[float]:
        # The key has no epoch, stage or stream: what one split leaves out, another one takes, whoever reads it.
        draws = Draws(derive_key(self.pipe.seed, "random_split"), start)
        while True:
            yield from draws.uniforms(_BLOCK).tolist()

    def capture(self) -> Capture:
        return tuple(self.counts)

    def describe(self, captured: Capture) -> Position:
        return {"counts": list(captured)}


def _chosen(left: list[float], draw: float) -> int | None:
    """Return the place that `draw`, in [0, 1), means, each as likely as what is left for it; None when nothing is."""
    reach = draw * sum(share for share in left if share > 0)
    chosen = None
    for place, share in enumerate(left):
        if share > 0:
            chosen = place
            if reach < share:
                break
            reach -= share
    return chosen


class _Siblings:
    """The splits of one call, which change their seed together."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members


class _RandomSplit(IterDataPipe[T]):
    """One of the splits."""

    run_class = _RandomSplitRun
    _numbers = True
    chained_as: ClassVar[str] = "random_split"
    _siblings: _Siblings | None = None

    def __init__(
        self,
        source_datapipe: IterDataPipe[T],
        weights: Mapping[Any, float],
        seed: int,
        total_length: int | None,
        target: Any,
    ) -> None:
        self.source_datapipe = source_datapipe
        self.weights = weights
        self.seed = seed
        self.total_length = total_length
        self.target = target

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_siblings"}

    def override_seed(self, seed: int) -> Self:
        """Split by `seed`, from the next iteration on, and so with the other splits of the call; returns the pipe."""
        seed = whole("seed", seed)
        for split in [self] if self._siblings is None else self._siblings.members:
            split.seed = seed
        return self

    def total(self) -> int:
        """Return how many elements are split."""
        return length_of(self.source_datapipe) if self.total_length is None else self.total_length

    def shares(self) -> list[Fraction]:
        """Return how many of them each split gets, which may be no whole number."""
        weights = [Fraction(weight).limit_denominator(10**9) for weight in self.weights.values()]
        return [weight * self.total() / sum(weights) for weight in weights]

    def _length(self, shard: Shard) -> int:
        shares = self.shares()
        if any(share.denominator != 1 for share in shares):
            raise no_length(self, f"its weights do not split {self.total()} elements into whole numbers of them")
        return int(shares[list(self.weights).index(self.target)])


@functional_datapipe("random_split")
class RandomSplitter(IterDataPipe[T]):
    """Return a list of pipes, one for each of `weights` in order, with that share of the elements; or only `target`'s.

    Args:
        source_datapipe: gives the elements, in the same order in every epoch: a shuffle belongs behind the splits.
        weights: by name, the share of a split: ints or floats of any sum.
        seed: decides, with the number of an element, where that goes; the loader's seed and the epoch do not.
        total_length: how many elements there are, unless `len(source_datapipe)` tells.
        target: the name of the one split to return.

    Where the weights divide the total, each split has its share exactly, and a length; else about that. Each reads
    all of the source, so two splits in one graph need a `.fork(2)` in front and a `target` each.
    `split.override_seed(seed)` splits all of a call anew.
    Raises TypeError for weights that are no dict of numbers, or without any total, ValueError for those that are
    negative or all 0, KeyError for an unknown target, GraphError for a `sharding_filter` in front, behind which numbers
    depend on the number of streams; warns of a shuffle there. While iterating, ValueError for more elements than the
    total.

    >>> from pipes.iter import IterableWrapper
    >>> train, valid = IterableWrapper(range(10)).random_split({"train": 0.8, "valid": 0.2}, seed=0)
    >>> len(train), len(valid), sorted([*train, *valid]) == list(range(10))
    (8, 2, True)
    """

    _chained_result: ClassVar[str] = "Any"

    def __new__(
        cls,
        source_datapipe: IterDataPipe[T],
        weights: Mapping[Any, float],
        seed: int,
        total_length: int | None = None,
        target: Any = None,
    ) -> Any:
        source, seed, total_length = as_pipe(source_datapipe), whole("seed", seed), _total(total_length)
        _check_weights(weights)
        if target is not None and target not in weights:
            raise KeyError(f"target={target!r} is none of the weights: {', '.join(map(repr, weights))}")
        _check_source(source)
        splits = [_RandomSplit[Any](source, dict(weights), seed, total_length, name) for name in weights]
        try:
            splits[0].total()
        except TypeError as error:
            raise TypeError(f"RandomSplitter needs total_length: {error}") from None
        if target is not None:
            return splits[list(weights).index(target)]
        siblings = _Siblings(splits)
        for split in splits:
            split._siblings = siblings
        return splits


def _total(total_length: Any) -> int | None:
    total = whole_or_none("total_length", total_length)
    if total is not None and total < 0:
        raise ValueError(f"total_length must be 0 or more, not {total}")
    return total


def _check_weights(weights: Any) -> None:
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of names and shares, not the {type(weights).__name__} {weights!r}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"the weight of {name!r} must be a number, not {weight!r}")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of {name!r} must be 0 or more, not {weight}")
    if not any(weights.values()):
        raise ValueError(f"weights needs one, at least, that is above 0, not {dict(weights)}")


def _check_source(source: IterDataPipe[Any]) -> None:
    for node in walk(source):
        if type(node)._shards:
            raise GraphError(
                f"{type(node).__name__}{built_at(node)} stands in front of random_split, so that the splits would "
                "overlap where another number of streams reads them: put .sharding_filter() behind the splits"
            )
        if isinstance(node, Reshuffled) and node._enabled:
            warnings.warn(
                f"{type(node).__name__}{built_at(node)} stands in front of random_split, so that each epoch splits the "
                "elements in another way, and what was for validation is trained on: shuffle behind the splits",
                stacklevel=4,
            )
