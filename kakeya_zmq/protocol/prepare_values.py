"""The values that prompt preparation works on: what it is asked, whom it may ask, its limits, and how it can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from kakeya_zmq.blocks import Chain, Part
from kakeya_zmq.engine import ModelFacts, TokenArray
from kakeya_zmq.planner import LINK_COMPRESSION_CHOICES, MINIMUM_SAVINGS_RATIO_DEFAULT, SEGMENT_TOKENS_DEFAULT
from kakeya_zmq.protocol.effects import AskId, LaneId, Ticket
from wire import limits
from wire.errors import LocalProtocolError
from wire.ids import NodeId
from wire.job_seal import JobKeys
from wire.messages import CipherSuite, Explanation, PrefillPolicy, SourceKind, ValueBytes

ValueSetter: TypeAlias = Callable[[str, int | str], None]
"""Replaces a gauge or text of the ``prefill`` telemetry section (kakeya_zmq.telemetry.Counters.set)."""

TailHash: TypeAlias = Callable[[bytes, int, int], bytes]
"""(parent hash, start, count) -> the chained hash of the prompt's own tokens [start, start + count) under that parent."""


class IdAllocator:
    """Names asks, lanes and tickets with numbers of one shared sequence, so that no number names two things.

    Args:
        next_id: gives out each number once in the process.
    """

    def __init__(self, next_id: Callable[[], int]) -> None:
        self._next_id = next_id

    def ask(self) -> AskId:
        return AskId(self._next_id())

    def lane(self) -> LaneId:
        return LaneId(self._next_id())

    def ticket(self) -> Ticket:
        return Ticket(self._next_id())


WHY_CHARACTERS_MAX = 120
"""Of what another node gives as its reason, in a line of this one."""
LEASE_MS_MAX = 600_000
"""The longest lease the protocol knows (wire.messages.Lookup)."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """A compatible cache holder (cache peers, and workers in that role). ``megabytes_per_second`` None: not measured."""

    node_id: NodeId
    round_trip_ms: float = 0.0
    megabytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A compatible prefill worker, as its card describes it. ``prefill_tokens_per_second`` 0: unknown."""

    node_id: NodeId
    identity_public_key: bytes
    """The key that its present session has proven, 32 bytes: a job is sealed for it."""
    prefill_tokens_per_second: float = 0.0
    queued_tokens: int = 0
    round_trip_ms: float = 0.0
    megabytes_per_second: float | None = None
    free_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PreparationSettings:
    """Limits of one preparation. ``fetch_timeout_s`` and ``worker_timeout_s`` bound the whole stage, retries included."""

    lookup_timeout_s: float = 2.0
    fetch_timeout_s: float = 30.0
    fetch_idle_timeout_s: float = 5.0
    worker_timeout_s: float = 120.0
    worker_stall_timeout_s: float = 30.0
    """A worker that says nothing for this long, besides its waiting time and two of its segments, is given up."""
    release_timeout_s: float = 2.0
    remote_minimum_tokens: int = 128
    max_import_bytes: int = 1 * limits.GIB
    minimum_savings_ratio: float = MINIMUM_SAVINGS_RATIO_DEFAULT
    compute_penalty_ms: float = 0.0
    """Cost of keeping decode waiting, added to what computing here costs."""
    suites: tuple[CipherSuite, ...] = (CipherSuite.AES_256_GCM, CipherSuite.SECRETBOX)
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT
    credit_bytes: int = limits.CREDIT_BYTES_DEFAULT
    link_compression: str = "auto"
    """One of planner.LINK_COMPRESSION_CHOICES."""
    value_bytes: ValueBytes = 1
    """Width of a value in the parts, for link codecs."""
    early_import_bytes: int = 4 * limits.MIB
    """Parts are copied into the engine in batches of at least this size while others are on their way."""
    import_grid_tokens: int = 0
    """Prefixes are imported only up to multiples of this, or whole; 0: up to any block (docs/decisions/0010)."""
    segment_tokens: int = SEGMENT_TOKENS_DEFAULT
    """Grid of prefill here: recurrent state can be had at its multiples."""
    peers_max: int = 8
    """Peers asked for one prompt; those with the best links are asked first."""

    def __post_init__(self) -> None:
        times = (
            self.lookup_timeout_s,
            self.fetch_timeout_s,
            self.fetch_idle_timeout_s,
            self.worker_timeout_s,
            self.worker_stall_timeout_s,
            self.release_timeout_s,
        )
        if min(times) <= 0 or self.max_import_bytes <= 0 or self.credit_bytes <= 0 or self.peers_max <= 0:
            raise LocalProtocolError("preparation limits must be positive")
        if self.link_compression not in LINK_COMPRESSION_CHOICES:
            raise LocalProtocolError(f"there is no link compression {self.link_compression!r}")
        if self.import_grid_tokens < 0 or self.segment_tokens <= 0:
            raise LocalProtocolError("the segment grid must be positive, the import grid 0 or positive")
        if self.remote_minimum_tokens < 0 or not 0 <= self.minimum_savings_ratio < 1 or not self.suites:
            raise LocalProtocolError("preparation thresholds out of range")


def _always(node_id: NodeId) -> bool:
    return True


def _yes() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class PreparationTask:
    """One append on one inference session: bring its KV from ``live_position`` to ``target``.

    ``tokens`` is the whole history, int32, shape (N,); ``chain`` covers its first N - 1 tokens, tail included.
    """

    session_id: str
    tokens: TokenArray
    live_position: int
    chain: Chain
    facts: ModelFacts
    fingerprint: bytes
    policy: PrefillPolicy
    publish: bool = True
    caches: tuple[PeerView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    settings: PreparationSettings = field(default_factory=PreparationSettings)
    hints: tuple[str, ...] = ()
    """Why nodes that might have helped cannot, for example "worker w is not compatible: rope_hash differs"."""
    no_worker: str = "no worker is known"
    """Why ``workers`` is empty, when it is."""
    is_connected: Callable[[NodeId], bool] = _always
    """Whether a node can be asked now; what was known at the beginning of a long prompt may have ended."""
    may_keep: Callable[[], bool] = _yes
    """Whether what comes and is computed may still go into the local store."""
    job_keys: JobKeys | None = None
    """Of the tenant; needed where there are workers."""
    identity_public_key: bytes = b""
    """This node's own, 32 bytes; the same."""

    def __post_init__(self) -> None:
        if len(self.tokens) == 0 or self.chain.tokens != self.target:
            raise LocalProtocolError("the chain must cover the history up to its last token but one")
        if not 0 <= self.live_position <= self.target:
            raise LocalProtocolError(f"live position {self.live_position} is outside of 0..{self.target}")
        if self.workers and (self.job_keys is None or not self.identity_public_key):
            raise LocalProtocolError("jobs need the tenant's keys and this node's identity")

    @property
    def target(self) -> int:
        """Tokens whose KV must be there; the last token of the history is run by Decode."""
        return len(self.tokens) - 1

    @property
    def stages_ms(self) -> int:
        """Longest time between the first look at the local store and the import, for leases."""
        settings = self.settings
        total_s = settings.lookup_timeout_s + settings.fetch_timeout_s + settings.worker_timeout_s
        return min(LEASE_MS_MAX, int(total_s * 1000))

    @property
    def remote_required(self) -> bool:
        return self.policy is PrefillPolicy.REMOTE_REQUIRED


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is, for the user: the KV of ``tokens_done`` of ``tokens_total`` tokens is there."""

    tokens_done: int
    tokens_total: int
    source: SourceKind


# --- outcomes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The session's KV covers ``position`` == target tokens. ``new_parts``: worth publishing, oldest first."""

    position: int
    explanation: Explanation
    new_parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The KV could not be brought up to date; the session holds ``position`` tokens and stays usable from there."""

    position: int
    reason: str
    explanation: Explanation
    new_parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Given up on request; the session holds ``position`` tokens."""

    position: int
    new_parts: tuple[Part, ...]


PreparationOutcome: TypeAlias = Ready | Unavailable | Cancelled
