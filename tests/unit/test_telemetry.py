"""Counters and the explanation ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.telemetry import NAMES_MAX, PREFILL_COUNTERS, Counters, bounded_ms, explanation_line, public_text
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


def test_an_explanation_reads_as_one_line() -> None:
    line = explanation_line(explanation("peer c timed out"))
    assert line == "65 tokens in 12 ms: [0, 64) cache of peer-b; peer c timed out"
    assert len(explanation_line(explanation(*["y" * 400] * 5))) == TEXT_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("nothing answers at 192.168.1.20:51051", "nothing answers at (address)"),
        ("10.0.0.1, 10.0.0.2", "(address), (address)"),
        ("lost [fe80::1%en0]:51051 and [::1]", "lost (address) and (address)"),
        ("peer fe80::1:2 left; 2001:db8:0:0:1:0:0:1 stayed", "peer (address) left; (address) stayed"),
        ("mac-studio.local:51051 is busy", "(address) is busy"),
        ("block " + "ab" * 32 + " is gone", "block (digest) is gone"),
    ],
)
def test_addresses_and_digests_do_not_leave_the_fleet(line: str, shown: str) -> None:
    assert public_text(line) == shown


@pytest.mark.parametrize(
    "line",
    [
        "own cache ends at token 2640: diverged or never stored at token 2640",
        "[0, 64) cache of peer-b; 12.5 MB in 3.5 ms",
        "kakeya-zmq 0.1.0 at 12:30:45",
        "worker w is not compatible: rope_hash differs",
        "prefill: worker-mac (compute 900 ms, import 30 ms)",
    ],
)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert public_text(line) == line


@given(st.text(max_size=3_000))
def test_any_text_becomes_a_bounded_line(text: str) -> None:
    assert len(public_text(text)) <= TEXT_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("value", "bounded"), [(1.23456, 1.235), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 1e12), (1e30, 1e12)]
)
def test_times_and_rates_are_finite(value: float, bounded: float) -> None:
    assert bounded_ms(value) == bounded
