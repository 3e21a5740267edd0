"""Revoked identity keys: who may revoke, and how revocations spread.

Rules
- A revocation is taken when its signature holds and its issuer may revoke: with a roster, who is listed there as an
  administrator; without, a node whose key is bound to its name here (docs/decisions/0016).
- A key is revoked once and for good; a second revocation of it is no news. Who is revoked cannot revoke.
- The book is bounded; a full one takes no more, and says so.

Exchanges carry the marks of what each side holds; what the other lacks comes back, what it has more is asked for. So a
revocation comes everywhere that cards come, as fast as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from wire.errors import RemoteProtocolError
from wire.limits import REVOCATIONS_MAX, REVOCATIONS_PER_EXCHANGE_MAX
from wire.revocations import MARK_BYTES, Revocation, mark_of_key, open_revocation

MALFORMED: Final = "a revocation is malformed or its signature does not hold"
NOT_ENTITLED: Final = "a revocation is not taken: its issuer may not revoke here"
FULL: Final = "a revocation is not taken: there are too many"


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
    """

    def __init__(self, entitled: Callable[[bytes], bool], known: Iterable[bytes] = ()) -> None:
        self._entitled = entitled
        self._held: dict[bytes, bytes] = {}
        self._keys: dict[bytes, Revocation] = {}
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
        theirs = _split(marks)
        return tuple(blob for mark, blob in self._held.items() if mark not in theirs)[:REVOCATIONS_PER_EXCHANGE_MAX]

    def wanted(self, marks: bytes) -> bytes:
        """Marks among these that we lack."""
        found = [mark for mark in _split(marks) if mark not in self._held]
        return b"".join(found[: min(REVOCATIONS_PER_EXCHANGE_MAX, REVOCATIONS_MAX - len(self._held))])

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
            elif len(self._held) >= REVOCATIONS_MAX:
                refused.append(FULL)
            else:
                self._take(revocation, blob)
                revoked.append(revocation)
        return Merged(tuple(revoked), tuple(refused))

    def _take(self, revocation: Revocation, blob: bytes) -> None:
        self._held[mark_of_key(revocation.identity_public_key)] = blob
        self._keys[revocation.identity_public_key] = revocation


def _split(marks: bytes) -> list[bytes]:
    """Marks; a broken rest is left out."""
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks) - MARK_BYTES + 1, MARK_BYTES)]
