"""What iterating costs: source → shuffle(1000) → map → filter → batch(32) over 200,000 ints, in one process.

The limit is the same chain in bare generators, with the fastest draw that the standard library has. Peers: torch's own
data pipes, torchdata.nodes (0.11 has neither shuffle nor filter, so it runs
the chain without) and webdataset.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from report import Row, arguments, interleaved, median, row, show, spread

from pipes.iter import IterableWrapper

ELEMENTS, BUFFER, BATCH = 200_000, 1000, 32


def increment(x: int) -> int:
    return x + 1


def is_even(x: int) -> bool:
    return x % 2 == 0


def consume(elements: Iterable[Any]) -> None:
    for _ in elements:
        pass


def shuffled(source: Iterator[int]) -> Iterator[int]:
    draw, buffer = random.random, list(islice(source, BUFFER))
    for element in source:
        slot = int(draw() * BUFFER)
        chosen, buffer[slot] = buffer[slot], element
        yield chosen
    random.shuffle(buffer)
    yield from buffer


def mapped(source: Iterator[int]) -> Iterator[int]:
    for element in source:
        yield increment(element)


def filtered(source: Iterator[int]) -> Iterator[int]:
    for element in source:
        if is_even(element):
            yield element


def batched(source: Iterator[int]) -> Iterator[list[int]]:
    while chunk := list(islice(source, BATCH)):
        yield chunk


def bare_generators() -> None:
    consume(batched(filtered(mapped(shuffled(iter(range(ELEMENTS)))))))


def pipes_chain() -> None:
    consume(IterableWrapper(range(ELEMENTS)).shuffle(BUFFER).map(increment).filter(is_even).batch(BATCH))


def pipes_map_and_batch() -> None:
    consume(IterableWrapper(range(ELEMENTS)).map(increment).batch(BATCH))


def torch_pipes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.data.datapipes.iter import IterableWrapper as TorchWrapper

        chain = TorchWrapper(range(ELEMENTS), deepcopy=False).shuffle(buffer_size=BUFFER)
        consume(chain.map(increment).filter(is_even).batch(BATCH))


def torchdata_nodes() -> None:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper

    node: Any = Mapper(IterableWrapper(range(ELEMENTS)), increment)
    consume(Loader(Batcher(node, BATCH, drop_last=False)))


def webdataset_chain() -> None:
    import webdataset

    pipeline = webdataset.DataPipeline(
        lambda: iter(range(ELEMENTS)),
        webdataset.shuffle(BUFFER),
        webdataset.map(increment),
        webdataset.select(is_even),
        webdataset.batched(BATCH, collation_fn=None),
    )
    consume(pipeline)


def compare(
    case: str, ours: str, peer: str, times: dict[str, list[float]], target: float | None, note: str = ""
) -> Row:
    # The median of paired ratios: both ran in the same round, so what else the machine did hits them alike.
    per_element = 1e6 / ELEMENTS
    mine, theirs = median(times[ours]) * per_element, median(times[peer]) * per_element
    line = row("chain", case, peer, mine, theirs, "µs/element", more_is_better=False, target=target, note=note)
    paired = median(b / a for a, b in zip(times[ours], times[peer], strict=True))
    return Row(**{**vars(line), "ratio": paired})


def main() -> None:
    options = arguments(__doc__ or "", rounds=21)
    case = "shuffle, map, filter, batch"
    contenders: dict[str, Callable[[], None]] = {"bare generators": bare_generators, "pipes": pipes_chain}
    times = interleaved(contenders, options.rounds)
    note = f"ours {spread(times['pipes'])}, theirs {spread(times['bare generators'])}"
    rows = [compare(case, "pipes", "bare generators", times, 1 / 1.3, note)]

    peers: list[tuple[str, str, Callable[[], None], Callable[[], None], float | None]] = [
        (case, "torch data pipes", pipes_chain, torch_pipes, 15),
        (case, "webdataset", pipes_chain, webdataset_chain, None),
        ("map, batch", "torchdata.nodes", pipes_map_and_batch, torchdata_nodes, None),
    ]
    notes = []
    for case, peer, ours, theirs, target in peers:
        try:
            times = interleaved({"pipes": ours, peer: theirs}, max(3, options.rounds // 7))
        except ImportError as error:
            notes.append(f"left out: {peer} ({error})")
            continue
        rows.append(compare(case, "pipes", peer, times, target))
    show(rows, title="Time an element, one process", as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
