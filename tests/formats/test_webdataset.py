"""Grouping by key, and the sample that also answers to torchdata's dotted names."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stage_contract import check_stage, saved, start
from torch.utils.data import default_collate

from pipes.errors import DataError, StateError
from pipes.formats.webdataset import Sample, WebDataset, group_samples
from pipes.iter import IterableWrapper
from pipes.utils import StreamWrapper


def test_dots_in_folders_do_not_split() -> None:
    stem = "v1.2/" + "q" * 140 + "/s0001"
    members = [
        (stem + ".bin", b""),
        (stem + ".seg.json", b'{"k":1}'),
        ("v1.2/s0002.bin", b"\0\1"),
        ("v1.2/s0002.seg.json", b"[]"),
    ]
    assert list(group_samples(members)) == [
        {"__key__": stem, "bin": b"", "seg.json": b'{"k":1}'},
        {"__key__": "v1.2/s0002", "bin": b"\0\1", "seg.json": b"[]"},
    ]


def test_names_without_extension_are_left_out_and_told() -> None:
    left_out: list[str] = []
    members = [("a.1", 1), ("README", 0), ("d.x/README", 0), (".hidden", 0), ("d/._a.jpg", 0), ("b.", 0), ("a.2", 2)]
    assert list(group_samples(members, left_out.append)) == [{"__key__": "a", "1": 1, "2": 2}]
    assert left_out == ["README", "d.x/README", ".hidden", "d/._a.jpg", "b."]
    assert list(group_samples([("README", 0)])) == []
    assert list(group_samples([])) == []


def test_only_consecutive_members_are_one_sample() -> None:
    keys = [sample["__key__"] for sample in group_samples([("a.1", 0), ("b.1", 0), ("a.2", 0)])]
    assert keys == ["a", "b", "a"]


def test_a_field_that_comes_twice_is_refused() -> None:
    with pytest.raises(DataError, match=r"sample 'd/a' has the field 'jpg' twice: 'd/a\.jpg'"):
        list(group_samples([("d/a.jpg", 1), ("d/a.jpg", 2)]))
    with pytest.raises(DataError, match="'__key__' twice"):
        list(group_samples([("a.__key__", 1)]))


def test_a_path_must_be_str() -> None:
    with pytest.raises(AssertionError, match="must be str"):
        list(group_samples([(b"a.jpg", 1)]))  # type: ignore[list-item]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_no_member_is_lost(numbers: list[tuple[int, int]]) -> None:
    seen: set[tuple[int, int]] = set()
    members, last = [], None
    for key, field in numbers:
        if key != last:
            seen, last = set(), key
        if (key, field) not in seen:
            seen.add((key, field))
            members.append((f"{key}.{field}", len(members)))
    samples = list(group_samples(members))
    assert [(f"{s['__key__']}.{f}", v) for s in samples for f, v in s.items() if f != "__key__"] == members


@pytest.fixture
def sample() -> Sample:
    return Sample({"__key__": "a", "jpg": 1, "seg.json": 2})


def test_dotted_names_mean_the_same_field(sample: Sample) -> None:
    assert (sample[".jpg"], sample["jpg"], sample[".seg.json"]) == (1, 1, 2)
    assert ".jpg" in sample
    assert "jpg" in sample
    assert ".png" not in sample
    assert 3 not in sample
    assert (sample.get(".jpg"), sample.get("png"), sample.get(".png", 0)) == (1, None, 0)
    sample[".jpg"] = 7
    assert sample.setdefault(".jpg", 9) == 7
    assert dict(sample) == {"__key__": "a", "jpg": 7, "seg.json": 2}
    del sample[".jpg"]
    assert (sample.pop(".seg.json"), sample.pop(".seg.json", None)) == (2, None)
    assert sample == {"__key__": "a"}


def test_a_missing_field_is_named_with_those_there_are(sample: Sample) -> None:
    with pytest.raises(KeyError, match=r"'png'; sample 'a' has \['jpg', 'seg.json'\]"):
        sample[".png"]
    with pytest.raises(KeyError):
        sample[3]  # type: ignore[index]


def test_copies_and_pickles_are_samples(sample: Sample) -> None:
    made: list[Any] = [copy.copy(sample), copy.deepcopy(sample), sample.copy(), pickle.loads(pickle.dumps(sample))]
    for other in made:
        assert type(other) is Sample
        assert other == sample
        assert other is not sample
        assert other[".jpg"] == 1


def test_torch_collates_samples() -> None:
    batch = default_collate([Sample({"__key__": "a", "x": 1}), Sample({"__key__": "b", "x": 2})])
    assert type(batch) is Sample
    assert batch["__key__"] == ["a", "b"]
    assert torch.equal(batch[".x"], torch.tensor([1, 2]))


def members(samples: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for number in range(samples):
        found += [(f"d/{number}.{field}", f"{number}{field}") for field in "abc"[: number % 3 + 1]]
        if number % 4 == 0:
            found.append((f"d/README{number}", "no sample"))
    return found


@pytest.mark.parametrize("samples", [0, 1, 2, 50])
def test_the_stage_keeps_every_promise(samples: int) -> None:
    data = members(samples)
    expected = [dict(sample) for sample in group_samples(data)]
    assert len(expected) == samples
    check_stage(lambda: IterableWrapper(data).then(WebDataset), expected)


def test_the_stage_behind_a_shuffle_and_before_one() -> None:
    data = [[(f"{n}.a", n), (f"{n}.b", -n)] for n in range(40)]
    check_stage(
        lambda: IterableWrapper(data).shuffle(buffer_size=6).unbatch().then(WebDataset).shuffle(buffer_size=5).batch(3)
    )


def test_a_restore_takes_the_members_of_at_most_thirty_two_samples_again() -> None:
    data = members(1000)
    calls = 0

    def count(member: Any) -> Any:
        nonlocal calls
        calls += 1
        return member

    run = start(IterableWrapper(data).map(count).then(WebDataset))
    list(islice(iter(run), 901))
    state = saved(run)
    calls = 0
    sample = next(iter(start(IterableWrapper(data).map(count).then(WebDataset), state)))
    assert sample["__key__"] == "d/901"
    assert calls <= 4, "only what is ahead is made again, the rest is passed over"
    anchor = state["2:WebDataset"]["anchor"]["taken"]
    assert 0 < state["2:WebDataset"]["taken"] - anchor <= 32 * 4


def test_members_left_out_are_counted_and_errors_name_the_stage() -> None:
    run = start(IterableWrapper(members(9)).then(WebDataset))
    list(run)
    assert run.context.tallies.counts()["1:WebDataset"].left_out == (("no extension", 3),)
    with pytest.raises(DataError, match="twice") as caught:
        list(IterableWrapper([("a.x", 1), ("a.x", 2)]).then(WebDataset))
    assert "1:WebDataset" in caught.value.__notes__[0]


def test_damaged_states_are_refused() -> None:
    run = start(IterableWrapper(members(9)).then(WebDataset))
    list(islice(iter(run), 3))
    for field, value in (("held", 2), ("taken", 0), ("taken", "x")):
        state = saved(run)
        state["1:WebDataset"][field] = value
        with pytest.raises(StateError, match="damaged"):
            start(IterableWrapper(members(9)).then(WebDataset), state)


def test_a_field_that_comes_again_is_numbered_by_choice() -> None:
    members = [("a.jpg", 1), ("a.jpg", 2), ("a.2.jpg", 3), ("a.jpg", 4), ("b.jpg", 5)]
    assert list(group_samples(members, duplicates="number")) == [
        {"__key__": "a", "jpg": 1, "2.jpg": 2, "2.2.jpg": 3, "3.jpg": 4},
        {"__key__": "b", "jpg": 5},
    ]
    check_stage(
        lambda: IterableWrapper(members).webdataset(duplicates="number"),
        [{"__key__": "a", "jpg": 1, "2.jpg": 2, "2.2.jpg": 3, "3.jpg": 4}, {"__key__": "b", "jpg": 5}],
    )
    with pytest.raises(ValueError, match="duplicates='suffix'"):
        IterableWrapper(members).webdataset(duplicates="suffix")  # type: ignore[arg-type]


def test_incomplete_samples_are_refused_or_left_out_and_counted() -> None:
    data = [(f"d/{n}.{field}", io.BytesIO(b"x")) for n in range(9) for field in ("jpg", "cls")[: 1 + (n % 3 > 0)]]
    data = [(path, StreamWrapper(stream)) for path, stream in data]
    with pytest.raises(DataError, match=r"sample 'd/0' is incomplete: it has \['jpg'\], and lacks \['\.cls'\]"):
        list(group_samples(data, required=("jpg", ".cls")))
    pipe = IterableWrapper(data, deepcopy=False).webdataset(required=("jpg", "cls"), on_error="skip", max_errors=3)
    run = start(pipe)
    assert [sample["__key__"] for sample in run] == [f"d/{n}" for n in range(9) if n % 3]
    counts = run.context.tallies.counts()["1:WebDataset"]
    assert (counts.taken, counts.skipped) == (9, 3)
    assert "lacks ['cls']" in counts.first
    assert [stream.closed for path, stream in data if path.startswith(("d/0.", "d/1.", "d/3."))] == [
        True, False, False, True,
    ]  # fmt: skip
    stood_in = IterableWrapper(data, deepcopy=False).webdataset(required=["cls"], on_error=lambda error, key: key)
    assert [sample for sample in stood_in if isinstance(sample, str)] == ["d/0", "d/3", "d/6"]
    assert list(group_samples([], required=["cls"])) == []


def test_incomplete_samples_and_resume() -> None:
    data = [(f"{n}.{field}", n) for n in range(20) for field in ("a", "b")[: 1 + (n % 4 > 0)]]
    check_stage(lambda: IterableWrapper(data).webdataset(required=["b"], on_error="skip", max_errors=None))
