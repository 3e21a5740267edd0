"""The store's budget: the formula, memory pressure, recovery, and what a real store makes of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.cache_budget import CacheBudget
from daemons.memory import available_memory_bytes, control_groups, physical_memory_bytes
from kakeya_zmq.budget import BudgetLimits, MemoryBudget, MemoryMeasured, SetBudget, static_budget
from kakeya_zmq.config import resolve_settings
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.store import BlockStore
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire.errors import ConfigError
from wire.limits import GIB, MIB

LIMITS = BudgetLimits(floor_bytes=GIB // 4, ceiling_bytes=8 * GIB, reserve_bytes=2 * GIB)


def measured(
    available_gib: float = 4, *, physical_gib: float = 16, model_gib: float = 10, store_gib: float = 0
) -> MemoryMeasured:
    return MemoryMeasured(*(int(size * GIB) for size in (physical_gib, available_gib, model_gib, store_gib)))


@pytest.mark.parametrize(
    ("physical_gib", "model_gib", "budget_gib"),
    [(16, 10, 4), (16, 2, 8), (64, 10, 8), (16, 13.5, 0.5), (16, 13.9, 0.25), (16, 20, 0.25), (8, 0, 6)],
)
def test_the_budget_is_what_model_and_reserve_leave(physical_gib: float, model_gib: float, budget_gib: float) -> None:
    memory = measured(physical_gib=physical_gib, model_gib=model_gib)
    assert static_budget(LIMITS, memory) == int(budget_gib * GIB)


def test_a_floor_above_the_ceiling_is_refused_with_both_flags() -> None:
    with pytest.raises(ConfigError, match=r"2 GiB.*1 GiB") as caught:
        BudgetLimits(floor_bytes=2 * GIB, ceiling_bytes=GIB, reserve_bytes=0)
    assert "--cache-min-gb" in str(caught.value.remedy)
    with pytest.raises(ConfigError):
        BudgetLimits(floor_bytes=0, ceiling_bytes=GIB, reserve_bytes=0)


def test_it_starts_at_the_floor_and_follows_the_model() -> None:
    budget = MemoryBudget(LIMITS)
    assert budget.target_bytes == LIMITS.floor_bytes
    assert budget.on(measured(), 0.0) == [SetBudget(4 * GIB)]
    assert budget.on(measured(), 2.0) == []
    assert budget.on(measured(model_gib=11), 4.0) == [SetBudget(3 * GIB)]
    assert budget.on(measured(model_gib=11 - 1 / 1024), 6.0) == [], "too small a rise to be worth it"
    assert budget.on(measured(model_gib=10), 8.0) == [SetBudget(4 * GIB)]
    assert budget.deadline() == 10.0


def test_pressure_makes_the_store_give_back_what_is_missing_to_the_reserve() -> None:
    budget = MemoryBudget(LIMITS)
    budget.on(measured(), 0.0)
    assert budget.on(measured(1.0, store_gib=3), 2.0) == [], "half of the reserve is still there"
    assert budget.on(measured(0.5, store_gib=3), 4.0) == [SetBudget(int(1.5 * GIB))]
    assert (budget.lowered, budget.cuts) == (True, 1)
    assert budget.on(measured(0.5, store_gib=1.5), 6.0) == [], "what was freed may not show yet"
    assert budget.on(measured(0.5, store_gib=1.5), 15.0) == [SetBudget(LIMITS.floor_bytes)]
    assert budget.on(measured(0.0, store_gib=0.25), 30.0) == [], "never below the floor"


def test_recovery_is_slow_and_stops_where_pressure_would_begin() -> None:
    budget = MemoryBudget(LIMITS)
    budget.on(measured(), 0.0)
    budget.on(measured(0.5, store_gib=2), 2.0)
    low = budget.target_bytes
    assert low == GIB // 2
    assert all(not budget.on(measured(1.5, store_gib=0.5), now) for now in range(4, 200, 2)), "between the marks: nothing"
    assert all(not budget.on(measured(4.0, store_gib=0.5), now) for now in range(200, 230, 2))
    assert budget.on(measured(4.0, store_gib=0.5), 230.0) == [SetBudget(low + GIB)]
    assert budget.lowered
    assert not budget.on(measured(4.0, store_gib=0.5), 232.0)
    budget.on(measured(1.9, store_gib=0.5), 234.0)
    assert not budget.on(measured(6.0, store_gib=1.5), 261.0), "a break in between starts the wait anew"
    assert budget.on(measured(9.0, store_gib=1.5), 291.0) == [SetBudget(4 * GIB)]
    assert not budget.lowered


steps = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 16), st.floats(0, 8), st.floats(0.1, 60)), min_size=1, max_size=60)


@given(steps)
def test_whatever_is_measured_the_budget_keeps_its_rules(history: list[tuple[float, float, float, float]]) -> None:
    budget = MemoryBudget(LIMITS)
    now = 0.0
    for model_gib, available_gib, store_gib, seconds in history:
        now += seconds
        before, lowered = budget.target_bytes, budget.lowered
        memory = measured(available_gib, model_gib=model_gib, store_gib=store_gib)
        changes = budget.on(memory, now)
        assert changes == ([] if budget.target_bytes == before else [SetBudget(budget.target_bytes)])
        assert LIMITS.floor_bytes <= budget.target_bytes <= static_budget(LIMITS, memory)
        if memory.available_bytes < LIMITS.reserve_bytes and lowered:
            assert budget.target_bytes <= before, "it never grows while the reserve is not there"
        assert budget.deadline() > now
    for _ in range(100):
        now += 31.0
        budget.on(measured(16.0, model_gib=2), now)
    assert budget.target_bytes == LIMITS.ceiling_bytes, "when all is well for long, it has everything"


# --- the machine's figures -------------------------------------------------------------------------------------------


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert control_groups(tmp_path) == []
    assert physical_memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < available_memory_bytes() <= physical_memory_bytes()


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_container_s_limit_counts_without_the_file_cache_that_can_go(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", {"cgroup": "0::/a/b\n"})
    top = tmp_path / "sys/fs/cgroup"
    group(top, {})
    group(
        top / "a",
        {
            "memory.max": f"{64 * MIB}\n",
            "memory.current": f"{48 * MIB}\n",
            "memory.stat": f"anon 1\ninactive_file {8 * MIB}\n",
        },
    )
    group(top / "a/b", {"memory.max": "max\n", "memory.current": "1\n", "memory.stat": "anon 1\n"})
    assert physical_memory_bytes(tmp_path) == 64 * MIB
    assert available_memory_bytes(tmp_path) == 24 * MIB


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", {"cgroup": "5:cpu:/x\n4:memory:/x\nnonsense\n"})
    files = {
        "memory.limit_in_bytes": f"{32 * MIB}\n",
        "memory.usage_in_bytes": f"{40 * MIB}\n",
        "memory.stat": f"cache 0\ntotal_inactive_file {MIB}\n",
    }
    group(tmp_path / "sys/fs/cgroup/memory", files)  # the path of the host is not there in a container
    assert physical_memory_bytes(tmp_path) == 32 * MIB
    assert available_memory_bytes(tmp_path) == 0


# --- the shell -------------------------------------------------------------------------------------------------------


def test_the_shell_fits_a_real_store_and_leaves_leases_alone() -> None:
    settings = resolve_settings(
        "cache", {"adaptive_cache": "1", "cache_gb": "2", "cache_min_gb": "0.001"}, environment={}
    ).settings
    reactor = Reactor(clock=lambda: 0.0)
    store = BlockStore(settings.cache_bytes, random_bytes=CountingBytes())
    model: list[int | None] = [None]
    budget = CacheBudget(reactor, settings, store, model_bytes=lambda: model[0])
    floor = int(0.001 * GIB)
    assert budget.section()[1]["physical_bytes"] == physical_memory_bytes(), "known before the model is"
    budget.measure(0.0)
    assert store.max_bytes == floor, "at the floor while the model is being loaded"
    model[0] = 0
    budget.measure(2.0)
    grown = min(2 * GIB, physical_memory_bytes() - 2 * GIB)
    assert store.max_bytes == grown
    parts = make_parts(make_chain(16 * 40), length_bytes=100_000)
    for part in parts:
        store.put(part, fingerprint=FINGERPRINT, now=2.0)
    store.lease([part.meta.ref for part in parts[:20]], 2.0, 60_000, fingerprint=FINGERPRINT)
    model[0] = 1 << 50
    budget.measure(4.0)
    assert store.max_bytes == 2_000_000, "leases hold more than the floor"
    assert all(store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in parts[:20])
    name, figures = budget.section()
    assert (name, figures["target_bytes"], figures["model_bytes"]) == ("budget", floor, 1 << 50)
    store.expire(63.0)
    budget.measure(64.0)
    assert store.max_bytes == floor
    reactor.close()


def test_a_large_cut_is_made_in_steps_that_the_node_can_answer_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemons.cache_budget.EVICTIONS_PER_STEP", 10)
    flags = {"adaptive_cache": "1", "cache_gb": "1", "cache_min_gb": "0.001", "memory_reserve_gb": "0"}
    settings = resolve_settings("cache", flags, environment={}).settings
    reactor = Reactor(clock=lambda: 0.0)
    store = BlockStore(settings.cache_bytes, random_bytes=CountingBytes())
    model = [0]
    budget = CacheBudget(reactor, settings, store, model_bytes=lambda: model[0])
    budget.measure(0.0)
    for part in make_parts(make_chain(16 * 45), length_bytes=1_000_000):
        store.put(part, fingerprint=FINGERPRINT, now=0.0)
    model[0] = 1 << 50
    now, left = 2.0, []
    while store.max_bytes > int(0.001 * GIB):
        budget.measure(now)
        left.append(store.stats().entry_count)
        stats = store.stats()
        assert stats.bytes_used <= stats.max_bytes
        assert budget._budget.deadline() - now < 0.1 or store.max_bytes == int(0.001 * GIB)
        now = budget._budget.deadline()
    assert left == [35, 25, 15, 5, 1]
    reactor.close()
