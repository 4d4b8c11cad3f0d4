"""What a runner around another one keeps to itself, drops, tells and passes on, over a runner that is a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipes.loader2.fake_device import FakeDevice
from pipes.loader2.feeder import Feeder, Feeding
from pipes.loader2.iterator import NOTHING
from pipes.loader2.streams import Plan

COUNT = 6
PLAN = Plan(seed=1, epoch=0, streams=1, world=1)


class Lists:
    """Has all outputs of an epoch, 0 to 5 and 10 to 15 and so on, ready at once, and notes what else is asked of it."""

    drew_above, inherited, inner, counts = "1:Mapper", False, "inner", ["counts"]

    def __init__(self) -> None:
        self.batches, self.epoch, self.asked = 0, -1, []
        self.left: list[int] = []

    def begin(self, plan: Any, states: Any, dealer: Any) -> None:
        self.epoch += 1
        self.left = [10 * self.epoch + number for number in range(COUNT)]

    def next(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        self.batches += 1
        return torch.full((4,), self.left.pop(0))

    next_ready = next

    def states(self, without: int = 0) -> Any:
        return f"before the newest {without}"

    def stage_counts(self) -> Any:
        return "stage counts"

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def close(self) -> None:
        self.asked.append("close")


def values(runner: Feeder, count: int) -> list[int]:
    return [int(runner.next()[0]) for _ in range(count)]


def test_what_was_ahead_when_an_epoch_was_left_is_neither_given_nor_counted() -> None:
    below = Lists()
    feeder = Feeder(below, Feeding(FakeDevice(), prefetch=2))
    states = []
    for epoch, count in enumerate((3, 1, COUNT)):
        feeder.begin(PLAN, {}, None)
        states.append(feeder.states(1))
        assert values(feeder, count) == [10 * epoch + number for number in range(count)]
        states.append(feeder.states())
    assert (feeder.batches, below.batches) == (10, 5 + 3 + 6)
    assert states == [f"before the newest {number}" for number in (1, 2, 1, 2, 1, 0)]
    for _ in range(2):
        with pytest.raises(StopIteration):
            feeder.next()
    feeder.close()


def test_what_is_passed_on() -> None:
    below = Lists()
    feeder = Feeder(below, Feeding(FakeDevice(), prefetch=2))
    feeder.begin(PLAN, {}, None)
    assert values(feeder, 1) == [0]
    feeder.pause()
    # What is ahead was made before the pause, and comes after it.
    assert feeder.next_ready() is NOTHING
    feeder.resume()
    assert values(feeder, 1) == [1]
    told = feeder.drew_above, feeder.inherited, feeder.inner, feeder.counts, feeder.stage_counts()
    assert told == (below.drew_above, False, below.inner, below.counts, "stage counts")
    assert below.asked == ["pause", "resume"]


def test_the_runner_is_closed_when_the_copies_are_done() -> None:
    below, device = Lists(), FakeDevice()
    device.run_due = lambda: None  # type: ignore[method-assign]
    feeder = Feeder(below, Feeding(device, prefetch=2))
    feeder.begin(PLAN, {}, None)
    values(feeder, 1)
    finish = feeder._sender.finish

    def finish_soon() -> None:
        assert (device.under_way, below.asked) == (3, [])
        finish(0.01)
        raise KeyboardInterrupt

    feeder._sender.finish = finish_soon  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        feeder.close()
    assert below.asked == ["close"]
    assert not feeder._ahead
    device.synchronize()
