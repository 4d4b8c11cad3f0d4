"""What main reads once for all streams: listings, and long lists at the sources of a graph.

Contract
- Success. Listers with constant roots are listed once a loader, on rank 0, at its first `iter`; every stream of every
  rank, and every restarted worker, sees the same names. A long list or tuple at a source travels to the workers as one
  block of shared memory, which they read in place of a copy of their own.
- Failure. What the listing raises on rank 0 is raised on every rank (see `remote_error`), and the next `iter` lists
  again.
- Stop. `close` closes main's descriptors; see `blocks`.
"""

from __future__ import annotations

import copy
import pickle
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.errors import add_note
from pipes.graph import clone
from pipes.loader2.blocks import BY_POSITION, IN_ORDER, Block, SharedList, is_long
from pipes.loader2.channel import Channel, Message
from pipes.loader2.messages import Kind
from pipes.loader2.remote_error import pack_error, unpack_error
from pipes.loader2.shipping import ship
from pipes.loader2.streams import Plan
from pipes.node import Node, built_at
from pipes.run import stage_names, walk
from pipes.sources.listing import Listing, has_constant_roots, listing_of
from pipes.stages.wrapping import IterableWrapper, SequenceWrapper

__all__ = ["Sharing", "list_once", "receive", "with_listings", "without_long_lists"]


def list_once(graph: IterDataPipe[Any]) -> dict[str, Listing]:
    """Return, by stage, the listing of every lister with constant roots; with several ranks, that of rank 0."""
    import torch.distributed as dist

    names = stage_names(graph)
    listers = {names[id(node)]: node for node in walk(graph) if has_constant_roots(node)}
    if not listers or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return {stage: _listed(stage, node) for stage, node in listers.items()}
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [{stage: _listed(stage, node) for stage, node in listers.items()}]
        except Exception as error:
            # As it is, it may not survive pickling, and the other ranks would wait for an answer.
            dist.broadcast_object_list([pack_error(error, "rank 0")], src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], bytes):
        raise unpack_error(answer[0])
    return answer[0]  # type: ignore[no-any-return]


def _listed(stage: str, lister: Node) -> Listing:
    try:
        return listing_of(lister)
    except Exception as error:
        add_note(error, f"in stage {stage}{built_at(lister, ' built at {}')}")
        raise


class Sharing:
    """Main's side: the graph as it travels, and what is sent beside it to each worker that starts.

    Raises UnpicklableStageError, and what listing raises.
    """

    def __init__(self, graph: IterDataPipe[Any]) -> None:
        self.listings = list_once(graph)
        self._blocks: dict[str, tuple[Block, str | None]] = {}
        #: Listings that no block can hold travel whole.
        self._whole: dict[str, Listing] = {}
        try:
            for stage, listing in self.listings.items():
                block = Block.write(listing.names)
                if block is None:
                    self._whole[stage] = listing
                else:
                    self._blocks[stage] = block, listing.digest
            instead = {id(node): standing for node in walk(graph) if (standing := self._standing_for(node)) is not None}
            #: The graph for the workers.
            self.shipped = ship(clone(graph, instead) if instead else graph, "the graph")
        except BaseException:
            self.close()
            raise

    def _standing_for(self, node: Node) -> Node | None:
        """Return a copy of a source whose list lies in a block, None for any other pipe."""
        field = _field_of_long_list(node)
        if field is None:
            return None
        data = getattr(node, field)
        block = Block.write(data, BY_POSITION if isinstance(node, SequenceWrapper) else IN_ORDER)
        if block is None:
            return None
        key = secrets.token_hex(8)
        self._blocks[key] = block, None
        return _with(node, field, SharedList(key, len(data)))

    @property
    def count(self) -> int:
        """The number of messages that `send` sends."""
        return len(self._blocks) + 1

    def send(self, channel: Channel) -> None:
        """Send all that is shared to a worker that has just started."""
        channel.post(Kind.SHARE, [pickle.dumps(("", self._whole), protocol=5)])
        for key, (block, digest) in self._blocks.items():
            channel.post(Kind.SHARE, [pickle.dumps((key, digest), protocol=5)], [block.descriptor()])

    def close(self) -> None:
        while self._blocks:
            self._blocks.popitem()[1][0].close()


def without_long_lists(graph: IterDataPipe[Any]) -> IterDataPipe[Any]:
    """Return a copy of the graph with only the first elements of long lists: to see whether it can travel."""
    fields = {id(node): (node, _field_of_long_list(node)) for node in walk(graph)}
    instead = {key: _with(node, field, getattr(node, field)[:1]) for key, (node, field) in fields.items() if field}
    return clone(graph, instead) if instead else graph


def _field_of_long_list(node: Node) -> str | None:
    fields: dict[type, str] = {IterableWrapper: "iterable", SequenceWrapper: "sequence"}
    field = fields.get(type(node))
    data: Any = None if field is None else getattr(node, field)
    return field if type(data) in (list, tuple) and is_long(data) else None


def _with(node: Node, field: str, value: Any) -> Node:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return changed


def receive(message: Message, listings: dict[str, Listing]) -> None:
    """Take in one message that `Sharing.send` sent: add to this process's blocks or to `listings`."""
    key, content = pickle.loads(message.body)
    if not message.fds:
        listings.update(content)
        return
    block = Block.attach(message.fds[0])
    if content is None:
        SharedList.attached[key] = block
    else:
        listings[key] = Listing(block, content)


def with_listings(plan: Plan, listings: Mapping[str, Listing]) -> Plan:
    """Return the plan for streams that read `listings`."""
    return replace(plan, listings=listings)
