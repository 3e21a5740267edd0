"""Acceptance of the two-Mac profile: each line of the runbook's list, on two machines that are network namespaces.

The daemons run as their property lists say (tests/deploy/two_macs.py). The head's policy is the profile's remote-required;
sessions that must show a fallback ask for local-fallback.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kakeya_zmq.client import Client, Session
from tests import fleet_rig as rig
from tests.deploy.service_rig import PROJECT
from tests.deploy.two_macs import (
    BULK_PORTS,
    GOSSIP_INTERVAL_S,
    HEAD_ID,
    TTL_S,
    WORKER,
    WORKER_ID,
    TwoMacs,
)
from tests.faults.requests import COUNT, Asking
from tests.fleet_rig import BLOCK_TOKENS, Answer, Reference, ask, figure, prompt, wait_until
from tests.namespaces import Star, required
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillPolicy, SourceKind, Status

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]
MANUAL = PROJECT / "docs" / "operations.md"
ANSWER_S = 30.0
LONG_PROMPT = 6_000
"""Tokens: some seconds of the worker's time, so that it can be killed in the middle."""
LONG_ANSWER = 20_000
"""Tokens: never all asked for."""
DECODED_MIN = 150
COMPUTE_HERE = "compute here"
SEEDS = itertools.count(10_000)
"""Of prompts that nobody has seen."""


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMacs]:
    required()
    home, kept = tmp_path_factory.mktemp("macs"), rig.kept_processes(request)
    with Star("head", "worker") as star, TwoMacs(star, model, home, kept) as macs:
        yield macs


@pytest.fixture
def macs(running: TwoMacs) -> Iterator[TwoMacs]:
    running.heal()
    prove(running)
    yield running
    running.show_logs()


def prove(macs: TwoMacs) -> None:
    """Have a job done: a worker that has not proven itself to a head is left alone for a while after whatever goes wrong."""
    with macs.head.client() as client:

        def used() -> bool:
            return SourceKind.WORKER in asked(client, prompt(300, next(SEEDS)), publish=False).reused

        wait_until(used, "the worker is used")


def asked(client: Client, tokens: list[int], **options: Any) -> Answer:
    """One prompt in a session of its own, which may fall back to the head, and does not look into the head's own cache."""
    with client.create_session(**{"policy": PrefillPolicy.LOCAL_FALLBACK, "use_local_cache": False, **options}) as session:
        return ask(session, tokens, COUNT, ANSWER_S)


def costs(said: Answer) -> dict[str, float]:
    """What each way to compute a prompt that nobody holds was estimated at, in milliseconds."""
    return dict(said.appended.explanation.decisions[0].costs_ms)


# --- both node cards appear within two gossip intervals; stale nodes disappear after TTL ----------------------------------


def test_a_dead_node_is_gone_after_its_ttl_and_listed_within_two_intervals_of_its_return(
    macs: TwoMacs,
) -> None:
    agent = macs.worker.agents[WORKER]
    age_s = macs.card_of(WORKER_ID, macs.head)["card_age_ms"] / 1000
    died_at = time.monotonic()
    agent.kill()
    wait_until(lambda: not macs.card_of(WORKER_ID, macs.head), "the dead worker is not listed any more", 2 * TTL_S)
    assert time.monotonic() - died_at >= TTL_S - age_s - 1, "it was dropped long before its time"
    wait_until(lambda: macs.shown().keys() == {HEAD_ID}, "the dashboard has forgotten it, too", TTL_S)
    agent.load()
    macs.worker.wait_serving(WORKER)
    macs.wait_known(2 * GOSSIP_INTERVAL_S)
    roles = {name: set(row["roles"]) for name, row in macs.shown().items()}
    assert roles == {HEAD_ID: {"primary"}, WORKER_ID: {"worker", "cache-holder"}}


# --- remote failure falls back to local prefill ----------------------------------------------------------------------------


def test_with_the_cable_pulled_prompts_are_computed_here(macs: TwoMacs, reference: Reference) -> None:
    macs.star.cut("worker")
    with macs.head.client() as client:
        tokens = prompt(500, seed=1)
        said = asked(client, tokens)
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
        assert "worker" in said.reasons
        with pytest.raises(RequestFailed) as caught, client.create_session() as session:
            session.append(prompt(500, seed=2), timeout_s=ANSWER_S)
        assert caught.value.code is FailureCode.UNAVAILABLE
        assert "worker" in str(caught.value)


# --- remote lookup returns the longest available chained-prefix snapshot ---------------------------------------------------


def test_the_longest_held_prefix_is_used(macs: TwoMacs, reference: Reference) -> None:
    whole, shorter, longer = prompt(1_000, seed=3), 200, 700
    with macs.head.client() as client, macs.worker.client() as worker:
        for length in (shorter, longer):
            assert SourceKind.WORKER in asked(client, whole[:length]).reused
            macs.wait_contents_told()
        before, computed = client.status(), figure(worker, "prefill", "job_tokens_computed")
        assert_served_from_what_is_held(macs, reference, whole[:longer])
        # Longer than all that is held: only what is beyond the longest of it is computed, by whichever machine.
        said = asked(client, whole)
        assert said.tokens == reference.answer(whole, COUNT)
        here = growth(before, client.status())["tokens_computed"]
        there = figure(worker, "prefill", "job_tokens_computed") - computed
    beyond = len(whole) - longer
    assert beyond <= here + there <= beyond + BLOCK_TOKENS


# --- imported snapshot checksum and compatibility fingerprint match --------------------------------------------------------


def test_kv_with_a_wrong_checksum_is_refused(macs: TwoMacs, reference: Reference) -> None:
    """Also: import rejection resets the verifier and performs full local prefill; afterwards the worker is used again."""
    tokens = prompt(600, seed=4)
    macs.change_worker(macs.install_worker().play("tests.faults.rogue_cache", "wrong-bytes"))
    with macs.head.client() as client:
        before = client.status()
        said = asked(client, tokens)
        grown = growth(before, client.status())
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
        assert grown["parts_refused"] + grown["fetch_failures"] + grown["remote_job_failures"] > 0
        assert (grown["fallbacks"] > 0, grown["tokens_reused"]) == (True, 0)
        assert WORKER_ID in said.reasons
    macs.heal()
    assert_used(macs, reference, seed=5)


def test_a_worker_of_another_namespace_is_not_used(macs: TwoMacs, reference: Reference) -> None:
    tokens = prompt(600, seed=6)
    macs.change_worker(macs.install_worker(KAKEYA_CACHE_COMPRESSION="zlib"))
    with macs.head.client() as client, macs.worker.client() as worker:
        before = client.status()
        said = asked(client, tokens)
        grown = growth(before, client.status())
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
        assert f"{WORKER_ID} is not compatible: cache_format_version differ" in said.reasons
        assert (grown["remote_jobs"], grown["bytes_received"], grown["bytes_published"]) == (0, 0, 0)
        assert figure(worker, "cache", "entry_count") == 0
        explained = macs.head.run("explain", "--address", f"{macs.head.address}:{macs.head.port}")
        assert "cache_format_version" in explained


# --- a cache miss is assigned to a compatible worker when its estimate beats blocking the primary --------------------------


def test_a_miss_goes_to_the_worker_when_that_is_cheaper(macs: TwoMacs, reference: Reference) -> None:
    tokens = prompt(900, seed=7)
    with macs.head.client() as client:
        said = asked(client, tokens)
    assert said.tokens == reference.answer(tokens, COUNT)
    assert said.reused == {SourceKind.WORKER: len(tokens) - 1}
    estimated = costs(said)
    assert estimated[f"worker {WORKER_ID}"] < estimated[COMPUTE_HERE]
    assert said.appended.explanation.decisions[0].chosen == f"worker {WORKER_ID}"


def test_a_miss_is_computed_here_when_the_worker_does_not_pay(macs: TwoMacs, reference: Reference) -> None:
    """Blocking costs nothing now, and a machine that is not ten times as fast does not pay."""
    ratio = 0.9
    macs.change_head(f"primary_prefill_penalty_ms = 0\nprefill_min_savings_ratio = {ratio}\n")
    tokens = prompt(900, seed=8)
    with macs.head.client() as client:
        before = client.status()
        said = asked(client, tokens)
        assert growth(before, client.status())["remote_jobs"] == 0
    assert said.tokens == reference.answer(tokens, COUNT)
    assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
    estimated = costs(said)
    assert estimated[f"worker {WORKER_ID}"] > (1 - ratio) * estimated[COMPUTE_HERE]
    assert "does not pay" in said.reasons


# --- no remote RPC occurs in autoregressive decode -------------------------------------------------------------------------


def test_decoding_asks_the_fleet_for_nothing(macs: TwoMacs, reference: Reference) -> None:
    tokens = prompt(500, seed=9)
    with macs.head.client() as client, macs.head.client() as watcher, macs.worker.client() as worker:
        with client.create_session(policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=False) as session:
            session.append(tokens, timeout_s=ANSWER_S)
            rig.wait_published(watcher)
            asked_before = asked_so_far(worker.status())
            decoded, between = decoded_meanwhile(session, watcher, macs)
            assert asked_so_far(worker.status()) == asked_before, "the worker was asked"
        first, last = between
        assert first.sections["primary"]["decoding"]
        assert last.sections["primary"]["decoding"]
        assert requests_so_far(last) == requests_so_far(first), "the head asked"
    assert decoded == reference.answer(tokens, len(decoded))


def decoded_meanwhile(session: Session, watcher: Client, macs: TwoMacs) -> tuple[list[int], tuple[Status, Status]]:
    """Tokens of an answer, and two looks at the head in the middle of it; in the end without a cable."""
    answer = session.generate(LONG_ANSWER, inter_token_timeout_s=ANSWER_S)
    decoded = [next(answer)]
    first = watcher.status()
    while len(decoded) < DECODED_MIN:
        decoded.append(next(answer))
    last = watcher.status()
    macs.star.cut("worker")
    try:
        for _ in range(DECODED_MIN):
            decoded.append(next(answer))
    finally:
        macs.star.mend("worker")
        answer.close()
    return decoded, (first, last)


def requests_so_far(status: Status) -> dict[str, int]:
    """What a node has said to others but for gossip, which goes on by itself."""
    node = status.sections["node"]
    exchanges = int(node["fleet_exchanges"] or 0)
    said = {name: int(node[name] or 0) for name in ("fleet_updates", "fleet_cancels", "lanes_opened")}
    return {**said, "requests": int(node["fleet_requests"] or 0) - exchanges}


def asked_so_far(status: Status) -> dict[str, int]:
    """What a worker was asked so far, by its own count."""
    cache = {name: int(status.sections["cache"][name] or 0) for name in ("lookup_hits", "lookup_misses", "bytes_served")}
    return {**cache, "lanes_opened": int(status.sections["node"]["lanes_opened"] or 0)}


# --- worker failure or timeout resets the verifier and performs full local prefill -----------------------------------------


def test_a_worker_that_dies_is_replaced_and_used_again(macs: TwoMacs, reference: Reference) -> None:
    agent = macs.worker.agents[WORKER]
    tokens = prompt(LONG_PROMPT, seed=10)
    with macs.head.client() as client:
        before = client.status()
        request = Asking(client, tokens, 2 * ANSWER_S, policy=PrefillPolicy.LOCAL_FALLBACK, use_local_cache=False)
        assert request.working.wait(ANSWER_S), "the worker has computed something"
        os.kill(agent.pid, signal.SIGKILL)
        said = request.result()
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused.get(SourceKind.COMPUTED, 0) > 0
        grown = growth(before, client.status())
        assert (grown["remote_job_failures"], grown["fallbacks"] > 0) == (1, True)
    starts = agent.starts
    assert agent.process is not None
    agent.process.wait(ANSWER_S)
    wait_until(lambda: agent.keep() and agent.starts == starts + 1, "launchd starts it again")
    macs.worker.wait_serving(WORKER)
    macs.wait_known()
    assert_used(macs, reference, seed=11)


def test_a_worker_with_shut_bulk_ports_is_left_alone_and_used_again(macs: TwoMacs, reference: Reference) -> None:
    rule = ("rule", "{}", "ipproto", "tcp", "dport", BULK_PORTS, "prohibit")
    ip = ("ip", "-n", macs.star.middle.name)
    added = [*ip, *(word.format("add") for word in rule)]
    if subprocess.run(added, capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no routing by port")
    try:
        with macs.head.client() as client:
            for seed in (12, 13):
                tokens = prompt(400, seed=seed)
                said = asked(client, tokens)
                assert said.tokens == reference.answer(tokens, COUNT)
                assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
            assert f"{WORKER_ID} is left alone for" in said.reasons.replace("was", "is")
    finally:
        subprocess.run([*ip, *(word.format("del") for word in rule)], check=True)

    def used_again() -> bool:
        with macs.head.client() as client:
            return SourceKind.WORKER in asked(client, prompt(400, seed=time.time_ns() % 1_000_000)).reused

    wait_until(used_again, "the pause is over, and the worker is used", 60)
    assert_used(macs, reference, seed=14)


def assert_used(macs: TwoMacs, reference: Reference, seed: int) -> None:
    """The worker computes a new prompt, and what it holds since then serves the same one again."""
    tokens = prompt(600, seed=seed)
    with macs.head.client() as client:
        said = asked(client, tokens, policy=PrefillPolicy.REMOTE_REQUIRED)
    assert said.tokens == reference.answer(tokens, COUNT)
    assert said.reused == {SourceKind.WORKER: len(tokens) - 1}
    macs.wait_contents_told()
    assert_served_from_what_is_held(macs, reference, tokens)


def assert_served_from_what_is_held(macs: TwoMacs, reference: Reference, tokens: list[int]) -> None:
    """All of it comes from the other machine, by a fetch or a job, and not a token is computed."""
    with macs.head.client() as client, macs.worker.client() as worker:
        before, computed = client.status(), figure(worker, "prefill", "job_tokens_computed")
        said = asked(client, tokens, policy=PrefillPolicy.REMOTE_REQUIRED)
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused.keys() <= {SourceKind.REMOTE_CACHE, SourceKind.WORKER}
        assert sum(said.reused.values()) == len(tokens) - 1
        assert growth(before, client.status())["tokens_computed"] == 0
        assert figure(worker, "prefill", "job_tokens_computed") == computed


# --- completed and KV-assisted token counters increase after live calls ----------------------------------------------------


def test_counters_grow_and_the_dashboard_shows_them(macs: TwoMacs) -> None:
    names = ("remote_jobs", "remote_hits", "local_hits", "tokens_reused", "tokens_generated")
    tokens = prompt(600, seed=15)
    with macs.head.client() as client:

        def figures() -> dict[str, int]:
            return {name: figure(client, "prefill", name) for name in names}

        def shown() -> dict[str, int]:
            counted, prefill = macs.get("/v1/network/tokens"), macs.get("/v1/network/prefill")
            assert counted["kv_assisted"] == prefill["tokens_reused"]
            return {**{name: prefill[name] for name in names[:-1]}, "tokens_generated": counted["completed"]}

        macs.wait_shown_now()
        before, shown_before = figures(), shown()
        # A new prompt, the same from what the worker holds, and, since it went through the own cache, once more from there.
        for use_local_cache in (False, True, True):
            asked(client, tokens, policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=use_local_cache)
            macs.wait_contents_told()
        after = figures()
        macs.wait_shown_now()
        shown_after = shown()
    grown = {name: after[name] - before[name] for name in names}
    assert {name: shown_after[name] - shown_before[name] for name in names} == grown
    assert grown.pop("remote_jobs") in (1, 2), "what the worker holds comes by a fetch or a job"
    assert grown == {
        "remote_hits": 2,
        "local_hits": 1,
        "tokens_reused": 3 * (len(tokens) - 1),
        "tokens_generated": 3 * COUNT,
    }
    assert macs.get("/v1/network/summary")["online_nodes"] == 2


def growth(before: Status, after: Status) -> dict[str, int]:
    """By how much the counters of section ``prefill`` have grown."""
    old, new = before.sections["prefill"], after.sections["prefill"]
    found = {name: int(value) - int(old.get(name) or 0) for name, value in new.items() if isinstance(value, int)}
    return {**dict.fromkeys(("parts_refused", "fetch_failures", "remote_job_failures"), 0), **found}


def test_the_manual_names_the_tests_of_this_file() -> None:
    named = set(re.findall(r"`(test_\w+)`", MANUAL.read_text(encoding="utf-8")))
    here = {name for name in globals() if name.startswith("test_")}
    assert named == here - {"test_the_manual_names_the_tests_of_this_file"}
