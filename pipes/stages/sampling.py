"""Random choices among pipes, and the indices that a sampler of torch gives: `SampleMultiplexer`, `Sampler`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import SequentialSampler

from pipes.arguments import whole_or_none
from pipes.datapipe import IterDataPipe, Shard, length_of, lengths_of
from pipes.errors import GraphError, StateError
from pipes.node import Node, built_at, walk
from pipes.run import Run
from pipes.seeds import GlobalGenerators, seed_globals
from pipes.stages.shuffling import Reseeded
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Cursor, Position, Ticks, count_from, damaged

__all__ = ["SampleMultiplexer", "Sampler"]

T = TypeVar("T")

_END = object()


class _SampleMultiplexerRun(Run):
    """Draw number n decides a choice; one that falls on a pipe which has no more is drawn again, without that pipe.

    The position is the number of draws and the places of the pipes that ended; those end again after a restore.
    """

    stateful = True
    count_fields = ("drawn",)

    def input_pipes(self) -> Sequence[Node]:
        return self.pipe.datapipes  # type: ignore[no-any-return]

    def check(self, position: Position) -> None:
        super().check(position)
        weights, ended = position.get("weights"), position.get("ended")
        if weights != list(self.pipe.weights):
            raise StateError(
                f"stage {self.stage} chooses by the weights {list(self.pipe.weights)}, but by {weights} when the state "
                "was saved; resume with those, or start afresh"
            )
        if not isinstance(ended, list):
            raise damaged(f"stage {self.stage} does not say which inputs ended")
        for place in ended:
            if count_from({"ended": place}, "ended", self.stage) >= len(weights):
                raise damaged(f"stage {self.stage} has no input {place}")

    def restore(self, position: Position) -> None:
        self.ended: tuple[int, ...] = () if position is None else tuple(position["ended"])
        self.ticks = Ticks(0 if position is None else position["drawn"])

    def elements(self) -> Iterator[Any]:
        sources, weights = [iter(source) for source in self.inputs], self.pipe.weights
        places = [place for place in range(len(sources)) if place not in self.ended]
        draws = self.draws(self.ticks.count)
        while places:
            reach = sum(weights[place] for place in places)
            for _, draw in zip(self.ticks, _uniforms(draws), strict=False):
                chosen = _chosen(places, weights, reach * draw)
                element = next(sources[chosen], _END)
                if element is _END:
                    break
                yield element
            places.remove(chosen)
            self.ended = (*self.ended, chosen)
            draws.seek(self.ticks.count)

    def capture(self) -> Capture:
        return self.ticks.count, self.ended

    def describe(self, captured: Capture) -> Position:
        drawn, ended = captured
        return {"drawn": drawn, "ended": list(ended), "weights": list(self.pipe.weights)}


def _uniforms(draws: Any) -> Iterator[float]:
    while True:
        yield from draws.uniforms(256).tolist()


def _chosen(places: list[int], weights: Sequence[float], reach: float) -> int:
    for place in places[:-1]:
        reach -= weights[place]
        if reach < 0:
            return place
    return places[-1]


class SampleMultiplexer(Reseeded, IterDataPipe[T]):
    """Give, each time, the next element of a pipe chosen at random by its weight, until all have ended.

    `pipes_to_weights_dict` has the weight of each pipe, of any sum; where one has ended, the others share its weight.
    The choices are a function of (seed, epoch, stage, stream) alone, so a resume repeats them; `seed`, like
    `.set_seed(seed)`, takes the place of the loader's. Raises TypeError for what is no dict of numbers, ValueError for
    an empty one or weights that are not above 0.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = SampleMultiplexer({IterableWrapper([1] * 90): 0.9, IterableWrapper([2] * 10): 0.1}, seed=0)
    >>> first = list(pipe)
    >>> len(first), sum(first), 1 < sum(first[:20]) / 20 < 1.4
    (100, 110, True)
    """

    run_class = _SampleMultiplexerRun

    def __init__(self, pipes_to_weights_dict: Mapping[IterDataPipe[T], float], seed: int | None = None) -> None:
        if not isinstance(pipes_to_weights_dict, Mapping):
            raise TypeError(f"SampleMultiplexer takes a dict of pipes, not a {type(pipes_to_weights_dict).__name__}")
        if not pipes_to_weights_dict:
            raise ValueError("SampleMultiplexer needs at least one pipe")
        for weight in pipes_to_weights_dict.values():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise TypeError(f"the weight of a pipe must be a number, not {weight!r}")
            if not weight > 0 or not math.isfinite(weight):
                raise ValueError(f"the weight of a pipe must be above 0, not {weight}")
        self.datapipes = tuple(as_pipe(source) for source in pipes_to_weights_dict)
        self.weights = tuple(pipes_to_weights_dict.values())
        self.seed = whole_or_none("seed", seed)
        if self.seed is not None:
            self.set_seed(self.seed)

    def _length(self, shard: Shard) -> int:
        return sum(lengths_of(self.datapipes, shard))


class _SamplerRun(Run):
    """The sampler is asked for all indices at once, with global generators seeded; the position is the number given."""

    stateful = True
    count_fields = ("at",)

    def input_pipes(self) -> Sequence[Node]:
        return ()

    def restore(self, position: Position) -> None:
        self.start = 0 if position is None else position["at"]
        self.cursor: Cursor | None = None

    def elements(self) -> Iterator[Any]:
        generators = GlobalGenerators.set_aside()
        try:
            seed_globals(self.context.key(self.stage, self.pipe))
            indices = list(self.pipe.made())
        except BaseException as error:
            self.note(error)
            raise
        finally:
            generators.restore()
        if self.start > len(indices):
            raise StateError(
                f"the sampler of stage {self.stage} gives {len(indices)} indices, but the state was saved after "
                f"{self.start}: resume with the data the state was made from, or start afresh"
            )
        self.cursor = Cursor(indices, self.start)
        return self.cursor.elements

    def capture(self) -> Capture:
        return self.start if self.cursor is None else self.cursor.position

    def describe(self, captured: Capture) -> Position:
        return {"at": captured}


class Sampler(Reseeded, IterDataPipe[Any]):
    """Give the indices, not the elements, that `sampler(data_source=datapipe, *sampler_args, **sampler_kwargs)` gives.

    What a sampler draws from torch's, NumPy's or Python's global generator is a function of (seed, epoch, stage,
    stream), so a resume repeats it. `datapipe` is asked for its length alone, so it needs one.
    Raises AssertionError for a pipe without a length, GraphError for a `sharding_filter` in it, which is never read.

    >>> from torch.utils.data import RandomSampler
    >>> from pipes.iter import IterableWrapper
    >>> list(Sampler(IterableWrapper("abc"))), sorted(Sampler(IterableWrapper("abc"), RandomSampler))
    ([0, 1, 2], [0, 1, 2])
    """

    run_class = _SamplerRun
    _numbers = True

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        sampler: type = SequentialSampler,
        sampler_args: tuple[Any, ...] | None = None,
        sampler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.datapipe = as_pipe(datapipe)
        try:
            length_of(self.datapipe)
        except TypeError as error:
            raise AssertionError(f"Sampler asks its pipe for the length: {error}") from None
        for node in walk(self.datapipe):
            if type(node)._shards:
                raise GraphError(
                    f"Sampler gives indices of the whole, where {type(node).__name__}{built_at(node)} would split "
                    "nothing: put .sharding_filter() behind it"
                )
        self.sampler = sampler
        self.sampler_args = () if sampler_args is None else tuple(sampler_args)
        self.sampler_kwargs = {} if sampler_kwargs is None else dict(sampler_kwargs)

    def made(self) -> Any:
        """Return a new sampler."""
        return self.sampler(*self.sampler_args, data_source=self.datapipe, **self.sampler_kwargs)

    def _length(self, shard: Shard) -> int:
        return len(self.made())
