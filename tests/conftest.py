"""What every test shares: no contact with real clouds, a loopback S3 server, and a check that a test leaves nothing."""

from __future__ import annotations

import gc
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings
from residue import Holdings, settled, start_forkserver, stop_forkserver

# only type checkers read these
collect_ignore = ["typing"]

SETTLE_SECONDS = 10.0

# The tests start hundreds of interpreters: compile the package once for all of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# no deadline for an example: this machine may be busy; in CI always the same examples
settings.register_profile("pipes", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("pipes")

# A shell starts what runs in its background with SIGINT ignored, and the tests send themselves some.
signal.signal(signal.SIGINT, signal.default_int_handler)

AWS_FOR_TESTS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
AWS_NOT_FOR_TESTS = ("AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE")

# The server ends when its standard input does: also when the tests are killed.
MOTO_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests: at the end one of them would keep a single process busy while the others idle."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: an address in a test's name differs between processes; give ids=")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of later garbage collections: a thousand tests collect, 0.2 s each else."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_real_cloud() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AWS_FOR_TESTS.items():
            patch.setenv(name, value)
        for name in AWS_NOT_FOR_TESTS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def moto_server(_no_real_cloud: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint URL of an S3 server on loopback, a process of its own, shared by all tests: use your own bucket."""
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-c", MOTO_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        assert url, f"the S3 server did not start:\n{log.read_text()}"
        yield url
    finally:
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


@pytest.fixture
def no_residue() -> Iterator[None]:
    """Fail when the test leaves child processes, threads, open descriptors or names in /dev/shm.

    What ends by itself within ten seconds is no residue, nor is the forkserver, which runs before the test; another one
    that the test started is ended here, and must go without a trace too. Only Python's threads count: pools of native
    threads (OpenMP, Tokio) live as long as the process.
    """
    # multiprocessing's tracker lives as long as the process: start it now, so that it is no news afterwards
    multiprocessing.resource_tracker.ensure_running()
    start_forkserver()
    gc.collect()
    before = Holdings.now()
    yield
    if settled(before, seconds=1.0):
        return
    stop_forkserver()
    if not settled(before, seconds=SETTLE_SECONDS):
        pytest.fail("the test left behind:\n" + "\n".join(Holdings.now().news_since(before)))
