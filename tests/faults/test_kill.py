"""Processes of the fleet are killed, or stop answering, at every step of a request: the answer is that of a cold run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.fleet_rig import Answer, Fleet, Reference, answer, ask, prompt, wait_published, wait_until
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillProgress, SourceKind

COUNT = 16
LONG = 4_000
DEADLINE_S = 60.0
"""Above every timeout that the primary of the rig is started with, taken together."""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
SIGNALS = [pytest.param(KILL, id="killed"), pytest.param(STOP, id="frozen")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.model_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with rig.kept_fleet(request, folder, tmp_path_factory.mktemp("fleet")) as fleet:
        quick = ("--cache-lookup-timeout-s", "1", "--cache-fetch-timeout-s", "3", "--prefill-worker-timeout-s", "6")
        fleet.start("primary", "worker", "cache", primary=quick)
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Iterator[Fleet]:
    running.heal()
    yield running
    running.show_logs()


class Appending:
    """An append and a generation on a thread of their own, so that the test can act meanwhile."""

    def __init__(self, client: Client, tokens: list[int], **options: Any) -> None:
        self._client = client
        self._tokens = tokens
        self._options = options
        self._found: Answer | BaseException | None = None
        self.working = threading.Event()
        """Set with the first sign that a worker computes."""
        self._thread = threading.Thread(target=self._run, name="appending")
        self._thread.start()

    def _run(self) -> None:
        def progressed(progress: PrefillProgress) -> None:
            if progress.source is SourceKind.WORKER and progress.tokens_done > 0:
                self.working.set()

        try:
            with self._client.create_session(**self._options) as session:
                self._found = ask(session, self._tokens, COUNT, DEADLINE_S, on_progress=progressed)
        except BaseException as error:  # whatever it was, the test's thread must see it
            self._found = error

    def result(self) -> Answer:
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), "the request hangs"
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found


def prefill(client: Client) -> dict[str, Any]:
    return dict(client.status().sections["prefill"])


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
@pytest.mark.parametrize("victims", [("worker",), ("worker", "cache")], ids=["worker", "both"])
def test_while_the_worker_computes(
    fleet: Fleet, reference: Reference, victims: tuple[str, ...], number: signal.Signals
) -> None:
    tokens = prompt(LONG, seed=1_000 + number + 100 * len(victims))
    with fleet["primary"].client() as client:
        failures = rig.figure(client, "prefill", "remote_job_failures")
        request = Appending(client, tokens)
        assert request.working.wait(DEADLINE_S)
        hit(fleet, victims, number)
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
        running = Appending(client, first)
        assert running.working.wait(DEADLINE_S)
        waiting = Appending(client, second)
        wait_until(lambda: rig.figure(worker, "worker", "queued_jobs") >= 1, "a job waits")
        hit(fleet, ("worker",), number)
        said = [running.result(), waiting.result()]
        assert [found.tokens for found in said] == [reference.answer(tokens, COUNT) for tokens in (first, second)]
        assert all("worker" in found.reasons for found in said)
        assert rig.figure(client, "prefill", "remote_job_failures") == failures + 2
        assert_healthy(fleet, client)


# --- a lookup and a fetch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("victims", [("cache",), ("worker", "cache")], ids=["cache", "both"])
def test_while_caches_are_asked(
    fleet: Fleet, reference: Reference, victims: tuple[str, ...], number: signal.Signals
) -> None:
    tokens = prompt(900, seed=3_000 + number + 100 * len(victims))
    with fleet["primary"].client() as client:
        seed_caches(fleet, client, tokens)
        rig.wait_idle(client)
        # Frozen first, so that the question is certainly open when the process dies.
        hit(fleet, victims, STOP)
        excluded = [] if "worker" in victims else ["worker"]
        request = Appending(client, tokens, use_local_cache=False, exclude_nodes=excluded)
        wait_until(lambda: rig.figure(client, "node", "open_asks") >= len(victims), "the caches are being asked")
        hit(fleet, victims, number)
        said = request.result()
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
        assert all(f"cache {node}" in said.reasons for node in victims)
        assert told(client, "cache cache")
        assert_healthy(fleet, client)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_parts_are_fetched(fleet: Fleet, reference: Reference, number: signal.Signals) -> None:
    tokens = prompt(LONG, seed=4_000 + number)
    with fleet["primary"].client() as client:
        seed_caches(fleet, client, tokens)
        before = prefill(client)
        request = Appending(client, tokens, use_local_cache=False, exclude_nodes=["worker"])
        wait_until(lambda: rig.figure(client, "prefill", "fetches") > before.get("fetches", 0), "a fetch began")
        hit(fleet, ("cache",), number)
        said = request.result()
        after = prefill(client)
        done = {
            name: after.get(name, 0) - before.get(name, 0) for name in ("fetches", "fetches_completed", "fetch_failures")
        }
        assert said.tokens == reference.answer(tokens, COUNT)
        # The signal may have come after the last byte; that a fetch did break off is tests/faults/test_corruption.py's part.
        assert done["fetches_completed"] + done["fetch_failures"] == done["fetches"] > 0
        assert_healthy(fleet, client)


# --- publishing and decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_while_new_kv_is_published(fleet: Fleet, reference: Reference, number: signal.Signals) -> None:
    tokens = prompt(900, seed=5_000 + number)
    with fleet["primary"].client() as client, client.create_session() as session:
        rig.wait_idle(client)
        before = prefill(client)
        hit(fleet, ("cache",), STOP)
        said = ask(session, tokens, COUNT)
        wait_until(lambda: prefill(client)["publish_attempts"] > before["publish_attempts"], "publishing began")
        hit(fleet, ("cache",), number)
        # Nobody waits for it: the conversation goes on.
        history = tokens + said.tokens
        more = ask(session, prompt(50, seed=5_100), COUNT)
        assert said.tokens == reference.answer(tokens, COUNT)
        assert more.tokens == reference.answer(history + prompt(50, seed=5_100), COUNT)
        wait_until(lambda: prefill(client)["publish_failures"] > before["publish_failures"], "the failure is counted", 40)
        assert "publish to cache" in prefill(client)["last_publish_error"]
        assert_healthy(fleet, client)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_tokens_are_decoded(fleet: Fleet, reference: Reference, number: signal.Signals) -> None:
    tokens = prompt(600, seed=6_000 + number)
    with fleet["primary"].client() as client, client.create_session() as session:
        session.append(tokens, timeout_s=DEADLINE_S)
        found: list[int] = []
        for token in session.generate(200, inter_token_timeout_s=DEADLINE_S):
            found.append(token)
            if len(found) == 20:
                hit(fleet, ("worker", "cache"), number)
        assert found == reference.answer(tokens, 200)
        for node in ("worker", "cache"):
            wait_until(partial(told, client, node, "lost"), f"the status tells that {node} is lost")
        assert_healthy(fleet, client)


# --- the primary -----------------------------------------------------------------------------------------------------


def test_the_primary_itself_dies_and_finds_everything_again(fleet: Fleet, reference: Reference) -> None:
    tokens = prompt(LONG, seed=7_000)
    with fleet["primary"].client() as client:
        request = Appending(client, tokens)
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
