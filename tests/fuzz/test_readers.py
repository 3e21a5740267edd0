"""Every reader of others' bytes under hypothesis: random bytes and damaged valid ones. In the normal run."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import Fuzzed, targets

TARGETS = targets()
SECONDS_MAX = 5.0
"""For one input of at most a few KB; some microseconds is what they take."""
MEMORY_MAX = 8 << 20


def take(target: Fuzzed, data: bytes) -> None:
    began = time.perf_counter()
    with contextlib.suppress(*target.errors):
        target.run(data)
    assert time.perf_counter() - began < SECONDS_MAX


@pytest.mark.parametrize("name", TARGETS)
def test_valid_bytes_are_read(name: str) -> None:
    """The seeds must reach behind the first check, or damaging them proves nothing."""
    target = TARGETS[name]
    for seed in target.seeds:
        target.run(seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes(name: str, data: bytes) -> None:
    take(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damaged_bytes(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    damaged = bytearray(data.draw(st.sampled_from(target.seeds)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged)))
        replacement = data.draw(st.binary(max_size=6))
        damaged[position : position + data.draw(st.integers(0, 6))] = replacement
    take(target, bytes(damaged))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1k", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"[", b'{"a":'])
def test_deep_and_huge_claims_cost_nothing(name: str, opener: bytes) -> None:
    target = TARGETS[name]
    data = opener * (20_000 // len(opener))
    tracemalloc.start()
    try:
        take(target, data)
        for seed in target.seeds[:2]:
            take(target, seed[: len(seed) // 2] + data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_MAX
