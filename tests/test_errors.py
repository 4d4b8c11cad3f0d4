from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from pipes import errors
from pipes.errors import ConfigError, PipesError, StoreError, brief, mask

CLASSES = [
    value
    for name in errors.__all__
    if isinstance(value := getattr(errors, name), type) and issubclass(value, PipesError)
]


def drawn() -> dict[str, tuple[str, list[str]]]:
    """Return what the docstring's tree says: {class: (parent, other bases)}."""
    tree: dict[str, tuple[str, list[str]]] = {}
    path: list[tuple[int, str]] = []
    for line in str(errors.__doc__).splitlines():
        found = re.match(r"^(    [│├└─ ]*)(\w+)(?:\(([\w, ]+)\))?", line)
        if found and hasattr(errors, found.group(2)):
            depth, name, other = len(found.group(1)), found.group(2), found.group(3)
            path = [entry for entry in path if entry[0] < depth]
            tree[name] = (path[-1][1] if path else "", other.split(", ") if other else [])
            path.append((depth, name))
    return tree


def test_the_tree_in_the_docstring_is_true_and_complete() -> None:
    tree = drawn()
    undrawn = {cls.__name__ for cls in CLASSES} - tree.keys()
    assert undrawn <= {"RemoteTraceback"}
    for name, (parent, others) in tree.items():
        bases = [base.__name__ for base in getattr(errors, name).__bases__]
        assert bases == [base for base in (parent, *others) if base], name


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling_with_fields_and_notes(cls: Any) -> None:
    error = (
        cls("what happened", bucket="b", key="k", status=503) if issubclass(cls, StoreError) else cls("what happened")
    )
    error.extra = {"more": 1}
    error.add_note("in stage 1:Mapper")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error) == "what happened"
    assert vars(copy) == vars(error)
    assert copy.__notes__ == ["in stage 1:Mapper"]


def test_a_store_error_is_an_os_error_with_its_own_text() -> None:
    error = StoreError("slow down", bucket="b", key="k", status=503, attempts=4, request_id="r")
    assert isinstance(error, OSError)
    assert (error.bucket, error.key, error.status, error.attempts, error.request_id) == ("b", "k", 503, 4, "r")
    assert str(error) == "slow down"


def test_a_config_error_says_where_and_stands_for_several() -> None:
    first, second = ConfigError("no such stage", "g.yaml", 3, 5), ConfigError("no such option", "g.yaml", 4, 7)
    whole = ConfigError.of([first, second])
    assert str(first) == "g.yaml:3:5: no such stage"
    assert str(whole) == "g.yaml:3:5: no such stage\ng.yaml:4:7: no such option"
    assert whole.errors == (first, second)
    assert first.errors == (first,)
    assert (whole.line, whole.column) == (3, 5)


@pytest.mark.parametrize(
    "secret",
    [
        "https://h/k?X-Amz-Signature=HUSH&x=1",
        "https://h/k?X-Amz-Credential=HUSH%2F2020",
        "https://user:HUSH@host/path",
        "password=HUSH",
        "api_key: HUSH",
        "{'secret_key': 'HUSH'}",
        '{"aws_secret_access_key": "HUSH"}',
        "AKIAHUSHHUSHHUSH1234",
        "aws_session_token=HUSH",
    ],
)
def test_secrets_are_masked(secret: str) -> None:
    assert "HUSH" not in mask(secret)
    assert "***" in mask(secret)
    assert "HUSH" not in brief(secret)


@pytest.mark.parametrize("text", ["s3://bucket/key.tar", "tokens per second", "a secretary", "https://host/path?x=1"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask(text) == text


def test_brief_is_short_for_anything() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    for value in (list(range(10**6)), "x" * 10**6, {i: i for i in range(100)}, b"\0" * 10**6, Bad(), None):
        assert len(brief(value)) <= 120
        assert len(brief(value, 20)) <= 20
    assert brief(Bad()).startswith("<Bad")
