"""What stages raise in workers arrives in main: in its place, with its class, its notes and the traceback of there."""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import loader_of, take, through_json, with_draws
from odd_errors import HoldsLock, Unprintable

from pipes import IterDataPipe
from pipes.errors import RemoteError, StateError
from pipes.iter import IterableWrapper
from pipes.saved import sealed

pytestmark = pytest.mark.usefixtures("no_residue")

N = 60


def numbers(count: int = N) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


class NeedsTwo(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Stop(BaseException):
    """No Exception, so no ordinary `except` of a training loop would see it."""


class TakesNoNotes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("frozen")

    def add_note(self, note: str) -> None:
        raise TypeError("frozen")


class SaysItIsText(Exception):
    def __reduce__(self) -> Any:
        return str, ("not an error",)


class FailsToReduce(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(5)


def with_notes(error: Exception, notes: Any) -> Exception:
    error.__notes__ = notes
    return error


def of_a_module_that_main_lacks() -> Exception:
    module = types.ModuleType("only_in_the_worker")
    sys.modules[module.__name__] = module
    exec("class Foreign(Exception): pass", module.__dict__)
    return module.Foreign("unknown")  # type: ignore[no-any-return]


def chained() -> Any:
    try:
        {}["the first"]
    except KeyError as error:
        raise LookupError("the second") from error


def suppressed() -> Any:
    try:
        {}["never to be seen"]
    except KeyError:
        raise LookupError("alone") from None


def again() -> Any:
    return again()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("the disk of the pickle is full")


def raise_(make: Callable[[], BaseException]) -> None:
    raise make()


# what item 5 does, and what the error in main must be and say
FAILURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two arguments": (lambda: raise_(lambda: NeedsTwo("this", "that")), RemoteError, "NeedsTwo: this and that"),
    "a lock": (lambda: raise_(lambda: HoldsLock("held")), RemoteError, "HoldsLock: held"),
    "no text": (lambda: raise_(Unprintable), RemoteError, "Unprintable: <unprintable>"),
    "two lines": (lambda: raise_(lambda: KeyError("a\nb")), KeyError, r"a\nb"),
    "exit": (lambda: raise_(lambda: SystemExit(3)), RemoteError, "SystemExit: 3"),
    "pickling": (Unpicklable, TypeError, "OSError: the disk of the pickle is full"),
    "stop": (lambda: raise_(StopIteration), RuntimeError, "StopIteration"),
    "interrupt": (lambda: raise_(KeyboardInterrupt), RemoteError, "KeyboardInterrupt"),
}

MORE_FAILURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "generator exit": (lambda: raise_(GeneratorExit), RemoteError, "GeneratorExit"),
    "base": (lambda: raise_(lambda: Stop("no more")), RemoteError, "Stop: no more"),
    "group": (lambda: raise_(lambda: ExceptionGroup("two", [ValueError(1), OSError(2)])), ExceptionGroup, "two (2 sub"),
    "group of a lock": (
        lambda: raise_(lambda: ExceptionGroup("odd", [HoldsLock("held")])),
        RemoteError,
        "ExceptionGroup: odd (1 sub",
    ),
    "base group": (
        lambda: raise_(lambda: BaseExceptionGroup("ends", [SystemExit(1)])),
        RemoteError,
        "BaseExceptionGroup: ends",
    ),
    "chain": (chained, LookupError, "the second"),
    "no chain": (suppressed, LookupError, "alone"),
    "recursion": (again, RecursionError, "maximum recursion depth"),
    "memory": (lambda: bytearray(1 << 60), MemoryError, ""),
    "unicode": (lambda: b"abc\xff".decode(), UnicodeDecodeError, "can't decode byte 0xff in position 3"),
    "notes of no text": (lambda: raise_(lambda: with_notes(ValueError("noted"), [1, "two"])), ValueError, "noted"),
    "notes that are no list": (lambda: raise_(lambda: with_notes(ValueError("noted"), "one")), ValueError, "noted"),
    "no notes": (lambda: raise_(TakesNoNotes), RemoteError, "TakesNoNotes: "),
    "foreign": (lambda: raise_(of_a_module_that_main_lacks), RemoteError, "only_in_the_worker.Foreign: unknown"),
    "reduce lies": (lambda: raise_(lambda: SaysItIsText("x")), RemoteError, "SaysItIsText: x"),
    "reduce raises": (lambda: raise_(lambda: FailsToReduce("x")), RemoteError, "FailsToReduce: x"),
    "200 MB": (
        lambda: raise_(lambda: ValueError("too much", bytes(200_000_000))),
        RemoteError,
        "ValueError: 'too much', <bytes of 200000000>",
    ),
}


def failing_at(number: int, what: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda element: what() if element == number else element


class TestErrors:
    @pytest.mark.parametrize("name", FAILURES)
    def test_they_come_in_their_place_and_say_where(self, name: str) -> None:
        what, kind, text = FAILURES[name]
        with loader_of(numbers().map(failing_at(5, what)), 3) as loader:
            iterator = iter(loader)
            assert take(iterator, 5) == [0, 1, 2, 3, 4]
            with pytest.raises(kind) as caught:
                next(iterator)
            error = caught.value
            assert text in str(error)
            notes = "\n".join(error.__notes__)
            assert "stage 2:Mapper" in notes
            assert "raised in worker 2" in notes
            assert "output 1 of stream 2, epoch 0" in notes
            assert "Traceback (most recent call last)" in str(error.__cause__)
            with pytest.raises(RuntimeError, match="gives no more"):
                next(iterator)
            # the state stands before the failing element, and a new iteration works
            state = loader.state_dict()
            assert take(iter(loader), 5) == [0, 1, 2, 3, 4]
            loader.load_state_dict(state)
            with pytest.raises(kind):
                next(iter(loader))

    def test_more_kinds_one_after_the_other(self, tmp_path: Path) -> None:
        kind_now = tmp_path / "kind"

        def fail(element: int) -> int:
            return MORE_FAILURES[kind_now.read_text()][0]() if element == 5 else element

        with loader_of(numbers().map(fail), 3) as loader:
            for name, (_, kind, text) in MORE_FAILURES.items():
                kind_now.write_text(name)
                iterator = iter(loader)
                assert take(iterator, 5) == [0, 1, 2, 3, 4]
                with pytest.raises(Exception) as caught:  # noqa: PT011
                    next(iterator)
                error = caught.value
                assert type(error) is kind, name
                assert text in str(error), name
                notes = "\n".join(error.__notes__)
                assert "stage 2:Mapper" in notes, name
                assert "raised in worker 2" in notes, name
                assert "output 1 of stream 2, epoch" in notes, name
                trace = str(error.__cause__)
                assert "Traceback (most recent call last)" in trace, name
                assert len(trace) < 100_000, name
                assert name != "chain" or "KeyError: 'the first'" in trace
                assert name != "no chain" or "never to be seen" not in trace
                assert name != "notes of no text" or error.__notes__[:2] == ["1", "two"]
            assert loader.stats()["restarts"] == 0

    @pytest.mark.parametrize("name", sorted({**FAILURES, **MORE_FAILURES}.keys() - {"pickling", "200 MB"}))
    def test_in_process_they_are_themselves_and_say_the_same(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # This process is main to the tests of workers.
        monkeypatch.setitem(sys.modules, "only_in_the_worker", types.ModuleType("only_in_the_worker"))
        what, kind, text = {**FAILURES, **MORE_FAILURES}[name]
        with loader_of(numbers().map(failing_at(5, what)), 0, 3) as loader:
            iterator = iter(loader)
            assert take(iterator, 5) == [0, 1, 2, 3, 4]
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                next(iterator)
            error = caught.value
            if kind is RemoteError:
                assert f"{type(error).__qualname__}: ".rpartition(".")[2] in text + ": "
            else:
                assert isinstance(error, kind)
                assert text in str(error)
            if name != "no notes":
                notes = "\n".join(map(str, error.__notes__))
                assert "in stage 2:Mapper" in notes
                assert "on element 5, in stream 2 of 3" in notes
                assert "output 1 of stream 2, epoch 0" in notes
            assert take(iter(loader), 5) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("workers", [0, 1, 2, 3])
    def test_all_before_the_error_is_given_and_the_state_is_before_its_unit(self, workers: int) -> None:
        flag: list[int] = []

        def graph(bad: bool) -> IterDataPipe[Any]:
            return numbers().map(failing_at(40, lambda: 1 // (0 if bad else 1))).map(with_draws).batch(4)

        with loader_of(graph(False), 0, 3) as loader:
            expected = list(loader)
        with loader_of(graph(True), workers, 3) as loader:
            given = []
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                for batch in loader:
                    given.append(batch)
            state = through_json(loader.state_dict())
        count = len(given)
        assert 8 <= count < 12
        assert given == expected[:count]
        assert not flag
        with loader_of(graph(False), 0, 3) as loader:
            loader.load_state_dict(state)
            assert list(loader) == expected[count:]

    def test_what_main_cannot_rebuild(self) -> None:
        class Local:
            def __reduce__(self) -> Any:
                return raise_in_main, (os.getpid(),)

        def raise_in_main(pid: int) -> None:
            raise ValueError("cannot be rebuilt here")

        with loader_of(numbers(4).map(lambda x: Local() if x == 2 else x), 1) as loader:
            iterator = iter(loader)
            assert take(iterator, 2) == [0, 1]
            with pytest.raises(Exception, match=r"rebuilt|raise_in_main"):
                next(iterator)
            assert take(iter(loader), 2) == [0, 1]

    def test_worker_init_fn_that_raises(self) -> None:
        def refuse(pipe: Any, info: Any) -> Any:
            raise LookupError(f"no data for {info.worker_id} of {info.num_workers}")

        with loader_of(numbers(), 2, worker_init_fn=refuse) as loader:
            for _ in range(2):
                with pytest.raises(LookupError, match=r"no data for \d of 2") as caught:
                    next(iter(loader))
                assert any("raised in worker" in note for note in caught.value.__notes__)

    def test_worker_reset_fn_that_raises(self) -> None:
        def refuse(pipe: Any, info: Any, seeds: Any) -> Any:
            raise LookupError("not this epoch")

        with loader_of(numbers(), 2, worker_reset_fn=refuse) as loader:
            for _ in range(2):
                with pytest.raises(LookupError, match="not this epoch"):
                    next(iter(loader))

    def test_a_warning_that_is_an_error_in_main_loses_no_message(self) -> None:
        def warn(element: int) -> int:
            if element == 50:
                warnings.warn("fifty came", stacklevel=1)
            return element

        pipe = numbers().map(warn).batch(2).map(lambda batch: torch.full((200, 200), batch[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with loader_of(pipe, 2) as loader:
                iterator = iter(loader)
                next(iterator)
                shown: list[Any] = []

                def refuse(message: Any, *arguments: Any, **options: Any) -> None:
                    shown.append(str(message))
                    raise UserWarning(str(message))

                original, warnings.showwarning = warnings.showwarning, refuse
                try:
                    with pytest.raises(UserWarning, match=r"\[worker \d\] fifty came"):
                        list(iterator)
                finally:
                    warnings.showwarning = original
                assert len(shown) == 1
                with warnings.catch_warnings(record=True):
                    assert len(list(loader)) == N // 2


def test_a_damaged_state_is_refused_and_the_loader_goes_on() -> None:
    def graph() -> IterDataPipe[Any]:
        return IterableWrapper(range(50)).shuffle(7).sharding_filter().map(abs).batch(2)

    for workers in (0, 2):
        with loader_of(graph(), workers, 2, snapshot_every=2) as loader:
            take(iter(loader), 10)
            state = through_json(loader.state_dict())
            text = json.dumps(state).replace('"taken": ', '"taken": 99')
            with pytest.raises(StateError):
                loader.load_state_dict(json.loads(text))
            # Also where somebody made the digest fit.
            with pytest.raises(StateError):
                loader.load_state_dict(sealed(json.loads(text)))
            loader.load_state_dict(state)
            assert len(list(loader)) == 16
