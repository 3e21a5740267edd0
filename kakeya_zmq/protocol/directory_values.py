"""Events, effects, bounds and settings of the directory; see kakeya_zmq.protocol.directory for how they fit together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from wire.cards import Card
from wire.ids import NodeId

NODES_MAX: Final = 1024
"""Live cards of other nodes: 16 MiB of the largest. As many as a server has sessions."""
IDENTITIES_MAX: Final = 4096
"""Node ids whose key is remembered, live or not: under 1 KiB each."""
CLOCK_SKEW_NOTED_S: Final = 30.0
"""Clocks that NTP keeps are off by milliseconds; half a minute makes logs of two machines hard to read side by side."""


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Gossip timing, in seconds."""

    interval_s: float = 10.0
    first_interval_s: float = 1.0
    """Between the first announcements, so that a young fleet converges quickly."""
    first_rounds: int = 5
    announce_interval_s: float = 0.25
    """Least time between two announcements that were asked for: many joiners at once cost four a second, not one each."""
    fanout: int = 4
    """Nodes to exchange with in each round. Three reach 200 nodes within three rounds, unless some cannot be asked."""
    avoid_rounds: int = 4
    """How long a node that could not be reached is not chosen."""
    jitter: float = 0.1
    """By what part of itself a pause between rounds may be shorter."""


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardsArrived:
    """Signed cards from another node's question or the bus, with their ages as told by the sender, in ms.

    ``unix_s``: our wall clock, to judge those of others; None: they are not judged. ``told_by``: whose exchange it was;
    empty: the bus, where anybody may write under anybody's name.
    """

    cards: tuple[bytes, ...] = field(repr=False)
    ages_ms: tuple[int, ...]
    unix_s: float | None = None
    told_by: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeEnded:
    """An :class:`Exchange` was answered, or not (``ok``)."""

    node_id: NodeId
    ok: bool
    cards: tuple[bytes, ...] = field(default=(), repr=False)
    ages_ms: tuple[int, ...] = ()
    wanted: bytes = field(default=b"", repr=False)
    more: bool = False
    unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """There is a session with a node now."""

    node_id: str


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    node_id: str


@dataclass(frozen=True, slots=True)
class AnnounceNow:
    """Something about this node changed (or a peer just connected): do not wait for the interval."""


@dataclass(frozen=True, slots=True)
class Slept:
    """This machine slept for so long, and its monotonic clock did not notice."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DirectoryTick:
    """``deadline()`` has passed."""


@dataclass(frozen=True, slots=True)
class Expelled:
    """Nothing that this key has signed is held any more; the book of identities takes nothing new of it."""

    identity_public_key: bytes
    reason: str


DirectoryEvent: TypeAlias = (
    CardsArrived | ExchangeEnded | PeerConnected | PeerDisconnected | AnnounceNow | Slept | DirectoryTick | Expelled
)


# --- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish our own card on the bus."""

    card: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange cards with a node, connecting to it first if need be; the end is told as :class:`ExchangeEnded`.

    ``known``: the digest of what is held here; None: nothing is wanted back, and no end is told.
    """

    node_id: NodeId
    cards: tuple[bytes, ...] = field(repr=False)
    ages_ms: tuple[int, ...]
    known: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A node appeared or its card changed. ``restarted``: its incarnation is new, so its leases and jobs are gone.

    A node that restarts after its card expired both appears and has restarted.
    """

    card: Card
    appeared: bool
    restarted: bool


@dataclass(frozen=True, slots=True)
class PeerGone:
    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class CardRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class OwnIdClaimed:
    """Somebody else in the fleet has our node id."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClockSkewed:
    """A node's wall clock is ahead of ours by so much (behind, if negative); told once, until it is right again."""

    node_id: NodeId
    skew_ms: float


DirectoryEffect: TypeAlias = Announce | Exchange | PeerChanged | PeerGone | CardRefused | OwnIdClaimed | ClockSkewed


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HeldCard:
    """A card, and when it was made on the clock of this machine."""

    card: Card
    blob: bytes
    born: float
    skew_ms: float | None = None
    skew_told: bool = False
    version: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.card.incarnation, self.card.sequence

    @property
    def expires(self) -> float:
        return self.born + self.card.ttl_ms / 1000

    def age_ms(self, now: float) -> int:
        return max(0, int((now - self.born) * 1000))


@dataclass(slots=True)
class Identity:
    public_key: bytes
    expired: tuple[int, int] | None = None
    """(incarnation, sequence) of the card that expired last: it and older ones of that incarnation are not news."""

    def has_expired(self, card: Card) -> bool:
        """Whether a relay brings back what has expired here. Another incarnation may be older: clocks are set back."""
        if self.expired is None:
            return False
        incarnation, sequence = self.expired
        return card.incarnation == incarnation and card.sequence <= sequence
