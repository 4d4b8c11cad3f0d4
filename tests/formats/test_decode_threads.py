"""Threads run on while an image is decoded: told by counts, in an interpreter that takes the GIL from no thread."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipes.formats.decode import Decoder
from pipes.iter import IterableWrapper


@pytest.fixture
def steps() -> Iterator[list[int]]:
    """The steps made by a thread that waits for the GIL at each of them; others keep it until they let it go."""
    counted, ending, interval = [0], threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not ending.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        yield counted
    finally:
        ending.set()
        sys.setswitchinterval(interval)
        thread.join()


def made_during(work: Callable[[Any], Any], steps: list[int], sample: Any) -> int:
    """How many steps the other thread made while `threadpool_map` did `work`."""

    def measured(element: Any) -> int:
        before = steps[0]
        work(element)
        return steps[0] - before

    (made,) = IterableWrapper([sample], deepcopy=False).threadpool_map(measured, max_workers=1)
    return int(made)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_the_gil_is_released_while_an_image_is_decoded(steps: list[int], kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (768, 768, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind)
    sample = {"__key__": "a", kind: buffer.getvalue()}
    Decoder()(sample)  # imports what it needs
    # A busy machine may give the other thread no processor during one of them.
    assert any(made_during(Decoder(), steps, sample) for _ in range(200))
    assert made_during(lambda _: sum(range(300_000)), steps, sample) == 0, "a work that holds it is told apart"
