"""What would each way to get a prefix cost, and which one pays: pure functions over measured rates.

Formulas (milliseconds; ``n`` tokens, ``b`` bytes):

* compute here: ``n / local rate * 1000``, plus a penalty for keeping decode waiting;
* import: ``round trip + b / link rate``;
* worker: ``queued tokens / worker rate + max(c, t) + min(c, t) / segments`` with ``c = n / worker rate`` and ``t = import``:
  a worker sends a segment while it computes the next one (the queue is counted once).

Which of the ways to take is decided in kakeya_zmq.protocol.routes.

A link has two rates, of plain and of compressed transfers, both in bytes of payload as experienced and never mixed: the
plain one is the link's own, which the choice of a codec needs; the compressed one also knows how fast the other side's
processor is. Every so often a transfer goes the other way, so that neither goes stale.

Something remote is taken only when it saves at least ``minimum_savings_ratio`` of the local cost. Every decision is a value
that carries the numbers behind it, so that an explanation can print them. Rates nobody has measured yet start
conservative.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kakeya_zmq.backoff import Backoff
from kakeya_zmq.codecs.link import CodecRates, choose_link_codec
from wire.ids import NodeId
from wire.messages import LinkCodec

LOCAL_TOKENS_PER_SECOND_DEFAULT = 20.0
WORKER_TOKENS_PER_SECOND_DEFAULT = 20.0
LINK_MEGABITS_PER_SECOND_DEFAULT = 1000.0
ROUND_TRIP_MS_DEFAULT = 2.0
MINIMUM_SAVINGS_RATIO_DEFAULT = 0.10
BYTES_PER_MS_OF_ONE_MEGABYTE_PER_SECOND = 1000.0
"""1 MB/s (decimal) is 1,000 bytes in a millisecond."""
EWMA_WEIGHT_OF_NEW = 0.25
"""One odd sample moves a rate by a quarter; four samples in a row have moved it by two thirds."""
EVIDENCE_MAX = (1 - EWMA_WEIGHT_OF_NEW) / EWMA_WEIGHT_OF_NEW
"""What earlier samples weigh together, at most, beside a new one of weight 1."""
ASSUMED_EVIDENCE = 0.5
"""What a trial at start weighs: the machine was busy loading, so the first real sample counts for two thirds."""
SEGMENT_TOKENS_DEFAULT = 256
"""Tokens computed in one step, as a worker does by default; a sample of fewer tokens tells less of the rate."""
CHECKPOINT_SHARE = 0.1
"""Of a worker's time; what is sent while it computes costs hardly any of it where there are processors and links enough."""
SAMPLE_TOKENS_MIN = 16
"""A smaller sample measures what a step costs by itself, not the rate."""
HERE = "compute here"
"""The name of the option to compute on this machine."""
PASSED_OVER_MAX = 1024
"""Options remembered; a fleet has 200 nodes."""
EXPLORE_EVERY = 16
"""An option that was refused so often in a row is tried again if it may cost twice as much as the best one, ..."""
EXPLORE_RATIO_STEP = 8
"""... and for every so many refusals once more as much: looking again costs an eighth of the time at most."""


LINK_COMPRESSION_CHOICES = ("auto", "none", "zlib", "zstd")
LINK_TOO_FAST_MEGABYTES_PER_SECOND = 1000.0
"""No codec keeps up with such a link on one core, so none is measured for it."""
LINK_STEP = 4.0
"""A sample so many times as fast as the mean, or as slow, is no noise: half of the way, in factors, is gone at once."""
ROUTES_MAX = 16
"""Endpoints of one node whose rates are remembered while another one is used; a card has no more."""
LINK_PROBE_EVERY = 16
"""One transfer of so many goes the other way, plain or compressed; costs a few per cent where compression pays."""


@dataclass(slots=True)
class Rate:
    """Exponentially weighted mean of a positive rate; the first sample replaces the default."""

    default: float
    measured: float | None = None
    evidence: float = 0.0
    """What ``measured`` weighs beside a new sample; 0 to :data:`EVIDENCE_MAX`."""

    @property
    def value(self) -> float:
        return self.default if self.measured is None else self.measured

    def assume(self, value: float) -> None:
        """Start from a trial rather than the default; real samples soon outweigh it. Values that are no rate are ignored."""
        if value > 0 and math.isfinite(value):
            self.measured = value
            self.evidence = ASSUMED_EVIDENCE

    def observe(self, amount: float, elapsed_ms: float, weight: float = 1.0) -> None:
        """Add one sample: ``amount`` units in ``elapsed_ms``; ``weight`` in (0, 1]. Samples without extent are ignored."""
        if amount <= 0 or elapsed_ms <= 0 or weight <= 0 or not math.isfinite(elapsed_ms):
            return
        sample = amount / elapsed_ms * 1000.0
        if self.measured is None:
            self.measured = sample
        else:
            known = self.evidence if self.evidence > 0 else EVIDENCE_MAX
            self.measured += weight / (known + weight) * (sample - self.measured)
        self.evidence = min(EVIDENCE_MAX, self.evidence + EVIDENCE_MAX * weight)


@dataclass(slots=True)
class PassedOver:
    """How often each option was refused since it was last taken: what is never taken is never measured again.

    One that was refused many times is taken once more although another one looks better, the longer ago the more it may
    cost. So a rate that was measured in a bad moment does not shut an option out for good.
    """

    counts: dict[str, int] = field(default_factory=dict)

    def is_due(self, name: str, cost_ms: float, best_ms: float) -> bool:
        """Whether the option should be taken to measure it, at its estimated cost beside that of the best one."""
        count = self.counts.get(name, 0)
        return count >= EXPLORE_EVERY and cost_ms <= best_ms * count / EXPLORE_RATIO_STEP

    def note(self, taken: str, refused: Iterable[str]) -> None:
        """A decision was made among these options."""
        self.counts.pop(taken, None)
        for name in refused:
            if name in self.counts or len(self.counts) < PASSED_OVER_MAX:
                self.counts[name] = self.counts.get(name, 0) + 1

    def measured(self, name: str) -> None:
        """The option was measured, whoever asked for it: there is no need to look again."""
        self.counts.pop(name, None)

    def forget(self, node_id: NodeId) -> None:
        """Drop what is known of options that need this node."""
        for name in [name for name in self.counts if node_id in name.split()]:
            del self.counts[name]


def _link_default() -> Rate:
    return Rate(default=LINK_MEGABITS_PER_SECOND_DEFAULT / 8)


def _observe_link(rate: Rate, megabytes: float, elapsed_ms: float) -> None:
    """Add a sample, faster where the link is another one now: a cable was pulled, somebody else is using it."""
    sample = megabytes / elapsed_ms * 1000.0 if elapsed_ms > 0 else 0.0
    if rate.measured is not None and sample > 0 and not 1 / LINK_STEP <= sample / rate.measured <= LINK_STEP:
        rate.assume(math.sqrt(rate.measured * sample))
    else:
        rate.observe(megabytes, elapsed_ms)


def _no_codecs() -> Mapping[str, CodecRates]:
    return {}


def _elsewhere(node_id: NodeId) -> bool:
    return False


def _import_default() -> Rate:
    return Rate(default=1000.0)


@dataclass(slots=True)
class MeasuredRates:
    """The rates one primary has measured; owned by its reactor thread, updated by the machines, read by the planner."""

    local: Rate = field(default_factory=lambda: Rate(default=LOCAL_TOKENS_PER_SECOND_DEFAULT))
    """Tokens per second of prefill on this machine."""
    imports: Rate = field(default_factory=_import_default)
    """Megabytes per second of importing parts into the engine."""
    links: dict[NodeId, Rate] = field(default_factory=dict)
    """Megabytes per second of plain bulk transfer from each node."""
    compressed_links: dict[NodeId, Rate] = field(default_factory=dict)
    """The same of compressed transfers, in megabytes of payload, before compression."""
    link_transfers: dict[NodeId, int] = field(default_factory=dict)
    """Transfers measured of each node, plain and compressed."""
    codec_rates: Callable[[], Mapping[str, CodecRates]] = _no_codecs
    """What each link codec does here; called when a link is slow enough to ask, so it may measure then (and remember)."""
    same_host: Callable[[NodeId], bool] = _elsewhere
    """Whether a node is reached without a network: what looks like a slow link is then a busy processor."""
    workers: dict[NodeId, Rate] = field(default_factory=dict)
    """Tokens per second of prefill on each worker."""
    passed_over: PassedOver = field(default_factory=PassedOver)
    """Options that were not taken, so that none is forgotten."""
    routes: dict[NodeId, str] = field(default_factory=dict)
    """The endpoint each node is reached through: the rates of its link are those of this endpoint."""
    backoff: Backoff = field(default_factory=Backoff)
    """Nodes that are left alone for a while."""
    parked: dict[NodeId, dict[str, tuple[Rate | None, Rate | None, int]]] = field(default_factory=dict)
    """What was measured of each node's other endpoints: plain, compressed, transfers."""

    def observe_local(self, tokens: int, elapsed_ms: float) -> None:
        if tokens >= SAMPLE_TOKENS_MIN:
            self.local.observe(tokens, elapsed_ms, sample_weight(tokens))
        if tokens >= SEGMENT_TOKENS_DEFAULT:
            self.passed_over.measured(HERE)

    def observe_import(self, size_bytes: int, elapsed_ms: float) -> None:
        self.imports.observe(size_bytes / 1e6, elapsed_ms)

    def observe_link(self, node_id: NodeId, size_bytes: int, elapsed_ms: float, codec: LinkCodec = LinkCodec.NONE) -> None:
        """Add one transfer: ``size_bytes`` of payload, before ``codec`` made them smaller."""
        rates = self.links if codec is LinkCodec.NONE else self.compressed_links
        _observe_link(rates.setdefault(node_id, _link_default()), size_bytes / 1e6, elapsed_ms)
        self.link_transfers[node_id] = self.link_transfers.get(node_id, 0) + 1

    def observe_worker(self, node_id: NodeId, tokens: int, elapsed_ms: float) -> None:
        rate = self.workers.setdefault(node_id, Rate(default=WORKER_TOKENS_PER_SECOND_DEFAULT))
        if tokens >= SAMPLE_TOKENS_MIN:
            rate.observe(tokens, elapsed_ms, sample_weight(tokens))
        self.passed_over.measured(f"worker {node_id}")

    def link_was_left(
        self, node_id: NodeId, size_bytes: int, projected_ms: float, codec: LinkCodec = LinkCodec.NONE
    ) -> None:
        """A transfer was given up, as it would have taken so long: the old rate of that link is not believed any more."""
        rates = self.links if codec is LinkCodec.NONE else self.compressed_links
        if size_bytes > 0 and projected_ms > 0:
            rates.setdefault(node_id, _link_default()).assume(size_bytes / 1e6 / projected_ms * 1000.0)

    def worker_was_left(self, node_id: NodeId, tokens: int, projected_ms: float) -> None:
        """The same of a job that had begun."""
        if tokens > 0 and projected_ms > 0:
            rate = self.workers.setdefault(node_id, Rate(default=WORKER_TOKENS_PER_SECOND_DEFAULT))
            rate.assume(tokens / projected_ms * 1000.0)

    def use_route(self, node_id: NodeId, endpoint: str) -> None:
        """A node is reached through this endpoint now: its link has the rates that were measured there, if any."""
        before = self.routes.get(node_id)
        self.routes[node_id] = endpoint
        if before is None or before == endpoint:
            return
        parked = self.parked.setdefault(node_id, {})
        plain, compressed = self.links.pop(node_id, None), self.compressed_links.pop(node_id, None)
        parked[before] = (plain, compressed, self.link_transfers.pop(node_id, 0))
        plain, compressed, transfers = parked.pop(endpoint, (None, None, 0))
        if plain is not None:
            self.links[node_id] = plain
        if compressed is not None:
            self.compressed_links[node_id] = compressed
        if transfers:
            self.link_transfers[node_id] = transfers
        while len(parked) > ROUTES_MAX:
            del parked[next(iter(parked))]

    def forget(self, node_id: NodeId) -> None:
        """Drop what was measured of a node that left the fleet, so that churn cannot grow this without end."""
        self.links.pop(node_id, None)
        self.compressed_links.pop(node_id, None)
        self.link_transfers.pop(node_id, None)
        self.workers.pop(node_id, None)
        self.passed_over.forget(node_id)
        self.backoff.forget(node_id)
        self.routes.pop(node_id, None)
        self.parked.pop(node_id, None)

    def link_megabytes_per_second(self, node_id: NodeId) -> float | None:
        """Payload a transfer may be expected to bring, the better way; None when nothing was measured."""
        measured = (self.plain_link(node_id), self.compressed_link(node_id))
        return max((rate for rate in measured if rate is not None), default=None)

    def plain_link(self, node_id: NodeId) -> float | None:
        rate = self.links.get(node_id)
        return rate.measured if rate is not None else None

    def compressed_link(self, node_id: NodeId) -> float | None:
        rate = self.compressed_links.get(node_id)
        return rate.measured if rate is not None else None

    def worker_tokens_per_second(self, node_id: NodeId, declared: float) -> float:
        """What was measured, else what the worker's card declares, else the default."""
        rate = self.workers.get(node_id)
        if rate is not None and rate.measured is not None:
            return rate.measured
        return declared if declared > 0 else WORKER_TOKENS_PER_SECOND_DEFAULT


# --- costs -------------------------------------------------------------------------------------------------------


def compute_ms(tokens: int, tokens_per_second: float, penalty_ms: float = 0.0) -> float:
    """Time to prefill ``tokens`` at a rate; 0 tokens cost nothing, not even the penalty. Rates <= 0 mean the default."""
    if tokens <= 0:
        return 0.0
    rate = tokens_per_second if tokens_per_second > 0 else LOCAL_TOKENS_PER_SECOND_DEFAULT
    return tokens / rate * 1000.0 + penalty_ms


def import_ms(size_bytes: int, round_trip_ms: float, megabytes_per_second: float | None) -> float:
    """Time to bring ``size_bytes`` over a link. A round trip <= 0 and a missing rate mean the defaults."""
    if size_bytes <= 0:
        return 0.0
    round_trip = round_trip_ms if round_trip_ms > 0 else ROUND_TRIP_MS_DEFAULT
    rate = LINK_MEGABITS_PER_SECOND_DEFAULT / 8
    if megabytes_per_second is not None and megabytes_per_second > 0:
        rate = megabytes_per_second
    return round_trip + size_bytes / (rate * BYTES_PER_MS_OF_ONE_MEGABYTE_PER_SECOND)


def worker_ms(tokens: int, queued_tokens: int, tokens_per_second: float, transfer_ms: float) -> float:
    """Time until a worker has worked off its queue, computed ``tokens`` and delivered the result.

    Segments travel while later ones are computed, so the slower of the two counts, and one segment of the other.
    """
    rate = tokens_per_second if tokens_per_second > 0 else WORKER_TOKENS_PER_SECOND_DEFAULT
    queue = max(0, queued_tokens) / rate * 1000.0
    compute = max(0, tokens) / rate * 1000.0
    segments = max(1, math.ceil(tokens / SEGMENT_TOKENS_DEFAULT))
    return queue + max(compute, transfer_ms) + min(compute, transfer_ms) / segments


def checkpoint_spacing(
    checkpoint_bytes: int, window_tokens: int, grid_tokens: int, tokens_per_second: float, megabytes_per_second: float
) -> int:
    """Tokens between two checkpoints of a job: as few as keep sending them below CHECKPOINT_SHARE of computing.

    Args:
        checkpoint_bytes: what one checkpoint moves.
        window_tokens: a window's length; checkpoints are no closer, so that no row is sent twice.
        grid_tokens: the result is a multiple of it.
    """
    sending_ms = checkpoint_bytes / (max(0.001, megabytes_per_second) * BYTES_PER_MS_OF_ONE_MEGABYTE_PER_SECOND)
    affordable = sending_ms * max(0.0, tokens_per_second) / 1000.0 / CHECKPOINT_SHARE
    return math.ceil(max(affordable, window_tokens, 1) / grid_tokens) * grid_tokens


def sample_weight(tokens: int) -> float:
    """How much a measurement over so many tokens tells, in (0, 1]."""
    return min(1.0, max(1, tokens) / SEGMENT_TOKENS_DEFAULT)


# --- decisions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkDecision:
    """Which codec one transfer should use, and why."""

    node_id: NodeId
    codec: LinkCodec
    payload_bytes: int
    link_megabytes_per_second: float | None
    """Of plain transfers; None: not measured."""
    reason: str

    def describe(self) -> str:
        rate = self.link_megabytes_per_second
        speed = "unknown speed" if rate is None else f"{rate:.1f} MB/s"
        return (
            f"link to {self.node_id} ({speed}), {self.payload_bytes / 1e6:.1f} MB: {self.codec.name.lower()}, {self.reason}"
        )


def decide_link_codec(
    link_compression: str, node_id: NodeId, payload_bytes: int, rates: MeasuredRates, *, frame_bytes: int
) -> LinkDecision:
    """How should a transfer of ``payload_bytes`` with ``node_id`` be compressed?

    ``auto`` takes what :func:`kakeya_zmq.codecs.link.choose_link_codec` estimates to be fastest on the measured link, unless
    compressed transfers with this node turned out slower than plain ones. Nothing is compressed before the link is measured,
    nor on the way to a node of the same host.

    Args:
        link_compression: one of :data:`LINK_COMPRESSION_CHOICES`; all but ``auto`` are taken as they are.
        payload_bytes: estimated.
        rates: measured.
        frame_bytes: bytes of one chunk.
    """
    rate = rates.plain_link(node_id)

    def decision(codec: str, reason: str) -> LinkDecision:
        return LinkDecision(node_id, LinkCodec[codec.upper()], payload_bytes, rate, reason)

    if link_compression != "auto":
        return decision(link_compression, "as configured")
    if rates.same_host(node_id):
        return decision("none", "the node is on this host")
    if rate is None:
        return decision("none", "the link is not measured")
    if rate >= LINK_TOO_FAST_MEGABYTES_PER_SECOND:
        return decision("none", "the link is faster than a codec")
    codec = choose_link_codec(rate, rates.codec_rates(), payload_bytes, frame_bytes)
    if codec == "none":
        return decision("none", "no codec is estimated to be faster")
    compressed = rates.compressed_link(node_id)
    pays = compressed is None or compressed > rate
    if rates.link_transfers.get(node_id, 0) % LINK_PROBE_EVERY == LINK_PROBE_EVERY - 1:
        return decision("none" if pays else codec, "to measure it again")
    if not pays:
        return decision("none", f"{codec} turned out slower: {compressed:.1f} MB/s")
    return decision(codec, "estimated to be fastest")


def rank_replicas(key: bytes, node_ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Order nodes for a key by rendezvous hashing, best first.

    The score of a node is SHA-256(key ‖ node id); it depends on that node and key alone, so that a node which joins or
    leaves moves only the keys that it wins or held (Thaler and Ravishankar, 1998).
    """
    scored = {node_id: hashlib.sha256(key + node_id.encode("utf-8")).digest() for node_id in node_ids}
    return tuple(sorted(scored, key=lambda node_id: (scored[node_id], node_id), reverse=True))
