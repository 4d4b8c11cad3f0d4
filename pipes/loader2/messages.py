"""What the main process and a worker say to each other over their channel.

Main to worker
    PAGE     one descriptor, before all else: where the worker says what it is doing
    SHARE    pickle (key, digest) and a block's descriptor: what all workers read; those that a Job counts come first
    EPOCH    pickle (iteration, plan, [(stream, state)], credits, traced, granted, own): drop what you do and run these
             streams; the worker before died at the output `traced`, (stream, number) or None; what the ledger grants
             from (granted, own) on comes on top of `credits`
    CREDIT   wakes a worker that sleeps: look at the ledger, where main allows batches and gives back slabs
    DEAL     shipped (stream, number, has, element): the answer to NEED; `has` is None when main could not read on
    PAUSE    begin no output until RESUME, or the next EPOCH
    RESUME   go on
    STOP     end

Worker to main
    BATCH    (iteration, stream, given, snapshot length), the snapshot's pickle or nothing, the packed batch
    END      (iteration, stream, given), pickle {stage: numbers} or nothing: the stream has no more; what users' pipes
             counted
    ERROR    (iteration, stream, given), the packed error: the stream raised; the iteration is over for this worker
    NEED     (iteration, stream, number): the stream waits for that element of the source that main reads
    DREW     (iteration, stream, 0), a stage's name: users' draws from the global generators were seen above that stage
    BEGUN    (iteration, stream, given), a snapshot's pickle: where a stream begins whose stages count epochs
    COUNTS   (iteration, stream, given), pickle {stage: counts}: what was skipped up to the output, or end, that follows
    LOG, WARNING   what logging and warnings gave, for main to replay
"""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = ["BATCH_HEAD", "EVENT_HEAD", "FATAL", "Kind"]


class Kind(IntEnum):
    """The kinds of messages."""

    EPOCH = 1
    CREDIT = 2
    STOP = 3
    DEAL = 4
    SHARE = 5
    PAGE = 6
    PAUSE = 7
    RESUME = 8
    BATCH = 11
    END = 12
    ERROR = 13
    LOG = 14
    WARNING = 15
    NEED = 16
    DREW = 17
    COUNTS = 18
    BEGUN = 19


BATCH_HEAD = struct.Struct("<qqqI4x")
EVENT_HEAD = struct.Struct("<qqq")

#: The iteration of an error that belongs to none: the worker cannot work at all.
FATAL = -1
