"""Elements of like length into batches: `.max_token_bucketize`, which a budget of tokens bounds, and `.bucketbatch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Self, TypeVar

import numpy as np

from pipes.arguments import whole
from pipes.datapipe import DataChunk, IterDataPipe, Shard, functional_datapipe, length_of
from pipes.errors import StateError
from pipes.run import Run
from pipes.stages.columns import check_columns
from pipes.stages.shuffling import Reshuffled, Shuffler
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, damaged

__all__ = ["BucketBatcher", "MaxTokenBucketizer"]

T = TypeVar("T")

Measured = list[tuple[float, Any]]


class _BucketsRun(Run):
    """Reads a buffer of inputs, gives all of its batches, reads the next one.

    So the anchor stands where the buffer began, `taken` inputs from the start; a restore reads that buffer again and
    passes over the batches that were `given` from it.
    """

    anchored = True
    leaves_out = True
    count_fields = ("taken", "given")

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] != position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.taken: int = 0 if position is None else position["taken"]
        self.given: int = 0 if position is None else position["given"]
        self.anchors = Anchors(self.upstream, 0)
        self.anchors.note(self.taken)

    def elements(self) -> Iterator[Any]:
        source, size = iter(self.inputs[0]), self.pipe.buffer_size
        passed = self.given
        while True:
            buffer = list(islice(source, size))
            read = len(buffer)
            batches = self.batches(buffer, passed > 0)
            if sum(1 for _ in islice(batches, passed)) < passed:
                raise StateError(
                    f"stage {self.stage} has fewer batches after input {self.taken} than when the state was saved "
                    f"({passed}); the data changed: resume with the data the state was made from, or start afresh"
                )
            for batch in batches:
                self.given += 1
                yield batch
            if read < size:
                return
            self.taken, self.given, passed = self.taken + read, 0, 0
            self.anchors.note(self.taken)

    def batches(self, buffer: list[Any], again: bool) -> Iterator[Any]:
        """Return the batches of one buffer, and empty it; `again` where some of them were given before a restore."""
        measured = self._measured(buffer, again)
        buffer.clear()
        return _cut(measured, self.pipe.max_token_count, self.pipe.include_padding)

    def _measured(self, buffer: list[Any], again: bool) -> Measured:
        """Return (length, element) of what the bounds let pass, by length; count the others, but not `again`."""
        pipe = self.pipe
        kept: Measured = []
        for element in buffer:
            try:
                length = pipe.len_fn(element)
                kind = "too short" if length < pipe.min_len else "" if length <= pipe.max_len else "too long"
            except BaseException as error:
                self.note(error, element)
                raise
            if not kind:
                kept.append((length, element))
            elif self.tally is not None and not again:
                self.tally.leave_out(kind)
        kept.sort(key=itemgetter(0))
        return kept

    def capture(self) -> Capture:
        return self.taken, self.given, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, given, entries = captured
        return {"taken": taken, "given": given, "anchor": self.anchors.describe(entries, taken)}


def _cut(measured: Measured, most: float, include_padding: bool) -> Iterator[DataChunk[Any]]:
    """Cut what ascends in length into batches of at most `most` tokens; empties `measured`."""
    measured.reverse()
    chunk: list[Any] = []
    tokens: float = 0
    while measured:
        length, element = measured.pop()
        tokens = (len(chunk) + 1) * length if include_padding else tokens + length
        if chunk and tokens > most:
            yield DataChunk(chunk)
            chunk, tokens = [], length
        chunk.append(element)
    if chunk:
        yield DataChunk(chunk)


@functional_datapipe("max_token_bucketize")
class MaxTokenBucketizer(IterDataPipe[DataChunk[T]]):
    """Gather elements of like length into batches of at most `max_token_count` tokens.

    Args:
        datapipe: gives the elements; where their order is no matter of chance, shuffle first.
        max_token_count: the most tokens a batch may have.
        len_fn: gives an element's length, a number.
        min_len, max_len: elements that are shorter or longer are left out and counted (`loader.stats()["left_out"]`);
            `max_len` is `max_token_count` by default.
        buffer_size: so many elements are read, sorted by length and cut into batches, which are given from short to
            long; then the next ones are read. The last batch of each is what is left. Shuffle the batches after it.
        include_padding: count what a batch has once it is padded, its number of elements times its longest.

    A restore reads the elements of one buffer again. Raises ValueError unless 0 <= min_len <= max_len <=
    max_token_count, and for a buffer_size below 1.

    >>> from pipes.iter import IterableWrapper
    >>> words = IterableWrapper(["a", "bcd", "ef", "ghij", "k"])
    >>> list(words.max_token_bucketize(4)), list(words.max_token_bucketize(4, include_padding=True, max_len=3))
    ([['a', 'k', 'ef'], ['bcd'], ['ghij']], [['a', 'k'], ['ef'], ['bcd']])
    """

    run_class = _BucketsRun
    _levels = 2
    forms_batches = True
    _calls = ("len_fn",)

    def __init__(
        self,
        datapipe: IterDataPipe[T],
        max_token_count: int,
        len_fn: Callable[[T], int] = len,  # type: ignore[assignment]
        min_len: int = 0,
        max_len: int | None = None,
        buffer_size: int = 1000,
        include_padding: bool = False,
    ) -> None:
        max_token_count, min_len = whole("max_token_count", max_token_count), whole("min_len", min_len)
        max_len = max_token_count if max_len is None else whole("max_len", max_len)
        buffer_size = whole("buffer_size", buffer_size)
        if not 0 <= min_len <= max_len <= max_token_count:
            raise ValueError(
                f"lengths must satisfy 0 <= min_len <= max_len <= max_token_count, not 0 <= {min_len} <= {max_len} <= "
                f"{max_token_count}"
            )
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, not {buffer_size}")
        self.datapipe = as_pipe(datapipe)
        self.max_token_count = max_token_count
        self.len_fn = len_fn
        self.min_len = min_len
        self.max_len = max_len
        self.buffer_size = buffer_size
        self.include_padding = include_padding


class _PoolsRun(_BucketsRun):
    """Reads a pool, shuffles it, sorts its buckets, gives the batches of them all in a random order.

    The draws of a pool follow from its number: first one for each element, then one for each batch.
    """

    leaves_out = False

    def batches(self, buffer: list[Any], again: bool) -> Iterator[Any]:
        pipe, count, size = self.pipe, len(buffer), self.pipe.batch_size
        draws = self.draws(self.taken * 2)
        order = np.argsort(draws.uniforms(count), kind="stable") if pipe.shuffles_elements else range(count)
        mixed = [buffer[place] for place in order]
        buffer.clear()
        if pipe.sort_key is not None:
            bucket_size = size * pipe.batch_num
            buckets = [mixed[at : at + bucket_size] for at in range(0, count, bucket_size)]
            mixed = [element for bucket in buckets for element in self._sorted(bucket)]
        starts = np.arange(0, count - size + 1 if pipe.drop_last else count, size)
        if pipe.shuffles_batches:
            starts = starts[np.argsort(draws.uniforms(len(starts)), kind="stable")]
        return (DataChunk(mixed[at : at + size]) for at in starts.tolist())

    def _sorted(self, bucket: list[Any]) -> list[Any]:
        count = len(bucket)
        try:
            found = list(self.pipe.sort_key(bucket))
            if len(found) != count:
                raise ValueError(
                    f"sort_key returns the elements of its list in another order, but gave {len(found)} for {count}; "
                    "leave elements out with .filter before .bucketbatch"
                )
        except BaseException as error:
            self.note(error)
            raise
        return found


@functional_datapipe("bucketbatch")
class BucketBatcher(Reshuffled, IterDataPipe[DataChunk[T]]):
    """Shuffle, sort elements within buckets, as by their length, and give the batches of the buckets in a random order.

    Args:
        datapipe: gives the elements.
        batch_size: elements of a batch.
        drop_last: leave out the last batch where it is shorter.
        batch_num: batches of a bucket.
        bucket_num: buckets that are read, and shuffled, at a time: `batch_size * batch_num * bucket_num` elements.
        sort_key: takes the list of a bucket's elements, returns them sorted. Without it elements are only shuffled.
            With it, and one bucket, nothing is shuffled: batches come from the first to the last of each bucket.
        use_in_batch_shuffle: shuffle what is read at a time; False shuffles by `.shuffle` with a buffer as large.

    A restore reads what was read at a time again. Raises AssertionError for sizes below 1; while iterating, ValueError
    for a `sort_key` that returns another number of elements.

    >>> from pipes.iter import IterableWrapper
    >>> words = IterableWrapper(["aaa", "b", "cc", "dddd"])
    >>> list(words.bucketbatch(2, batch_num=2, sort_key=lambda bucket: sorted(bucket, key=len)))
    [['b', 'cc'], ['aaa', 'dddd']]
    """

    run_class = _PoolsRun
    _calls = ("sort_key",)
    _levels = 2
    forms_batches = True

    def __init__(
        self,
        datapipe: IterDataPipe[T],
        batch_size: int,
        drop_last: bool = False,
        batch_num: int = 100,
        bucket_num: int = 1,
        sort_key: Callable[[list[T]], list[T]] | None = None,
        use_in_batch_shuffle: bool = True,
    ) -> None:
        sizes = {"batch_size": batch_size, "batch_num": batch_num, "bucket_num": bucket_num}
        for name, value in sizes.items():
            sizes[name] = whole(name, value)
            assert sizes[name] > 0, f"{name} must be at least 1, not {value}"
        if sort_key is not None:
            check_columns(sort_key, None)
        self.batch_size, self.batch_num, self.bucket_num = sizes.values()
        self.drop_last = drop_last
        self.sort_key = sort_key
        self.use_in_batch_shuffle = use_in_batch_shuffle
        source = as_pipe(datapipe)
        self._made_above = self.shuffles_before
        self.datapipe: Any = Shuffler(source, self.buffer_size) if self.shuffles_before else source

    def set_shuffle(self, shuffle: bool = True) -> Self:
        """Switch all shuffling of the stage on or off (then elements pass in order); returns the pipe."""
        if self.shuffles_before:
            self.datapipe.set_shuffle(shuffle)
        return super().set_shuffle(shuffle)

    def set_seed(self, seed: int) -> Self:
        """Use `seed` for this stage, from its next iteration on as epoch 0; returns the pipe."""
        if self.shuffles_before:
            self.datapipe.set_seed(seed)
        return super().set_seed(seed)

    @property
    def buffer_size(self) -> int:
        return self.batch_size * self.batch_num * self.bucket_num

    @property
    def _mixes(self) -> bool:
        return self.sort_key is None or self.bucket_num > 1

    @property
    def shuffles_before(self) -> bool:
        return self._mixes and not self.use_in_batch_shuffle

    @property
    def shuffles_elements(self) -> bool:
        return self._enabled and self._mixes and self.use_in_batch_shuffle

    @property
    def shuffles_batches(self) -> bool:
        return self._enabled and self.sort_key is not None and self.bucket_num > 1

    def _length(self, shard: Shard) -> int:
        count = length_of(self.datapipe, shard)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)
