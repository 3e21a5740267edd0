"""Revoked identity keys: who may revoke, and how revocations spread.

Rules
- A revocation is taken when its signature holds and its issuer may revoke: with a roster, who is listed there as an
  administrator; without, a node whose key is bound to its name here, or is revoked here (docs/decisions/0016).
- **A key is refused when any revocation of it counts, whether or not the issuer of that one is revoked itself.** So what
  counts depends on which revocations there are, and not on the order in which they came: all nodes end with the same, and
  nobody can lift a revocation by another one (docs/decisions/0018). Two nodes that revoke each other are both refused.
- The roster is the last word: revocations of who is no administrator any more do not count, and count again when he is.
- The book is bounded. Of one issuer's revocations the earliest PER_ISSUER_MAX count, by (time it claims, mark). What makes
  room in a full book is told in .revocation_room; what finds none is refused, and says so.
- A signature is checked once: what is held, or was judged lately, is known by its digest. Before anything new is looked at,
  the caller is asked whether it may cost that work now; what may not is told again in a later exchange.
- What comes from the node's own file is judged by the same rules, but that without a roster who had been entitled when his
  revocation was taken is so for good.

Exchanges carry the marks of what each side holds; what the other lacks comes back, what it has more is asked for. So a
revocation comes everywhere that cards come, as fast as they do. One exchange takes a few; where more differ, the next one
begins elsewhere, so that those which the other side refuses do not stand in the way of the rest.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from kakeya_zmq.protocol.revocation_room import HeldRevocation, makes_room
from wire.errors import RemoteProtocolError
from wire.limits import REVOCATIONS_MAX, REVOCATIONS_PER_EXCHANGE_MAX
from wire.revocations import MARK_BYTES, Revocation, claimed_revocation, open_revocation

MALFORMED: Final = "a revocation is malformed or its signature does not hold"
NOT_ENTITLED: Final = "a revocation is not taken: its issuer may not revoke here"
FULL: Final = "a revocation is not taken: there are too many"
TOO_MANY_OF_ISSUER: Final = "a revocation is not taken: there are too many of its issuer"
TOO_FAST: Final = "a revocation is not taken now: too many new ones are told at once"
PER_ISSUER_MAX: Final = 32
REMEMBERED_MAX: Final = 2 * REVOCATIONS_MAX
"""Revocations whose signature, and as many whose refusal, is remembered."""
_STEP: Final = 13
"""How far on in a list the next exchange begins: less than it takes, so that nothing is left out, and prime."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What came of some revocations.

    ``revoked``: those that made a key refused; ``reinstated``: keys that are refused no more, as what revoked them had to
    make room; ``refused``: why others were not taken (fixed texts); ``taken``: all that the book did not hold before.
    """

    revoked: tuple[Revocation, ...]
    reinstated: tuple[bytes, ...]
    refused: tuple[str, ...]
    taken: tuple[Revocation, ...] = ()


@dataclass(frozen=True, slots=True)
class _TurnedAway:
    """Found no room. ``changes`` and ``bound``: how the book stood then."""

    digest: bytes
    reason: str
    changes: int
    bound: bool


class RevocationBook:
    """The revocations of one node.

    Args:
        entitled: whether the holder of this key may revoke, when somebody tells a revocation of it.
        known: signed revocations from the node's own file.
        valid: whether what the holder of this key has revoked before still counts.
        bound: whether a key is bound to a node's name here, by the roster or because it was seen.
        trusted: whether revocations by the holder of this key have room before all others: administrators of the roster, and
            the node's own operator, who signs with its key.
    """

    def __init__(
        self,
        entitled: Callable[[bytes], bool],
        known: Iterable[bytes] = (),
        *,
        valid: Callable[[bytes], bool] = lambda key: True,
        bound: Callable[[bytes], bool] = lambda key: True,
        trusted: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        self._entitled = entitled
        self._valid = valid
        self._bound = bound
        self._trusted = trusted
        self._held: dict[bytes, HeldRevocation] = {}
        """By mark, the one that was taken longest ago first."""
        self._of_issuer: dict[bytes, set[bytes]] = {}
        """Issuer's key → marks."""
        self._dormant: set[bytes] = set()
        """Marks of those that do not count: their issuers may not revoke any more."""
        self._keys: Counter[bytes] = Counter()
        """Revoked keys, and how many revocations of each count."""
        self._opened: OrderedDict[bytes, Revocation] = OrderedDict()
        """By digest, those whose signature was found to hold."""
        self._turned_away: OrderedDict[bytes, _TurnedAway] = OrderedDict()
        """By mark."""
        self._changes = 0
        """Of what is held."""
        self._turn = 0
        self.merge_own(known)

    def __len__(self) -> int:
        """How many keys are revoked."""
        return len(self._keys)

    def __contains__(self, identity_public_key: object) -> bool:
        return identity_public_key in self._keys

    @property
    def revoked_keys(self) -> tuple[bytes, ...]:
        """All revoked identity keys."""
        return tuple(self._keys)

    def blobs(self) -> tuple[bytes, ...]:
        """All, as they travel, also those that do not count now: what is kept over a restart."""
        return tuple(held.blob for held in self._held.values())

    # --- exchanges -----------------------------------------------------------------------------------------------

    def marks(self) -> bytes:
        """What we hold and let count, 8 bytes each."""
        return b"".join(self._counting())

    def lacking(self, marks: bytes) -> tuple[bytes, ...]:
        """Ours that the holder of these marks lacks, as many as fit an exchange."""
        theirs = set(_split(marks))
        return tuple(self._some([self._held[mark].blob for mark in self._counting() if mark not in theirs]))

    def wanted(self, marks: bytes) -> bytes:
        """Marks among these that we lack, as many as fit an exchange; of those that found no room lately one at most, and
        only when there are no others: of that one its holder learns that we lack it."""
        lacked = [mark for mark in _split(marks) if mark not in self._held or mark in self._dormant]
        fresh = [mark for mark in lacked if mark not in self._dormant and not self._is_turned_away(mark)]
        return b"".join(self._some(fresh) if fresh else self._some(lacked)[:1])

    def named(self, marks: bytes) -> tuple[bytes, ...]:
        """Ours with these marks."""
        found = [self._held[mark].blob for mark in _split(marks) if mark in self._held and mark not in self._dormant]
        return tuple(found[:REVOCATIONS_PER_EXCHANGE_MAX])

    def _counting(self) -> list[bytes]:
        return [mark for mark in self._held if mark not in self._dormant]

    def _some(self, found: Sequence[bytes]) -> Sequence[bytes]:
        """As many of these as fit an exchange, others each time."""
        if len(found) <= REVOCATIONS_PER_EXCHANGE_MAX:
            return found
        self._turn += 1
        start = self._turn * _STEP % len(found)
        return [*found[start:], *found[:start]][:REVOCATIONS_PER_EXCHANGE_MAX]

    # --- what is taken -------------------------------------------------------------------------------------------

    def merge(self, blobs: Iterable[bytes], affordable: Callable[[Revocation], bool] = lambda claimed: True) -> Merged:
        """Take what somebody told, as far as it is new and right.

        Args:
            affordable: asked before a new one is judged, with what it claims, whether that may be done now.
        """
        return self._merge(blobs, self._entitled, affordable)

    def merge_own(self, blobs: Iterable[bytes]) -> Merged:
        """Take what stands in the node's own file; revocations whose issuer may not revoke any more are kept, too."""
        return self._merge(blobs, lambda issuer: True, lambda claimed: True)

    def judge_again(self) -> tuple[tuple[Revocation, ...], tuple[bytes, ...]]:
        """The roster has changed: revocations by which a key is refused now and was not before, and keys the other way
        round."""
        before = set(self._keys)
        self._changes += 1
        for mark, held in self._held.items():
            self._let_count(mark, held, self._valid(held.revocation.issuer_public_key))
        revoked = {
            key: self._held[mark].revocation
            for mark in self._counting()
            if (key := self._held[mark].revocation.identity_public_key) not in before
        }
        return tuple(revoked.values()), tuple(before - self._keys.keys())

    def _merge(
        self, blobs: Iterable[bytes], entitled: Callable[[bytes], bool], affordable: Callable[[Revocation], bool]
    ) -> Merged:
        before = set(self._keys)
        taken: list[Revocation] = []
        refused: list[str] = []
        for blob in blobs:
            changes, digest = self._changes, _digest(blob)
            if reason := self._judge(blob, digest, entitled, affordable):
                refused.append(reason)
            elif self._changes != changes:
                taken.append(self._opened[digest])
        revoked = {each.identity_public_key: each for each in reversed(taken) if each.identity_public_key in self._keys}
        news = [each for key, each in revoked.items() if key not in before]
        return Merged(tuple(reversed(news)), tuple(before - self._keys.keys()), tuple(refused), tuple(taken))

    def _judge(
        self, blob: bytes, digest: bytes, entitled: Callable[[bytes], bool], affordable: Callable[[Revocation], bool]
    ) -> str:
        """Why it is not taken, or an empty text; also when it is held already."""
        try:
            revocation = self._opened.get(digest) or claimed_revocation(blob)
            held = self._held.get(revocation.mark)
            if held is None or held.blob != blob:
                away = self._turned_away.get(revocation.mark)
                if away is not None and away.digest == digest and self._is_turned_away(revocation.mark):
                    return away.reason
                if not affordable(revocation):
                    return TOO_FAST
                self._verify(blob, digest)
        except RemoteProtocolError:
            return MALFORMED
        return self._take(HeldRevocation(revocation, blob), digest, entitled)

    def _verify(self, blob: bytes, digest: bytes) -> None:
        if digest not in self._opened:
            self._opened[digest] = open_revocation(blob)
            if len(self._opened) > REMEMBERED_MAX:
                self._opened.popitem(last=False)
        self._opened.move_to_end(digest)

    def _take(self, arrived: HeldRevocation, digest: bytes, entitled: Callable[[bytes], bool]) -> str:
        """The same, of one whose signature holds."""
        mark, issuer = arrived.revocation.mark, arrived.revocation.issuer_public_key
        held = self._held.get(mark)
        if (held is None or mark in self._dormant) and not entitled(issuer):
            return NOT_ENTITLED
        if held is not None:
            if arrived.order < held.order:  # which of the two came first must not matter
                self._held[mark] = arrived
                self._changes += 1
            return ""
        self._add(arrived)
        victim, reason = self._too_much(arrived)
        if victim is not None:
            self._drop(victim)
        if victim is arrived:
            self._turn_away(arrived, digest, reason)
            return reason
        self._turned_away.pop(mark, None)
        self._changes += 1
        return ""

    def _add(self, arrived: HeldRevocation) -> None:
        mark, issuer = arrived.revocation.mark, arrived.revocation.issuer_public_key
        self._held[mark] = arrived
        self._of_issuer.setdefault(issuer, set()).add(mark)
        self._keys[arrived.revocation.identity_public_key] += 1
        self._let_count(mark, arrived, self._valid(issuer))

    def _let_count(self, mark: bytes, held: HeldRevocation, counts: bool) -> None:
        if counts != (mark in self._dormant):
            return
        key = held.revocation.identity_public_key
        if counts:
            self._dormant.discard(mark)
            self._keys[key] += 1
        else:
            self._dormant.add(mark)
            self._uncount(key)

    def _uncount(self, key: bytes) -> None:
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]

    # --- room ----------------------------------------------------------------------------------------------------

    def _too_much(self, arrived: HeldRevocation) -> tuple[HeldRevocation | None, str]:
        """What has to go, now that this one is held, too; and why."""
        marks = self._of_issuer[arrived.revocation.issuer_public_key]
        if len(marks) > PER_ISSUER_MAX:
            return max((self._held[mark] for mark in marks), key=lambda held: held.order), TOO_MANY_OF_ISSUER
        if len(self._held) <= REVOCATIONS_MAX:
            return None, ""
        victim = makes_room(
            self._held,
            arrived,
            dormant=self._dormant,
            trusted=self._trusted,
            revoked=self._keys.__contains__,
            bound=self._bound,
        )
        return victim, FULL

    def _turn_away(self, arrived: HeldRevocation, digest: bytes, reason: str) -> None:
        bound = self._bound(arrived.revocation.identity_public_key)
        self._turned_away[arrived.revocation.mark] = _TurnedAway(digest, reason, self._changes, bound)
        if len(self._turned_away) > REMEMBERED_MAX:
            self._turned_away.popitem(last=False)

    def _is_turned_away(self, mark: bytes) -> bool:
        """Whether it found no room, and would find none now."""
        away = self._turned_away.get(mark)
        if away is None or away.changes != self._changes:
            return False
        revocation = self._opened.get(away.digest)
        return revocation is not None and away.bound == self._bound(revocation.identity_public_key)

    def _drop(self, held: HeldRevocation) -> None:
        mark, issuer = held.revocation.mark, held.revocation.issuer_public_key
        del self._held[mark]
        self._of_issuer[issuer].discard(mark)
        if not self._of_issuer[issuer]:
            del self._of_issuer[issuer]
        if mark in self._dormant:
            self._dormant.discard(mark)
        else:
            self._uncount(held.revocation.identity_public_key)


def _digest(blob: bytes) -> bytes:
    return blake2b(blob, digest_size=16).digest()


def _split(marks: bytes) -> list[bytes]:
    """Marks; a broken rest is left out."""
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks) - MARK_BYTES + 1, MARK_BYTES)]
