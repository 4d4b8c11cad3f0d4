from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from odd_errors import HoldsLock, Unprintable

from pipes.errors import DataError, RemoteError, RemoteTraceback, StoreError, add_note
from pipes.loader2.remote_error import pack_error, unpack_error


class TwoArguments(Exception):
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(f"{a} and {b}")


class UnprintableByExit(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


class Doubles(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"bad: {text}")


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(5)


class ExitsWhenUnpickled(Exception):
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(6)",)


class Becomes(Exception):
    def __reduce__(self) -> Any:
        return str, ("not an error",)


class NoAttributes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        if name == "__notes__":
            raise TypeError("frozen")
        super().__setattr__(name, value)


class HasFields(Exception):
    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


def local_class() -> Exception:
    class Local(Exception):
        pass

    return Local("here")


def raised(error: BaseException, place: str = "worker 3", notes: tuple[str, ...] = ()) -> BaseException:
    def user_function() -> None:
        raise error

    try:
        user_function()
    except BaseException as caught:
        return unpack_error(pack_error(caught, place, notes))
    raise AssertionError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("a\nb"),
        OSError(2, "No such file", "x.tar"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        DataError("x.tar: broken"),
        StoreError("gone", bucket="b", key="k", status=503, attempts=4),
        HasFields("text", 7),
        ExceptionGroup("two", [ValueError(1), TypeError(2)]),
        ValueError(object()),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_same_exception_where_it_survives(error: Exception) -> None:
    error.add_note("element: 5")
    got = raised(error, notes=("in stage 1: Mapper",))
    assert type(got) is type(error)
    assert len(got.args) == len(error.args)
    assert {key: value for key, value in vars(got).items() if key != "__notes__"} == {
        key: value for key, value in vars(error).items() if key != "__notes__"
    }
    assert got.__notes__ == ["element: 5", "in stage 1: Mapper", "raised in worker 3"]
    assert isinstance(got.__cause__, RemoteTraceback)
    text = "".join(traceback.format_exception(got))
    assert "in user_function" in text
    assert "raise error" in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TwoArguments(1, 2), "TwoArguments: 1 and 2"),
        (lambda: HoldsLock("held"), "HoldsLock: held"),
        (lambda: ValueError(threading.Lock()), "ValueError: <unlocked"),
        (Unprintable, "Unprintable: <unprintable>"),
        (UnprintableByExit, "UnprintableByExit: <unprintable>"),
        (lambda: Doubles("x"), "Doubles: bad: x"),
        (lambda: ExitsWhenPickled("x"), "ExitsWhenPickled: x"),
        (lambda: ExitsWhenUnpickled("x"), "ExitsWhenUnpickled: x"),
        (lambda: Becomes("x"), "Becomes: x"),
        (local_class, "local_class.<locals>.Local: here"),
        (lambda: SystemExit(3), "SystemExit: 3"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt: "),
        (lambda: GeneratorExit("x"), "GeneratorExit: x"),
        (lambda: StopIteration(3), "StopIteration: 3"),
        (lambda: StopAsyncIteration("x"), "StopAsyncIteration: x"),
    ],
)
def test_stands_for_what_does_not_travel(make: Callable[[], BaseException], message: str) -> None:
    got = raised(make())
    assert type(got) is RemoteError
    assert message in str(got)
    assert got.exception_type in str(got)
    assert got.__notes__ == ["raised in worker 3"]
    text = "".join(traceback.format_exception(got))
    assert "in user_function" in text
    again = pickle.loads(pickle.dumps(got))
    assert (type(again), str(again), again.exception_type) == (RemoteError, str(got), got.exception_type)


def test_class_that_main_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_error(HasFields("text"), "worker 1")
    monkeypatch.delitem(globals(), "HasFields")
    got = unpack_error(packed)
    assert type(got) is RemoteError
    assert str(got).endswith("HasFields: text")


def test_exception_that_takes_no_notes() -> None:
    got = raised(NoAttributes("x"))
    assert type(got) is RemoteError
    assert got.__notes__ == ["raised in worker 3"]


def test_causes_are_in_the_text() -> None:
    def fail() -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        fail()
    got = unpack_error(pack_error(caught.value, "rank 0"))
    assert "KeyError: 'missing'" in str(got.__cause__)
    assert "direct cause" in str(got.__cause__)


def test_endless_recursion() -> None:
    def again() -> None:
        again()

    with pytest.raises(RecursionError) as caught:
        again()
    got = unpack_error(pack_error(caught.value, "rank 0"))
    assert type(got) is RecursionError
    assert len(str(got.__cause__)) < 10_000


@pytest.mark.parametrize(
    "payload", [bytes(1 << 25), "x" * (1 << 25), list(range(1 << 22))], ids=lambda p: type(p).__name__
)
def test_what_an_error_carries_stays_behind_when_it_is_large(payload: Any) -> None:
    packed = pack_error(ValueError(payload), "worker 0", notes=["n" * (1 << 24)])
    assert len(packed) < 4_000_000
    got = unpack_error(packed)
    assert type(got) is RemoteError
    assert str(got) == f"ValueError: <{type(payload).__name__} of {len(payload)}>"
    error = HasFields("text")
    error.batch = payload  # type: ignore[attr-defined]
    assert str(unpack_error(pack_error(error, "rank 0"))).endswith("HasFields: text")


@pytest.mark.parametrize("notes", [[1, None, "text"], "no list", 7, ("a", "tuple")])
def test_notes_of_any_kind(notes: Any) -> None:
    error = ValueError("x")
    error.__notes__ = notes
    assert add_note(error, "in stage 1:Mapper")
    got = raised(error)
    assert type(got) is ValueError
    assert all(isinstance(note, str) for note in got.__notes__)
    assert got.__notes__[-2:] == ["in stage 1:Mapper", "raised in worker 3"]


def test_never_raised() -> None:
    got = unpack_error(pack_error(ValueError("made, not raised"), "rank 0"))
    assert str(got.__cause__).strip() == "ValueError: made, not raised"
