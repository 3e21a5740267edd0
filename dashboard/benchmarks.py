"""Benchmark runs: what a stage must hold, what follows from it, the summary of a run, and what of it is public."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from wire.errors import InvalidInput

JsonObject = dict[str, Any]

STATUSES: Final = ("running", "completed", "failed")
DEFAULT_KIND: Final = "distributed_prefill_fleet_benchmark"
STAGE_NAMES: Final = frozenset(
    (
        *("remote_compute", "primary_hot_hit", "allens_cold_restore", "agent_generator", "agent_critic"),
        *("agent_premise_auditor", "agent_definition_auditor", "agent_counterexample_worker", "agent_decomposer"),
        *("agent_formalizer", "agent_prover", "agent_adversarial_proponent", "agent_judge"),
    )
)
HIT_SOURCES: Final = ("remote_worker", "primary_hot", "allens_offload", "unknown")
FORBIDDEN_KEYS: Final = frozenset(
    ("prompt", "token_ids", "cache_key", "block_hash", "payload_sha256", "peer_address", "source_path")
)
FORBIDDEN_TEXTS: Final = ("/Users/", "169.254.")
DEPTH_MAX: Final = 8
_COUNTS: Final = ("prefix_tokens", "output_tokens")
_SECONDS: Final = ("append_s", "decode_s", "e2e_s")
_NUMBER_MAX: Final = 1e15
_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,47}")
"""A text that can hold neither an address, a path nor a sentence, and is shorter than any digest in use."""


class NotPublicSafe(InvalidInput):
    """A benchmark holds what must not be kept in a public place."""


def check_public_safe(value: Any, depth: int = 0) -> None:
    """Refuse keys and texts that give away prompts, caches, addresses or users, at any depth.

    Raises:
        NotPublicSafe: something of that kind, or nested too deeply.
    """
    if depth > DEPTH_MAX:
        raise NotPublicSafe("nested too deeply")
    match value:
        case str() if any(text in value for text in FORBIDDEN_TEXTS):
            raise NotPublicSafe("a text holds a private path or address")
        case Mapping():
            for key, inner in value.items():
                if key in FORBIDDEN_KEYS:
                    raise NotPublicSafe(f"the field {key} must not be in a benchmark")
                check_public_safe(key, depth + 1)
                check_public_safe(inner, depth + 1)
        case list() | tuple():
            for inner in value:
                check_public_safe(inner, depth + 1)


def normalised_stage(raw: Mapping[str, Any]) -> JsonObject:
    """A stage with its numbers checked and rates derived; further fields pass through.

    Raises:
        InvalidInput: unknown name or source, a number that is none or negative, or not public-safe.
    """
    stage: JsonObject = dict(raw)
    if stage.get("name") not in STAGE_NAMES:
        raise InvalidInput("a stage has no known name")
    stage["hit_source"] = stage.get("hit_source") or "unknown"
    if stage["hit_source"] not in HIT_SOURCES:
        raise InvalidInput("a stage has no known hit_source")
    for name in _COUNTS:
        stage[name] = int(_number(stage, name))
    for name in _SECONDS:
        stage[name] = _number(stage, name)
    stage["ttft_s"] = _number(stage, "ttft_s", signed=True)
    prefix, output, decode_s = stage["prefix_tokens"], stage["output_tokens"], stage["decode_s"]
    stage["prefill_or_restore_tok_s"] = _quotient(prefix, stage["append_s"])
    stage["decode_tok_s"] = _quotient(output, decode_s)
    stage["generation_latency_ms_per_token"] = _quotient(decode_s * 1000, output)
    stage["e2e_tok_s"] = _quotient(output, stage["e2e_s"])
    check_public_safe(stage)
    return stage


def summarise(stages: Sequence[Mapping[str, Any]]) -> JsonObject:
    """The summary over all stages of a run, failed ones included; empty for a run without any."""
    if not stages:
        return {}
    reused = sum(_delta(stage, "tokens_reused") for stage in stages)
    prefix = sum(stage["prefix_tokens"] for stage in stages)
    warm_reused = sum(_loose(stage.get("warmup_tokens_reused")) for stage in stages)
    warm_prefix = sum(_loose(stage.get("warmup_prefix_tokens")) for stage in stages)
    output = sum(stage["output_tokens"] for stage in stages)
    sources = Counter(stage["hit_source"] for stage in stages)
    return {
        "stages_total": len(stages),
        "stages_failed": sum(not stage.get("ok", True) for stage in stages),
        "incomplete_stages": sum(stage.get("complete", True) is False for stage in stages),
        "stop_reason_counts": dict(Counter(str(stage.get("stop_reason") or "unknown") for stage in stages)),
        "ttft_p50_s": median(stage["ttft_s"] for stage in stages),
        "prefill_tok_s_p50": median(stage["prefill_or_restore_tok_s"] for stage in stages),
        "decode_tok_s_p50": median(stage["decode_tok_s"] for stage in stages),
        "e2e_tok_s_p50": median(stage["e2e_tok_s"] for stage in stages),
        "generation_latency_ms_p50": median(stage["generation_latency_ms_per_token"] for stage in stages),
        "inference_kv_token_hit_rate": _quotient(reused, prefix),
        "workload_kv_token_hit_rate": _quotient(reused + warm_reused, prefix + warm_prefix),
        "aggregate_decode_tok_s": _quotient(output, sum(stage["decode_s"] for stage in stages)),
        "aggregate_e2e_tok_s": _quotient(output, sum(stage["e2e_s"] for stage in stages)),
        "bytes_received": sum(_delta(stage, "bytes_received") for stage in stages),
        "hit_source_counts": {source: sources[source] for source in HIT_SOURCES},
    }


def public_part(value: Any) -> Any:
    """What anybody may see of a config, a stage or a summary: numbers, switches and short labels, by any short name.

    Free text, lists of numbers (token ids would be one) and whatever else is not known to be harmless is left out, not
    searched for bad words.
    """
    match value:
        case Mapping():
            shown = {key: public_part(inner) for key, inner in value.items() if _is_label(key) and key not in FORBIDDEN_KEYS}
            return {key: inner for key, inner in shown.items() if inner is not None}
        case bool() | int() | float():
            return value
        case str() if _is_label(value):
            return value
        case _:
            return None


def _is_label(text: object) -> bool:
    return isinstance(text, str) and _LABEL.fullmatch(text) is not None


def _number(stage: Mapping[str, Any], name: str, *, signed: bool = False) -> float:
    value = stage.get(name, 0) or 0
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"{name} of a stage is not a number") from None
    if not math.isfinite(number) or abs(number) > _NUMBER_MAX or (number < 0 and not signed):
        raise InvalidInput(f"{name} of a stage is out of range")
    return number


def _loose(value: Any) -> float:
    """A number that came through unchecked, 0 when it is none that can be added."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable and 0 <= value <= _NUMBER_MAX else 0


def _delta(stage: Mapping[str, Any], name: str) -> float:
    delta = stage.get("delta")
    return _loose(delta.get(name)) if isinstance(delta, Mapping) else 0


def _quotient(dividend: float, divisor: float) -> float:
    return dividend / divisor if divisor else 0.0
