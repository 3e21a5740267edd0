"""How fast parts move between two processes: a sealed, verified lane against bare pyzmq PUSH/PULL.

Run: ``python -m tests.bench.bench_transfer [--rounds 5] [--suite aes|secretbox]``. Not collected by pytest.

Both runs of a round move the same bytes over TCP loopback from this process to a child; the clock runs in the parent
from the first send to the child's word that it has everything. The bar: the lane takes at most 2.2 times as long.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import zmq

from kakeya_zmq.blocks import Part, part_checksum
from kakeya_zmq.io import sockets
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lanes import LaneEvent
from kakeya_zmq.io.memory import BufferPool, tune_heap
from kakeya_zmq.io.receiver import ReceiverLane
from kakeya_zmq.io.sender import SenderLane
from kakeya_zmq.protocol.effects import CreditEarned, LaneFinished, LaneId, LaneOpened, PartsReceived, WantedPart
from wire import limits
from wire.messages import CipherSuite, PartKind, PartMeta, PartRef, TransferGrant

HOST: Final = "127.0.0.1"
BAR: Final = 2.2
BARE_MESSAGE_BYTES: Final = 2 * limits.MIB
IDLE_TIMEOUT_S: Final = 20.0


def part_hash(number: int) -> bytes:
    return hashlib.sha256(b"part %d" % number).digest()


def make_parts(count: int, length_bytes: int) -> list[Part]:
    arena = np.random.default_rng(1).integers(0, 256, size=count * length_bytes, dtype=np.uint8).data
    parts = []
    for number in range(count):
        payload = arena[number * length_bytes : (number + 1) * length_bytes].toreadonly()
        meta = PartMeta(
            block_hash=part_hash(number),
            parent_hash=bytes(32),
            kind=PartKind.FULL,
            start=number * 64,
            token_count=64,
            length_bytes=length_bytes,
            digest=hashlib.sha256(payload).digest(),
            checksum=part_checksum(payload),
        )
        parts.append(Part(meta=meta, payload=payload))
    return parts


@dataclass(frozen=True, slots=True)
class Run:
    """Wall time, and processor time of the sending and the receiving process: the latter hold on a busy machine too."""

    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float


class Child:
    """The receiving process: one command line in, event lines out."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bench_transfer", "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> list[str]:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().decode().split()
        if not words:
            raise RuntimeError("the receiving process died")
        return words

    def close(self) -> None:
        self.tell("quit")
        self.process.communicate(timeout=10)


def run_lane(
    context: zmq.Context[zmq.Socket[bytes]], gate: Gate, child: Child, parts: Sequence[Part], suite: CipherSuite
) -> Run:
    events: queue.SimpleQueue[LaneEvent] = queue.SimpleQueue()
    sender = SenderLane.bind(
        context,
        gate,
        lane=LaneId(1),
        host=HOST,
        port_range=None,
        suite=suite,
        chunk_bytes=limits.CHUNK_BYTES_DEFAULT,
        credit_bytes=limits.CREDIT_BYTES_DEFAULT,
        post=events.put,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    opened = events.get(timeout=10)
    assert isinstance(opened, LaneOpened)
    child.tell("lane", str(len(parts)), msgspec.msgpack.encode(opened.grant).hex())
    assert child.hear() == ["ready"]
    start, cpu_s = time.perf_counter(), time.process_time()
    sender.feed(parts, final=True)
    while True:
        match child.hear():
            case ["credit", amount]:
                sender.add_credit(int(amount))
            case ["done", "True", child_cpu_s]:
                break
            case other:
                raise RuntimeError(f"the transfer failed: {other}")
    elapsed_s = time.perf_counter() - start
    run = Run(elapsed_s, time.process_time() - cpu_s, float(child_cpu_s))
    sender.close(True, "")
    finished = events.get(timeout=10)
    assert isinstance(finished, LaneFinished)
    assert finished.ok, finished.reason
    assert sender.join(5)
    return run


def run_bare(context: zmq.Context[zmq.Socket[bytes]], child: Child, parts: Sequence[Part]) -> Run:
    arena = np.concatenate([np.frombuffer(part.payload, dtype=np.uint8) for part in parts]).data
    messages = [arena[at : at + BARE_MESSAGE_BYTES] for at in range(0, arena.nbytes, BARE_MESSAGE_BYTES)]
    with context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        port = push.bind_to_random_port(f"tcp://{HOST}")
        child.tell("bare", str(len(messages)), str(port))
        assert child.hear() == ["ready"]
        start, cpu_s = time.perf_counter(), time.process_time()
        for message in messages:
            push.send(message, copy=False)
        _, _, child_cpu_s = child.hear()
        return Run(time.perf_counter() - start, time.process_time() - cpu_s, float(child_cpu_s))


def child_lane(context: zmq.Context[zmq.Socket[bytes]], count: int, grant: TransferGrant, pool: BufferPool) -> None:
    events: queue.SimpleQueue[LaneEvent] = queue.SimpleQueue()
    received: list[Part] = []
    lane = ReceiverLane.connect(
        context,
        lane=LaneId(2),
        host=HOST,
        grant=grant,
        expected=[
            WantedPart(
                ref=PartRef(block_hash=part_hash(number), kind=PartKind.FULL),
                parent_hash=bytes(32),
                start=number * 64,
                token_count=64,
                bytes_min=1,
                bytes_max=limits.PART_BYTES_MAX,
            )
            for number in range(count)
        ],
        budget_bytes=limits.GIB,
        idle_timeout_s=IDLE_TIMEOUT_S,
        post=events.put,
        verify_digests=False,
        allocate_part=pool.allocate,
    )
    print("ready", flush=True)
    cpu_s = time.process_time()
    while True:
        match events.get(timeout=IDLE_TIMEOUT_S + 5):
            case PartsReceived(parts=parts):
                received.extend(parts)
            case CreditEarned(credit_bytes=amount):
                print("credit", amount, flush=True)
            case LaneFinished(ok=ok, reason=reason):
                print("done", ok, time.process_time() - cpu_s, reason, flush=True)
                break
    lane.join(5)


def child_bare(context: zmq.Context[zmq.Socket[bytes]], count: int, port: int) -> None:
    with context.socket(zmq.PULL) as pull:
        pull.setsockopt(zmq.LINGER, 0)
        pull.connect(f"tcp://{HOST}:{port}")
        print("ready", flush=True)
        cpu_s = time.process_time()
        for _ in range(count):
            assert pull.recv(copy=False).buffer.nbytes > 0
        print("done", True, time.process_time() - cpu_s, flush=True)


def child_main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pool = BufferPool()
    for line in sys.stdin:
        match line.split():
            case ["lane", count, grant]:
                child_lane(context, int(count), msgspec.msgpack.decode(bytes.fromhex(grant), type=TransferGrant), pool)
            case ["bare", count, port]:
                child_bare(context, int(count), int(port))
            case _:
                break
    context.term()


def main() -> None:
    parser = argparse.ArgumentParser(description="sealed lane against bare PUSH/PULL")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suite", choices=("aes", "secretbox"), default="aes")
    arguments = parser.parse_args()
    tune_heap()  # as every daemon does; it serves both sides of the comparison
    if arguments.child:
        child_main()
        return
    sockets.check_libzmq()
    suite = CipherSuite.AES_256_GCM if arguments.suite == "aes" else CipherSuite.SECRETBOX
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context)
    child = Child()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {suite.name}, {arguments.rounds} rounds, interleaved")
    for count, length_bytes in ((64, 2 * limits.MIB), (330, 393_216)):
        parts = make_parts(count, length_bytes)
        total_bytes = count * length_bytes
        run_bare(context, child, parts)  # warm-up
        run_lane(context, gate, child, parts, suite)
        bare_runs, lane_runs = [], []
        for _ in range(arguments.rounds):
            bare_runs.append(run_bare(context, child, parts))
            lane_runs.append(run_lane(context, gate, child, parts, suite))
        bare_s, lane_s = (statistics.median(run.wall_s for run in runs) for runs in (bare_runs, lane_runs))
        print(f"{count} parts of {length_bytes} bytes: ratio {lane_s / bare_s:.2f} (bar {BAR})")
        report("bare", bare_runs, total_bytes)
        report("lane", lane_runs, total_bytes)
    child.close()
    gate.close()
    context.term()


def report(name: str, runs: Sequence[Run], total_bytes: int) -> None:
    wall_s = statistics.median(run.wall_s for run in runs)
    print(
        f"  {name}: median {wall_s * 1e3:.1f} ms ({total_bytes / wall_s / 1e9:.2f} GB/s), "
        f"best {min(run.wall_s for run in runs) * 1e3:.1f} ms, "
        f"processor {statistics.median(run.sender_cpu_s for run in runs) * 1e3:.1f} ms sending, "
        f"{statistics.median(run.receiver_cpu_s for run in runs) * 1e3:.1f} ms receiving"
    )


if __name__ == "__main__":
    main()
