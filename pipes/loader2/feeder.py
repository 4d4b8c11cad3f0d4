"""The last metre: outputs of the workers to a device, copied ahead of the user, each handed over when it is asked for.

Contract
- Success. `next()` gives the same outputs in the same order as the runner below, their tensors on the device, safe to
  use in the user's current stream at once. Outputs that the workers have ready are copied ahead, `prefetch` of them at
  most, so that the next is there when it is wanted; without workers nothing is made ahead.
- State. `states()` is that after the last output given to the user: what was copied ahead counts as not given, and so
  does what Ctrl-C tore from the hands of `next()`.
- Host memory of an output is kept until its copies are done, then its slab goes back. The copies of `prefetch + 1`
  outputs are under way at most: no more are sent ahead then, and `next()` waits for the oldest only if the output that
  it gives was not sent, which is to say for a bus that is slower than the user, and for nothing else.
- Failure. What the runner raises, and a batch that cannot be moved, is raised in its place in the order. An output for
  which the device has no memory left while it is copied ahead is copied again when it is its turn, and raises then.
- Stop. `close()` waits for the copies under way, 5 s at most, then closes the runner; may be called twice.
- There is no thread here: all happens inside the calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from pipes.datapipe import IterDataPipe
from pipes.device_choice import resolve_device
from pipes.devices import Device
from pipes.errors import GraphError
from pipes.loader2.dealing import Dealer
from pipes.loader2.iterator import NOTHING, Runner, RunnerAround
from pipes.loader2.streams import Plan, StreamState
from pipes.moving import Sender, Sent
from pipes.node import walk
from pipes.stages.moving import DeviceMover

__all__ = ["Feeder", "Feeding", "take_off"]


@dataclass
class _Ahead:
    """An output taken from the runner, waiting or sent, or the error that came in its place."""

    host: Any = None
    sent: Sent | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Feeding:
    """Where a loader's outputs go: the device, how many are sent ahead, and the last stage that says more."""

    device: Device
    prefetch: int = 2
    stage: DeviceMover[Any] | None = None

    def sender(self) -> Sender:
        """Return a new sender to the device."""
        return Sender(self.device) if self.stage is None else self.stage.sender(self.device)


def take_off(
    graph: IterDataPipe[Any], device: Any, memory: str, *, has_workers: bool
) -> tuple[IterDataPipe[Any], Feeding | None]:
    """Return the graph without `.to_device` or `.pin_memory` at its end, and where its outputs go, if anywhere.

    Raises GraphError for such a stage elsewhere when there are workers, ValueError when the loader has a device too,
    DeviceError for a device that is not there.
    """
    stage = graph if isinstance(graph, DeviceMover) else None
    if stage is not None:
        if device is not None or memory != "auto":
            raise ValueError(
                f"{type(stage).__name__} at the end of the graph names the device; leave device= and memory= out"
            )
        graph = stage.source_datapipe
    for node in walk(graph):
        if isinstance(node, DeviceMover) and has_workers:
            raise GraphError(
                f"{type(node).__name__} belongs at the end of a graph that runs in workers: its batches come to the "
                "device in the calling process, after everything else. Move it there; on_device= runs a function on "
                "the device"
            )
    if stage is not None:
        return graph, Feeding(stage.resolved(), stage.prefetch, stage)
    found = resolve_device(device, memory)
    return graph, None if found is None else Feeding(found)


class Feeder(RunnerAround):
    """A runner whose outputs are on a device."""

    def __init__(self, runner: Runner, feeding: Feeding) -> None:
        super().__init__(runner)
        self._sender = feeding.sender()
        # What stays on the host has nothing to be ahead with.
        self._prefetch = 0 if feeding.device.name == "host" else feeding.prefetch
        self._ahead: deque[_Ahead] = deque()

    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None:
        """Begin an epoch; drops what was sent ahead."""
        self._ahead.clear()
        self._dropped += self._not_given
        self._runner.begin(plan, states, dealer)

    def next(self) -> Any:
        """Return the next output, on the device; raises StopIteration at the end, and what the runner raises."""
        if not self._ahead:
            self._ahead.append(_Ahead(self._runner.next()))
        first = self._ahead[0]
        if first.error is not None:
            raise first.error
        # Nothing was ahead, or the device had no room for it then.
        if first.sent is None:
            self._sender.let_go(self._prefetch)
            self._send(first)
        assert first.sent is not None
        output = self._sender.hand_over(first.sent)
        self._look_ahead()
        self._ahead.popleft()
        self._given += 1
        return output

    def _look_ahead(self) -> None:
        """Send what the workers have ready, without waiting for copies under way."""
        while len(self._ahead) <= self._prefetch and self._ahead[-1].sent is not None:
            if self._sender.under_way() > self._prefetch:
                return
            try:
                host = self._runner.next_ready()
            except StopIteration:
                return
            except Exception as error:
                self._ahead.append(_Ahead(error=error))
                return
            if host is NOTHING:
                return
            ahead = _Ahead(host)
            self._ahead.append(ahead)
            try:
                self._send(ahead)
            except torch.OutOfMemoryError:
                return
            except Exception as error:
                ahead.error = error
                return
            del host

    def _send(self, output: _Ahead) -> None:
        output.sent = self._sender.send(output.host)
        output.host = None

    def close(self) -> None:
        """Wait for the copies under way, then close the runner; see the contract."""
        try:
            self._sender.finish()
        finally:
            self._ahead.clear()
            self._runner.close()
