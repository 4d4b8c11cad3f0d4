"""S3 read by the workers of a DataLoader2: every start method with both clients, and a parent that is busy (D12)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest
from fault_server import FaultServer
from s3_objects import put_objects

KEYS = [f"k{number:02d}" for number in range(40)]
BODIES = {key: bytes((31 * i + 7) % 251 for i in range(10_000 + number)) for number, key in enumerate(KEYS)}
SUMS = {key: sha256(body).hexdigest() for key, body in BODIES.items()}

# One process for all start methods: starting one costs more than what is tested. In it threads read from the store all
# the time, also while the workers are started; in the cases of D12 others take and release a lock, and log, in loops
# without a pause.
PROGRAM = """
import hashlib, json, logging, os, signal, sys, threading, warnings

from pipes.iter import S3FileLister
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

lock = threading.Lock()
stop = threading.Event()
records = []


class Kept(logging.Handler):
    def emit(self, record):
        if record.name == "pipes" and "is in use" in record.getMessage():
            records.append(record.getMessage())


def digest(pair):
    name, stream = pair
    data = stream.read()
    logging.getLogger("work").info("%s is read", name)
    return name.rpartition("/")[2], hashlib.sha256(data).hexdigest(), os.getpid()


def take_and_release():
    while not stop.is_set():
        with lock:
            pass


def log():
    while not stop.is_set():
        logging.getLogger("busy").info("busy")


def read(store):
    while not stop.wait(0.002):
        assert store.get("s3://bkt/parent") == b"p"


def options(url, client):
    return S3Options(endpoint_url=url, access_key="testing", secret_key="testing", region="us-east-1", client=client)


def graph(url, prefix, clients):
    loaders = []
    for client in clients:
        names = S3FileLister(f"s3://bkt/{prefix}/k", page_size=7, options=options(url, client)).sharding_filter()
        loaders.append(names.load_files_by_s3(options=options(url, client)).map(digest))
    return loaders[0].concat(*loaders[1:])


def run(url, prefix, method, clients, kill):
    records.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        service = MultiProcessingReadingService(2, multiprocessing_context=method)
        results = []
        with DataLoader2(graph(url, prefix, clients), reading_service=service) as loader:
            for place, element in enumerate(loader):
                results.append(element)
                if kill and place == 5:
                    os.kill(loader.stats()["workers"][1], signal.SIGKILL)
            restarts = loader.stats()["restarts"]
    return {
        "results": results,
        "warnings": [str(warning.message) for warning in caught],
        "in use": sorted(set(records)),
        "restarts": restarts,
    }


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    sys.setswitchinterval(0.0002)  # else each answer waits for the turns of the loops
    logging.getLogger().addHandler(Kept())
    logging.getLogger().setLevel("INFO")
    urls = {case[0]: case[1] for case in cases}
    stores = {url: [S3Store(options(url, client)) for client in ("boto3", "obstore")] for url in urls}
    for url, prefix in urls.items():
        assert sum(1 for _ in stores[url][0].list(f"s3://bkt/{prefix}/k", 10)) == 40
        assert [store.get("s3://bkt/parent") for store in stores[url]] == [b"p"] * 2
    done = []
    for url in urls:
        stop.clear()
        busy = [threading.Thread(target=read, args=(store,)) for store in stores[url]]
        if url == list(urls)[-1]:
            busy += [threading.Thread(target=take_and_release), threading.Thread(target=log)]
        for thread in busy:
            thread.start()
        try:
            done += [run(*case) for case in cases if case[0] == url]
        finally:
            stop.set()
        for thread in busy:
            thread.join()
    print(json.dumps({"parent": os.getpid(), "cases": done}))
"""


@dataclass
class Case:
    """What one loader gave."""

    prefix: str
    method: str
    clients: list[str]
    killed: bool
    found: list[tuple[str, str, int]]
    warnings: list[str]
    in_use: dict[int, set[str]]
    restarts: int
    ports: dict[str, set[int]]

    @property
    def workers(self) -> set[int]:
        return {process for _, _, process in self.found}

    def check(self) -> None:
        names = [name for name, _, _ in self.found]
        assert names == KEYS * len(self.clients)
        assert {name: digest for name, digest, _ in self.found} == SUMS
        assert self.restarts == self.killed
        assert len(self.workers) == 2 + self.killed


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, moto_server: str) -> Any:
    """The process id of the program, and what each of its loaders gave."""
    put_objects(moto_server, "bkt", {f"matrix/{key}": body for key, body in BODIES.items()} | {"parent": b"p"})
    methods = ("forkserver", "fork", "spawn")
    on_fault = {f"{method}/{key}": body for method in methods for key, body in BODIES.items()}
    program = tmp_path_factory.mktemp("workers") / "program.py"
    program.write_text(PROGRAM)
    with FaultServer(on_fault | {"parent": b"p"}) as server:
        cases: list[tuple[str, str, str, list[str], bool]] = [
            (moto_server, "matrix", "fork", ["boto3"], False),
            (moto_server, "matrix", "fork", ["obstore"], False),
            (moto_server, "matrix", "forkserver", ["boto3"], True),
            (moto_server, "matrix", "forkserver", ["obstore"], True),
            (server.url, "fork", "fork", ["auto"], False),
            (server.url, "forkserver", "forkserver", ["auto"], False),
            (server.url, "spawn", "spawn", ["boto3", "obstore"], False),
        ]
        command = [sys.executable, str(program), json.dumps(cases)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        ports: dict[str, set[int]] = {}
        for request in server.requests:
            ports.setdefault(request.key, set()).add(request.port)
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout)
    outcomes = []
    for (_, prefix, method, clients, kill), given in zip(cases, report["cases"], strict=True):
        in_use: dict[int, set[str]] = {}
        for client, process in re.findall(r"s3://bkt: (\w+) is in use in process (\d+)", "\n".join(given["in use"])):
            in_use.setdefault(int(process), set()).add(client)
        outcomes.append(
            Case(prefix, method, clients, kill, given["results"], given["warnings"], in_use, given["restarts"], ports)
        )
    return report["parent"], outcomes


pytestmark = [
    pytest.mark.race,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]


@pytest.mark.parametrize(
    ("prefix", "method", "clients"),
    [
        ("matrix", "forkserver", ["boto3"]),
        ("matrix", "forkserver", ["obstore"]),
        ("matrix", "fork", ["boto3"]),
        ("matrix", "fork", ["obstore"]),
        ("spawn", "spawn", ["boto3", "obstore"]),
    ],
)
def test_every_start_method_with_both_clients(outcome: Any, prefix: str, method: str, clients: list[str]) -> None:
    """Under fork and forkserver over another implementation of S3; under forkserver a worker is killed on the way."""
    parent, cases = outcome
    (case,) = [each for each in cases if (each.prefix, each.method, each.clients) == (prefix, method, clients)]
    case.check()
    assert parent not in case.workers
    forbidden = method == "fork" and clients == ["obstore"]
    warned = [text for text in case.warnings if "forked from one that had used obstore" in text]
    assert len(warned) == 2 * forbidden, "each worker says once that it cannot use obstore, and none where it can"
    used = {client for process in case.workers for client in case.in_use[process]}
    assert used == ({"boto3"} if forbidden else set(clients))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_busy_parent_and_its_workers_have_their_own_connections(outcome: Any, method: str) -> None:
    """Case D12: the parent has listed, and reads, logs, takes and releases a lock in threads while workers start."""
    (case,) = [each for each in outcome[1] if each.prefix == method]
    case.check()
    ports = [set[int](), set[int]()]
    for name, _, process in case.found:
        ports[process == max(case.workers)] |= case.ports[f"{method}/{name}"]
    assert all(ports)
    assert not ports[0] & ports[1], "two workers on one connection"
    assert not case.ports["parent"] & (ports[0] | ports[1]), "a worker on the parent's connection"
