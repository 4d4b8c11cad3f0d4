"""Every public stage, source and reader has a case, and each case keeps what states promise."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import stage_cases
import user_pipes
from loading import through_json
from stage_cases import CASES, PAYLOAD, SPLITTERS, Places
from stage_contract import check_stage, loader_over, plain, saved, start

from pipes import IterDataPipe, MapDataPipe
from pipes.run import Run, walk
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

# A replayed user's stage says so once a process; a resume in another process says so again.
pytestmark = pytest.mark.filterwarnings("ignore:stage .* has no state of its own")

NO_STAGES = {"DataChunk", "IterDataPipe", "MapDataPipe", "functional_datapipe"}
# They hold what others share, or stand in graphs that only the loader makes (tests/loader2/test_dealing.py).
NOT_RUN_BY_CASES = {
    "RecordsRun",
    "ExpandingRun",
    "AppliedRun",
    "_JoiningRun",
    "_CountingRun",
    "ShardRun",
    "_DealtRun",
    "_DealingRun",
}

Make = Callable[[], IterDataPipe[Any]]


@pytest.fixture(scope="module")
def places(moto_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    kept = S3Store(S3Options(endpoint_url=moto_server))  # equal stores share its clients: making one takes long
    yield Places.make(tmp_path_factory.mktemp("cases"), moto_server)
    del kept


def made(name: str, places: Places) -> Make:
    return partial(CASES[name], places)


@pytest.mark.parametrize("catalogue", ["iter", "map"])
def test_every_name_of_the_catalogues_has_a_case(catalogue: str, places: Places) -> None:
    module = import_module(f"pipes.{catalogue}")
    for name in set(module.__all__) - NO_STAGES:
        keys = [key for key in CASES if key.split(" of ")[0].split(" with ")[0] == f"{catalogue}.{name}"]
        assert keys, f"pipes.{catalogue}.{name} has no case in tests/stage_cases.py: add one"
        if isinstance(getattr(module, name), type) and name not in SPLITTERS:
            for key in keys:
                stages = {type(node) for node in walk(made(key, places)())}
                assert getattr(module, name) in stages, f"the case {key} has no such stage"


def test_every_registered_name_is_in_a_catalogue() -> None:
    public = {id(value) for name in ("iter", "map") for value in vars(import_module(f"pipes.{name}")).values()}
    for base in (IterDataPipe, MapDataPipe):
        for name, maker in base.functions.items():
            assert id(maker) in public or not maker.__module__.startswith("pipes."), name


def runs_below(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from runs_below(each)


def test_every_run_is_run_by_a_case(places: Places) -> None:
    ran: set[type] = set()
    for name in CASES:
        run = start(made(name, places)())
        ran.update(type(each) for each in run.context.runs.values())
        run.context.close()
    known = {each for each in runs_below(Run) if each.__module__.startswith("pipes.")}
    missing = {each.__qualname__ for each in known - ran} - NOT_RUN_BY_CASES
    assert not missing, f"no case in tests/stage_cases.py runs {missing}"


@pytest.mark.parametrize("name", CASES)
def test_the_case_keeps_every_promise_of_a_stage(name: str, places: Places) -> None:
    forked = any(each in name for each in SPLITTERS)
    check_stage(made(name, places), streams=(1, 2), equal_state=not forked)


@pytest.mark.parametrize("name", CASES)
def test_no_state_holds_an_element(name: str, places: Places) -> None:
    make = made(name, places)
    run = start(make())
    shown = 0
    for element in run:
        shown += PAYLOAD in json.dumps(plain(element))
        assert PAYLOAD not in json.dumps(saved(run))
    assert shown > 2, "the elements of the case do not show whether they are kept"
    loader = loader_over(make)
    for _ in loader:
        assert PAYLOAD not in json.dumps(loader.state_dict())
    assert PAYLOAD not in json.dumps(loader.state_dict())


FRESH = f"""
import json, pickle, sys
sys.path.append({str(Path(__file__).parent)!r})
from pathlib import Path
from pipes.loader2 import DataLoader2
from stage_contract import plain
for name in sys.argv[1:]:
    graph = pickle.loads(Path(name + ".graph").read_bytes())
    loader = DataLoader2(graph)
    loader.load_state_dict(json.loads(Path(name + ".json").read_text()))
    found = [[plain(output) for output in loader] for _ in range(2)]
    Path(name + ".found").write_text(json.dumps(found))
"""


def test_fresh_interpreters_go_on(places: Places, tmp_path: Path) -> None:
    """Graph and state travel by file; a few interpreters, each loading torch for seconds, share the cases."""
    for module in (stage_cases, user_pipes):
        cloudpickle.register_pickle_by_value(module)
    expected: dict[str, Any] = {}
    try:
        for number, name in enumerate(CASES):
            loader = loader_over(made(name, places))
            whole = [[plain(output) for output in loader] for _ in range(2)]
            k = random.Random(name).randint(0, len(whole[0]))
            loader.seed(11)
            iterator = iter(loader)
            assert [plain(next(iterator)) for _ in range(k)] == whole[0][:k]
            path = tmp_path / str(number)
            path.with_suffix(".graph").write_bytes(cloudpickle.dumps(loader.datapipe))
            path.with_suffix(".json").write_text(json.dumps(loader.state_dict()))
            expected[str(path)] = through_json([whole[0][k:], whole[1]])
            loader.shutdown()
    finally:
        for module in (stage_cases, user_pipes):
            cloudpickle.unregister_pickle_by_value(module)
    names = list(expected)
    fresh = [
        subprocess.Popen([sys.executable, "-c", FRESH, *names[part::2]], stderr=subprocess.PIPE, text=True)
        for part in range(2)
    ]
    for process in fresh:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    for name in names:
        assert json.loads(Path(name + ".found").read_text()) == expected[name], name
