"""Stores that travel to processes, and processes forked from one that had used its store (case D12, client part)."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fault_server import FaultServer

PROGRAM = """
import hashlib, json, logging, multiprocessing, sys, threading, time, warnings

import pipes.sources.s3_obstore
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

lock = threading.Lock()


def read(store, keys, sender):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sums = {key: hashlib.sha256(store.get("s3://bkt/" + key)).hexdigest() for key in keys}
        sums.update((key, hashlib.sha256(store.get("s3://bkt/" + key)).hexdigest()) for key in keys)
    sender.send((sums, [str(warning.message) for warning in caught]))


def take_and_release():
    while True:
        with lock:
            pass


def log():
    while True:
        logging.getLogger("x").warning("busy")


if __name__ == "__main__":
    method, url, client, before = sys.argv[1:]
    store = S3Store(S3Options(endpoint_url=url, unsigned=True, client=client))
    if before == "store":
        assert sum(1 for _ in store.list("s3://bkt/k", 10)) == 40
        store.get("s3://bkt/parent"), store.get("s3://bkt/parent")
    elif before == "obstore":
        import obstore
        obstore.get(obstore.store.S3Store("bkt", endpoint=url, skip_signature=True, allow_http=True), "parent").bytes()
    logging.basicConfig(stream=open("/dev/null", "w"))
    threading.Thread(target=log, daemon=True).start()
    threading.Thread(target=take_and_release, daemon=True).start()
    sys.setswitchinterval(0.0002)
    context = multiprocessing.get_context(method)
    keys = [f"k{i:02d}" for i in range(40)]
    readers = []
    for part in (keys[:20], keys[20:]):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=read, args=(store, part, sender))
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
        readers.append((process, receiver))
    results = [receiver.recv() for _, receiver in readers if receiver.poll(60)]
    if before == "store":
        store.get("s3://bkt/parent")
    for process, _ in readers:
        process.join(5)
    print(json.dumps([results, [process.exitcode for process, _ in readers]]))
"""


@pytest.mark.parametrize(
    ("method", "client", "before"),
    [
        ("fork", "auto", "store"),
        ("fork", "boto3", "store"),
        ("fork", "obstore", "store"),
        ("fork", "obstore", "obstore"),
        ("fork", "obstore", "nothing"),
        ("forkserver", "auto", "store"),
        ("spawn", "obstore", "store"),
    ],
)
def test_children_of_a_process_that_used_its_store(tmp_path: Path, method: str, client: str, before: str) -> None:
    bodies = {f"k{i:02d}": bytes((31 * j + 7) % 251 for j in range(10_000 + i)) for i in range(40)} | {"parent": b"p"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with FaultServer(bodies) as server:
        done = subprocess.run(
            [sys.executable, str(program), method, server.url, client, before],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results, codes = json.loads(done.stdout)
        ports = [
            {request.port for request in server.requests if request.key in keys}
            for keys in ({"parent"}, set(results[0][0]), set(results[1][0]))
        ]
    assert codes == [0, 0]
    sums = results[0][0] | results[1][0]
    assert sums == {key: hashlib.sha256(body).hexdigest() for key, body in bodies.items() if key != "parent"}
    assert not ports[1] & ports[2], "two processes on one connection"
    assert not ports[0] & (ports[1] | ports[2]), "a child on the parent's connection"
    inherited = method == "fork" and client != "boto3" and before != "nothing"
    for _, warned in results:
        assert ["forked from one that had used obstore" in text for text in warned] == [True] * inherited


STREAM_ACROSS_A_FORK = """
import os, sys
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

store = S3Store(S3Options(endpoint_url=sys.argv[1], unsigned=True, client=sys.argv[2]))
stream = store.open("s3://bkt/x")
whole = bytes((31 * i + 7) % 251 for i in range(251)) * 40_000
assert stream.read(1000) == whole[:1000]
child = os.fork()
rest = stream.read()
if child == 0:
    os._exit(0 if rest == whole[1000:] else 3)
assert rest == whole[1000:]
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_a_stream_that_was_open_at_a_fork(client: str) -> None:
    body = bytes((31 * i + 7) % 251 for i in range(251)) * 40_000
    with FaultServer({"x": body}) as server:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STREAM_ACROSS_A_FORK, server.url, client],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
