"""A loader in the cells of a notebook, run by a real Jupyter kernel (`pip install jupyter_client ipykernel`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from worker_processes import is_running

from pipes.loader2.guard import sleep_until

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

SETUP = """
import logging, os, time, warnings
from dataclasses import dataclass
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService

def loader_of(function, count=40):
    pipe = IterableWrapper(range(count)).sharding_filter().map(function)
    return DataLoader2(pipe, reading_service=MultiProcessingReadingService(2))
"""


class Kernel:
    """A kernel, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        # the launcher takes the folder it starts in off the path
        self.manager.start_kernel(cwd=str(folder))
        self.pid: int = self.manager.provisioner.pid
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=100)

    def run(self, cell: str, interrupt_at: str = "") -> str:
        """Return what a cell prints, gives and raises; interrupt it when it has printed `interrupt_at`."""
        number, said = self.client.execute(cell), ""
        while True:
            message = self.client.get_iopub_msg(timeout=100)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return said
            if kind == "execute_result":
                said += f"=> {content['data']['text/plain']}"
            said += content.get("text", "") + (f"{content['ename']}: {content['evalue']}" if kind == "error" else "")
            if interrupt_at and interrupt_at in said:
                interrupt_at = ""
                self.manager.interrupt_kernel()

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


@pytest.fixture
def cells(kernel: Kernel) -> Callable[..., str]:
    assert kernel.run(SETUP) == ""
    return kernel.run


def test_a_session(kernel: Kernel, cells: Callable[..., str]) -> None:
    assert cells("@dataclass\nclass Point:\n    x: int\n    def twice(self): return 2 * self.x\nscale = 3") == ""
    cell = "loader = loader_of(lambda x: Point(scale * x))\nassert all(type(p) is Point for p in loader)\n"
    assert cells(cell + "[p.twice() for p in loader][:3]") == "=> [0, 6, 12]"
    # the class is defined again, and the loader made again
    assert cells("@dataclass\nclass Point:\n    x: int\n    y: int = 9\nscale = 1") == ""
    assert cells("loader = loader_of(Point)\n[(p.x, p.y) for p in loader][:2]") == "=> [(0, 9), (1, 9)]"
    assert "Trouble: seven" in cells(
        "class Trouble(Exception): pass\ndef fail(x):\n    if x == 7: raise Trouble('seven')\nlist(loader_of(fail))"
    )
    cell = "def tell(x):\n    logging.warning('log %d', x); warnings.warn('warned'); return x\n"
    said = cells(cell + "list(loader_of(tell, 2))")
    assert "[worker 1] log 1" in said
    assert "UserWarning: [worker" in said
    cell = (
        "def slow(x):\n    time.sleep(0.1); return x\nloader = loader_of(slow)\nfor x in loader: print(x, flush=True)"
    )
    assert "KeyboardInterrupt" in cells(cell, interrupt_at="5\n")
    # the output that was on its way may have been given and not printed
    cell = "state, given = loader.state_dict(), x\nloader.load_state_dict(state)\n"
    assert cells(cell + "list(loader)[0] - given in (1, 2)") == "=> True"
    assert cells("%env SAID=so\nlist(loader_of(lambda x: os.environ['SAID'], 1))").endswith("=> ['so']")
    pids = kernel.children()
    assert len(pids) > 2
    kernel.manager.restart_kernel(now=True)
    assert sleep_until(lambda: not any(map(is_running, pids)), 60)
