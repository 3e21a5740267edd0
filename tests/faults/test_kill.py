"""Several processes are killed, or stop answering, at once; a job dies while it waits; the primary itself dies.

One process at each step is the fault matrix's part (test_matrix.py).
"""

from __future__ import annotations

import signal

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.faults.requests import COUNT, Asking
from tests.fleet_rig import Fleet, Reference, answer, ask, prompt, wait_published, wait_until
from wire.errors import FailureCode, RequestFailed
from wire.messages import SourceKind

LONG = 4_000
DEADLINE_S = 60.0
"""Above every timeout that the primary of the rig is started with, taken together."""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
BOTH = ("worker", "cache")
SIGNALS = [pytest.param(KILL, id="killed"), pytest.param(STOP, id="frozen")]


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    quick = ("--cache-lookup-timeout-s", "1", "--cache-fetch-timeout-s", "3", "--prefill-worker-timeout-s", "6")
    empty_fleet.start("primary", "worker", "cache", primary=quick)
    return empty_fleet


def hit(fleet: Fleet, nodes: tuple[str, ...], number: signal.Signals) -> None:
    for node in nodes:
        fleet[node].signal(number)


def seed_caches(fleet: Fleet, client: Client, tokens: list[int]) -> None:
    """Let the worker compute a prompt and the cache peer get a copy; the primary itself keeps nothing."""
    with rig.worker_only(client) as session:
        ask(session, tokens, COUNT)
    wait_published(client)
    for node in ("worker", "cache"):
        fleet.wait_card(node, lambda row: row["cache_entries"] > 0, f"the card of {node} tells of its contents")


def assert_healthy(fleet: Fleet, client: Client) -> None:
    """Nothing is left open, and once everybody is back the fleet serves again."""
    fleet.heal()
    rig.wait_idle(client)
    with rig.worker_only(client) as session:
        assert ask(session, prompt(200, seed=999), 2).reused.keys() <= {SourceKind.WORKER, SourceKind.REMOTE_CACHE}


def told(client: Client, *words: str) -> bool:
    """Whether a line among the recent events has all these words."""
    return any(all(word in line for word in words) for line in client.status().recent)


# --- a job -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_worker_computes(fleet: Fleet, reference: Reference, number: signal.Signals) -> None:
    tokens = prompt(LONG, seed=1_000 + number)
    with fleet["primary"].client() as client:
        failures = rig.figure(client, "prefill", "remote_job_failures")
        request = Asking(client, tokens, DEADLINE_S)
        assert request.working.wait(DEADLINE_S)
        hit(fleet, BOTH, number)
        said = request.result()
        assert said.tokens == reference.answer(tokens, COUNT)
        # What had arrived is kept, the rest is computed here.
        assert 0 < said.reused[SourceKind.COMPUTED] <= LONG - 1
        assert "worker" in said.reasons
        assert rig.figure(client, "prefill", "remote_job_failures") == failures + 1
        assert told(client, "worker worker")
        assert_healthy(fleet, client)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_a_job_waits_in_the_queue(fleet: Fleet, reference: Reference, number: signal.Signals) -> None:
    first, second = prompt(LONG, seed=2_000 + number), prompt(700, seed=2_100 + number)
    with fleet["primary"].client() as client, fleet["worker"].client() as worker:
        failures = rig.figure(client, "prefill", "remote_job_failures")
        running = Asking(client, first, DEADLINE_S)
        assert running.working.wait(DEADLINE_S)
        waiting = Asking(client, second, DEADLINE_S)
        wait_until(lambda: rig.figure(worker, "worker", "queued_jobs") >= 1, "a job waits")
        hit(fleet, ("worker",), number)
        said = [running.result(), waiting.result()]
        assert [found.tokens for found in said] == [reference.answer(tokens, COUNT) for tokens in (first, second)]
        assert all("worker" in found.reasons for found in said)
        assert rig.figure(client, "prefill", "remote_job_failures") == failures + 2
        assert_healthy(fleet, client)


# --- a lookup --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_while_caches_are_asked(fleet: Fleet, reference: Reference, number: signal.Signals) -> None:
    tokens = prompt(900, seed=3_000 + number)
    with fleet["primary"].client() as client:
        seed_caches(fleet, client, tokens)
        rig.wait_idle(client)
        # Frozen first, so that the question is certainly open when the process dies.
        hit(fleet, BOTH, STOP)
        request = Asking(client, tokens, DEADLINE_S, use_local_cache=False)
        wait_until(lambda: rig.figure(client, "node", "open_asks") >= len(BOTH), "the caches are being asked")
        hit(fleet, BOTH, number)
        said = request.result()
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
        assert all(f"cache {node}" in said.reasons for node in BOTH)
        assert told(client, "cache cache")
        assert_healthy(fleet, client)


# --- the primary -----------------------------------------------------------------------------------------------------


def test_the_primary_itself_dies_and_finds_everything_again(fleet: Fleet, reference: Reference) -> None:
    tokens = prompt(LONG, seed=7_000)
    with fleet["primary"].client() as client:
        request = Asking(client, tokens, DEADLINE_S)
        assert request.working.wait(DEADLINE_S)
        fleet["primary"].kill()
        with pytest.raises(RequestFailed) as caught:
            request.result()
        assert caught.value.code is FailureCode.UNAVAILABLE
    # The worker notices that nobody wants its job any more, and keeps what it has computed.
    with fleet["worker"].client() as worker:
        wait_until(lambda: rig.figure(worker, "worker", "running_jobs") == 0, "the job has ended")
    fleet.heal()
    with fleet["primary"].client() as client:
        fleet.wait_card("worker", lambda row: row["cache_entries"] > 0, "the worker's card tells of its contents")
        said = answer(client, tokens, COUNT)
    assert said.tokens == reference.answer(tokens, COUNT)
    assert SourceKind.COMPUTED not in said.reused
