"""What makes room in a full book of revocations: fair shares, so that nobody fills it for all others. Pure.

What goes is the first of
1. what does not count now;
2. of issuers that are neither administrators of the roster nor the node's own operator: his who has most. The k-th of an
   issuer's revocations, by the time it claims, stands at level k; those of keys that nobody here has met are counted apart,
   and stand UNMET_LEVELS higher. The highest level goes: so the first word of a newcomer finds room in a book that a few
   dozen others have filled.
3. among equal ones: of issuers that are revoked themselves, then what has just arrived.

Who is revoked must not be the first question: an issuer's revocations could be lifted by revoking it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from wire.revocations import Revocation

UNMET_LEVELS: Final = 8

_Share: TypeAlias = tuple[bool, bytes, bool]
"""Whether they count, their issuer, whether the keys are known here."""
_Rank: TypeAlias = tuple[bool, bool, int, bool, bool]


@dataclass(frozen=True, slots=True)
class HeldRevocation:
    """One revocation in a book. ``blob``: as it travels."""

    revocation: Revocation
    blob: bytes

    @property
    def order(self) -> tuple[float, bytes, bytes]:
        """Among those of its issuer."""
        return self.revocation.issued_at_unix, self.revocation.mark, self.blob


def makes_room(
    held: Mapping[bytes, HeldRevocation],
    arrived: HeldRevocation,
    *,
    dormant: Collection[bytes],
    trusted: Callable[[bytes], bool],
    revoked: Callable[[bytes], bool],
    bound: Callable[[bytes], bool],
) -> HeldRevocation:
    """Which of these goes, when one has to.

    Args:
        held: by mark, all, the one that arrived last among them, the one that was taken longest ago first.
        dormant: marks of those that have no effect now.
        trusted, revoked: of an issuer's key.
        bound: of a revoked key: whether it is known here as a node's.
    """
    shares: dict[_Share, list[HeldRevocation]] = {}
    newest: _Share | None = None
    for mark, each in held.items():
        revocation = each.revocation
        share = mark not in dormant, revocation.issuer_public_key, bound(revocation.identity_public_key)
        shares.setdefault(share, []).append(each)
        if each is arrived:
            newest = share

    def rank(share: _Share) -> _Rank:
        counting, issuer, met = share
        level = len(shares[share]) + (0 if met else UNMET_LEVELS)
        return not counting, not trusted(issuer), level, revoked(issuer), share == newest

    return max(shares[max(shares, key=rank)], key=lambda each: each.order)
