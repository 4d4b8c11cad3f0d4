"""Threads of an upload that are late: an upload that fails does not wait for what they did not take up."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fault_server import FaultServer, Step

from pipes.errors import StoreError
from pipes.sources import s3_upload
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

PART = 64 << 10


def test_a_part_that_no_thread_took_up_is_not_waited_for(
    shared_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unhurried(ThreadPoolExecutor):
        """The third part lies in its queue until it is cancelled."""

        left: Future[str]

        def submit(self, fn: Any, /, *arguments: Any, **named: Any) -> Any:
            if arguments[0] != 3:
                return super().submit(fn, *arguments, **named)
            self.left = Future()
            return self.left

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            if cancel_futures:
                self.left.cancel()
            super().shutdown(wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(s3_upload, "ThreadPoolExecutor", Unhurried)
    monkeypatch.setattr(s3_upload, "_SINGLE", PART)
    server = shared_server
    server.reset({})
    store = S3Store(S3Options(endpoint_url=server.url, unsigned=True, region="us-east-1"))
    both = threading.Barrier(2)
    server.script("old#1", Step(meet=both))
    server.script("old#2", Step(status=400, code="EntityTooSmall", meet=both))
    with pytest.raises(StoreError) as caught:
        store.put("s3://bkt/old", bytes(3 * PART))
    assert not getattr(caught.value, "__notes__", [])
    assert server.uploads == {}
