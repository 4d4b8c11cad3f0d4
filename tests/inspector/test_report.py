"""The facts about each stage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipes.datapipe import IterDataPipe
from pipes.inspector.report import Report, StageReport, describe_graph
from pipes.iter import IterableWrapper
from pipes.map import SequenceWrapper


def stages(report: Report) -> dict[str, StageReport]:
    return {stage.name: stage for stage in report.stages}


def test_a_sharded_chain() -> None:
    pipe = IterableWrapper(range(100)).shuffle(1000).sharding_filter().map(str).shuffle(10).batch(8, drop_last=True)
    report = describe_graph(pipe, streams=3)
    found = [(s.name, s.sharding, s.state, s.rereads, s.length, s.buffer, s.held) for s in report.stages]
    assert found == [
        ("IterableWrapper", "all", "position", None, 100, 0, 0),
        ("shuffle", "all", "anchor", 7488, 100, 1000, 3000),
        ("sharding_filter", "point", "position", None, 100, 0, 0),
        ("map", "share", "none", None, 100, 0, 0),
        ("shuffle", "share", "anchor", 29, 100, 10, 30),
        ("batch", "share", "none", None, 12, 8, 24),
    ]
    assert report.notes == []
    assert report.stages[-1].parameters == {"batch_size": "8", "drop_last": "True"}
    assert report.stages[1].inputs == [report.stages[0].id]
    assert report.stages[0].built.startswith(f"{__file__}:")


@pytest.mark.parametrize("streams", [1, 2, 3, 7])
def test_the_length_of_all_streams_is_the_number_of_batches_they_give(streams: int) -> None:
    from pipes.context import Context

    pipe = IterableWrapper(range(50)).sharding_filter().batch(4)
    given = sum(len(list(Context(pipe, seed=1, stream=s, streams=streams).start())) for s in range(streams))
    assert describe_graph(pipe, streams).stages[-1].length == given


def test_without_a_shard_point_the_automatic_one_is_told() -> None:
    pipe = IterableWrapper(range(9)).map(str).batch(2)
    report = describe_graph(pipe, streams=2)
    assert [stage.sharding for stage in report.stages] == ["point after", "share", "share"]
    assert "no sharding_filter" in report.notes[0]
    assert "behind IterableWrapper" in report.notes[0]
    assert report.stages[-1].length is None
    assert "automatic shard point" in report.stages[-1].length_note
    assert describe_graph(pipe).stages[-1].length == 5


def test_functions_above_the_shard_point_are_pointed_out() -> None:
    notes = describe_graph(IterableWrapper([[1]]).flatmap().map(str).sharding_filter()).notes
    assert len(notes) == 1
    assert notes[0].startswith("map: above the shard point")


def test_two_shard_points_on_one_path_are_pointed_out() -> None:
    notes = describe_graph(IterableWrapper([1]).sharding_filter().batch(2).sharding_filter()).notes
    assert [note.partition(":")[0] for note in notes] == ["A shard point stands below another one"]
    a, b = IterableWrapper([1]).sharding_filter(), IterableWrapper([2]).sharding_filter()
    assert describe_graph(a.zip(b)).notes == []


def test_unknown_lengths_say_why() -> None:
    report = describe_graph(IterableWrapper(range(9)).filter(bool).header(3).cycle())
    found = stages(report)
    assert found["filter"].length is None
    assert "Filter" in found["filter"].length_note
    assert found["header"].length is None
    assert "Filter" in found["header"].length_note
    assert "cycles forever" in found["cycle"].length_note


class Plain(IterDataPipe[Any]):
    def __init__(self, source: IterDataPipe[Any], secret_key: str = "") -> None:
        self.source, self.secret_key = source, secret_key

    def __iter__(self) -> Any:
        yield from self.source


class Stateless(Plain):
    stateless = True


class Remembers(Plain):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        del state


def test_users_stages_are_told_apart() -> None:
    pipe = IterableWrapper([1]).sharding_filter().then(Plain).then(Stateless).then(Remembers)
    report = describe_graph(pipe)
    assert {name: stage.state for name, stage in stages(report).items()} == {
        "IterableWrapper": "position",
        "sharding_filter": "position",
        "Plain": "replay",
        "Stateless": "none",
        "Remembers": "own",
    }
    assert any(note.startswith("Plain: without state of their own") for note in report.notes)


def test_secrets_never_show() -> None:
    pipe = IterableWrapper(["https://me:hush@host/x?X-Amz-Signature=hush"]).then(Plain, secret_key="hush")
    assert "hush" not in json.dumps(describe_graph(pipe).as_data())


def test_branches_and_map_pipes() -> None:
    with pytest.warns(UserWarning, match="without limit"):
        a, b = SequenceWrapper([1, 2]).to_iter_datapipe().fork(2, buffer_size=-1)
    report = describe_graph(a.zip(b.map(str)))
    found = stages(report)
    assert list(found) == ["SequenceWrapper", "to_iter_datapipe", "fork", "fork 0", "fork 1", "map", "zip"]
    assert found["SequenceWrapper"].state == "by key"
    assert (found["fork"].buffer, found["fork"].held) == (-1, -1)
    assert any("without limit" in note for note in report.notes)
    assert found["zip"].inputs == [found["fork 0"].id, found["map"].id]
    assert json.loads(json.dumps(report.as_data()))["stages"][-1]["name"] == "zip"


def test_describing_does_not_run_the_graph() -> None:
    class Explodes:
        def __iter__(self) -> Any:
            raise AssertionError("it was run")

        def __len__(self) -> int:
            return 5

    assert describe_graph(IterableWrapper(Explodes(), deepcopy=False).shuffle()).stages[-1].length == 5
