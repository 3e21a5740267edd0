"""Lookups of one gathering: every cache holder is asked what it holds of the prompt, and its answer is remembered."""

from __future__ import annotations

from kakeya_zmq.blocks import ROOT_HASH
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.protocol.effects import Ask, AskFailed, AskReplied, CancelAsk, Effect
from kakeya_zmq.protocol.gather_holders import CacheHolders
from kakeya_zmq.protocol.gather_peer import Peer, words
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask, TailHash
from wire.codec import pack_hashes
from wire.errors import RemoteProtocolError
from wire.messages import Cut, Lookup, LookupReply, Tail


class Lookups:
    """Asks, and takes the answers, those that come too late included.

    Args:
        task: the preparation's.
        holdings: is told of tails, and of what workers hold.
        holders: who is asked.
        ids: numbers for asks.
        hash_tail: hashes the prompt's own tokens, to match tails of other prompts.
    """

    def __init__(
        self,
        task: PreparationTask,
        holdings: Holdings,
        holders: CacheHolders,
        ids: IdAllocator,
        hash_tail: TailHash,
    ) -> None:
        self._task = task
        self._holdings = holdings
        self._holders = holders
        self._ids = ids
        self._hash_tail = hash_tail
        self._workers = {worker.node_id for worker in task.workers}
        block_tokens = task.facts.requirement.block_tokens
        self._asked = tuple(block for block in task.chain.blocks if block.token_count == block_tokens)
        self._ends = {ROOT_HASH: 0} | {block.block_hash: block.end for block in self._asked}

    def ask(self) -> list[Effect]:
        """Ask all of them at once."""
        body = Lookup(
            fingerprint=self._task.fingerprint,
            requirement=self._task.facts.requirement,
            block_hashes=pack_hashes([block.block_hash for block in self._asked]),
            lease_ms=self._task.stages_ms,
        )
        effects: list[Effect] = []
        for peer in self._holders.peers:
            peer.lookup = self._ids.ask()
            effects.append(Ask(peer.lookup, peer.view.node_id, body, self._task.settings.lookup_timeout_s))
        return effects

    def waiting(self) -> list[Peer]:
        """Those that have not answered."""
        return [peer for peer in self._holders.peers if peer.lookup is not None]

    def take(self, peer: Peer, event: AskReplied | AskFailed) -> list[Effect]:
        """An answer that was waited for."""
        peer.lookup = None
        match event:
            case AskReplied(body=LookupReply() as reply):
                return self._take_reply(peer, reply)
            case AskReplied():
                return self._holders.distrust(peer, "answered a lookup with something else")
            case AskFailed(code=code):
                return self._holders.distrust(peer, f"lookup failed ({words(code)})")

    def take_late(self, peer: Peer, event: AskReplied | AskFailed, *, finished: bool) -> list[Effect]:
        """An answer that nobody waited for: it tells whom to ask when a fetch fails, and its lease is to be given back."""
        peer.lookup = None
        if not isinstance(event, AskReplied) or not isinstance(event.body, LookupReply):
            return []
        if finished:
            peer.lease_id = event.body.lease_id
            return self._holders.release_leases()
        return self._take_reply(peer, event.body)

    def time_out(self) -> list[Effect]:
        """Wait for no answer any more."""
        effects: list[Effect] = []
        for peer in self.waiting():
            effects += self._holders.distrust(peer, "did not answer a lookup in time")
        return [*effects, *self.drop()]

    def drop(self) -> list[Effect]:
        """Cancel the open ones."""
        effects: list[Effect] = []
        for peer in self._holders.peers:
            if peer.lookup is not None:
                effects.append(CancelAsk(peer.lookup))
                peer.lookup = None
        return effects

    def _take_reply(self, peer: Peer, reply: LookupReply) -> list[Effect]:
        try:
            self._note_presence(peer, reply)
        except RemoteProtocolError:  # a peer that breaks the protocol is not asked again for this prompt
            return self._holders.distrust(peer, "broke the protocol in its lookup reply")
        return []

    def _note_presence(self, peer: Peer, reply: LookupReply) -> None:
        for tail in peer.take_reply(reply, self._asked, self._ends, self._is_own_tokens):
            self._holdings.add_tail(tail)
        self._holdings.note_known(peer.has, self._hash_tail)
        if peer.view.node_id in self._workers:
            boundary = best_boundary(self._task.chain, self._task.facts.requirement, peer.has)
            self._holdings.held_by[peer.view.node_id] = boundary

    def _is_own_tokens(self, tail: Tail | Cut) -> bool:
        """Whether the tail's tokens are the prompt's own: only the hash of our own tokens can tell."""
        start = self._ends.get(tail.parent_hash)
        if start is None or start + tail.token_count > self._task.target:
            return False
        if self._hash_tail(tail.parent_hash, start, tail.token_count) == tail.block_hash:
            return True
        self._holdings.note_branch(start)
        return False
