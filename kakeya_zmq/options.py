"""The table of the daemons' settings: for each its type, default, unit and meaning.

The command line, the environment and the configuration file are all read through :data:`OPTIONS`, so they cannot drift
apart. Merging the sources is kakeya_zmq.config's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.cards import CARD_TTL_MS_MAX
from wire.errors import ConfigError
from wire.limits import BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, PROMPT_TOKENS_MAX

ALL_ROLES = ("primary", "worker", "cache")
NETWORKS = ("thunderbolt", "lan", "tailscale", "public", "loopback")
DEFAULT_PORTS: Mapping[str, int] = {"primary": 51051, "cache": 52051, "worker": 53051}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: ``name`` is the field; with dashes it is the flag, in capitals after ``KAKEYA_`` the variable."""

    name: str
    kind: str
    """text, path, integer, number, switch, list or choice."""
    default: Any
    help: str
    roles: tuple[str, ...] = ALL_ROLES
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "KAKEYA_" + self.name.upper()


OPTIONS: tuple[Option, ...] = (
    Option("node_id", "text", "", "name of this node, unique in the fleet (default: the role and the host name)"),
    Option(
        "bind",
        "text",
        "",
        "address to serve on, host:port; port 0 picks a free one (default: 127.0.0.1 and the role's port)",
    ),
    Option("bus_bind", "text", "", "address of the event bus, host:port (default: the host of --bind, a free port)"),
    Option("advertise", "text", "", "address other nodes should use to reach this one (default: the bound address)"),
    Option(
        "endpoint",
        "list",
        (),
        "another address of this node, ADDRESS[/NETWORK[/PRIORITY]], like 10.7.0.2:53051/thunderbolt; may be repeated",
    ),
    Option("peer", "list", (), "address of a node to join the fleet through; may be repeated"),
    Option(
        "cache_peer",
        "list",
        (),
        "address of a cache to use even when no card of it arrives; may be repeated",
        ("primary",),
    ),
    Option(
        "worker",
        "list",
        (),
        "address of a worker to use even when no card of it arrives; may be repeated",
        ("primary",),
    ),
    Option("fleet_psk_file", "path", "", "the fleet's pre-shared key, mode 0600 (default: ~/.kakeya/fleet.psk)"),
    Option("roster_file", "path", "", "who belongs to the fleet and may do what (default: fleet.toml beside the PSK)"),
    Option("tenant_id", "text", "default", "tenant whose prompts this node serves; part of the namespace"),
    Option("tenant_key_file", "path", "", "key of that tenant, mode 0600 (default: beside the PSK)", ("primary", "worker")),
    Option(
        "model",
        "path",
        "",
        "folder of the MLX model (default: the demo model, prepared by `kakeya model prepare`)",
        ("primary", "worker"),
    ),
    Option(
        "model_id",
        "text",
        "",
        "name of the model in the namespace; equal on all nodes (default: the folder's name)",
        ("primary", "worker"),
    ),
    Option(
        "revision_label",
        "text",
        "",
        "your name for the revision of model and tokenizer, in the namespace beside their digests; equal on all nodes",
        ("primary", "worker"),
    ),
    Option(
        "kv_policy",
        "choice",
        "native",
        "KV cache policy: the model's own, or bounded to sink + window tokens",
        ("primary", "worker"),
        ("native", "sink-window"),
    ),
    Option(
        "sink",
        "integer",
        4,
        "with --kv-policy sink-window: first tokens always kept",
        ("primary", "worker"),
        minimum=0,
        maximum=1024,
    ),
    Option(
        "window",
        "integer",
        2048,
        "with --kv-policy sink-window: last tokens kept",
        ("primary", "worker"),
        minimum=16,
        maximum=1_000_000,
    ),
    Option(
        "cache_block_tokens",
        "integer",
        BLOCK_TOKENS_DEFAULT,
        "tokens in a block; equal on all nodes",
        ("primary", "worker"),
        minimum=BLOCK_TOKENS_MIN,
        maximum=BLOCK_TOKENS_MAX,
    ),
    Option(
        "prefill_compute_chunk_tokens",
        "integer",
        256,
        "tokens computed in one step; smaller reacts sooner, larger is faster",
        ("primary", "worker"),
        minimum=16,
        maximum=8192,
    ),
    Option("cache_gb", "number", 4.0, "memory for stored KV, in GiB", minimum=0.001, maximum=4096),
    Option(
        "adaptive_cache",
        "switch",
        False,
        "fit that memory to the machine: what the model and a reserve leave, less when memory runs low",
    ),
    Option(
        "cache_min_gb",
        "number",
        0.25,
        "with --adaptive-cache: memory for stored KV at the least, in GiB",
        minimum=0.001,
        maximum=4096,
    ),
    Option(
        "memory_reserve_gb",
        "number",
        2.0,
        "with --adaptive-cache: memory left to the rest of the machine, in GiB",
        minimum=0,
        maximum=4096,
    ),
    Option("bulk_ports", "text", "", "port range for bulk transfers, low-high (default: any free port)"),
    Option(
        "network",
        "choice",
        "lan",
        "kind of network --advertise is on",
        ALL_ROLES,
        NETWORKS,
    ),
    Option(
        "priority",
        "integer",
        0,
        "preference of that address; higher wins; 0 takes the network's own",
        minimum=0,
        maximum=1000,
    ),
    Option("gossip_interval_s", "number", 10.0, "seconds between announcements of this node", minimum=0.05, maximum=3600),
    Option(
        "ttl_seconds",
        "number",
        120.0,
        "seconds after which a silent node is forgotten",
        minimum=0.2,
        maximum=CARD_TTL_MS_MAX / 1000,
    ),
    Option(
        "cache_replication_factor",
        "integer",
        1,
        "cache peers that get a copy of new KV; 0 turns publishing off",
        ("primary",),
        minimum=0,
        maximum=16,
    ),
    Option(
        "enable_prefill_cache",
        "switch",
        False,
        "share KV with the fleet and keep it; without it, every prompt is computed here and nothing is kept",
        ("primary",),
    ),
    Option(
        "prefill_policy",
        "choice",
        "local-fallback",
        "what to do when the fleet cannot prefill",
        ("primary",),
        ("local-fallback", "remote-required", "local-only"),
    ),
    Option(
        "remote_prefill_min_tokens",
        "integer",
        128,
        "prompts with fewer missing tokens are computed here",
        ("primary",),
        minimum=0,
        maximum=10_000_000,
    ),
    Option(
        "prefill_min_savings_ratio",
        "number",
        0.10,
        "how much faster the fleet must be to be used, 0 to 1",
        ("primary",),
        minimum=0,
        maximum=0.99,
    ),
    Option(
        "primary_prefill_penalty_ms",
        "number",
        5000.0,
        "what keeping decode waiting costs, added to the time of prefill here; 0 compares plain times",
        ("primary",),
        minimum=0,
        maximum=1e9,
    ),
    Option(
        "cache_lookup_timeout_s",
        "number",
        2.0,
        "seconds to wait for a cache's answer",
        ("primary",),
        minimum=0.01,
        maximum=600,
    ),
    Option("cache_fetch_timeout_s", "number", 30.0, "seconds a fetch may take", ("primary",), minimum=0.01, maximum=3600),
    Option(
        "prefill_worker_timeout_s",
        "number",
        120.0,
        "seconds a worker may take for a prompt",
        ("primary",),
        minimum=0.01,
        maximum=86_400,
    ),
    Option(
        "cache_max_import_gb",
        "number",
        1.0,
        "largest KV taken from the fleet for one prompt, in GiB",
        ("primary",),
        minimum=0.001,
        maximum=1024,
    ),
    Option(
        "import_grid",
        "choice",
        "auto",
        "use prefixes only up to multiples of --prefill-compute-chunk-tokens, or whole; auto does unless KV is float32",
        ("primary",),
        ("auto", "on", "off"),
    ),
    Option(
        "local_prefill_tps",
        "number",
        20.0,
        "tokens per second assumed here until measured",
        ("primary",),
        minimum=0.01,
        maximum=1e6,
    ),
    Option(
        "worker_prefill_tps",
        "number",
        20.0,
        "tokens per second assumed of a worker until measured",
        ("primary", "worker"),
        minimum=0.01,
        maximum=1e6,
    ),
    Option(
        "cache_link_mbps",
        "number",
        1000.0,
        "megabits per second assumed of a link until measured",
        ("primary",),
        minimum=0.01,
        maximum=1e6,
    ),
    Option(
        "cache_compression",
        "choice",
        "none",
        "how KV is stored; int8 and kakeyalattice-d4 lose precision; equal on all nodes that share KV",
        ("primary", "worker"),
        ("none", "zlib", "int8", "kakeyalattice-d4"),
    ),
    Option(
        "lattice_q",
        "integer",
        38,
        "with --cache-compression kakeyalattice-d4: levels on each side of zero; more is finer and larger",
        ("primary", "worker"),
        minimum=1,
        maximum=255,
    ),
    Option(
        "link_compression",
        "choice",
        "auto",
        "compression of KV on its way; auto compresses only on links where it saves time",
        ("primary",),
        ("auto", "none", "zlib", "zstd"),
    ),
    Option(
        "capacity",
        "integer",
        4,
        "sessions held at once; the oldest idle one of whoever has most of them makes room",
        ("primary",),
        minimum=1,
        maximum=4096,
    ),
    Option(
        "session_idle_s",
        "number",
        1800.0,
        "seconds after which an idle session is closed",
        ("primary",),
        minimum=1,
        maximum=1e7,
    ),
    Option(
        "max_connections",
        "integer",
        1024,
        "connections of others held at once by the control port, and as many by the bus",
        minimum=16,
        maximum=65_536,
    ),
    Option(
        "peer_requests_per_s",
        "number",
        2000.0,
        "requests a second one node may make here; more get RESOURCE_EXHAUSTED and a hint when to try again",
        minimum=0.5,
        maximum=1e6,
    ),
    Option(
        "peer_lookups_per_s",
        "number",
        500.0,
        "of these, cache lookups",
        minimum=0.5,
        maximum=1e6,
    ),
    Option(
        "peer_publishes_per_s",
        "number",
        500.0,
        "of these, offers of KV",
        minimum=0.5,
        maximum=1e6,
    ),
    Option(
        "peer_jobs_per_s",
        "number",
        200.0,
        "of these, prefill jobs",
        minimum=0.5,
        maximum=1e6,
    ),
    Option("max_jobs", "integer", 128, "prefill jobs queued or running", ("worker",), minimum=1, maximum=100_000),
    Option(
        "max_jobs_per_node",
        "integer",
        64,
        "of these, jobs of one asking node",
        ("worker",),
        minimum=1,
        maximum=100_000,
    ),
    Option(
        "max_prompt_tokens",
        "integer",
        PROMPT_TOKENS_MAX,
        "longest prompt a job may have",
        ("worker",),
        minimum=2,
        maximum=PROMPT_TOKENS_MAX,
    ),
    Option(
        "blas_threads",
        "integer",
        0,
        "threads of the CPU matrix library on Linux; 0 takes one for each core",
        ("primary", "worker"),
        minimum=0,
        maximum=1024,
    ),
    Option(
        "decode_worker",
        "switch",
        False,
        "run the model in a child process, which is replaced when it crashes or hangs",
        ("primary",),
    ),
    Option(
        "decode_worker_timeout_s",
        "number",
        120.0,
        "with --decode-worker: seconds a step may take before the child is killed and replaced",
        ("primary",),
        minimum=0.1,
        maximum=86_400,
    ),
    Option(
        "decode_worker_startup_timeout_s",
        "number",
        180.0,
        "with --decode-worker: seconds the child may take to load the model",
        ("primary",),
        minimum=1,
        maximum=86_400,
    ),
    Option(
        "assert_compatibility",
        "list",
        (),
        "field=value the loaded model must match, e.g. model_revision=…; may be repeated",
        ("primary", "worker"),
    ),
    Option(
        "telemetry_interval_s",
        "number",
        2.0,
        "seconds between snapshots of this node on the event bus, while somebody listens",
        minimum=0.1,
        maximum=3600,
    ),
    Option(
        "memory_warning_gb",
        "number",
        18.0,
        "memory of this process that is worth a warning, in GiB",
        ("primary", "worker"),
        minimum=0.01,
        maximum=4096,
    ),
    Option(
        "memory_drain_gb",
        "number",
        20.0,
        "from here on no new sessions and jobs are taken, in GiB",
        ("primary", "worker"),
        minimum=0.01,
        maximum=4096,
    ),
    Option(
        "memory_unhealthy_gb",
        "number",
        21.5,
        "from here on the health endpoint says unhealthy, in GiB",
        ("primary", "worker"),
        minimum=0.01,
        maximum=4096,
    ),
    Option(
        "memory_poll_s",
        "number",
        5.0,
        "seconds between looks at that memory",
        ("primary", "worker"),
        minimum=0.05,
        maximum=3600,
    ),
    Option(
        "decode_stall_s",
        "number",
        120.0,
        "seconds in one step of the model, while a session decodes, after which this daemon ends to be restarted; 0 never",
        ("primary",),
        minimum=0,
        maximum=86_400,
    ),
    Option(
        "runtime_health_port",
        "integer",
        0,
        "port of the health endpoint (HTTP, on 127.0.0.1); 0 turns it off",
        ("primary", "worker"),
        minimum=0,
        maximum=65_535,
    ),
    Option(
        "drain_s",
        "number",
        20.0,
        "seconds that running work may take to finish after a first SIGTERM",
        minimum=0,
        maximum=86_400,
    ),
    Option("ready_file", "path", "", "file to write this daemon's addresses to once it serves (for scripts)"),
    Option("log_level", "choice", "info", "least level of log lines", ALL_ROLES, ("debug", "info", "warning", "error")),
    Option("log_format", "choice", "human", "lines for people, or one JSON object a line", ALL_ROLES, ("human", "json")),
    Option(
        "log_max_mb",
        "number",
        10.0,
        "size in MiB at which a log file on standard error is rotated (three old ones are kept); 0 never",
        minimum=0,
        maximum=1_000_000,
    ),
)


def options_for(role: str) -> tuple[Option, ...]:
    return tuple(option for option in OPTIONS if role in option.roles)


def parse_value(option: Option, value: Any, source: str) -> Any:
    """Turn a flag's, variable's or file's value into the option's type.

    Raises:
        ConfigError: it does not fit; the message names ``source`` and what would fit.
    """
    match option.kind:
        case "text" | "path":
            text = _as_text(value, source)
            return str(Path(text).expanduser()) if option.kind == "path" and text else text
        case "list":
            return tuple(text for item in _items(value, source) if (text := _as_text(item, source).strip()))
        case "switch":
            return _parse_switch(value, source)
        case "choice":
            if value not in option.choices:
                raise ConfigError(f"{source} is {str(value)[:60]!r}", remedy=f"one of: {', '.join(option.choices)}")
            return value
        case _:
            return _parse_number(option, value, source)


def _as_text(value: Any, source: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{source} is {_shown(value)}", remedy="a text in quotes")
    return value


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a very long number"


def _items(value: Any, source: str) -> Iterable[Any]:
    """A list may be one text with commas, or (in a file, or from a repeated flag) several texts, each with commas."""
    if isinstance(value, str):
        return value.split(",")
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{source} is {_shown(value)}", remedy="a list of texts, or one text with commas")
    return [part for item in value for part in _as_text(item, source).split(",")]


def _parse_switch(value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    lowered = value.lower() if isinstance(value, str) else _shown(value).lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{source} is {_shown(value)}", remedy="1 or 0")


def _parse_number(option: Option, value: Any, source: str) -> int | float:
    wanted = "a whole number" if option.kind == "integer" else "a number"
    bounds = (
        f" from {option.minimum:g} to {option.maximum:g}"
        if option.minimum is not None and option.maximum is not None
        else ""
    )
    try:
        number: int | float = int(str(value)) if option.kind == "integer" else float(str(value))
    except ValueError:
        shown = repr(value[:60]) if isinstance(value, str) else _shown(value)
        raise ConfigError(f"{source} is {shown}", remedy=f"{wanted}{bounds}") from None
    low = option.minimum if option.minimum is not None else float("-inf")
    high = option.maximum if option.maximum is not None else float("inf")
    if not low <= number <= high:
        raise ConfigError(f"{source} is {str(value)[:60]}", remedy=f"{wanted}{bounds}")
    return number
