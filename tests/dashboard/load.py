"""A simulated large fleet on real buses, and what it costs the dashboard: ``python -m tests.dashboard.load --seconds 30``.

Each node is a publisher of its own with a snapshot as large as a real one (every other node is its peer). Besides the
snapshots, jobs, requests and transfers make up the asked rate. Prints one JSON object: CPU of the dashboard's process,
its memory half way and at the end, and how long an event takes from the bus to an open page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.bus_publisher import Publisher
from kakeya_zmq.io.descriptors import raise_descriptor_limit
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.session import LocalNode
from kakeya_zmq.telemetry import PREFILL_COUNTERS
from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import EventStream, call
from tests.fleet_rig import PROJECT, clean_environment, wait_until
from wire.events import TOPIC_OF, Event, JobEvent, PeerView, RequestEvent, SourceView, TransferEvent, encode_event
from wire.keys import FleetKey, NodeIdentity, write_secret_file

INTERVAL_S: Final = 2.0
TURN_S: Final = 0.05


class SimulatedFleet:
    """Publishers of many nodes on one reactor."""

    def __init__(self, nodes: int, events_per_second: float, key: FleetKey) -> None:
        self._reactor = Reactor()
        self._publishers: list[Publisher] = []
        self._names = [f"node-{number:03d}" for number in range(nodes)]
        for name in self._names:
            local = LocalNode(
                node_id=name, identity=NodeIdentity.generate(), roles=("worker",), incarnation=1, software="load"
            )
            self._publishers.append(Publisher(self._reactor, bind=Address("127.0.0.1", 0), local=local, fleet_key=key))
        self.addresses = [publisher.address for publisher in self._publishers]
        self._peers = tuple(
            PeerView(
                node_id=name, roles=("worker",), state="connected", bus_address=str(address), rtt_ms=0.4, ttl_ms=120_000
            )
            for name, address in zip(self._names, self.addresses, strict=True)
        )
        self.published = 0
        self._numbers = count(1)
        self._per_turn = max(0.0, events_per_second - nodes / INTERVAL_S) * TURN_S
        self._owed = 0.0
        self._next_snapshot = 0
        self._started = self._reactor.clock()
        self._reactor.call_later(TURN_S, self._turn)
        self._reactor.start_thread("load")

    def close(self) -> None:
        self._reactor.close()

    def mark(self, text: str) -> None:
        """A job with this id (32 hexadecimal digits, to be shown), now."""
        event = JobEvent(job_id=text, state="running", tokens_total=100, tokens_done=1)
        self._reactor.call(lambda: self._publish(0, event))

    def _turn(self) -> None:
        now = self._reactor.clock()
        wanted = int((now - self._started) / INTERVAL_S * len(self._names))
        # Late turns are made up for, but not all at once.
        for _ in range(min(wanted - self._next_snapshot, len(self._names))):
            index = self._next_snapshot % len(self._names)
            self._publish(index, self._snapshot(index, self._next_snapshot // len(self._names)))
            self._next_snapshot += 1
        self._owed += self._per_turn
        while self._owed >= 1:
            self._owed -= 1
            node, event = self._event(next(self._numbers))
            self._publish(node % len(self._names), event)
        self._reactor.call_later(TURN_S, self._turn)

    def _publish(self, index: int, event: Event) -> None:
        self._publishers[index].publish(TOPIC_OF[type(event)], encode_event(event))
        self.published += 1

    def _snapshot(self, index: int, turn: int) -> Event:
        counters = {name: turn * 17 + number for number, name in enumerate(PREFILL_COUNTERS)}
        counters |= {f"counter_{number}": turn + number for number in range(60)}
        return snapshot(
            interval_ms=int(INTERVAL_S * 1000),
            ttl_ms=120_000,
            roles=("primary",) if index == 0 else ("worker",),
            peers=self._peers[:index] + self._peers[index + 1 :],
            sections={"prefill": counters, "cache": {"bytes_used": turn, "max_bytes": 1 << 30}, "node": {"uptime_s": turn}},
        )

    def _event(self, number: int) -> tuple[int, Event]:
        """(which node, what): a step of a job, a request or a transfer."""
        step = number // 3
        match number % 3:
            case 0:
                job, phase = divmod(step, 8)
                state = ("running", "completed")[phase == 7]
                event: Event = JobEvent(
                    job_id=f"{job:032x}", state=state, tokens_total=800, tokens_done=100 * phase + 100, asker="node-000"
                )
                return job, event
            case 1:
                event = RequestEvent(
                    request_id=f"{number:016x}",
                    operation="append",
                    outcome="ready",
                    source=("hot", "worker", "remote_cache")[step % 3],
                    prompt_tokens=900,
                    ttft_ms=float(step % 900),
                    sources=(SourceView(kind="hot", start=0, end=900),),
                    reasons=("diverged at token 64",),
                )
            case _:
                event = TransferEvent(direction="in", purpose="fetch", peer="node-001", parts=9, payload_bytes=1 << 20)
        return step, event


@contextmanager
def dashboard_process(home: Path, key: FleetKey, bus: Address) -> Iterator[tuple[psutil.Process, Address]]:
    """A dashboard that holds nothing but the telemetry key, and is told one address."""
    write_secret_file(home / "telemetry.key", key.telemetry_key().to_text())
    ready = home / "dashboard.started"
    arguments = ["dashboard", "--bind", "127.0.0.1:0", "--bus", str(bus), "--ready-file", str(ready), "--log-level", "error"]
    environment = {**clean_environment(), "KAKEYA_HOME": str(home)}
    with subprocess.Popen([sys.executable, "-m", "daemons", *arguments], cwd=PROJECT, env=environment) as process:
        try:
            wait_until(ready.exists, "the dashboard is ready")
            yield psutil.Process(process.pid), parse_address(json.loads(ready.read_text("utf-8"))["address"])
        finally:
            process.terminate()
            process.wait(20)


def delay_to_page(fleet: SimulatedFleet, web: Address, samples: int) -> list[float]:
    """Seconds from the bus to an open page, for that many marks."""
    found = []
    with EventStream(web, "/v1/network/events?topics=jobs") as stream:
        for number in range(samples):
            mark = f"{number:0>8}".rjust(32, "f")
            started = time.monotonic()
            fleet.mark(mark)
            while mark not in {job["job_id"] for job in stream.next("jobs")["active"]}:
                assert time.monotonic() - started < 60
            found.append(time.monotonic() - started)
    return found


def run(nodes: int, events: float, seconds: float, samples: int = 5) -> dict[str, Any]:
    """The figures of one run."""
    raise_descriptor_limit()
    key = FleetKey(FleetKey.generate())
    with tempfile.TemporaryDirectory() as folder:
        fleet = SimulatedFleet(nodes, events, key)
        try:
            with dashboard_process(Path(folder), key, fleet.addresses[0]) as (process, web):
                wait_until(lambda: call(web, "GET", "/healthz").json["online_nodes"] == nodes, "all nodes are seen", 60)
                stopped = threading.Event()
                readers = [threading.Thread(target=_read, args=(web, stopped), daemon=True) for _ in range(2)]
                for reader in readers:
                    reader.start()
                memory = []
                begun, published = time.monotonic(), fleet.published
                cpu = sum(process.cpu_times()[:2])
                for half in (1, 2):
                    while time.monotonic() - begun < seconds * half / 2:
                        time.sleep(0.1)
                    memory.append(process.memory_info().rss)
                spent = time.monotonic() - begun
                used = sum(process.cpu_times()[:2]) - cpu
                rate = (fleet.published - published) / spent
                delays = delay_to_page(fleet, web, samples)
                stopped.set()
                bus = call(web, "GET", "/v1/network/bus").json
                nodes_seen = call(web, "GET", "/healthz").json["online_nodes"]
                for reader in readers:
                    reader.join(20)
        finally:
            fleet.close()
    return {
        "nodes": nodes,
        "nodes_seen": nodes_seen,
        "events_per_second": round(rate, 1),
        "cpu_percent_of_a_core": round(100 * used / spent, 1),
        "memory_mb_half_way": round(memory[0] / 1e6, 1),
        "memory_mb_at_the_end": round(memory[1] / 1e6, 1),
        "page_delay_s_median": round(median(delays), 2),
        "page_delay_s_max": round(max(delays), 2),
        "missed": bus["missed"],
        "dropped": bus["dropped"],
        "malformed": bus["malformed"],
    }


def _read(web: Address, stopped: threading.Event) -> None:
    """An open page."""
    with EventStream(web, "/v1/network/events?topics=summary,nodes,jobs,requests,transfers,series,bus") as stream:
        while not stopped.is_set():
            stream.next("bus")


def main() -> None:
    parser = argparse.ArgumentParser(description="The dashboard under a large simulated fleet.")
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--events", type=float, default=500.0, help="a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    print(json.dumps(run(options.nodes, options.events, options.seconds), indent=2))


if __name__ == "__main__":
    main()
