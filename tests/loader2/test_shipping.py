from __future__ import annotations

import functools
import itertools
import linecache
import pickle
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contents import DTYPES, of_dtype
from wire import same

from pipes.errors import UnpicklableStageError
from pipes.loader2 import shipping
from pipes.loader2.shipping import find_unpicklable, ship, unship

LOCK = threading.Lock()

SOURCE = """
import functools, threading
TABLE = [1, 2, 3]
LOCK = threading.Lock()
def main():
    LOCK.acquire()
    class Local:
        def give(self): return "local"
    return lambda: Local().give()
@functools.lru_cache(maxsize=5)
def sum_to(n): return n and n + sum_to(n - 1)
class Table:
    @functools.cached_property
    def rows(self): return TABLE
    @functools.lru_cache
    def row(self, n): return self.rows[n]
def use_table():
    return TABLE
class Outer:
    class Inner: pass
class Far(Exception): pass
def make(): return Outer(), Outer.Inner(), Far("x")
def fail(): raise Far("y")
"""


@pytest.fixture
def foreign() -> Iterator[Any]:
    """A module that only this process has, as a test runner or a notebook makes it."""
    module = types.ModuleType("made.in_main")
    exec(compile(SOURCE, "<cell 5>", "exec"), vars(module))
    sys.modules |= {"made": types.ModuleType("made"), "made.in_main": module}
    linecache.cache["<cell 5>"] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), "<cell 5>")
    yield module
    del sys.modules["made"], sys.modules["made.in_main"]
    del linecache.cache["<cell 5>"]


class Stage:
    def __init__(self, fn: Any = None, **fields: Any) -> None:
        self.fn = fn
        self.__dict__.update(fields)


def closure_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def recursive() -> Callable[[int], int]:
    def down(n: int) -> int:
        return n and down(n - 1)

    return down


@pytest.mark.parametrize(
    ("obj", "use", "expected"),
    [
        (lambda x: x + 1, lambda f: f(1), 2),
        (closure_over(7), lambda f: f(), 7),
        (recursive(), lambda f: f(3), 0),
        (functools.partial(pow, 2), lambda f: f(5), 32),
        (Stage(lambda x: x * 2), lambda stage: stage.fn(4), 8),
        ([1, {"a": (2,)}], lambda x: x, [1, {"a": (2,)}]),
    ],
    ids=["lambda", "closure", "recursive", "partial", "stage", "data"],
)
def test_round_trip(obj: Any, use: Callable[[Any], Any], expected: Any) -> None:
    assert use(unship(ship(obj))) == expected


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    tensors = [of_dtype(dtype, count, step) for count in (0, 5) for step in (1, 2)]
    same(unship(ship(tensors)), tensors)


def test_globals_travel_as_of_now(foreign: Any) -> None:
    packed = ship(foreign.use_table)
    foreign.TABLE = "later"
    assert unship(packed)() == [1, 2, 3]


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        (Stage(closure_over(LOCK)), "fn: closure variable 'value'"),
        (Stage(lambda: LOCK), "fn: global 'LOCK'"),
        (Stage(lambda: (lambda: LOCK)), "fn: global 'LOCK'"),
        (Stage(lambda x=LOCK: x), "fn: a default argument"),
        (Stage(lambda *, x=LOCK: x), "fn: default of argument 'x'"),
        (Stage(functools.partial(print, 1, LOCK)), "fn: argument 1"),
        (Stage(functools.partial(print, file=LOCK)), "fn: argument 'file'"),
        (Stage(Stage(lock=LOCK).__eq__), "fn: .*lock"),
        (Stage(params={"a": [0, {"b": LOCK}]}), r"params: \['a'\]: \[1\]: \['b'\]"),
        (Stage(params=(Stage(x=LOCK),)), r"params: \[0\]: x"),
        (Stage(params={LOCK}), "params: an element"),
        (LOCK, ""),
    ],
    ids=map(str, itertools.count()),
)  # fmt: skip
def test_culprit_is_named(obj: Any, where: str) -> None:
    found = find_unpicklable(obj, "stage 3 Mapper")
    where = where and f"{where}: "
    assert re.fullmatch(f"stage 3 Mapper: {where}cannot pickle '_thread.lock' object", found), found
    with pytest.raises(UnpicklableStageError, match=re.escape(found)):
        ship(obj, "stage 3 Mapper")


def test_culprit_in_a_circle_and_nothing_to_find() -> None:
    stage = Stage()
    stage.fn = stage
    assert find_unpicklable(stage) == ""
    stage.lock = LOCK
    assert find_unpicklable(stage) == "lock: cannot pickle '_thread.lock' object"


class Refuses:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("not me")


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("obj", "reason"), [(Refuses(), "source: not me"), (generator(), "source: cannot pickle 'generator' object")]
)
def test_other_refusals(obj: Any, reason: str) -> None:
    with pytest.raises(UnpicklableStageError, match=reason) as caught:
        ship(Stage(source=obj), "stage 0 IterableWrapper")
    assert "stage 0 IterableWrapper" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_big_global_is_warned_about_by_name(monkeypatch: pytest.MonkeyPatch, foreign: Any) -> None:
    monkeypatch.setattr(shipping, "BIG", 2**20)
    foreign.TABLE = bytes(3 * 2**20)
    with pytest.warns(UserWarning, match=r"the global 'TABLE' \(3 MiB\) .* use_table \(<cell 5>:17\)"):
        ship(Stage(foreign.use_table))
    with pytest.warns(UserWarning, match=r"the closure variable 'value' \(2 MiB\)"):
        ship(closure_over(bytearray(2 * 2**20)))
    # Data of a stage, and functions that travel by name, are nobody's surprise.
    ship(Stage(data=bytes(3 * 2**20)))


def in_fresh_interpreter(code: str, *inputs: bytes) -> bytes:
    prologue = (
        "import pickle, sys; inputs = pickle.load(sys.stdin.buffer); from pipes.loader2.shipping import unship\n"
        "def give(data): sys.stdout.buffer.write(data)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prologue + code], input=pickle.dumps(inputs), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_classes_of_modules_that_a_worker_cannot_import_come_home(foreign: Any) -> None:
    code = "a, f = unship(inputs[0]); give(pickle.dumps((a, *f())))"
    returned = pickle.loads(in_fresh_interpreter(code, ship((foreign.Outer.Inner, foreign.make))))
    assert [item if isinstance(item, type) else type(item) for item in returned] == [
        foreign.Outer.Inner,
        foreign.Outer,
        foreign.Outer.Inner,
        foreign.Far,
    ]


def test_what_a_function_made_travels_without_that_function(foreign: Any) -> None:
    made = foreign.main()
    assert in_fresh_interpreter("give(unship(inputs[0])().encode())", ship(made)) == b"local"


def test_caching_functions_travel(foreign: Any) -> None:
    code = """
sum_to, local, table, row = unship(inputs[0])
give(pickle.dumps((sum_to(4), sum_to.cache_parameters(), local(2), table.rows is table.rows, row(2))))
"""
    table = foreign.Table()
    packed = ship((foreign.sum_to, functools.lru_cache(recursive()), table, table.row))
    assert pickle.loads(in_fresh_interpreter(code, packed)) == (10, {"maxsize": 5, "typed": False}, 0, True, 3)


def test_tracebacks_of_a_worker_show_the_users_lines(foreign: Any) -> None:
    def fails() -> None:
        raise ValueError("here")  # the line in question

    code = """
import traceback
for function in unship(inputs[0]):
    try: function()
    except Exception: give(traceback.format_exc().encode())
"""
    text = in_fresh_interpreter(code, ship((foreign.fail, fails))).decode()
    assert 'File "<cell 5>", line 23, in fail\n    def fail(): raise Far("y")\n' in text
    assert f'File "{__file__}", line {fails.__code__.co_firstlineno + 1}, in fails\n' in text
    assert "# the line in question" in text


def test_shipping_leaves_cloudpickles_settings_alone(foreign: Any) -> None:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    ship(foreign.use_table)
    with pytest.raises(UnpicklableStageError):
        ship(LOCK)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_shipping_from_many_threads(foreign: Any) -> None:
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.extend(unship(ship(Stage(foreign.use_table))).fn() for _ in range(50)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1, 2, 3]] * 200
