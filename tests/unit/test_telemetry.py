"""Counters and the explanation ring."""

from __future__ import annotations

import pytest

from kakeya_zmq.telemetry import NAMES_MAX, PREFILL_COUNTERS, Counters, ExplainLog, explanation_line
from wire.errors import LocalProtocolError
from wire.limits import TEXT_CHARACTERS_MAX
from wire.messages import Explanation, Source, SourceKind


def explanation(*reasons: str) -> Explanation:
    source = Source(kind=SourceKind.REMOTE_CACHE, start=0, end=64, node_id="peer-b", transfer_bytes=10, elapsed_ms=1.0)
    return Explanation(prompt_tokens=65, sources=(source,), reasons=reasons, elapsed_ms=12.4)


def test_every_prefill_name_is_there_from_the_start() -> None:
    snapshot = Counters.for_prefill().snapshot()
    assert all(snapshot[name] == 0 for name in PREFILL_COUNTERS)
    assert snapshot["last_fallback_reason"] == ""


def test_counters_add_values_replace_and_snapshots_do_not_follow() -> None:
    counters = Counters.for_prefill()
    before = counters.snapshot()
    counters.add("misses")
    counters.add("misses", 2)
    counters.set("last_fallback_reason", "x" * 2000)
    assert counters.get("misses") == 3
    assert counters.get("last_fallback_reason") == "x" * TEXT_CHARACTERS_MAX
    assert before["misses"] == 0


def test_a_counter_never_goes_down_and_a_text_is_no_counter() -> None:
    counters = Counters.for_prefill()
    with pytest.raises(LocalProtocolError):
        counters.add("misses", -1)
    with pytest.raises(LocalProtocolError):
        counters.add("last_fallback_reason")


def test_names_are_bounded() -> None:
    counters = Counters()
    for number in range(NAMES_MAX):
        counters.add(f"name_{number}")
    with pytest.raises(LocalProtocolError):
        counters.add("one_more")


def test_the_log_keeps_the_last_explanations() -> None:
    log = ExplainLog(entries_max=2)
    assert log.latest() is None
    for number in range(3):
        log.add(float(number), f"s{number}", explanation(f"reason {number}"))
    assert [subject for _, subject, _ in log] == ["s1", "s2"]
    assert log.latest() == explanation("reason 2")
    assert len(log.lines()) == len(log) == 2


def test_an_explanation_reads_as_one_line() -> None:
    line = explanation_line(explanation("peer c timed out"))
    assert line == "65 tokens in 12 ms: [0, 64) cache of peer-b; peer c timed out"
    assert len(explanation_line(explanation(*["y" * 400] * 5))) == TEXT_CHARACTERS_MAX
