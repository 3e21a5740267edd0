"""Telemetry of real processes, as a reader sees it who holds the telemetry key and nothing else."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq

from kakeya_zmq.client import Client
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.bus_publisher import Publisher
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.kvfs import namespaces
from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, ask, prompt, wait_published, wait_until
from tests.loopback.reactor_kit import node, run_until
from wire.bus import BusMessage, Topic
from wire.errors import RequestFailed
from wire.events import (
    Event,
    EvictionEvent,
    JobEvent,
    NodeSnapshot,
    RequestEvent,
    SecurityEvent,
    TransferEvent,
    decode_event,
)
from wire.keys import FleetKey, TelemetryKey, write_secret_file
from wire.messages import PrefillPolicy, PrefillProgress

TELEMETRY = tuple(topic for topic in Topic if topic.group.value == "telemetry")
WAIT_S = 30.0


@pytest.fixture(scope="module")
def fleet(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", "cache")
    empty_fleet.launch(empty_fleet.add("primary", "--cache-gb", "0.001", name="small"))
    return empty_fleet


class Reader:
    """A subscriber that follows the buses it is told of, with everything it heard."""

    def __init__(self, fleet: Fleet, *topics: Topic, follow: bool = True) -> None:
        self.heard: list[tuple[str, Event]] = []
        self.payloads: list[bytes] = []
        self._follow = follow
        self._reactor = Reactor()
        # The file that a dashboard would hold: no PSK in it.
        file = fleet.home / "telemetry.key"
        if not file.exists():
            write_secret_file(file, FleetKey.load(fleet.psk_file).telemetry_key().to_text())
        key = TelemetryKey.load(file)
        self._subscriber = Subscriber(self._reactor, keys=key, topics=topics or TELEMETRY, on_message=self._message)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()
        assert self._reactor.callback_errors == 0
        self._reactor.close()

    def connect(self, address: str) -> None:
        self._subscriber.connect(parse_address(address))

    def _message(self, message: BusMessage) -> None:
        event = decode_event(message.topic, message.payload)
        self.payloads.append(message.payload)
        self.heard.append((message.node_id, event))
        if self._follow and isinstance(event, NodeSnapshot):
            for peer in event.peers:
                if peer.bus_address:
                    self.connect(peer.bus_address)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Listen until a condition on what was heard holds."""
        deadline = time.monotonic() + WAIT_S

        def check() -> None:
            if condition() or time.monotonic() > deadline:
                self._reactor.stop()
            else:
                self._reactor.call_later(0.005, check)

        check()
        self._reactor.run()
        assert condition(), (
            f"not heard within {WAIT_S:.0f} s: {what}; heard {[(n, type(e).__name__) for n, e in self.heard]}"
        )

    def snapshots(self, node: str) -> list[NodeSnapshot]:
        return [event for name, event in self.heard if name == node and isinstance(event, NodeSnapshot)]

    def jobs(self, node: str) -> list[JobEvent]:
        return [event for name, event in self.heard if name == node and isinstance(event, JobEvent)]

    def requests(self, operation: str) -> list[RequestEvent]:
        return [e for _, e in self.heard if isinstance(e, RequestEvent) and e.operation == operation]

    def transfers(self, node: str) -> list[TransferEvent]:
        return [event for name, event in self.heard if name == node and isinstance(event, TransferEvent)]


def bus_of(fleet: Fleet, node: str) -> str:
    return f"127.0.0.1:{fleet[node].status().sections['node']['bus_port']}"


def test_a_reader_with_the_telemetry_key_sees_the_fleet_work(fleet: Fleet) -> None:
    with Reader(fleet) as reader, fleet["primary"].client() as client:
        reader.connect(bus_of(fleet, "primary"))
        nodes = ("primary", "worker", "cache")
        # It knows one bus; the others it learns of.
        reader.until(lambda: all(reader.snapshots(node) for node in nodes), "a snapshot of every node")
        tokens = prompt(2_000, seed=1)
        with rig.worker_only(client) as session:
            said = ask(session, tokens, 12)
        wait_published(client)
        reader.until(lambda: any(job.state == "completed" for job in reader.jobs("worker")), "the job's end")
        reader.until(lambda: bool(reader.requests("append") and reader.requests("generate")), "both requests")
        purposes = [
            ("worker", "out", "job"),
            ("primary", "in", "job"),
            ("primary", "out", "publish"),
            ("cache", "in", "publish"),
        ]
        for node, direction, purpose in purposes:
            reader.until(
                lambda node=node, wanted=(direction, purpose): any(  # type: ignore[misc]
                    (t.direction, t.purpose) == wanted for t in reader.transfers(node)
                ),
                f"{node}: {purpose} {direction}",
            )

        jobs = reader.jobs("worker")
        assert len({job.job_id for job in jobs}) == 1
        assert jobs[0].state == "queued"
        assert "running" in {job.state for job in jobs}
        assert [job.tokens_done for job in jobs] == sorted(job.tokens_done for job in jobs)
        final = jobs[-1]
        assert (final.state, final.tokens_done, final.tokens_total) == ("completed", 1_999, 1_999)
        assert final.asker == "primary"
        assert final.place == "worker"
        assert final.tokens_per_second > 0

        (append,) = reader.requests("append")
        assert append.outcome == "ready"
        assert append.source == "worker"
        assert append.prompt_tokens == 2_000
        assert append.boundary == 1_999
        assert [(s.kind, s.start, s.end, s.node_id) for s in append.sources] == [("worker", 0, 1_999, "worker")]
        assert append.transfer_bytes == sum(s.transfer_bytes for s in said.appended.explanation.sources) > 0
        (generate,) = reader.requests("generate")
        assert generate.append_id == append.request_id
        assert generate.generated_tokens == 12
        assert generate.stop_reason == "max_tokens"
        assert generate.ttft_ms > append.elapsed_ms
        assert generate.decode_tokens_per_second > 0

        (received,) = [t for t in reader.transfers("primary") if t.purpose == "job"]
        (sent,) = [t for t in reader.transfers("worker") if t.purpose == "job"]
        assert received.ok
        assert sent.ok
        assert (received.peer, sent.peer) == ("worker", "primary")
        assert received.payload_bytes == sent.payload_bytes == append.transfer_bytes
        assert received.parts == sent.parts > 0
        check_secrets(reader, fleet, tokens)


def check_secrets(reader: Reader, fleet: Fleet, tokens: list[int]) -> None:
    """Nothing that was heard names an address outside of snapshots, a digest of blocks, a key or a session."""
    key = fleet.psk_file.read_text(encoding="utf-8").strip()
    for _, event in reader.heard:
        text = msgspec.json.encode(event).decode()
        assert key not in text
        assert "sess-" not in text
        assert "token_ids" not in text
        if not isinstance(event, NodeSnapshot):
            assert "127.0.0.1" not in text
    packed = b"".join(token.to_bytes(4, "little") for token in tokens[:16])
    assert not any(packed in payload for payload in reader.payloads)


class LongAppend:
    """An append that keeps the worker busy, in a thread, until it is told to stop."""

    def __init__(self, client: Client) -> None:
        self._session = rig.worker_only(client)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LongAppend:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cancel it; returns when it has ended."""
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(InterruptedError, RequestFailed):
            self._session.append(prompt(30_000, seed=3), on_progress=self._progress, timeout_s=WAIT_S)

    def _progress(self, progress: PrefillProgress) -> None:
        if self._stop.is_set():
            raise InterruptedError


def test_a_late_reader_gets_the_present_state_at_once(fleet: Fleet) -> None:
    with fleet["primary"].client() as client:
        with client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
            ask(session, prompt(300, seed=2), 4)
        kept = client.requests(50)
        assert kept[-1].operation == "generate"
        with Reader(fleet, Topic.NODE, Topic.JOB, Topic.REQUEST, follow=False) as reader, LongAppend(client) as append:
            with fleet["worker"].client() as worker:
                wait_until(lambda: rig.figure(worker, "worker", "running_jobs") == 1, "the job runs")
            reader.connect(bus_of(fleet, "worker"))
            reader.until(lambda: bool(reader.snapshots("worker")), "the worker's snapshot")
            reader.until(lambda: bool(reader.jobs("worker")), "the running job")
            reader.connect(bus_of(fleet, "primary"))
            reader.until(lambda: len(reader.requests("generate")) > 0, "former requests")
            append.stop()
            reader.until(lambda: any(job.state == "cancelled" for job in reader.jobs("worker")), "the end of the job")
    assert reader.jobs("worker")[0].state == "running"
    assert {record.request_id for record in kept} <= {
        event.request_id for _, event in reader.heard if isinstance(event, RequestEvent)
    }
    snapshot = reader.snapshots("worker")[0]
    assert snapshot.roles[0] == "worker"
    assert snapshot.worker is not None
    assert snapshot.models[0].fingerprint
    assert snapshot.endpoints[0].address == fleet["worker"].address
    assert snapshot.sections["node"]["state"] == "serving"


def test_what_the_primary_computes_itself_is_a_job_too(fleet: Fleet) -> None:
    with Reader(fleet, Topic.NODE, Topic.JOB, follow=False) as reader, fleet["primary"].client() as client:
        reader.connect(bus_of(fleet, "primary"))
        reader.until(lambda: bool(reader.snapshots("primary")), "a snapshot")
        with client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
            ask(session, prompt(700, seed=4), 2)
        reader.until(lambda: any(job.state == "completed" for job in reader.jobs("primary")), "the end of the prefill")
    jobs = reader.jobs("primary")
    assert {job.place for job in jobs} == {"primary"}
    assert jobs[0].state == "running"
    assert (jobs[-1].tokens_done, jobs[-1].tokens_total, jobs[-1].tokens_reused) == (699, 699, 0)


def test_refusals_and_evictions_are_told_in_sums(fleet: Fleet) -> None:
    with Reader(fleet, Topic.NODE, Topic.SECURITY, Topic.EVICTION, follow=False) as reader:
        reader.connect(bus_of(fleet, "small"))
        reader.until(lambda: bool(reader.snapshots("small")), "a snapshot")
        with pytest.raises(RequestFailed):
            Client(fleet["small"].address, fleet_key=FleetKey(FleetKey.generate()), connect_timeout_s=10)
        reader.until(lambda: any(isinstance(event, SecurityEvent) for _, event in reader.heard), "the refusal")
        with fleet["small"].client() as client:
            for seed in range(5, 9):
                with client.create_session(policy=PrefillPolicy.LOCAL_ONLY, publish=False) as session:
                    ask(session, prompt(400, seed=seed), 2)
        reader.until(lambda: any(isinstance(event, EvictionEvent) for _, event in reader.heard), "evictions")
    refusals = [
        event for _, event in reader.heard if isinstance(event, SecurityEvent) and event.kind == "connection_refused"
    ]
    assert sum(event.count for event in refusals) >= 1
    evictions = [event for _, event in reader.heard if isinstance(event, EvictionEvent)]
    assert all(event.parts > 0 and event.size_bytes > 0 and 0 < event.bytes_used <= event.max_bytes for event in evictions)


# --- who listens -----------------------------------------------------------------------------------------------------


def test_the_publisher_knows_what_somebody_listens_to() -> None:
    key = FleetKey(FleetKey.generate())
    reactor = Reactor()
    publisher = Publisher(reactor, bind=Address("127.0.0.1", 0), local=node("n"), fleet_key=key)
    made: list[Subscriber] = []

    def subscriber(*topics: Topic) -> Subscriber:
        one = Subscriber(reactor, keys=key, topics=topics, on_message=lambda message: None)
        one.connect(publisher.address)
        made.append(one)
        return one

    try:
        assert not publisher.has_subscribers(Topic.JOB)
        first = subscriber(Topic.JOB, Topic.NODE)
        second = subscriber(Topic.JOB, Topic.LOG)
        run_until(reactor, lambda: all(map(publisher.has_subscribers, (Topic.JOB, Topic.NODE, Topic.LOG))))
        first.close()
        run_until(reactor, lambda: not publisher.has_subscribers(Topic.NODE))
        assert publisher.has_subscribers(Topic.JOB)
        # One reader cannot silence a topic for another by taking back what it never asked for.
        second._socket.setsockopt(zmq.UNSUBSCRIBE, Topic.LOG.frame)
        third = subscriber(Topic.JOB)
        third._socket.setsockopt(zmq.UNSUBSCRIBE, Topic.JOB.frame)
        subscriber(Topic.EVICTION)
        run_until(reactor, lambda: publisher.has_subscribers(Topic.EVICTION))
        assert publisher.has_subscribers(Topic.JOB)
        second.disconnect(publisher.address)
        for one in made[2:]:
            one.close()
        run_until(reactor, lambda: not publisher.has_subscribers(Topic.EVICTION))
    finally:
        for one in made:
            one.close()
        publisher.close()
        assert reactor.callback_errors == 0
        assert reactor.close()


# --- the command -----------------------------------------------------------------------------------------------------


def test_explain_shows_what_the_last_requests_cost(fleet: Fleet) -> None:
    with fleet["primary"].client() as client, rig.worker_only(client) as session:
        ask(session, prompt(600, seed=10), 3)
    address = ("--address", fleet["primary"].address)
    shown = rig.run_kakeya("explain", *address, "--last", "2", "--json", home=fleet.home)
    assert shown.returncode == 0, shown.stderr
    append, generate = json.loads(shown.stdout.splitlines()[-1])["requests"]
    assert append["source"] == "worker"
    assert append["boundary"] == 599
    assert generate["append_id"] == append["request_id"]
    assert generate["generated_tokens"] == 3
    told = rig.run_kakeya("explain", *address, "--last", "2", home=fleet.home)
    assert told.returncode == 0
    assert "prefill by worker" in told.stdout
    assert "600 tokens" in told.stdout
    assert "first token after" in told.stdout
    refused = rig.run_kakeya("explain", "--address", fleet["worker"].address, home=fleet.home)
    assert refused.returncode != 0
    assert "does not do that" in refused.stderr


def test_explain_follows_new_requests(fleet: Fleet) -> None:
    with fleet["primary"].client() as client, client.create_session() as session:
        ask(session, prompt(40, seed=13), 2)
    command = [sys.executable, "-m", "daemons", "explain", "--address", fleet["primary"].address]
    process = subprocess.Popen(
        [*command, "--follow", "--json", "--last", "1"],
        cwd=rig.PROJECT,
        env=fleet.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["operation"], first["generated_tokens"]) == ("generate", 2)
        with fleet["primary"].client() as client, client.create_session(label="followed") as session:
            ask(session, prompt(41, seed=11), 2)
        # Once each, and nothing older, though the node tells every new reader of the last requests again.
        found = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [(record["operation"], record["prompt_tokens"]) for record in found] == [("append", 41), ("generate", 41)]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_kvfs_shows_the_namespace_and_who_holds_it(fleet: Fleet) -> None:
    with fleet["primary"].client() as client:
        with client.create_session() as session:
            ask(session, prompt(400, seed=12), 2)
        wait_published(client)
        wait_until(
            lambda: (
                {m["node_id"] for view in namespaces(client.cards()) for m in view["mounts"] if m["bytes_used"]}
                >= {"primary", "cache"}
            ),
            "their cards tell",
        )
    shown = rig.run_kakeya("kvfs", "--address", fleet["primary"].address, "--json", home=fleet.home)
    assert shown.returncode == 0, shown.stderr
    (view,) = json.loads(shown.stdout.splitlines()[-1])["namespaces"]
    with fleet["primary"].client() as client:
        (model,) = next(card for card in client.cards() if card.node_id == "primary").models
    assert view["uri"] == f"kv://default/{model.model_id}/{model.fingerprint.hex()}"
    assert view["coherent_shared_memory"] is False
    tiers = {mount["node_id"]: mount["tier"] for mount in view["mounts"]}
    assert tiers["primary"] == "hot"
    assert tiers["cache"] == tiers["worker"] == "cold-offload"
    told = rig.run_kakeya("kvfs", "--address", fleet["primary"].address, home=fleet.home)
    assert view["uri"] in told.stdout


# --- the end of a worker ---------------------------------------------------------------------------------------------


def test_a_worker_that_stops_still_tells_that_its_job_failed(fleet: Fleet) -> None:
    with fleet["primary"].client() as client, Reader(fleet, Topic.NODE, Topic.JOB, Topic.REQUEST) as reader:
        reader.connect(bus_of(fleet, "worker"))
        reader.until(lambda: bool(reader.snapshots("primary") and reader.snapshots("worker")), "snapshots")
        with LongAppend(client):
            reader.until(lambda: any(job.state == "running" for job in reader.jobs("worker")), "the job runs")
            assert fleet["worker"].terminate() == 0
            reader.until(lambda: any(job.state == "failed" for job in reader.jobs("worker")), "the end of the job")
            reader.until(lambda: reader.snapshots("worker")[-1].state == "stopping", "the worker's last snapshot")
            reader.until(lambda: any(r.outcome == "unavailable" for r in reader.requests("append")), "the request's end")
    assert "stopping" in next(job.reason for job in reader.jobs("worker") if job.state == "failed")
    request = next(request for request in reader.requests("append") if request.outcome == "unavailable")
    assert request.prompt_tokens == 30_000
    assert any("remote prefill is required" in reason for reason in request.reasons)
    fleet["worker"].restart()
