"""What the HELLOs and the sessions of members may cost a server.

Each connection has so many HELLOs, and new nodes come in at a bounded rate. A session counts for an identity key only when
its first sealed message has come: a HELLO that a node was sent can be sent again by it, but nobody but its author can use
the answer. So a key has so many sessions that were begun and confirmed, and of those so many at one time, under all its
names (a new one takes the place of its oldest). Sessions that wait for that message are bounded all together, and so are
HELLOs of which nothing comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kakeya_zmq.protocol.limits import KeyedBuckets, TokenBucket
from kakeya_zmq.protocol.session_table import ServerSession
from wire.errors import RemoteProtocolError

HELLOS_PER_S: Final = 1.0
HELLOS_BURST: Final = 8.0
"""Of one connection: a client repeats a HELLO after a second, and says a new one when its session got lost."""
KEY_HELLOS_PER_S: Final = 8.0
KEY_HELLOS_BURST: Final = 64.0
"""Confirmed ones of one identity key over all its connections: twice as many a second as an honest node may ever need to
come back with all its sessions."""
UNPROVEN_HELLOS_PER_S: Final = 500.0
UNPROVEN_HELLOS_BURST: Final = 2000.0
"""HELLOs that nobody confirms, of all connections together: a tenth of a processor for them."""
UNPROVEN_SESSIONS_MAX: Final = 512
"""Sessions that wait for their first sealed message, which comes within a round trip; a new one ends the oldest."""
REGISTRATIONS_PER_S: Final = 50.0
REGISTRATIONS_BURST: Final = 500.0
"""Node ids never seen before, of all connections together: a fleet of some hundred nodes that starts in the same moment."""
SESSIONS_PER_KEY_MAX: Final = 16
"""A node has one session, and for SESSION_IDLE_S those that it lost with their connections."""


class SessionBounds:
    """Of one server; see the module's text.

    Args:
        sessions_max: most sessions at once.
    """

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._hello_rates = KeyedBuckets(HELLOS_PER_S, HELLOS_BURST)
        self._key_hello_rates = KeyedBuckets(KEY_HELLOS_PER_S, KEY_HELLOS_BURST)
        self._unproven = TokenBucket(UNPROVEN_HELLOS_PER_S, UNPROVEN_HELLOS_BURST)
        self._registrations = TokenBucket(REGISTRATIONS_PER_S, REGISTRATIONS_BURST)

    def take_hello(self, route: bytes, now: float) -> None:
        """A member has said HELLO.

        Raises:
            RemoteProtocolError: it is one too many.
        """
        if self._hello_rates.take(route, now) > 0:
            raise RemoteProtocolError("a connection says hello too often")
        if self._unproven.take(now) > 0:
            raise RemoteProtocolError("too many hellos that nobody confirms")

    def take_registration(self, now: float) -> None:
        """A node id was never seen before.

        Raises:
            RemoteProtocolError: it is one too many.
        """
        if self._registrations.take(now) > 0:
            raise RemoteProtocolError("too many new nodes in a short time")

    def confirm_hello(self, public_key: bytes, now: float) -> bool:
        """The author of a HELLO has confirmed it, and it counts for its key; False: that one has had too many of them."""
        self._unproven.give_back()
        return self._key_hello_rates.take(public_key, now) == 0

    def give_way_to_own(self, public_key: bytes, sessions: Iterable[ServerSession]) -> list[ServerSession]:
        """Which of the ``sessions`` end when one more of this key is proven."""
        proven = [session for session in sessions if session.proven]
        own = [session for session in proven if session.peer.identity_public_key == public_key]
        return own[: max(0, len(own) + 1 - SESSIONS_PER_KEY_MAX)]

    def gives_way_to_new(self, sessions: Iterable[ServerSession]) -> ServerSession | None:
        """Which of the ``sessions`` ends when one more begins; None when there is room.

        Raises:
            RemoteProtocolError: there is no room, and all of them are proven.
        """
        everyone = list(sessions)
        unproven = [session for session in everyone if not session.proven]
        if len(everyone) < self._sessions_max and len(unproven) < UNPROVEN_SESSIONS_MAX:
            return None
        if not unproven:
            raise RemoteProtocolError("too many sessions")
        return unproven[0]
