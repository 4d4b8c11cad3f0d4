"""`no_residue` sees what it is there to see: each kind of leak is reported, and gone when it is put right."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from residue import Holdings, settled


def news(before: Holdings) -> str:
    return "\n".join(Holdings.now().news_since(before))


def test_child_process() -> None:
    before = Holdings.now()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert f"process {child.pid}: " in news(before)
    child.kill()
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert settled(before, seconds=10)


def test_dead_child_that_nobody_waited_for() -> None:
    before = Holdings.now()
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    child.start()
    os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)
    assert "zombie" in news(before)
    child.join()
    child.close()
    assert settled(before, seconds=10)


def test_thread() -> None:
    before = Holdings.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    assert news(before) == "thread left-over"
    stop.set()
    thread.join()
    assert settled(before, seconds=10)


def test_descriptor() -> None:
    before = Holdings.now()
    descriptor = os.open(__file__, os.O_RDONLY)
    assert news(before).startswith("1 descriptors, among these:")
    assert not settled(before, seconds=0.1)
    os.close(descriptor)
    assert settled(before, seconds=10)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_shared_memory() -> None:
    before = Holdings.now()
    path = Path("/dev/shm", f"pipes-test-{uuid.uuid4().hex}")
    path.touch()
    assert news(before) == f"shared memory {path.name}"
    path.unlink()
    assert settled(before, seconds=10)


STRANGER = """
import multiprocessing, os, sys
if os.fork():
    os._exit(0)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_a_semaphore_of_another_program_is_not_ours() -> None:
    before = Holdings.now()
    command = [sys.executable, "-c", STRANGER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert Path(f"/dev/shm/sem.{parent.stdout.readline().strip().removeprefix('/')}").exists()
        parent.wait()
        assert "sem.mp-" not in news(before)
    assert settled(before, seconds=10)


def test_nothing_new_is_settled_at_once(no_residue: None) -> None:
    assert settled(Holdings.now(), seconds=0)


def test_the_server_speaks_s3(moto_server: str, no_residue: None) -> None:
    import boto3

    bucket = f"bucket-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=moto_server)
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="key", Body=b"body")
    assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == b"body"
    client.close()
