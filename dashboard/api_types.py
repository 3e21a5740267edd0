"""What the JSON API takes and gives: one type a body or answer, the allow-list of all that can leave this process.

Only what has a field here can be shown. A field that names an address, a tenant or free text is marked *key*: without the
API key it is empty ("" or null). Times ending in ``_at`` are seconds since the epoch, ages and durations say their unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Figure = int | float | str | bool | None
Alias = Annotated[str, Meta(min_length=1, max_length=100)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Epoch = Annotated[float, Meta(ge=0.0, le=1e12)]


class _Part(Struct, frozen=True, kw_only=True):
    pass


# --- requests --------------------------------------------------------------------------------------------------------


class RegisterBody(_Part, frozen=True, kw_only=True):
    alias: Alias
    address: Annotated[str, Meta(min_length=3, max_length=255)]
    region: Annotated[str, Meta(max_length=100)] = "Private"
    role: Literal["head", "cache", "hybrid", "inference"] = "hybrid"


class RedeemBody(_Part, frozen=True, kw_only=True):
    """Proof of a pairing token and of a node key (docs/dashboard.md); all but ``node_id`` in hexadecimal digits."""

    token_id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
    node_id: Alias
    public_key: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    proof: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    signature: Annotated[str, Meta(pattern="^[0-9a-f]{128}$", max_length=128)]


class GroupBody(_Part, frozen=True, kw_only=True):
    name: Alias
    node_ids: Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(min_length=1, max_length=256)]


class TokensBody(_Part, frozen=True, kw_only=True):
    node_id: Alias
    completed: Count
    kv_assisted: Count = 0


class BenchmarkBody(_Part, frozen=True, kw_only=True):
    kind: Annotated[str, Meta(max_length=100)] = "distributed_prefill_fleet_benchmark"
    config: dict[str, Any] = {}
    started_at: Epoch | None = None


class BenchmarkUpdateBody(_Part, frozen=True, kw_only=True):
    stages: list[dict[str, Any]] = []
    status: str | None = None
    finished_at: Epoch | None = None


class DrainBody(_Part, frozen=True, kw_only=True):
    max_items: Annotated[int, Meta(ge=1, le=64)] = 8


class LimitQuery(_Part, frozen=True, kw_only=True):
    """``limit``: how many at most, 1 to 200."""

    limit: int = 50


class RunsQuery(_Part, frozen=True, kw_only=True):
    limit: int = 20
    status: str | None = None


class StagesQuery(_Part, frozen=True, kw_only=True):
    offset: int = 0
    limit: int = 50


class EventsQuery(_Part, frozen=True, kw_only=True):
    """``once``: one summary and the end. ``topics``: which events, separated by commas."""

    once: bool = False
    topics: Annotated[str, Meta(max_length=200)] = "summary"


class SeriesQuery(_Part, frozen=True, kw_only=True):
    """``resolution``: fine, the last hour in steps of 5 s; coarse, the last day in steps of 5 min."""

    resolution: Literal["fine", "coarse"] = "fine"


# --- the fleet ---------------------------------------------------------------------------------------------------------


class Problem(_Part, frozen=True, kw_only=True):
    """Every error."""

    detail: str


class Health(_Part, frozen=True, kw_only=True):
    status: Literal["ok"]
    online_nodes: int
    cache_bytes_used: int
    bus: Literal["waiting", "live", "silent"]


class Tokens(_Part, frozen=True, kw_only=True):
    """``completed``: generated, as counted by nodes or reported. ``kv_assisted``: reused instead of computed."""

    completed: int
    kv_assisted: int
    hit_rate: float


class Summary(_Part, frozen=True, kw_only=True):
    online_nodes: int
    stale_nodes: int
    registered_nodes: int
    groups: int
    completed_tokens: int
    kv_assisted_tokens: int
    kv_hit_rate: float
    cache_bytes_used: int
    cache_bytes_free: int
    cache_evictions: int
    cache_bytes_evicted: int
    cache_put_failures: int
    local_lookup_hits: int
    local_lookup_misses: int
    local_tokens_served: int
    prefill: dict[str, Figure]
    jobs_active: int
    bus: Literal["waiting", "live", "silent"]


class Model(_Part, frozen=True, kw_only=True):
    model_id: str
    role: str
    quantization: str
    tokens_per_second: float


class Cache(_Part, frozen=True, kw_only=True):
    bytes_used: int
    bytes_free: int
    entry_count: int
    epoch: int
    tokens_served: int
    evictions: int
    bytes_evicted: int
    put_failures: int
    format: str
    model_id: str


class PrefillWorker(_Part, frozen=True, kw_only=True):
    address: str
    """key"""
    max_concurrent_jobs: int
    inflight_jobs: int
    queued_jobs: int
    queued_tokens: int
    load: float
    tokens_per_second: float
    ram_bytes_free: int


class Endpoint(_Part, frozen=True, kw_only=True):
    address: str
    """key"""
    network: str
    priority: int
    rtt_ms: float


class Node(_Part, frozen=True, kw_only=True):
    """``status``: online, stale (silent for a while), pending (registered, not seen yet), offline (paired, not seen)."""

    id: str
    alias: str
    region: str
    role: Literal["head", "cache", "hybrid", "inference"]
    roles: list[str]
    status: Literal["online", "stale", "pending", "offline"]
    platform: str
    memory_bytes: int
    models: list[Model]
    cache: Cache | None
    prefill_worker: PrefillWorker | None
    endpoint: Endpoint
    state: str = ""
    software: str = ""
    uptime_s: float = 0.0
    silent_s: float = 0.0
    restarts: int = 0
    paired: bool = False


class Registered(_Part, frozen=True, kw_only=True):
    """Shown once, to who made it."""

    id: str
    alias: str
    address: str
    region: str
    role: str
    status: Literal["pending"]
    pairing_token: str
    created_at: float
    expires_at: float


class Paired(_Part, frozen=True, kw_only=True):
    id: str
    alias: str
    region: str
    role: str
    status: Literal["paired"]
    node_id: str


class Removed(_Part, frozen=True, kw_only=True):
    status: Literal["removed"]


class Group(_Part, frozen=True, kw_only=True):
    id: str
    name: str
    node_ids: list[str]
    created_at: float


class GroupMembers(_Part, frozen=True, kw_only=True):
    id: str
    name: str
    node_ids: list[str]
    created_at: float
    members: list[Node]
    online: int


class Edge(_Part, frozen=True, kw_only=True):
    source: str
    target: str
    group_id: str


class Topology(_Part, frozen=True, kw_only=True):
    nodes: list[Node]
    edges: list[Edge]


class Mount(_Part, frozen=True, kw_only=True):
    node_id: str
    address: str
    """key"""
    bytes_used: int
    bytes_free: int
    entry_count: int
    network: str
    tier: Literal["hot", "cold-offload"]


class Namespace(_Part, frozen=True, kw_only=True):
    """``namespaces``: the uris of all, if the fleet runs more than one model; this one is the first primary's."""

    uri: str
    access: str
    coherent_shared_memory: Literal[False]
    mounts: list[Mount]
    bytes_used: int
    bytes_free: int
    entry_count: int
    namespaces: list[str]


class Accepted(_Part, frozen=True, kw_only=True):
    status: Literal["accepted"]


# --- benchmarks --------------------------------------------------------------------------------------------------------


class BenchmarkRow(_Part, frozen=True, kw_only=True):
    id: str
    schema_version: int
    kind: str
    status: str
    started_at: float
    finished_at: float | None
    config: dict[str, Any]
    summary: dict[str, Any]


class Benchmark(_Part, frozen=True, kw_only=True):
    id: str
    schema_version: int
    kind: str
    status: str
    started_at: float
    finished_at: float | None
    config: dict[str, Any]
    summary: dict[str, Any]
    stages: list[dict[str, Any]]


class Stages(_Part, frozen=True, kw_only=True):
    items: list[dict[str, Any]]
    total: int


# --- what happens --------------------------------------------------------------------------------------------------------


class Job(_Part, frozen=True, kw_only=True):
    """``state``: queued, running, completed, failed, cancelled, lost. ``progress``: 0 to 1. ``eta_ms`` 0: not known.

    Without the API key a ``job_id`` that has not the form of one is "other"; so are the ids of a :class:`Request`.
    """

    job_id: str
    node_id: str
    place: str
    state: str
    asker: str
    tenant: str
    """key"""
    tokens_total: int
    tokens_done: int
    tokens_reused: int
    progress: float
    elapsed_ms: float
    tokens_per_second: float
    eta_ms: float
    changed_at: float
    reason_kind: str
    reason: str
    """key"""


class Jobs(_Part, frozen=True, kw_only=True):
    """``active``: oldest first. ``ended``: newest first."""

    active: list[Job]
    ended: list[Job]


class Source(_Part, frozen=True, kw_only=True):
    kind: str
    start: int
    end: int
    node_id: str
    transfer_bytes: int
    elapsed_ms: float


class Decision(_Part, frozen=True, kw_only=True):
    what: str
    chosen: str
    costs_ms: dict[str, float]
    text: str
    """key"""


class Request(_Part, frozen=True, kw_only=True):
    """One explain record. ``at``: null when it was before this process listened. ``diverged_at``: null when nothing did."""

    number: int
    at: float | None
    node_id: str
    request_id: str
    append_id: str
    operation: str
    outcome: str
    source: str
    prompt_tokens: int
    boundary: int
    generated_tokens: int
    transfer_bytes: int
    elapsed_ms: float
    ttft_ms: float
    decode_tokens_per_second: float
    diverged_at: int | None
    stop_reason: str
    sources: list[Source]
    decisions: list[Decision]
    reason_kinds: list[str]
    reasons: list[str]
    """key"""


class Requests(_Part, frozen=True, kw_only=True):
    """Newest first."""

    items: list[Request]
    total: int


class Transfer(_Part, frozen=True, kw_only=True):
    number: int
    at: float
    node_id: str
    direction: str
    purpose: str
    peer: str
    parts: int
    payload_bytes: int
    elapsed_ms: float
    codec: str
    ok: bool
    reason_kind: str
    reason: str
    """key"""


class Transfers(_Part, frozen=True, kw_only=True):
    """Newest first."""

    items: list[Transfer]
    total: int


class Eviction(_Part, frozen=True, kw_only=True):
    number: int
    at: float
    node_id: str
    parts: int
    size_bytes: int
    bytes_used: int
    max_bytes: int


class Evictions(_Part, frozen=True, kw_only=True):
    """Newest first."""

    items: list[Eviction]
    total: int


class SecurityItem(_Part, frozen=True, kw_only=True):
    number: int
    at: float
    node_id: str
    kind: str
    subject: str
    count: int
    text: str


class Security(_Part, frozen=True, kw_only=True):
    """``kinds``: how often each kind was told since this process listens. ``items``: newest first, with the key only."""

    total: int
    refusals_total: int
    kinds: dict[str, int]
    items: list[SecurityItem]


class LogLine(_Part, frozen=True, kw_only=True):
    number: int
    at: float
    node_id: str
    level: str
    text: str


class Logs(_Part, frozen=True, kw_only=True):
    """Newest first."""

    items: list[LogLine]


class Point(_Part, frozen=True, kw_only=True):
    """One bucket. Null: nothing to tell. ``ttft_ms`` and ``decode_tokens_per_second``: means; ``ttft_ms`` by source."""

    index: int
    """Number of the bucket: the same bucket told again has the same."""
    at: float
    tokens_reused: int
    tokens_computed: int
    tokens_generated: int
    hit_rate: float | None
    bytes_moved: int
    bytes_evicted: int
    transfers: int
    requests: int
    refusals: int
    ttft_ms: dict[str, float]
    decode_tokens_per_second: float | None
    cache_bytes_used: int | None
    cache_bytes_max: int | None
    nodes_online: int | None
    jobs_active: int | None


class Series(_Part, frozen=True, kw_only=True):
    """Oldest first; buckets in which nothing was known are missing."""

    step_s: float
    points: list[Point]


class UnheardNode(_Part, frozen=True, kw_only=True):
    node_id: str
    roles: list[str]
    told_by: str


class Bus(_Part, frozen=True, kw_only=True):
    """How well this process hears the fleet.

    ``unheard``: nodes that others know and that are not heard here. ``handshakes_rejected``: buses that refused the
    telemetry key, or that are none of the fleet. ``refused``: messages that were not signed by the node they named.
    """

    state: Literal["waiting", "live", "silent"]
    last_message_age_s: float | None
    messages: int
    missed: int
    dropped: int
    malformed: int
    handshakes_rejected: int
    refused: int
    unheard: list[UnheardNode]
