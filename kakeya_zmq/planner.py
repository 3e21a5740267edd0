"""What would each way to get a prefix cost, and which one pays: pure functions over measured rates.

Formulas (milliseconds; ``n`` tokens, ``b`` bytes):

* compute here: ``n / local rate * 1000``, plus a penalty for keeping decode waiting;
* import: ``round trip + b / link rate``;
* worker: ``queued tokens / worker rate + n / worker rate + import`` (the queue is counted once).

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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


LINK_COMPRESSION_CHOICES = ("auto", "none", "zlib", "zstd")
LINK_TOO_FAST_MEGABYTES_PER_SECOND = 1000.0
"""No codec keeps up with such a link on one core, so none is measured for it."""
LINK_PROBE_EVERY = 16
"""One transfer of so many goes the other way, plain or compressed; costs a few per cent where compression pays."""


@dataclass(slots=True)
class Rate:
    """Exponentially weighted mean of a positive rate; the first sample replaces the default."""

    default: float
    measured: float | None = None

    @property
    def value(self) -> float:
        return self.default if self.measured is None else self.measured

    def observe(self, amount: float, elapsed_ms: float) -> None:
        """Add one sample: ``amount`` units in ``elapsed_ms``. Samples without extent are ignored."""
        if amount <= 0 or elapsed_ms <= 0 or not math.isfinite(elapsed_ms):
            return
        sample = amount / elapsed_ms * 1000.0
        if self.measured is None:
            self.measured = sample
        else:
            self.measured += EWMA_WEIGHT_OF_NEW * (sample - self.measured)


def _link_default() -> Rate:
    return Rate(default=LINK_MEGABITS_PER_SECOND_DEFAULT / 8)


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

    def observe_local(self, tokens: int, elapsed_ms: float) -> None:
        self.local.observe(tokens, elapsed_ms)

    def observe_import(self, size_bytes: int, elapsed_ms: float) -> None:
        self.imports.observe(size_bytes / 1e6, elapsed_ms)

    def observe_link(self, node_id: NodeId, size_bytes: int, elapsed_ms: float, codec: LinkCodec = LinkCodec.NONE) -> None:
        """Add one transfer: ``size_bytes`` of payload, before ``codec`` made them smaller."""
        rates = self.links if codec is LinkCodec.NONE else self.compressed_links
        rates.setdefault(node_id, _link_default()).observe(size_bytes / 1e6, elapsed_ms)
        self.link_transfers[node_id] = self.link_transfers.get(node_id, 0) + 1

    def observe_worker(self, node_id: NodeId, tokens: int, elapsed_ms: float) -> None:
        rate = self.workers.setdefault(node_id, Rate(default=WORKER_TOKENS_PER_SECOND_DEFAULT))
        rate.observe(tokens, elapsed_ms)

    def forget(self, node_id: NodeId) -> None:
        """Drop what was measured of a node that left the fleet, so that churn cannot grow this without end."""
        self.links.pop(node_id, None)
        self.compressed_links.pop(node_id, None)
        self.link_transfers.pop(node_id, None)
        self.workers.pop(node_id, None)

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
    """Time until a worker has worked off its queue, computed ``tokens`` and delivered the result."""
    rate = tokens_per_second if tokens_per_second > 0 else WORKER_TOKENS_PER_SECOND_DEFAULT
    return (max(0, queued_tokens) + max(0, tokens)) / rate * 1000.0 + transfer_ms


# --- decisions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImportDecision:
    """Whether to import what peers hold. ``saved_tokens``: tokens that need not be computed then."""

    accepted: bool
    saved_tokens: int
    transfer_bytes: int
    import_ms: float
    compute_ms: float
    minimum_savings_ratio: float

    def describe(self) -> str:
        verdict = "pays" if self.accepted else "does not pay"
        return (
            f"importing {self.saved_tokens} tokens ({self.transfer_bytes / 1e6:.1f} MB) {verdict}: "
            f"{self.import_ms:.0f} ms against {self.compute_ms:.0f} ms of prefill here"
        )


@dataclass(frozen=True, slots=True)
class LinkShare:
    """What one peer would have to deliver."""

    size_bytes: int
    round_trip_ms: float
    megabytes_per_second: float | None


def decide_import(
    shares: Sequence[LinkShare],
    saved_tokens: int,
    rates: MeasuredRates,
    *,
    minimum_savings_ratio: float,
    penalty_ms: float = 0.0,
    forced: bool = False,
) -> ImportDecision:
    """Import from peers, or compute the same tokens here?

    Args:
        shares: one for each peer; they deliver side by side, so the slowest one counts.
        saved_tokens: tokens the import makes unnecessary to compute.
        rates: measured.
        minimum_savings_ratio: in [0, 1).
        penalty_ms: cost of keeping decode waiting, added to the local side.
        forced: take it whatever it costs (remote-required).
    """
    size_bytes = sum(share.size_bytes for share in shares)
    transfer = max((import_ms(s.size_bytes, s.round_trip_ms, s.megabytes_per_second) for s in shares), default=0.0)
    load = size_bytes / (rates.imports.value * BYTES_PER_MS_OF_ONE_MEGABYTE_PER_SECOND)
    local = compute_ms(saved_tokens, rates.local.value, penalty_ms)
    return ImportDecision(
        accepted=forced or _pays(transfer + load, local, minimum_savings_ratio),
        saved_tokens=saved_tokens,
        transfer_bytes=size_bytes,
        import_ms=transfer + load,
        compute_ms=local,
        minimum_savings_ratio=minimum_savings_ratio,
    )


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


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """What the planner knows of a worker. ``tokens_per_second`` 0: unknown."""

    node_id: NodeId
    tokens_per_second: float
    queued_tokens: int
    round_trip_ms: float = ROUND_TRIP_MS_DEFAULT
    megabytes_per_second: float | None = None
    free_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDecision:
    """What one worker would cost for a job, and whether it pays."""

    node_id: NodeId
    accepted: bool
    tokens: int
    worker_ms: float
    compute_ms: float

    def describe(self) -> str:
        verdict = "pays" if self.accepted else "does not pay"
        return (
            f"worker {self.node_id} for {self.tokens} tokens {verdict}: "
            f"{self.worker_ms:.0f} ms against {self.compute_ms:.0f} ms of prefill here"
        )


def rank_workers(
    offers: Iterable[WorkerOffer],
    *,
    worker_tokens: int,
    local_tokens: int,
    transfer_bytes: int,
    rates: MeasuredRates,
    minimum_savings_ratio: float,
    penalty_ms: float = 0.0,
    forced: bool = False,
) -> tuple[WorkerDecision, ...]:
    """All workers, cheapest first (ties: more free memory, then the smaller node id), each with its verdict.

    Args:
        offers: the workers that could run the job.
        worker_tokens: tokens a worker would have to compute.
        local_tokens: tokens this machine would have to compute instead.
        transfer_bytes: size of what the worker would send.
        rates: measured.
        minimum_savings_ratio: in [0, 1).
        penalty_ms: cost of keeping decode waiting, added to the local side.
        forced: every worker is acceptable (remote-required).
    """
    local = compute_ms(local_tokens, rates.local.value, penalty_ms)
    ranked: list[tuple[float, int, NodeId]] = []
    for offer in offers:
        transfer = import_ms(transfer_bytes, offer.round_trip_ms, offer.megabytes_per_second)
        speed = rates.worker_tokens_per_second(offer.node_id, offer.tokens_per_second)
        cost = worker_ms(worker_tokens, offer.queued_tokens, speed, transfer)
        ranked.append((cost, -offer.free_memory_bytes, offer.node_id))
    return tuple(
        WorkerDecision(
            node_id=node_id,
            accepted=forced or _pays(cost, local, minimum_savings_ratio),
            tokens=worker_tokens,
            worker_ms=cost,
            compute_ms=local,
        )
        for cost, _, node_id in sorted(ranked)
    )


def rank_replicas(key: bytes, node_ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Order nodes for a key by rendezvous hashing, best first.

    The score of a node is SHA-256(key ‖ node id); it depends on that node and key alone, so that a node which joins or
    leaves moves only the keys that it wins or held (Thaler and Ravishankar, 1998).
    """
    scored = {node_id: hashlib.sha256(key + node_id.encode("utf-8")).digest() for node_id in node_ids}
    return tuple(sorted(scored, key=lambda node_id: (scored[node_id], node_id), reverse=True))


def _pays(remote_ms: float, local_ms: float, minimum_savings_ratio: float) -> bool:
    return local_ms > 0 and remote_ms <= local_ms * (1.0 - minimum_savings_ratio)
