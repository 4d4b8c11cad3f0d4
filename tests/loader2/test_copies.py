"""What a stream's copy of a user's pipe has of its own, and what it shares."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipes import IterDataPipe
from pipes.graph import list_dps, traverse_dps
from pipes.iter import IterableWrapper
from pipes.loader2 import copies
from pipes.loader2.copies import Copies


class Stage(IterDataPipe[Any]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[Any]:
        yield from ()


class Notes:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.seen = [1]


def copied(**attributes: Any) -> tuple[Any, Any]:
    graph = Stage(**attributes)
    return graph, Copies().of(graph, 0)


def test_what_changes_is_its_own() -> None:
    kept = [1]
    graph, copy = copied(kept=kept, alias=kept, notes=Notes(), array=np.zeros(2), tensor=torch.zeros(2))
    assert copy is not graph
    assert copy.kept == [1]
    assert copy.kept is not kept
    assert copy.alias is copy.kept
    assert copy.notes.seen == [1]
    assert copy.notes.seen is not graph.notes.seen
    copy.array[0] = copy.tensor[0] = 1
    assert graph.array[0] == graph.tensor[0] == 0


def test_code_and_data_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LARGE", 1000)
    graph, copy = copied(
        call=lambda: 0, kind=Notes, module=np, text="x" * 100, array=np.zeros(1000), tensors=[torch.zeros(1000)]
    )
    for name in ("call", "kind", "module", "text", "array"):
        assert vars(copy)[name] is vars(graph)[name]
    assert copy.tensors is not graph.tensors
    assert copy.tensors[0] is graph.tensors[0]


def test_what_cannot_be_copied_is_shared_and_the_rest_is_not() -> None:
    graph, copy = copied(lock=threading.Lock(), kept=[1])
    assert copy.lock is graph.lock
    assert copy.kept is not graph.kept


def test_what_two_pipes_have_in_common_they_have_in_the_copy() -> None:
    generator = random.Random(1)
    copy = Copies().of(Stage(source=Stage(generator=generator), generator=generator), 0)
    assert copy.generator is copy.source.generator is not generator


def test_a_pipe_inside_another_loader_is_copied_with_it() -> None:
    graph, copy = copied(loader=torch.utils.data.DataLoader(IterableWrapper(range(3)), batch_size=None))
    assert copy.loader.dataset is not graph.loader.dataset
    both = zip(graph.loader, copy.loader, strict=True)
    assert list(both) == [(0, 0), (1, 1), (2, 2)]


def test_the_graph_above_is_the_stream_s_own_too() -> None:
    source = IterableWrapper(range(3))
    graph, copy = copied(inputs={"a": source.map(str)}, again=[source])
    inside = {id(node) for node in list_dps(traverse_dps(graph))}
    assert not inside & {id(node) for node in list_dps(traverse_dps(copy))}
    assert copy.again[0] is copy.inputs["a"].datapipe


def test_a_stream_keeps_its_copy_and_another_graph_gets_new_ones() -> None:
    made, graph, plain = Copies(), Stage(), IterableWrapper(range(3)).batch(2)
    first = made.of(graph, 0)
    assert made.of(graph, 0) is first is not made.of(graph, 1)
    assert made.of(plain, 0) is plain
    assert made.of(graph, 0) is not first


def test_a_number_that_the_user_sets_between_two_epochs_reaches_the_copies() -> None:
    graph: Any = Stage(epoch=0, given=0).map(str)
    pipe, copies = graph.datapipe, Copies()
    first, second = (copies.of(graph, stream).datapipe for stream in (0, 1))  # type: ignore[attr-defined]
    first.given = second.given = 7  # what a copy counts itself stays
    pipe.epoch = 3
    for stream, copy in enumerate((first, second)):
        assert copies.of(graph, stream).datapipe is copy  # type: ignore[attr-defined]
        assert (copy.epoch, copy.given) == (3, 7)
