"""Who may hold a connection of the web server: nobody that sends or reads too slowly, no address more than its share.

There are few places for connections, and who is slow, silent or never reads would hold his for as long as he likes. What
nobody is owed an answer on is *spare*. One that is served now never goes for others.

When places, or the bytes that may wait, run out, the spare connection goes that has been as it is for the longest time, of
the address that has most. Who sends his request at once is the newest, and is served before it is his turn to go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Final, Protocol

REQUEST_S: Final = 15.0
"""A request, its headers and its body, is complete after this time, or its connection is closed."""
ANSWER_S: Final = 10.0
STREAM_ANSWER_S: Final = 60.0
"""As ANSWER_S, for live events: their reader may well be a page that sleeps for a while."""
ANSWER_BYTES: Final = 32 * 1024
"""So much of an answer, or all that is left of it, leaves in every ANSWER_S: a sixth of what 20 kB a second makes."""


class Reason(StrEnum):
    """Why a connection was closed."""

    SLOW_REQUEST = "slow request"
    UNREAD = "answer not taken"
    UNREAD_OF_ALL = "too much not taken"
    SHARE = "too many of one address"
    NO_PLACE = "no place"


class Channel(Protocol):
    """What is used of a connection (:class:`dashboard.channel.WebChannel`)."""

    addr: Any
    request: Any
    """The request that is incomplete yet, or None."""
    requests: list[Any]
    """Complete ones that wait for their answer, or are answered now."""
    since: float
    """When it was made, began a request, or was answered, whatever was last; moved on while an answer leaves in time."""
    total_outbufs_len: int
    """Bytes of answers that the system has not taken yet."""
    sent_bytes: int
    """Bytes that it has taken, of all answers."""

    def cut(self) -> None:
        """Close it now."""


class ConnectionRules:
    """Looks at all connections, on the thread that serves them and between its turns.

    Args:
        places: connections of all addresses.
        share: connections of one address.
        unread_bytes: of answers that wait for their readers, live events aside.
    """

    def __init__(self, places: int, share: int, unread_bytes: int) -> None:
        self._places = places
        self._share = share
        self._unread_bytes = unread_bytes
        self._taken: dict[Channel, tuple[float, int]] = {}
        self.closed: Counter[Reason] = Counter(dict.fromkeys(Reason, 0))
        """Connections by why they were closed."""

    def enforce(self, channels: Iterable[Channel], now: float) -> int:
        """Close what is late or beyond its share; how many connections. ``now``: seconds of the channels' clock."""
        listed = list(channels)
        before = self.closed.total()
        slow = [channel for channel in _spare(listed) if channel.request is not None and now - channel.since > REQUEST_S]
        self._close(slow, Reason.SLOW_REQUEST)
        unread = [channel for channel in self._unread(listed, now) if channel not in slow]
        self._close(unread, Reason.UNREAD)
        by_address: dict[str, list[Channel]] = defaultdict(list)
        for channel in listed:
            if channel not in slow and channel not in unread:
                by_address[_address(channel)].append(channel)
        for held in by_address.values():
            self._reduce(held, self._share, Reason.SHARE, lambda channel: 1)
        return self.closed.total() - before

    def make_room(self, channels: Iterable[Channel]) -> int:
        """Close what is beyond the bounds of all; how many connections. Cheap when nothing is: for every turn."""
        listed = list(channels)
        before = self.closed.total()
        if len(listed) > self._places:
            self._reduce(listed, self._places, Reason.NO_PLACE, lambda channel: 1)
        unread = [channel for channel in _spare(listed) if channel.total_outbufs_len]
        if sum(map(_unread_bytes, unread)) > self._unread_bytes:
            self._reduce(unread, self._unread_bytes, Reason.UNREAD_OF_ALL, _unread_bytes)
        return self.closed.total() - before

    def _reduce(self, channels: list[Channel], bound: int, reason: Reason, size: Callable[[Channel], int]) -> None:
        """Close spare ones until the sizes sum up to the bound: the oldest of the address that has most, again and again."""
        held: Counter[str] = Counter()
        for channel in channels:
            held[_address(channel)] += size(channel)
        spare = _spare(channels)
        while spare and held.total() > bound:
            going = min(spare, key=lambda channel: (-held[_address(channel)], channel.since))
            held[_address(going)] -= size(going)
            spare.remove(going)
            channels.remove(going)
            self._close([going], reason)

    def _unread(self, channels: list[Channel], now: float) -> list[Channel]:
        before = self._taken
        self._taken = {}
        late = []
        for channel in channels:
            if not channel.total_outbufs_len:
                continue
            begun, taken = before.get(channel, (now, channel.sent_bytes))
            if channel.sent_bytes - taken >= ANSWER_BYTES:
                begun, taken = now, channel.sent_bytes
                channel.since = now
            self._taken[channel] = (begun, taken)
            if now - begun > (STREAM_ANSWER_S if channel.requests else ANSWER_S):
                late.append(channel)
        return late

    def _close(self, channels: list[Channel], reason: Reason) -> None:
        for channel in channels:
            channel.cut()
            self.closed[reason] += 1


def _address(channel: Channel) -> str:
    return str(channel.addr[0])


def _unread_bytes(channel: Channel) -> int:
    return channel.total_outbufs_len


def _spare(channels: list[Channel]) -> list[Channel]:
    return [channel for channel in channels if not channel.requests]
