"""Benchmark runs: what a stage must hold, what follows from it, the summary of a run, and what of it is public."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
FORBIDDEN_IN_KEYS: Final = ("prompt", "tokenid", "hash", "sha256", "cachekey", "address", "path")
"""Parts of the names of fields, compared in lower case and without what separates words."""
COUNTING_KEYS: Final = frozenset(("prompttokens", "promptcount"))
"""Names that may hold such a part, for numbers."""
FORBIDDEN_TEXTS: Final = ("/users/", "/home/", "\\users\\", "169.254.")
PUBLIC_TEXTS: Final = frozenset(
    (
        *("name", "kind", "status", "agent", "phase", "hit_source", "stop_reason", "review_scope", "topology"),
        *("model", "model_id", "prefill_policy", "quantization", "kv_dtype", "variant", "workload"),
    )
)
"""Fields whose text anybody may see."""
DEPTH_MAX: Final = 8
_COUNTS: Final = ("prefix_tokens", "output_tokens")
_SECONDS: Final = ("append_s", "decode_s", "e2e_s")
_NUMBER_MAX: Final = 1e15
_RATE_MAX: Final = 1e18
_INTEGER_MAX: Final = 2**63 - 1
_WORD_SEPARATORS: Final = re.compile(r"[\W_]+")
_DIGEST: Final = re.compile(r"[0-9A-Fa-f]{16}")
_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,47}")
"""A text that can hold neither an address, a path nor a sentence."""


class NotPublicSafe(InvalidInput):
    """A benchmark holds what must not be kept in a public place."""


def check_public_safe(value: Any, depth: int = 0) -> None:
    """Refuse keys and texts that give away prompts, caches, addresses or users, at any depth.

    Raises:
        NotPublicSafe: something of that kind, nested too deeply, or a number that cannot be kept.
    """
    if depth > DEPTH_MAX:
        raise NotPublicSafe("nested too deeply")
    match value:
        case str() if any(text in value.casefold() for text in FORBIDDEN_TEXTS):
            raise NotPublicSafe("a text holds a private path or address")
        case Mapping():
            for key, inner in value.items():
                if _is_forbidden(key, inner):
                    raise NotPublicSafe(f"the field {key[:64]} must not be in a benchmark")
                check_public_safe(key, depth + 1)
                check_public_safe(inner, depth + 1)
        case list() | tuple():
            for inner in value:
                check_public_safe(inner, depth + 1)
        case int() if abs(value) > _INTEGER_MAX:
            raise NotPublicSafe("a number is out of range")
        case float() if not math.isfinite(value):
            raise NotPublicSafe("a number is out of range")


def _is_forbidden(key: str, value: Any) -> bool:
    name = _WORD_SEPARATORS.sub("", key.casefold())
    if name in COUNTING_KEYS and isinstance(value, int | float):
        return False
    return any(part in name for part in FORBIDDEN_IN_KEYS)


def normalised_stage(raw: Mapping[str, Any]) -> JsonObject:
    """A stage with its numbers checked and rates derived; further fields pass through.

    Raises:
        InvalidInput: unknown name or source, a number that is none, negative or too large, or not public-safe.
    """
    stage: JsonObject = dict(raw)
    if not _is_one_of(stage.get("name"), STAGE_NAMES):
        raise InvalidInput("a stage has no known name")
    stage["hit_source"] = stage.get("hit_source") or "unknown"
    if not _is_one_of(stage["hit_source"], HIT_SOURCES):
        raise InvalidInput("a stage has no known hit_source")
    for name in _COUNTS:
        stage[name] = int(_number(stage, name))
    for name in _SECONDS:
        stage[name] = _number(stage, name)
    stage["ttft_s"] = _number(stage, "ttft_s", signed=True)
    prefix, output, decode_s = stage["prefix_tokens"], stage["output_tokens"], stage["decode_s"]
    rates = {
        "prefill_or_restore_tok_s": _quotient(prefix, stage["append_s"]),
        "decode_tok_s": _quotient(output, decode_s),
        "generation_latency_ms_per_token": _quotient(decode_s * 1000, output),
        "e2e_tok_s": _quotient(output, stage["e2e_s"]),
    }
    if max(rates.values()) > _RATE_MAX:
        raise InvalidInput("a rate of a stage is out of range", remedy="give seconds")
    stage.update(rates)
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
        "inference_kv_token_hit_rate": min(_RATE_MAX, _quotient(reused, prefix)),
        "workload_kv_token_hit_rate": min(_RATE_MAX, _quotient(reused + warm_reused, prefix + warm_prefix)),
        # A stage may have tokens and no time, and another one next to no time.
        "aggregate_decode_tok_s": min(_RATE_MAX, _quotient(output, sum(stage["decode_s"] for stage in stages))),
        "aggregate_e2e_tok_s": min(_RATE_MAX, _quotient(output, sum(stage["e2e_s"] for stage in stages))),
        "bytes_received": sum(_delta(stage, "bytes_received") for stage in stages),
        "hit_source_counts": {source: sources[source] for source in HIT_SOURCES},
    }


def public_part(value: Any) -> Any:
    """What anybody may see of a config, a stage or a summary: numbers and switches by any short name, and short labels in
    the fields of :data:`PUBLIC_TEXTS`.

    Free text, lists of numbers (token ids would be one) and whatever else is not known to be harmless is left out, not
    searched for bad words.
    """
    match value:
        case Mapping():
            shown = {
                key: public_label(inner) if isinstance(inner, str) and key in PUBLIC_TEXTS else public_part(inner)
                for key, inner in value.items()
                if public_label(key) and not _is_forbidden(key, inner)
            }
            return {key: inner for key, inner in shown.items() if inner is not None}
        case bool():
            return value
        case int() | float() if abs(value) <= _RATE_MAX:
            return value
        case _:
            return None


def public_label(text: object) -> str | None:
    """The text, when it is a label that anybody may see: short, and nothing that could be a digest."""
    usable = isinstance(text, str) and _LABEL.fullmatch(text) is not None and _DIGEST.search(text) is None
    return text if usable and isinstance(text, str) else None


def _is_one_of(value: object, known: Collection[str]) -> bool:
    return isinstance(value, str) and value in known


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
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return value if usable and 0 <= value <= _NUMBER_MAX else 0


def _delta(stage: Mapping[str, Any], name: str) -> float:
    delta = stage.get("delta")
    return _loose(delta.get(name)) if isinstance(delta, Mapping) else 0


def _quotient(dividend: float, divisor: float) -> float:
    return dividend / divisor if divisor else 0.0
