"""``transfer``: a sealed, verified fetch from a cache peer against bare pyzmq moving the same bytes unsealed.

Ours is everything from the request to the last verified part: lookup, lease, grant, sealed chunks; the cache peer is a real
one that the parts were published into. With ``--peers`` also gRPC, Redis and plain TCP.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, Program, Series, interleave, ratio
from daemons.bench.references import Peers, Reference
from daemons.bench.report import milliseconds, percent
from daemons.bench.rig import BenchFleet, Rig
from kakeya_zmq.client import Client
from wire.limits import KIB, MIB

MEMORY_BAR = 1.3
SERVER_MEMORY_BAR = 0.5
"""What a server needs are the chunk buffers of a transfer (8 MiB), whatever its size."""


@dataclass(frozen=True, slots=True)
class Load:
    """One amount of bytes. Bars: times of bare pyzmq, 0 for none."""

    name: str
    count: int
    length_bytes: int
    bar: float
    secretbox_bar: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.count * self.length_bytes


LOADS = (
    Load("128 MiB", 64, 2 * MIB, bar=2.2, secretbox_bar=4.5),
    Load("36 MiB", 96, 384 * KIB, bar=3.0),
)
SMOKE_LOADS = (Load("1 MiB", 4, 256 * KIB, bar=1000.0),)


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(5, 21)
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    figures: dict[str, object] = {"rounds": rounds}
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(rig.fleet("transfer", ("cache",)))
        ours = stack.enter_context(rig.program("sealed_fetch", running.member("cache").address, str(running.psk_file)))
        bare = stack.enter_context(contextlib.closing(Reference(rig, "bare_zmq")))
        peers = Peers(rig)
        stack.callback(peers.close)
        if options.peers:
            peers.start()
        for load in SMOKE_LOADS if options.smoke else LOADS:
            rig.tell(f"transfer: {load.name}, {rounds} rounds")
            ours.ask("publish", count=load.count, length_bytes=load.length_bytes)
            memory = _memory_bars(ours, running, load)
            found = _measure(ours, bare, peers, load, rounds)
            figures[load.name] = {name: series.as_json() for name, series in found.items()}
            if options.peers:
                bars += _unmeasured_bars(load, found)
            rows += [_row(load, name, series, found["bare pyzmq"]) for name, series in found.items()]
            bars += [*_bars(load, found), *memory]
        notes = tuple(peers.notes)
    heads = ("bytes", "way", "median ms", "best ms", "spread", "GB/s", "× bare pyzmq")
    return Outcome("transfer", "from a cache peer to verified parts", heads, tuple(rows), tuple(bars), figures, notes)


def _measure(ours: Program, bare: Reference, peers: Peers, load: Load, rounds: int) -> dict[str, Series]:
    def fetch(suite: str) -> Callable[[int], float]:
        def measure(number: int) -> float:
            answer = ours.ask("fetch", count=load.count, length_bytes=load.length_bytes, suite=suite)
            assert answer["moved_bytes"] == load.total_bytes
            return float(answer["wall_s"])

        return measure

    sides = {"kakeya": fetch("auto"), "bare pyzmq": lambda number: bare.move(load.total_bytes)}
    sides |= peers.sides(load.name, load.total_bytes)
    if load.secretbox_bar:
        sides["secretbox"] = fetch("secretbox")
    interleave(2, sides)  # a warm-up: arenas, connections, page faults
    found = interleave(rounds, sides)
    return {name: series for name, series in found.items() if name not in peers.failed}


def _memory_bars(ours: Program, running: BenchFleet, load: Load) -> list[Bar]:
    """Peak memory of the first fetch: of the client above what it held before and the arrays that it keeps, and of the
    server above what it had ever held.

    Only the first and largest fetch of a process can tell: later ones hide below the peak.
    """
    if not load.secretbox_bar:
        return []
    with Client(running.member("cache").address, psk_file=running.psk_file) as client:
        before_bytes = _peak_bytes(client)
        answer = ours.ask("fetch", count=load.count, length_bytes=load.length_bytes, suite="auto")
        served = (_peak_bytes(client) - before_bytes) / load.total_bytes
    fetched = (int(answer["peak_growth_bytes"]) - load.total_bytes) / load.total_bytes
    at_most, unit = Direction.AT_MOST, "× payload"
    return [
        Bar(f"peak memory of a {load.name} fetch above its arrays", fetched, MEMORY_BAR, at_most, unit),
        Bar(f"memory a server needs for a {load.name} fetch", served, SERVER_MEMORY_BAR, at_most, unit),
    ]


def _peak_bytes(client: Client) -> int:
    return int(client.status().sections["node"]["memory_peak_bytes"] or 0)


def _bars(load: Load, found: dict[str, Series]) -> list[Bar]:
    bare = found["bare pyzmq"]
    bars = [Bar(f"{load.name} against bare pyzmq", ratio(found["kakeya"], bare), load.bar, Direction.AT_MOST)]
    if "secretbox" in found:
        measured = ratio(found["secretbox"], bare)
        bars.append(Bar(f"{load.name} with secretbox", measured, load.secretbox_bar, Direction.AT_MOST))
    bars += [
        Bar(f"{load.name} against {name}", ratio(found["kakeya"], found[name]), 1.0, Direction.AT_MOST)
        for name in ("gRPC", "Redis")
        if name in found
    ]
    return bars


def _unmeasured_bars(load: Load, found: Collection[str]) -> list[Bar]:
    """What was asked for and could not be measured counts as missed."""
    absent = [name for name in ("gRPC", "Redis") if name not in found]
    return [Bar(f"{load.name} against {name}", math.nan, 1.0, Direction.AT_MOST) for name in absent]


def _row(load: Load, name: str, series: Series, bare: Series) -> tuple[str, ...]:
    return (
        load.name,
        name,
        milliseconds(series.median),
        milliseconds(min(series.values)),
        percent(series.spread),
        f"{load.total_bytes / series.median / 1e9:.2f}",
        f"{ratio(series, bare):.2f}",
    )
