"""Ctrl-C at each place where Python looks for signals inside `next`: the state loses no output and doubles none."""

from __future__ import annotations

import dis
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
from loading import take, through_json, with_draws

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.loader2.engine import Engine
from pipes.loader2.fake_device import FakeDevice
from pipes.loader2.feeder import Feeder
from pipes.loader2.in_process import InProcessEngine
from pipes.loader2.iterator import DataLoader2Iterator
from pipes.loader2.streams import Stream
from pipes.moving import Sender

pytestmark = pytest.mark.usefixtures("no_residue")

METHODS = [
    DataLoader2Iterator.__next__, Feeder.next, Feeder._look_ahead, Sender.send, Sender.hand_over, Sender.under_way,
    Sender.let_go, Engine.next, Engine.next_ready, Engine._read, Engine._next, Engine._deliver, InProcessEngine.next,
    Stream.next,
]  # fmt: skip
CODES: set[CodeType] = {method.__code__ for method in METHODS}
# Behind calls, at the start of a function and at a jump back; nowhere else.
LOOKS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


@contextmanager
def interrupt_at(place: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt at the `place`-th look for signals in METHODS; yields where that was, once it was."""
    where: list[str] = []
    looks = 0
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal looks
        if frame.f_code not in CODES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not where:
            last = before.get(frame)
            before[frame] = frame.f_lasti
            if last is None or dis.opname[frame.f_code.co_code[last]] in LOOKS:
                looks += 1
                if looks > place:
                    where.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
                    raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(None)
        before.clear()


def loader_of(workers: int, device: Any) -> DataLoader2[Any]:
    pipe = IterableWrapper(range(24)).shuffle(5).sharding_filter().shuffle(3).map(with_draws)
    service = MultiProcessingReadingService(workers, prefetch=8)
    return DataLoader2(pipe, reading_service=service, device=device, num_streams=2)


@pytest.mark.race
@pytest.mark.parametrize(("workers", "ahead"), [(0, False), (0, True), (1, False), (1, True)])
def test_the_state_after_ctrl_c_is_that_after_the_last_output_given(workers: int, ahead: bool) -> None:
    with loader_of(0, None) as whole:
        whole.seed(5)
        expected = list(whole)
    places, begun = [], 3
    with loader_of(workers, FakeDevice() if ahead else None) as loader, loader_of(0, None) as other:
        while True:
            loader.seed(5)
            iterator = iter(loader)
            given = take(iterator, begun)
            if ahead and workers:
                # Until there is something to look ahead to.
                time.sleep(0.002)
            try:
                with interrupt_at(len(places)) as where:
                    given.append(next(iterator))
            except KeyboardInterrupt:
                pass
            if not where:
                break
            places += where
            assert len(given) == begun, where
            other.load_state_dict(through_json(loader.state_dict()))
            assert given + list(other) == expected, where
        assert given == expected[: begun + 1]
    assert len(places) > 10
