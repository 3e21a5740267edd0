"""Who may hold a connection of the web server: nobody that sends a request too slowly, no address more than its share.

The web server closes connections that are idle. One that gets a byte now and then is not, and would be kept for as long as
its sender likes; there are few places for connections.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, Protocol

REQUEST_S: Final = 15.0
"""A request, its headers and its body, is complete after this time, or its connection is closed."""


class Channel(Protocol):
    """What is used of a connection of waitress."""

    addr: Any
    request: Any
    """The request that is incomplete yet, or None."""
    requests: list[Any]
    """Complete ones that wait for their answer, or are answered now."""
    creation_time: float
    will_close: bool
    """Set to have the server close it with its next turn."""


class ConnectionRules:
    """Looks at all connections now and then, on the thread that serves them.

    Args:
        share: connections of one address.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._since: dict[Channel, tuple[Any, float]] = {}

    def enforce(self, channels: Iterable[Channel], now: float) -> int:
        """Close what breaks a rule; how many connections. ``now``: seconds of a clock that is never set back."""
        listed = list(channels)
        closing = [*self._slow(listed, now), *self._beyond_share(listed)]
        for channel in closing:
            channel.will_close = True
        return len(closing)

    def _slow(self, channels: list[Channel], now: float) -> list[Channel]:
        incomplete = [channel for channel in channels if channel.request is not None and not channel.requests]
        before = self._since
        self._since = {}
        for channel in incomplete:
            request, since = before.get(channel, (None, now))
            self._since[channel] = (channel.request, since if request is channel.request else now)
        return [channel for channel, (_, since) in self._since.items() if now - since > REQUEST_S]

    def _beyond_share(self, channels: list[Channel]) -> list[Channel]:
        """The newest ones go, and none that is being answered."""
        by_address: dict[str, list[Channel]] = defaultdict(list)
        for channel in channels:
            by_address[str(channel.addr[0])].append(channel)
        closing = []
        for held in by_address.values():
            spare = [channel for channel in sorted(held, key=lambda each: each.creation_time) if not channel.requests]
            excess = len(held) - self._share
            closing += spare[-excess:] if excess > 0 else []
        return closing
