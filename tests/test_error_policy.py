"""`on_error` and its budget, stage by stage, in one stream: what is given, what is counted, and an exact resume."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from stage_contract import check_everywhere, check_stage, saved, start

from pipes import IterDataPipe
from pipes.error_policy import StageCounts, check_policy, summed
from pipes.errors import ErrorBudgetExceeded, GraphError, StateError
from pipes.iter import IterableWrapper
from pipes.shard_points import check_shard_points


def thirds_fail(x: int) -> int:
    if x % 3 == 1:
        raise ValueError(f"bad {x}")
    return x * 10


def thirds_fail_with(x: int, rng: Any) -> int:
    return thirds_fail(x) + int(rng.integers(1000))


def fail_or_keep(x: int) -> bool:
    return thirds_fail(x) > 50


def twice_or_fail(x: int) -> Any:
    yield x
    yield thirds_fail(x)


def minus(error: Exception, x: int) -> int:
    return -1


def minus_for_even(error: Exception, x: int) -> int | None:
    return -1 if x % 2 == 0 else None


def nothing(error: Exception, x: Any) -> None:
    """A handler that only logs."""


def counts_of(run: Any) -> StageCounts:
    counts: StageCounts = run.context.tallies.counts()[run.stage]
    return counts


SKIPPING: dict[str, tuple[Callable[[IterDataPipe[int]], IterDataPipe[Any]], list[Any], tuple[int, int]]] = {
    # what stands behind the source, what it gives of range(8), (skipped, replaced)
    "map": (lambda dp: dp.map(thirds_fail, on_error="skip", max_errors=99), [0, 20, 30, 50, 60], (3, 0)),
    "map replacing": (
        lambda dp: dp.map(thirds_fail, on_error=minus, max_errors=99),
        [0, -1, 20, 30, -1, 50, 60, -1],
        (0, 3),
    ),
    "map both": (
        lambda dp: dp.map(thirds_fail, on_error=minus_for_even, max_errors=99),
        [0, 20, 30, -1, 50, 60],
        (2, 1),
    ),
    "map logging": (lambda dp: dp.map(thirds_fail, on_error=nothing, max_errors=None), [0, 20, 30, 50, 60], (3, 0)),
    "filter": (lambda dp: dp.filter(fail_or_keep, on_error="skip", max_errors=99), [6], (3, 0)),
    "filter replacing": (lambda dp: dp.filter(fail_or_keep, on_error=minus, max_errors=99), [-1, -1, 6, -1], (0, 3)),
    "flatmap": (
        lambda dp: dp.flatmap(twice_or_fail, on_error="skip", max_errors=99),
        [0, 0, 1, 2, 20, 3, 30, 4, 5, 50, 6, 60, 7],
        (3, 0),
    ),
    "flatmap replacing": (
        lambda dp: dp.flatmap(twice_or_fail, on_error=minus, max_errors=99),
        [0, 0, 1, -1, 2, 20, 3, 30, 4, -1, 5, 50, 6, 60, 7, -1],
        (0, 3),
    ),
}


class TestElements:
    @pytest.mark.parametrize("name", SKIPPING)
    def test_what_is_given_and_counted_and_resumed(self, name: str) -> None:
        build, expected, (skipped, replaced) = SKIPPING[name]
        check_stage(lambda: build(IterableWrapper(range(8))), expected)
        run = start(build(IterableWrapper(range(8))))
        assert list(run) == expected
        counts = counts_of(run)
        assert (counts.taken, counts.skipped, counts.replaced) == (8, skipped, replaced)
        assert counts.first.startswith("ValueError: bad 1")

    @pytest.mark.parametrize("name", ["map", "map both", "filter replacing", "flatmap", "flatmap replacing"])
    def test_everywhere_in_a_graph(self, name: str) -> None:
        check_everywhere(SKIPPING[name][0])

    @pytest.mark.parametrize("name", SKIPPING)
    def test_counts_are_exact_after_a_resume_at_every_point(self, name: str) -> None:
        def graph() -> IterDataPipe[Any]:
            return SKIPPING[name][0](IterableWrapper(range(41))).shuffle(6).batch(2)

        def stage(run: Any) -> StageCounts:
            counts: dict[str, StageCounts] = run.context.tallies.counts()
            return next(iter(counts.values()))[:4]  # type: ignore[return-value]

        run = start(graph())
        iterator = iter(run)
        whole = [stage(run)]
        for _ in iterator:
            whole.append(stage(run))
        end = stage(run)
        assert end[0] == 41
        for k in range(0, len(whole) - 1, 3):
            run = start(graph())
            list(islice(iter(run), k))
            again = start(graph(), saved(run))
            rest = iter(again)
            for at in range(k + 1, len(whole)):
                next(rest)
                assert stage(again) == whole[at], f"resumed at {k}, counted otherwise at {at}"
            assert next(rest, None) is None
            assert stage(again) == end

    def test_draws_of_a_random_map_do_not_shift(self) -> None:
        def graph(**policy: Any) -> IterDataPipe[Any]:
            return IterableWrapper(range(8)).map(thirds_fail_with, rng=True, **policy)

        check_everywhere(lambda dp: dp.map(thirds_fail_with, rng=True, on_error="skip", max_errors=99))
        kept = dict(zip([0, 2, 3, 5, 6], start(graph(on_error="skip", max_errors=9)), strict=True))
        run = start(IterableWrapper(range(8)).map(lambda x, rng: int(rng.integers(1000)), rng=True))
        draws = list(run)
        assert all(value == 10 * x + draws[x] for x, value in kept.items())

    def test_rounds_of_a_cycle_count_on(self) -> None:
        def graph() -> IterDataPipe[Any]:
            return IterableWrapper(range(6)).shuffle(3).map(thirds_fail, on_error="skip", max_errors=99).cycle(3)

        check_stage(graph)
        run = start(graph())
        assert len(list(run)) == 12
        assert run.context.tallies.counts()["2:Mapper"][:3] == (18, 6, 0)
        for k in range(13):
            run = start(graph())
            list(islice(iter(run), k))
            again = start(graph(), saved(run))
            saved(again)  # describing a round opens its stages for a moment
            assert len(list(again)) == 12 - k
            assert again.context.tallies.counts()["2:Mapper"][:3] == (18, 6, 0)

    def test_errors_from_above_are_not_for_this_stage(self) -> None:
        pipe = IterableWrapper(range(3)).map(thirds_fail).map(abs, on_error="skip").filter(bool, on_error="skip")
        with pytest.raises(ValueError, match="bad 1") as caught:
            list(pipe)
        assert "in stage 1:Mapper" in caught.value.__notes__[0]
        assert len(caught.value.__notes__) == 1

    @pytest.mark.parametrize(
        "error",
        [
            GraphError("g"),
            StateError("s"),
            ImportError("no pillow"),
            MemoryError(),
            torch.OutOfMemoryError(),
            ErrorBudgetExceeded("e"),
            OSError(errno.EMFILE, "Too many open files"),
        ],
    )
    def test_what_says_nothing_about_the_element_is_raised(self, error: Exception) -> None:
        def fail(x: int) -> int:
            raise error

        with pytest.raises(type(error)):
            list(IterableWrapper(range(3)).map(fail, on_error="skip", max_errors=None))

    def test_what_torch_raises_without_memory_is_raised(self) -> None:
        with pytest.raises(RuntimeError, match="allocate memory"):
            list(IterableWrapper([1 << 50]).map(torch.empty, on_error="skip", max_errors=None))

    @pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()])
    def test_what_is_no_exception_is_raised(self, error: BaseException) -> None:
        def fail(x: int) -> int:
            raise error

        with pytest.raises(type(error)):
            list(IterableWrapper(range(3)).map(fail, on_error=minus, max_errors=None))

    def test_a_stop_iteration_of_a_function_is_an_error_like_others(self) -> None:
        def fail(x: int) -> int:
            if x == 1:
                raise StopIteration
            return x

        assert list(IterableWrapper(range(3)).map(fail, on_error="skip")) == [0, 2]

    def test_a_function_may_raise_the_error_or_another(self) -> None:
        def only_ones(error: Exception, x: int) -> None:
            if x != 1:
                raise error

        def fails(error: Exception, x: int) -> None:
            raise KeyError("handler")

        got = []
        with pytest.raises(ValueError, match="bad 4") as caught:  # noqa: PT012
            for element in IterableWrapper(range(8)).map(thirds_fail, on_error=only_ones):
                got.append(element)
        assert got == [0, 20, 30]
        assert "on element 4" in caught.value.__notes__[0]
        with pytest.raises(KeyError, match="handler") as other:
            list(IterableWrapper(range(8)).map(thirds_fail, on_error=fails))
        assert isinstance(other.value.__context__, ValueError)
        assert "while on_error of stage 1:Mapper" in other.value.__notes__[0]

    def test_the_length_is_not_known(self) -> None:
        assert len(IterableWrapper(range(4)).map(thirds_fail)) == 4
        for pipe in (
            IterableWrapper(range(4)).map(thirds_fail, on_error="skip"),
            IterableWrapper(["a"]).open_files(on_error="skip"),
            IterableWrapper([]).parse_json_files(on_error=minus),
        ):
            with pytest.raises(TypeError, match="it may skip elements"):
                len(pipe)

    def test_it_may_not_stand_between_shard_points_and_a_zip(self) -> None:
        def graph(**policy: Any) -> IterDataPipe[Any]:
            left, right = (IterableWrapper(range(6)).sharding_filter() for _ in range(2))
            return left.map(thirds_fail, **policy).zip(right)

        check_shard_points(graph(), 2)
        with pytest.raises(GraphError, match="would pair what does not belong together"):
            check_shard_points(graph(on_error="skip"), 2)


class TestBudget:
    def test_a_count(self) -> None:
        pipe = IterableWrapper(range(20)).map(thirds_fail, on_error="skip", max_errors=3)
        got = []
        with pytest.raises(ErrorBudgetExceeded) as caught:  # noqa: PT012
            for element in pipe:
                got.append(element)
        assert got == [0, 20, 30, 50, 60, 80, 90]
        text = str(caught.value)
        assert "stage 1:Mapper skipped 4 of the 11 elements it took, more than max_errors=3" in text
        assert "The first: ValueError: bad 1" in text
        assert "the last: ValueError: bad 10" in text
        assert str(caught.value.__cause__) == "bad 10"
        assert len(list(IterableWrapper(range(20)).map(thirds_fail, on_error="skip", max_errors=7))) == 13

    def test_none_may_fail(self) -> None:
        with pytest.raises(ErrorBudgetExceeded, match="max_errors=0"):
            list(IterableWrapper(range(9)).map(thirds_fail, on_error="skip", max_errors=0))

    def test_a_fraction_is_of_a_hundred_at_least(self) -> None:
        def fail_on(*numbers: int) -> Callable[[int], int]:
            return lambda x: x if x not in numbers else 1 // 0

        def given(count: int, *numbers: int, max_errors: Any = 0.02) -> int:
            pipe = IterableWrapper(range(count)).map(fail_on(*numbers), on_error="skip", max_errors=max_errors)
            return len(list(pipe))

        assert given(3, 0, 1) == 1
        with pytest.raises(ErrorBudgetExceeded, match=r"skipped 3 of the 9 .* max_errors=0\.02, a fraction"):
            given(10, 0, 1, 8)
        assert given(200, 0, 1, 149, 199) == 196
        with pytest.raises(ErrorBudgetExceeded, match="skipped 3 of the 149"):
            given(200, 0, 1, 148)

    def test_a_stage_that_skips_all_is_an_error_by_default(self) -> None:
        def fail(x: int) -> int:
            raise ValueError(x)

        for policy in ({"on_error": "skip"}, {"on_error": "skip", "max_errors": 50}):
            with pytest.raises(ErrorBudgetExceeded, match="skipped 5 of the 5 elements"):
                list(IterableWrapper(range(5)).map(fail, **policy))
        assert list(IterableWrapper(range(5)).map(fail, on_error="skip", max_errors=None)) == []
        assert list(IterableWrapper(range(5)).map(fail, on_error=minus)) == [-1] * 5
        assert list(IterableWrapper([]).map(fail, on_error="skip")) == []

    def test_an_endless_source_of_bad_elements_ends(self) -> None:
        def fail(x: int) -> int:
            raise ValueError(x)

        pipe = IterableWrapper(range(1000)).cycle().map(fail, on_error="skip", max_errors=0.5)
        run = start(pipe, streams=2)
        with pytest.raises(ErrorBudgetExceeded, match="10000 in a row"):
            next(iter(run))

    def test_replaced_elements_count(self) -> None:
        with pytest.raises(ErrorBudgetExceeded, match="skipped 0 and replaced 2 of the 5"):
            list(IterableWrapper(range(9)).map(thirds_fail, on_error=minus, max_errors=1))

    @pytest.mark.parametrize(
        ("policy", "kind", "text"),
        [
            ({"on_error": "ignore"}, ValueError, "'raise', 'skip' or a function"),
            ({"on_error": None}, ValueError, "'raise', 'skip' or a function"),
            ({"on_error": "skip", "max_errors": -1}, ValueError, "0 or more"),
            ({"on_error": "skip", "max_errors": 1.5}, ValueError, "between 0 and 1"),
            ({"on_error": "skip", "max_errors": float("nan")}, ValueError, "between 0 and 1"),
            ({"on_error": "skip", "max_errors": True}, TypeError, "a count"),
            ({"on_error": "skip", "max_errors": "3"}, TypeError, "a count"),
            ({"on_error": "raise", "max_errors": 3}, ValueError, "no effect"),
        ],
    )
    def test_what_is_no_policy_is_refused_when_built(self, policy: Any, kind: type[Exception], text: str) -> None:
        with pytest.raises(kind, match=text):
            IterableWrapper([1]).map(abs, **policy)
        with pytest.raises(kind, match=text):
            check_policy(**{"max_errors": 0.1, **policy})


class TestState:
    def test_counts_in_a_state_are_checked(self) -> None:
        def graph() -> IterDataPipe[Any]:
            return IterableWrapper(range(9)).map(thirds_fail, on_error="skip", max_errors=9)

        run = start(graph())
        list(islice(iter(run), 4))
        state = saved(run)
        assert state["1:Mapper+errors"] == {
            "taken": 6,
            "skipped": 2,
            "replaced": 0,
            "first": "ValueError: bad 1",
        }
        for change in (
            {"taken": 1},
            {"skipped": -1},
            {"taken": "x"},
            {"first": 3},
            {"left_out": 4},
            {"replaced": True},
        ):
            bad = json.loads(json.dumps(state))
            bad["1:Mapper+errors"].update(change)
            with pytest.raises(StateError, match="damaged"):
                start(graph(), bad)

    def test_secrets_do_not_show(self) -> None:
        def fail(x: str) -> str:
            raise ValueError(f"cannot reach {x}")

        url = "https://h/b?X-Amz-Signature=abc&x=1"
        run = start(IterableWrapper([url]).map(fail, on_error="skip"))
        list(run)
        assert "abc" not in counts_of(run).first


def test_one_line_a_stage_and_epoch(caplog: pytest.LogCaptureFixture) -> None:
    pipe = IterableWrapper(range(30)).map(thirds_fail, on_error="skip", max_errors=99).fork(2)
    both = pipe[0].zip(pipe[1])
    with caplog.at_level(logging.INFO, logger="pipes"):
        for _ in range(2):
            list(both)
    assert [record.getMessage() for record in caplog.records] == [
        "stage 1:Mapper skipped 10 of the 30 elements it took in this epoch; the first: ValueError: bad 1"
    ] * 2
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="pipes"):
        list(IterableWrapper([("a.b", 1), ("b", 2)]).webdataset())
    assert [record.getMessage() for record in caplog.records] == [
        "stage 1:WebDataset left out 1 (no extension) in this epoch"
    ]


def test_sums() -> None:
    one = {"1:Mapper": StageCounts(10, 2, 1, "first", "last", (("directory", 1),), 5)}
    two = {"1:Mapper": StageCounts(5, 0, 0, "", "", (("directory", 2), ("fifo", 1)), 5), "2:Filter": StageCounts(4)}
    total = summed([one, two])
    assert total["1:Mapper"] == StageCounts(15, 2, 1, "first", "last", (("directory", 3), ("fifo", 1)), 5)
    assert total["2:Filter"] == StageCounts(4)


def test_nothing_is_kept_for_elements_that_do_not_fail() -> None:
    run = start(IterableWrapper(range(1000)).map(torch.tensor, on_error="skip").batch(10))
    list(run)
    assert saved(run) == {"0:IterableWrapper": {"at": 1000}, "1:Mapper+errors": {"taken": 1000}}
