"""Revoked identity keys: who may revoke, and how revocations spread.

Rules
- A revocation is taken when its signature holds and its issuer may revoke: with a roster, who is listed there as an
  administrator; without, a node whose key is bound to its name here (docs/decisions/0016).
- A key is revoked once and for good; a second revocation of it is no news. Who is revoked cannot revoke.
- The book is bounded, and so is what one issuer has in it; what does not fit is refused, and says so.
- A member can revoke keys that nobody ever had, without end. So a revocation of a key that is bound to a name here, where
  there is no room for it, takes the place of the oldest one of a key that is not: of the same issuer where it is the
  issuer's bound, else of anybody. And when an issuer is revoked, its revocations of keys that are not bound here go.

Exchanges carry the marks of what each side holds; what the other lacks comes back, what it has more is asked for. So a
revocation comes everywhere that cards come, as fast as they do. One exchange takes a few; where more differ, the next one
begins elsewhere, so that those which the other side refuses do not stand in the way of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from wire.errors import RemoteProtocolError
from wire.limits import REVOCATIONS_MAX, REVOCATIONS_PER_EXCHANGE_MAX
from wire.revocations import MARK_BYTES, Revocation, mark_of_key, open_revocation

MALFORMED: Final = "a revocation is malformed or its signature does not hold"
NOT_ENTITLED: Final = "a revocation is not taken: its issuer may not revoke here"
FULL: Final = "a revocation is not taken: there are too many"
TOO_MANY_OF_ISSUER: Final = "a revocation is not taken: there are too many of its issuer"
PER_ISSUER_MAX: Final = 32
_STEP: Final = 13
"""How far on in a list the next exchange begins: less than it takes, so that nothing is left out, and prime."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What came of some revocations: those that are new, and why others were refused (fixed texts)."""

    revoked: tuple[Revocation, ...]
    refused: tuple[str, ...]


class RevocationBook:
    """The revocations of one node.

    Args:
        entitled: whether the holder of this key may revoke.
        known: signed revocations of earlier runs, which were judged then.
        bound: whether a key is bound to a node's name here, by the roster or because it was seen.
    """

    def __init__(
        self,
        entitled: Callable[[bytes], bool],
        known: Iterable[bytes] = (),
        *,
        bound: Callable[[bytes], bool] = lambda key: True,
    ) -> None:
        self._entitled = entitled
        self._bound = bound
        self._held: dict[bytes, bytes] = {}
        """Mark → the revocation as it travels, the oldest first."""
        self._keys: dict[bytes, Revocation] = {}
        """By revoked key, in the same order."""
        self._unbound: set[bytes] = set()
        """Revoked keys that were not bound here when their revocation was taken."""
        self._turn = 0
        for blob in known:
            try:
                self._take(open_revocation(blob), blob)
            except RemoteProtocolError:  # a damaged line of our own file costs that line
                continue

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, identity_public_key: object) -> bool:
        return identity_public_key in self._keys

    @property
    def revoked_keys(self) -> tuple[bytes, ...]:
        """All revoked identity keys."""
        return tuple(self._keys)

    def blobs(self) -> tuple[bytes, ...]:
        """All, as they travel: what is kept over a restart."""
        return tuple(self._held.values())

    def marks(self) -> bytes:
        """What we hold, 8 bytes each."""
        return b"".join(self._held)

    def lacking(self, marks: bytes) -> tuple[bytes, ...]:
        """Ours that the holder of these marks lacks, as many as fit an exchange."""
        theirs = set(_split(marks))
        return tuple(self._some([blob for mark, blob in self._held.items() if mark not in theirs]))

    def wanted(self, marks: bytes) -> bytes:
        """Marks among these that we lack, as many as fit an exchange and this book. One at least: of that one its holder
        learns that we lack it, even when we refuse it then."""
        room = max(1, REVOCATIONS_MAX - len(self._held) + len(self._unbound))
        return b"".join(self._some([mark for mark in _split(marks) if mark not in self._held])[:room])

    def _some(self, found: Sequence[bytes]) -> Sequence[bytes]:
        """As many of these as fit an exchange, others each time."""
        if len(found) <= REVOCATIONS_PER_EXCHANGE_MAX:
            return found
        self._turn += 1
        start = self._turn * _STEP % len(found)
        return [*found[start:], *found[:start]][:REVOCATIONS_PER_EXCHANGE_MAX]

    def named(self, marks: bytes) -> tuple[bytes, ...]:
        """Ours with these marks."""
        return tuple(self._held[mark] for mark in _split(marks) if mark in self._held)[:REVOCATIONS_PER_EXCHANGE_MAX]

    def merge(self, blobs: Iterable[bytes]) -> Merged:
        """Take what is new and right."""
        revoked: list[Revocation] = []
        refused: list[str] = []
        for blob in blobs:
            try:
                revocation = open_revocation(blob)
            except RemoteProtocolError:
                refused.append(MALFORMED)
                continue
            if revocation.identity_public_key in self._keys:
                continue
            issuer = revocation.issuer_public_key
            if issuer in self._keys or not self._entitled(issuer):
                refused.append(NOT_ENTITLED)
            elif reason := self._make_room(revocation):
                refused.append(reason)
            else:
                self._take(revocation, blob)
                revoked.append(revocation)
                self._drop_all(self._unbound_of(revocation.identity_public_key))
        return Merged(tuple(revoked), tuple(refused))

    def _make_room(self, revocation: Revocation) -> str:
        """Why there is none for it, or an empty text."""
        issuer = revocation.issuer_public_key
        full = len(self._held) >= REVOCATIONS_MAX
        many = sum(held.issuer_public_key == issuer for held in self._keys.values()) >= PER_ISSUER_MAX
        if not (full or many):
            return ""
        yielding = self._unbound_of(issuer if many else None) if self._bound(revocation.identity_public_key) else []
        self._drop_all(yielding[:1])
        return "" if yielding else TOO_MANY_OF_ISSUER if many else FULL

    def _unbound_of(self, issuer: bytes | None) -> list[bytes]:
        """Revoked keys that were not bound here, of this issuer or of all, the oldest first."""
        return [key for key, held in self._keys.items() if key in self._unbound and issuer in (None, held.issuer_public_key)]

    def _drop_all(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del self._keys[key]
            del self._held[mark_of_key(key)]
            self._unbound.discard(key)

    def _take(self, revocation: Revocation, blob: bytes) -> None:
        key = revocation.identity_public_key
        self._held[mark_of_key(key)] = blob
        self._keys[key] = revocation
        if not self._bound(key):
            self._unbound.add(key)


def _split(marks: bytes) -> list[bytes]:
    """Marks; a broken rest is left out."""
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks) - MARK_BYTES + 1, MARK_BYTES)]
