"""How much one peer may ask of a node: token buckets and the limiter of requests. Pure; the clock is passed in.

Rules
- A bucket starts full, refills at its rate and never holds more than its burst. A clock that stands still or goes back
  refills nothing.
- What a peer did not get costs it nothing: a refusal takes no token, and tells after what time the same thing is possible.
- Memory is bounded whoever asks: a peer whose bucket is full again is as good as unknown and is forgotten first.
- Requests are counted from admission to release, with the bytes of their message; both are checked before a request is kept.

The defaults are far above honest use: an agent that makes 50 requests a second makes 50 lookups, 50 fetches and 50 offers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from wire import limits
from wire.errors import LocalProtocolError
from wire.messages import ExchangeCards, Lookup, PublishOffer, RequestBody, SubmitJob

PEERS_MAX: Final = 4096
"""Peers whose buckets are remembered."""
BURST_SECONDS: Final = 2.0
"""A bucket holds what its rate gives in this time: bursts of honest peers pass."""
EXCHANGES_PER_S: Final = 50.0
"""Exchanges of cards of one peer: each may carry 48 signatures, 5 ms of work. A node makes one an interval and a change."""
OPEN_REQUESTS_PER_NODE_MAX: Final = 4 * limits.REQUESTS_IN_FLIGHT_MAX
"""Over all sessions of a node: it has one, and for a while those that it lost."""
OPEN_BYTES_PER_NODE_MAX: Final = 64 * limits.MIB
"""A hundred jobs with the longest prompt."""
OPEN_BYTES_MAX: Final = 256 * limits.MIB


class TokenBucket:
    """``rate_per_s`` tokens a second, at most ``burst`` at once.

    Raises:
        LocalProtocolError: the rate is not positive, or the burst is under one token.
    """

    __slots__ = ("_at", "_burst", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        if not rate_per_s > 0 or not burst >= 1:
            raise LocalProtocolError("a token bucket needs a positive rate and a burst of at least one")
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at: float | None = None

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take ``amount`` tokens. Returns 0 when they were there, else the seconds until they will be (nothing is taken).

        Raises:
            LocalProtocolError: the amount is more than the bucket can ever hold, or negative.
        """
        wait_s = self.wait(now, amount)
        if wait_s == 0:
            self._tokens -= amount
        return wait_s

    def give_back(self, amount: float = 1.0) -> None:
        """What was taken was not used up after all."""
        self._tokens = min(self._burst, self._tokens + amount)

    def wait(self, now: float, amount: float = 1.0) -> float:
        """What :meth:`take` would return, without taking anything.

        Raises:
            LocalProtocolError: as :meth:`take`.
        """
        if not 0 <= amount <= self._burst:
            raise LocalProtocolError(f"a bucket of {self._burst:g} tokens can't give {amount:g}")
        self._refill(now)
        return max(0.0, (amount - self._tokens) / self._rate_per_s)

    def is_full(self, now: float) -> bool:
        """Whether it is as good as new."""
        self._refill(now)
        return self._tokens >= self._burst

    def _refill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate_per_s)
        if self._at is None or now > self._at:
            self._at = now


class KeyedBuckets:
    """One :class:`TokenBucket` for each key, for at most ``keys_max`` keys.

    A newcomer beyond that takes the place of the key that was served longest ago.
    """

    __slots__ = ("_buckets", "_burst", "_keys_max", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, keys_max: int = PEERS_MAX) -> None:
        TokenBucket(rate_per_s, burst)  # holds the arguments to their rules now, not at the first key
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: OrderedDict[bytes | str, TokenBucket] = OrderedDict()

    def take(self, key: bytes | str, now: float) -> float:
        """As :meth:`TokenBucket.take`, of the key's bucket."""
        return self._bucket(key, now).take(now)

    def wait(self, key: bytes | str, now: float) -> float:
        """As :meth:`TokenBucket.wait`, of the key's bucket."""
        return self._bucket(key, now).wait(now)

    def _bucket(self, key: bytes | str, now: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[key] = TokenBucket(self._rate_per_s, self._burst)
        self._buckets.move_to_end(key)
        return bucket

    def __len__(self) -> int:
        return len(self._buckets)

    def _make_room(self, now: float) -> None:
        # Two a newcomer: what is full again goes without anybody noticing, so the table shrinks when the rush is over.
        for key in [key for key, _ in zip(self._buckets, range(2), strict=False)]:
            if len(self._buckets) >= self._keys_max or self._buckets[key].is_full(now):
                del self._buckets[key]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one node may ask for. Rates are per second and node; a burst of BURST_SECONDS' worth is free.

    Raises:
        LocalProtocolError: a rate is under one request in BURST_SECONDS, or a maximum is not positive.
    """

    requests_per_s: float = 2000.0
    lookups_per_s: float = 500.0
    publishes_per_s: float = 500.0
    jobs_per_s: float = 200.0
    exchanges_per_s: float = EXCHANGES_PER_S
    open_requests_max: int = OPEN_REQUESTS_PER_NODE_MAX
    open_bytes_per_node_max: int = OPEN_BYTES_PER_NODE_MAX
    open_bytes_max: int = OPEN_BYTES_MAX

    def __post_init__(self) -> None:
        rates = (self.requests_per_s, self.lookups_per_s, self.publishes_per_s, self.jobs_per_s, self.exchanges_per_s)
        if not all(rate * BURST_SECONDS >= 1 for rate in rates):
            raise LocalProtocolError(f"rates are at least one request in {BURST_SECONDS:g} s")
        if min(self.open_requests_max, self.open_bytes_per_node_max, self.open_bytes_max) < 1:
            raise LocalProtocolError("limits on open requests are positive")


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Why a request is not taken. ``reason`` is fixed text for a counter; ``message`` goes to the peer, with the hint."""

    reason: str
    message: str
    retry_after_ms: int


@dataclass(slots=True)
class _Open:
    requests: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class RequestLimiter:
    """Admits requests of all peers of one node; see the module's rules.

    Every admitted request must be released exactly once, with the same node id and size.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    _rates: dict[str, KeyedBuckets] = field(init=False)
    _open: dict[str, _Open] = field(init=False, default_factory=dict)
    _open_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        rates = {
            "requests": self.limits.requests_per_s,
            "lookups": self.limits.lookups_per_s,
            "offers": self.limits.publishes_per_s,
            "jobs": self.limits.jobs_per_s,
            "card exchanges": self.limits.exchanges_per_s,
        }
        self._rates = {what: KeyedBuckets(rate, rate * BURST_SECONDS) for what, rate in rates.items()}

    @property
    def open_bytes(self) -> int:
        """Bytes of the messages of all open requests."""
        return self._open_bytes

    def admit(self, node_id: str, body: RequestBody, size_bytes: int, now: float) -> OverLimit | None:
        """Take a request of ``size_bytes``, or say why not."""
        refusal = self._room(node_id, size_bytes) or self._rate(node_id, body, now)
        if refusal is None:
            entry = self._open.setdefault(node_id, _Open())
            entry.requests += 1
            entry.size_bytes += size_bytes
            self._open_bytes += size_bytes
        return refusal

    def release(self, node_id: str, size_bytes: int) -> None:
        """An admitted request has ended.

        Raises:
            LocalProtocolError: more is released than was admitted.
        """
        entry = self._open.get(node_id)
        if entry is None or entry.requests < 1 or entry.size_bytes < size_bytes:
            raise LocalProtocolError("a request was released twice")
        entry.requests -= 1
        entry.size_bytes -= size_bytes
        self._open_bytes -= size_bytes
        if entry.requests == 0:
            del self._open[node_id]

    def _room(self, node_id: str, size_bytes: int) -> OverLimit | None:
        entry = self._open.get(node_id, _Open())
        allowed = self.limits
        if entry.requests >= allowed.open_requests_max:
            text = f"this node has {allowed.open_requests_max} requests of yours open; try again when one has ended"
            return OverLimit("a peer has too many requests open", text, 0)
        if entry.size_bytes + size_bytes > allowed.open_bytes_per_node_max or (
            self._open_bytes + size_bytes > allowed.open_bytes_max
        ):
            text = "the open requests take all the memory they may; try again when some have ended"
            return OverLimit("open requests take too much memory", text, 0)
        return None

    def _rate(self, node_id: str, body: RequestBody, now: float) -> OverLimit | None:
        match body:
            case Lookup():
                what = "lookups"
            case PublishOffer():
                what = "offers"
            case SubmitJob():
                what = "jobs"
            case ExchangeCards():
                what = "card exchanges"
            case _:
                what = "requests"
        asked = tuple(dict.fromkeys((what, "requests")))
        wait_s, slowest = max((self._rates[each].wait(node_id, now), each) for each in asked)
        if wait_s > 0:
            wait_ms = math.ceil(wait_s * 1000)
            text = f"more {slowest} a second than one peer may make; try again in {wait_ms} ms"
            return OverLimit(f"a peer makes too many {slowest}", text, wait_ms)
        for each in asked:
            self._rates[each].take(node_id, now)
        return None
