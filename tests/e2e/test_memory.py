"""Memory, threads and descriptors of the daemons: nothing grows over many requests, and an import costs no second copy."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import psutil
import pytest

from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, answer, ask, figure, prompt, wait_published
from wire.limits import MIB
from wire.messages import PrefillPolicy, SourceKind

REQUESTS = 200
WARM_UP = 60
WINDOW = 40
"""Requests in the windows whose medians are compared: the first after the warm-up, and the last."""
GROWTH_BYTES_MAX = 4 * MIB
"""Between the windows, 100 requests apart: 40 KB a request. The KV of one of these prompts is ten times that."""
STORE_GB = "0.004"
"""Small enough to be full, and evicting, before the warm-up is over: a store that fills up is no leak."""


@pytest.fixture(scope="module")
def fleet(empty_fleet: Fleet) -> Fleet:
    small = ("--cache-gb", STORE_GB)
    empty_fleet.start("primary", "worker", "cache", primary=small, worker=small, cache=small)
    empty_fleet.wait_all_joined()  # later connections among them are no growth
    return empty_fleet


@dataclass(frozen=True, slots=True)
class Sample:
    memory_bytes: int
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    process = psutil.Process(pid)
    with process.oneshot():
        return Sample(process.memory_info().rss, process.num_fds(), process.num_threads())


def test_nothing_grows_over_many_requests(fleet: Fleet) -> None:
    samples: dict[str, list[Sample]] = {name: [] for name in fleet.nodes}
    shared = prompt(300, seed=0)
    with fleet["primary"].client() as client:
        # A process's first zero-copy send makes pyzmq's collector, a thread and its sockets: each peer has it beforehand.
        answer(client, prompt(330, seed=1_000), 1, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        found = answer(client, prompt(330, seed=1_000), 1, use_local_cache=False, exclude_nodes=["worker"])
        assert SourceKind.REMOTE_CACHE in found.reused
        for number in range(REQUESTS):
            # In turn: by the worker, from whoever holds the shared beginning, computed here.
            policy = PrefillPolicy.LOCAL_ONLY if number % 3 == 2 else None
            tokens = prompt(350, seed=number) if number % 3 else shared + prompt(100, seed=number)
            with client.create_session(policy=policy, use_local_cache=number % 2 == 0) as session:
                ask(session, tokens, 4)
            for name, node in fleet.nodes.items():
                samples[name].append(sample(node.pid))
        wait_published(client)
        prefill = client.status().sections["prefill"]
        # It was this fleet's whole business that was measured.
        assert all(int(prefill[name] or 0) > 10 for name in ("remote_jobs", "remote_hits", "publish_successes"))
        assert int(client.status().sections["cache"]["evictions"] or 0) > 0
    for name, taken in samples.items():
        early, late = taken[WARM_UP : WARM_UP + WINDOW], taken[-WINDOW:]
        growth = statistics.median(s.memory_bytes for s in late) - statistics.median(s.memory_bytes for s in early)
        assert growth <= GROWTH_BYTES_MAX, f"{name} grew by {growth / MIB:.1f} MiB"
        # The least of a window: publishing goes on behind the requests, on a busy machine several at once.
        assert min(s.descriptors for s in late) <= min(s.descriptors for s in early) + 2, name
        assert min(s.threads for s in late) <= min(s.threads for s in early) + 1, name


def test_nothing_stays_open(fleet: Fleet) -> None:
    for node in fleet.nodes.values():
        with node.client() as client:
            rig.wait_idle(client)
            status = client.status()
        assert status.sections["cache"]["bytes_reserved"] == 0
        assert int(status.sections["cache"]["bytes_used"] or 0) <= float(STORE_GB) * 1024 * MIB
    with fleet["primary"].client() as client:
        assert figure(client, "primary", "sessions") == 0


def test_an_import_costs_less_than_a_second_copy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Peak above what the model and the session's own KV take stays under twice the snapshot that was imported."""
    tokens = prompt(2_200, seed=1)
    model = rig.model_folder(tmp_path_factory, "wide", **rig.WIDE)
    with Fleet(model, tmp_path_factory.mktemp("wide")) as fleet:
        fleet.start("primary", "worker")
        with fleet["primary"].client() as client:
            # A small prompt first: what the first import sets up once is not the snapshot's cost.
            with rig.worker_only(client) as session:
                ask(session, prompt(300, seed=2), 2)
            before_bytes = figure(client, "node", "memory_bytes")
            with rig.worker_only(client) as session:
                # The store of the primary would hold a copy of its own; here only the session does.
                said = ask(session, tokens, 2)
                kv_bytes = session.info().kv_bytes
                peak_bytes = figure(client, "node", "memory_peak_bytes")
    assert said.reused == {SourceKind.WORKER: len(tokens) - 1}
    snapshot_bytes = sum(source.transfer_bytes for source in said.appended.explanation.sources)
    assert snapshot_bytes >= 64 * MIB
    above_bytes = peak_bytes - before_bytes - kv_bytes
    assert above_bytes < 2 * snapshot_bytes, f"{above_bytes / MIB:.0f} MiB for {snapshot_bytes / MIB:.0f} MiB"
