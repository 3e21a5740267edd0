"""Bulk lanes over real sockets: what arrives is what was sent, and nothing else is ever shown."""

from __future__ import annotations

import contextlib
import hashlib
import socket as os_socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from kakeya_zmq.blocks import Part
from kakeya_zmq.io import receiver, sockets
from kakeya_zmq.io.addresses import Address, PortRange
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lanes import CONNECTION_LOST, LaneGroup
from kakeya_zmq.io.monitor import CROWDED, UNFINISHED, WAITING_MAX
from kakeya_zmq.io.receiver import TOLD_AT_ONCE_PARTS, ReceiverLane
from kakeya_zmq.io.sender import SenderLane
from kakeya_zmq.protocol.effects import NO_CONNECTION, CreditEarned, LaneFinished, LaneId, LaneOpened, PartsReceived
from tests.loopback.lane_support import (
    CHUNK_BYTES,
    DEADLINE_S,
    HOST,
    Context,
    HandMadeSender,
    Mailbox,
    expected,
    is_cut,
    make_part,
    same_parts,
    wait_until,
)
from wire import limits
from wire.chunks import ChunkKind
from wire.errors import LocalProtocolError
from wire.messages import CipherSuite, PartMeta, TransferGrant

SUITES = pytest.mark.parametrize("suite", list(CipherSuite))
SENDER = LaneId(1)
RECEIVER = LaneId(2)
AES = CipherSuite.AES_256_GCM
MIXED_LENGTHS = (
    1,
    2,
    1000,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    3 * CHUNK_BYTES,
    5,
    2 * CHUNK_BYTES + 7,
    30_000,
    31_000,
)
MIXED = [make_part(number, length) for number, length in enumerate(MIXED_LENGTHS)]


@pytest.fixture
def group(gate: Gate) -> Iterator[LaneGroup]:
    """Made after the gate, so it is emptied before the gate and the context go."""
    made = LaneGroup()
    yield made
    assert made.close_all(5)
    assert len(made) == 0


class Rig:
    """Makes lanes with short arguments; a pair of them is wired as two machines would: credit goes back, Done ends it."""

    def __init__(self, context: Context, gate: Gate, group: LaneGroup) -> None:
        self.context = context
        self.gate = gate
        self.group = group
        self.sent = Mailbox()
        self.received = Mailbox()

    def bind_sender(self, **changes: Any) -> tuple[SenderLane, TransferGrant]:
        options: dict[str, Any] = {
            "lane": SENDER,
            "host": HOST,
            "port_range": None,
            "suite": AES,
            "chunk_bytes": CHUNK_BYTES,
            "credit_bytes": limits.CREDIT_BYTES_DEFAULT,
            "post": self.sent.post,
            "idle_timeout_s": DEADLINE_S,
        }
        sender = SenderLane.bind(self.context, self.gate, **(options | changes))
        self.group.add(sender)
        return sender, self.sent.wait_for(LaneOpened).grant

    def connect_receiver(self, grant: TransferGrant, wanted: Sequence[Part], **changes: Any) -> ReceiverLane:
        options: dict[str, Any] = {
            "lane": RECEIVER,
            "host": HOST,
            "grant": grant,
            "expected": expected(wanted),
            "budget_bytes": limits.GIB,
            "idle_timeout_s": DEADLINE_S,
            "post": self.received.post,
            "verify_digests": True,
        }
        receiver = ReceiverLane.connect(self.context, **(options | changes))
        self.group.add(receiver)
        return receiver

    def bind_receiver(self, expected: Sequence[PartMeta], **changes: Any) -> tuple[ReceiverLane, TransferGrant]:
        options: dict[str, Any] = {
            "lane": RECEIVER,
            "host": HOST,
            "suite": AES,
            "chunk_bytes": CHUNK_BYTES,
            "expected": expected,
            "post": self.received.post,
            "idle_timeout_s": DEADLINE_S,
        }
        receiver = ReceiverLane.bind(self.context, self.gate, **(options | changes))
        self.group.add(receiver)
        return receiver, self.received.wait_for(LaneOpened).grant

    def connect_sender(self, grant: TransferGrant, parts: Sequence[Part], **changes: Any) -> SenderLane:
        options: dict[str, Any] = {
            "lane": SENDER,
            "host": HOST,
            "grant": grant,
            "credit_bytes": limits.CREDIT_BYTES_DEFAULT,
            "parts": parts,
            "post": self.sent.post,
            "idle_timeout_s": DEADLINE_S,
        }
        sender = SenderLane.connect(self.context, **(options | changes))
        self.group.add(sender)
        return sender

    def wire(self, sender: SenderLane) -> None:
        def back(event: object) -> None:
            if isinstance(event, CreditEarned):
                sender.add_credit(event.credit_bytes)
            if isinstance(event, LaneFinished):
                sender.close(event.ok, event.reason)

        self.received.listeners.append(back)

    def finish(self) -> tuple[LaneFinished, LaneFinished]:
        received = self.received.wait_for(LaneFinished)
        sent = self.sent.wait_for(LaneFinished)
        self.received.assert_ended_once(RECEIVER)
        self.sent.assert_ended_once(SENDER)
        return sent, received


@pytest.fixture
def rig(context: Context, gate: Gate, group: LaneGroup) -> Rig:
    return Rig(context, gate, group)


# --- what works ------------------------------------------------------------------------------------------------------


@SUITES
def test_parts_of_every_size_arrive_in_order(rig: Rig, suite: CipherSuite) -> None:
    sender, grant = rig.bind_sender(suite=suite)
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED, final=True)
    sent, received = rig.finish()
    assert sent.ok
    assert received.ok
    assert same_parts(rig.received.parts, MIXED)
    assert sent.transferred_bytes == received.transferred_bytes == sum(MIXED_LENGTHS)
    assert all(part.payload.readonly for part in rig.received.parts)


@SUITES
def test_a_publish_arrives(rig: Rig, suite: CipherSuite) -> None:
    _, grant = rig.bind_receiver([part.meta for part in MIXED], suite=suite)
    rig.wire(rig.connect_sender(grant, MIXED))
    sent, received = rig.finish()
    assert (sent.ok, received.ok) == (True, True)
    assert same_parts(rig.received.parts, MIXED)


def test_parts_flow_while_later_ones_are_still_computed(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    for part in MIXED:
        sender.feed([part], final=False)
        wait_until(lambda: MIXED.index(part) < len(rig.received.parts), "the part arrives before the next is fed")  # noqa: B023
    sender.feed([], final=False)
    sender.feed([], final=True)
    sent, received = rig.finish()
    assert (sent.ok, received.ok) == (True, True)
    assert same_parts(rig.received.parts, MIXED)


def test_an_empty_transfer_ends_well(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, [])
    sender.feed([], final=True)
    sent, received = rig.finish()
    assert (sent.ok, received.ok, received.transferred_bytes) == (True, True, 0)


def test_more_parts_than_one_manifest_holds(rig: Rig) -> None:
    parts = [make_part(number, 40) for number in range(1500)]
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, parts)
    sender.feed(parts, final=True)
    assert rig.finish()[1].ok
    assert same_parts(rig.received.parts, parts)


def test_a_part_has_memory_of_its_own(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED, final=True)
    rig.finish()
    owners = {id(part.payload.obj) for part in rig.received.parts}
    assert len(owners) == len(MIXED)
    assert all(memoryview(part.payload.obj).nbytes == part.meta.length_bytes for part in rig.received.parts)


def test_two_processes(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loopback.lane_process", str(len(MIXED))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(msgspec.msgpack.encode(grant).hex() + "\n")
        process.stdin.flush()
        sender.feed(MIXED, final=True)
        for line in process.stdout:
            match line.split():
                case ["credit", amount]:
                    sender.add_credit(int(amount))
                case ["done", ok, digest]:
                    sender.close(ok == "True", "")
                    assert digest == hashlib.sha256(b"".join(part.payload for part in MIXED)).hexdigest()
    assert process.returncode == 0
    assert rig.sent.wait_for(LaneFinished).ok


def test_a_port_range_is_kept(rig: Rig) -> None:
    with os_socket.socket() as probe:
        probe.bind((HOST, 0))
        free = probe.getsockname()[1]
    _, grant = rig.bind_sender(port_range=PortRange(free, min(free + 20, 65_535)))
    assert free <= grant.port <= free + 20


# --- credit ----------------------------------------------------------------------------------------------------------


def test_bytes_in_flight_never_exceed_the_credit(rig: Rig) -> None:
    """A receiver that earns no credit gets exactly as many whole chunks as fit what was granted."""
    parts = [make_part(number, CHUNK_BYTES) for number in range(20)]
    sender, grant = rig.bind_sender(credit_bytes=5 * CHUNK_BYTES)
    rig.connect_receiver(grant, parts)
    sender.feed(parts, final=True)
    wait_until(lambda: len(rig.received.parts) == 4, "the manifest and four chunks arrive")
    for granted in range(1, 4):
        sender.add_credit(CHUNK_BYTES)
        wait_until(lambda: len(rig.received.parts) == 4 + granted, "one more chunk for one chunk of credit")  # noqa: B023
    sender.close(False, "enough")
    finished = rig.sent.wait_for(LaneFinished)
    assert finished.transferred_bytes == 7 * CHUNK_BYTES
    assert len(rig.received.parts) == 7


@pytest.mark.parametrize("credit_bytes", [CHUNK_BYTES, 2 * CHUNK_BYTES + 1, 4 * CHUNK_BYTES])
def test_the_smallest_credit_cannot_stall_a_transfer(rig: Rig, credit_bytes: int) -> None:
    sender, grant = rig.bind_sender(credit_bytes=credit_bytes)
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED, credit_bytes=credit_bytes)
    sender.feed(MIXED, final=True)
    assert rig.finish()[1].ok
    assert same_parts(rig.received.parts, MIXED)


def test_credit_is_told_in_steps_of_a_half(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "CREDIT_SECONDS", 1e9)
    parts = [make_part(number, CHUNK_BYTES) for number in range(40)]
    sender, grant = rig.bind_sender(credit_bytes=16 * CHUNK_BYTES)
    rig.wire(sender)
    rig.connect_receiver(grant, parts, credit_bytes=16 * CHUNK_BYTES)
    sender.feed(parts, final=True)
    assert rig.finish()[1].ok
    steps = [event.credit_bytes for event in rig.received.seen if isinstance(event, CreditEarned)]
    assert steps
    assert all(8 * CHUNK_BYTES < step <= 9 * CHUNK_BYTES for step in steps)


def test_on_a_slow_link_credit_is_told_sooner(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time at all to wait it is told for each chunk, the manifest's included, but the last."""
    monkeypatch.setattr(receiver, "CREDIT_SECONDS", -1.0)
    parts = [make_part(number, CHUNK_BYTES) for number in range(10)]
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, parts)
    sender.feed(parts, final=True)
    assert rig.finish()[1].ok
    steps = [event.credit_bytes for event in rig.received.seen if isinstance(event, CreditEarned)]
    assert steps[1:] == [CHUNK_BYTES] * 9


def test_credit_for_what_was_never_sent_ends_the_transfer(rig: Rig) -> None:
    """Whoever gives it has not received anything: it keeps nothing open."""
    sender, _ = rig.bind_sender()
    sender.feed([make_part(1, CHUNK_BYTES)], final=True)
    sender.add_credit(1)
    finished = rig.sent.wait_for(LaneFinished)
    assert (finished.ok, finished.reason) == (False, "credit came for bytes that were never sent")


def test_a_credit_smaller_than_a_chunk_is_our_own_mistake(rig: Rig) -> None:
    with pytest.raises(LocalProtocolError, match="never lets"):
        rig.bind_sender(credit_bytes=CHUNK_BYTES - 1)
    with pytest.raises(LocalProtocolError, match="out of range"):
        rig.bind_sender(chunk_bytes=1)


def test_slots_are_not_reused_while_the_socket_still_reads_them(rig: Rig) -> None:
    """A receiver that does not read: every slot fills, and what it finally reads is what was sealed."""
    parts = [make_part(number, CHUNK_BYTES) for number in range(400)]
    sender, grant = rig.bind_sender(credit_bytes=limits.GIB)
    pull = sockets.create_socket(rig.context, zmq.PULL, sockets.LANE_PULL)
    pull.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    pull.setsockopt(zmq.RCVHWM, 1)
    sockets.apply_plain_client(pull, grant.token)
    with pull:
        pull.connect(Address(HOST, grant.port).zmq_endpoint())
        sender.feed(parts, final=True)
        frames = [pull.recv_multipart() for _ in range(401)]
    assert len({sealed for _, sealed in frames}) == 401
    sender.close(True, "")
    assert rig.sent.wait_for(LaneFinished).ok


# --- strangers -------------------------------------------------------------------------------------------------------


def dial_pull(context: Context, grant: TransferGrant, token: str) -> zmq.Socket[bytes]:
    pull = sockets.create_socket(context, zmq.PULL, sockets.LANE_PULL)
    sockets.apply_plain_client(pull, token)
    pull.connect(Address(HOST, grant.port).zmq_endpoint())
    return pull


def test_a_thief_without_the_token_gets_nothing(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    with dial_pull(rig.context, grant, "0" * 64) as thief:
        wait_until(lambda: ("lane", "wrong token") in rig.gate.refused, "the thief is refused")
        rig.connect_receiver(grant, MIXED)
        sender.feed(MIXED, final=True)
        assert rig.finish()[1].ok
        assert thief.poll(0) == 0
    assert same_parts(rig.received.parts, MIXED)


def test_a_second_user_of_the_token_gets_nothing(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED[:1], final=False)
    wait_until(lambda: len(rig.received.parts) == 1, "the honest peer is in")
    with dial_pull(rig.context, grant, grant.token) as second:
        # Whichever is first: the gate's answer, or the lane that wants nobody else.
        refused = {("lane", "token already used"), ("lane", CROWDED)}
        wait_until(lambda: bool(refused & rig.gate.refused.keys()), "the second user is refused")
        sender.feed(MIXED[1:], final=True)
        assert rig.finish()[1].ok
        assert second.poll(0) == 0
    assert same_parts(rig.received.parts, MIXED)


def silent(grant: TransferGrant, count: int) -> list[os_socket.socket]:
    return [os_socket.create_connection((HOST, grant.port), timeout=DEADLINE_S) for _ in range(count)]


def test_few_silent_strangers_wait_at_a_bulk_port_and_not_for_long(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    strangers = silent(grant, WAITING_MAX + 5)
    try:
        wait_until(lambda: rig.gate.refused.get(("lane", CROWDED)) == 5, "five are cut")
        wait_until(lambda: [is_cut(each) for each in strangers].count(True) == 5, "the oldest ones")
        assert [is_cut(each) for each in strangers] == [True] * 5 + [False] * WAITING_MAX
        wait_until(lambda: all(map(is_cut, strangers)), "all of them, before the handshake's usual time is over")
        rig.connect_receiver(grant, MIXED)
        sender.feed(MIXED, final=True)
        assert rig.finish()[1].ok
    finally:
        for each in strangers:
            each.close()


@pytest.mark.parametrize("busy", [False, True], ids=["waits", "works"])
def test_once_its_bearer_is_there_strangers_are_cut_at_once(rig: Rig, busy: bool) -> None:
    """Also while there is something to send all the time; and the bearer's own connection is none of those."""
    parts = [make_part(number, CHUNK_BYTES) for number in range(64)]
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, parts)
    sender.feed(parts[:1], final=False)
    wait_until(lambda: len(rig.received.parts) == 1, "the honest peer is in")
    strangers: list[os_socket.socket] = []
    try:
        for part in parts[1:-1]:
            if busy:
                sender.feed([part], final=False)
            strangers += silent(grant, 1)
        wait_until(lambda: all(map(is_cut, strangers)), "all are cut")
        sender.feed([parts[-1]] if busy else parts[1:], final=True)
        assert rig.finish()[1].ok
    finally:
        for each in strangers:
            each.close()
    assert same_parts(rig.received.parts, parts)
    assert rig.gate.refused["lane", CROWDED] == len(strangers)


def test_a_receiver_that_is_busy_cuts_strangers_too(rig: Rig) -> None:
    parts = [make_part(number, CHUNK_BYTES) for number in range(256)]
    strangers: list[os_socket.socket] = []

    def knock(event: object) -> None:
        if isinstance(event, PartsReceived) and len(strangers) < 50:
            strangers.extend(silent(grant, 10))

    rig.received.listeners.append(knock)  # on the lane's own thread, in the middle of its work
    _, grant = rig.bind_receiver([part.meta for part in parts])
    sender = rig.connect_sender(grant, parts)
    rig.wire(sender)
    try:
        assert rig.finish()[1].ok
        assert len(strangers) >= 10
        assert same_parts(rig.received.parts, parts)
        assert rig.gate.refused["lane", CROWDED] >= 10
    finally:
        for each in strangers:
            each.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system has one loopback address only")
def test_strangers_from_one_host_do_not_cut_who_comes_from_another(rig: Rig) -> None:
    _, grant = rig.bind_sender()
    with contextlib.ExitStack() as stack:
        from_elsewhere = stack.enter_context(silent(grant, 1)[0])
        for _ in range(WAITING_MAX + 5):
            stranger = os_socket.create_connection((HOST, grant.port), DEADLINE_S, source_address=("127.0.0.2", 0))
            stack.enter_context(stranger)
        wait_until(lambda: rig.gate.refused.get(("lane", CROWDED)) == 6, "the others are cut")
        assert not is_cut(from_elsewhere)


def test_a_bearer_that_leaves_before_its_handshake_is_through_ends_the_transfer(rig: Rig) -> None:
    """Its token serves once: nobody else could come."""
    _, grant = rig.bind_receiver([part.meta for part in MIXED])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    hello = b"\x05HELLO" + bytes([len(sockets.PLAIN_USERNAME)]) + sockets.PLAIN_USERNAME + b"\x40" + grant.token.encode()
    with os_socket.create_connection((HOST, grant.port), timeout=DEADLINE_S) as bearer:
        bearer.sendall(greeting + b"\x04" + bytes([len(hello)]) + hello)
        received = b""
        while b"WELCOME" not in received:
            received += bearer.recv(1024)
        silent(grant, 1)[0].close()  # what happens at the port is looked at
        wait_until(lambda: ("lane", CROWDED) in rig.gate.refused or ("lane", UNFINISHED) in rig.gate.refused, "it is")
    ended = rig.received.wait_for(LaneFinished)
    assert (ended.ok, ended.reason) == (False, CONNECTION_LOST)


def test_a_flooder_at_a_bound_lane_costs_no_memory(rig: Rig) -> None:
    """Raw ZMTP without credentials, frames of a message that never ends; the honest publish then succeeds."""
    _, grant = rig.bind_receiver([part.meta for part in MIXED])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    frame = b"\x03" + (32 * limits.KIB).to_bytes(8, "big") + bytes(32 * limits.KIB)  # flags: more, long
    before = psutil.Process().memory_info().rss
    sent = 0
    with os_socket.create_connection((HOST, grant.port), timeout=DEADLINE_S) as flooder:
        flooder.sendall(greeting)
        with contextlib.suppress(OSError):  # reset or broken pipe, as the system likes
            for _ in range(8192):  # up to 256 MiB
                flooder.sendall(frame)
                sent += len(frame)
    assert sent < 64 * limits.MIB
    assert psutil.Process().memory_info().rss - before < 32 * limits.MIB
    rig.wire(rig.connect_sender(grant, MIXED))
    assert rig.finish()[1].ok
    assert same_parts(rig.received.parts, MIXED)


# --- a sender that breaks the rules ----------------------------------------------------------------------------------

SMALL = [make_part(number, length) for number, length in enumerate((100, 200, CHUNK_BYTES, 2 * CHUNK_BYTES))]
Attack = Callable[[HandMadeSender], list[list[bytes]]]


def flipped(message: list[bytes], frame: int) -> list[bytes]:
    changed = bytearray(message[frame])
    changed[-1] ^= 1
    return [bytes(changed) if number == frame else part for number, part in enumerate(message)]


def small(*numbers: int) -> bytes:
    return b"".join(SMALL[number].payload for number in numbers)


def relabelled(sender: HandMadeSender) -> list[list[bytes]]:
    other = msgspec.structs.replace(SMALL[0].meta, digest=bytes(32))
    return [sender.manifest(0, [Part(other, SMALL[0].payload)]), sender.data(1, small(0))]


def moved(part: Part) -> Part:
    return Part(msgspec.structs.replace(part.meta, start=part.meta.start + 64), part.payload)


def foreign(sender: HandMadeSender) -> list[list[bytes]]:
    message = sender.data(1, small(0, 1))
    return [sender.manifest(0, SMALL[:2]), [message[0].replace(b"t" * 16, b"u" * 16), message[1]]]


ATTACKS: dict[str, tuple[Attack, str]] = {
    "no header": (lambda s: [[b"x", b"y"]], "header"),
    "no body": (lambda s: [s.manifest(0, SMALL)[:1]], "no body"),
    "two bodies": (lambda s: [[*s.manifest(0, SMALL), b"more"]], "more than one body"),
    "corrupted manifest": (lambda s: [flipped(s.manifest(0, SMALL), 1)], "seal"),
    "corrupted header": (lambda s: [flipped(s.manifest(0, SMALL), 0)], "sealed in"),
    "corrupted data": (lambda s: [s.manifest(0, SMALL), flipped(s.data(1, small(0, 1)), 1)], "seal"),
    "truncated data": (lambda s: [s.manifest(0, SMALL), [(m := s.data(1, small(0, 1)))[0], m[1][:-1]]], "sealed in"),
    "duplicate": (lambda s: [m := s.manifest(0, SMALL), m], "chunk 0 came instead of 1"),
    "reordered": (lambda s: [s.manifest(0, SMALL), s.data(2, small(0, 1))], "chunk 2 came instead of 1"),
    "foreign transfer": (foreign, "another transfer"),
    "data before a manifest": (lambda s: [s.data(0, small(0))], "no manifest"),
    "data of another batch": (lambda s: [s.manifest(0, SMALL), s.data(1, small(0, 1), batch=1)], "no manifest"),
    "manifest too early": (lambda s: [s.manifest(0, SMALL), s.manifest(1, SMALL[:1], batch=1)], "before the parts"),
    "batch skipped": (lambda s: [s.manifest(0, SMALL, batch=1)], "batch 1"),
    "plan ignored": (lambda s: [s.manifest(0, SMALL), s.data(1, small(0))], "the manifest says"),
    "final too early": (lambda s: [s.manifest(0, SMALL), s.data(1, small(0, 1), final=True)], "before the parts"),
    "manifest final": (lambda s: [s.manifest(0, SMALL, final=True)], "empty manifest"),
    "empty not final": (lambda s: [s.manifest(0, [])], "empty manifest"),
    "not wanted": (lambda s: [s.manifest(0, [make_part(99, 100)])], "not asked for"),
    "twice in a manifest": (lambda s: [s.manifest(0, [SMALL[0], SMALL[0]])], "came twice"),
    "twice in a transfer": (
        lambda s: [s.manifest(0, SMALL[:1]), s.data(1, small(0)), s.manifest(2, SMALL[:1], batch=1)],
        "came twice",
    ),
    "wrong digest": (relabelled, "digest"),
    "not a manifest": (lambda s: [s.seal(s.header(ChunkKind.MANIFEST, 0, 5), b"hello")], "malformed"),
    "larger than its tokens": (lambda s: [s.manifest(0, [make_part(5, 101)])], "place or size"),
    "smaller than its tokens": (lambda s: [s.manifest(0, [make_part(5, 99)])], "place or size"),
    "at another place": (lambda s: [s.manifest(0, [moved(make_part(5, 100))])], "place or size"),
    "over the budget": (lambda s: [s.manifest(0, [make_part(4, limits.MIB)])], "exceeds"),
}


@SUITES
@pytest.mark.parametrize("name", ATTACKS)
def test_a_violation_ends_the_transfer_and_shows_nothing(
    context: Context, gate: Gate, suite: CipherSuite, name: str
) -> None:
    attack, complaint = ATTACKS[name]
    mailbox = Mailbox()
    sender = HandMadeSender(context, gate, suite)
    lane = ReceiverLane.connect(
        context,
        lane=RECEIVER,
        host=HOST,
        grant=sender.grant,
        expected=expected([*SMALL, make_part(4, limits.MIB), make_part(5, 100)]),
        budget_bytes=5 * CHUNK_BYTES,
        idle_timeout_s=DEADLINE_S,
        post=mailbox.post,
        verify_digests=True,
    )
    messages = attack(sender)
    sender.send(*messages)
    finished = mailbox.wait_for(LaneFinished)
    sender.close()
    assert lane.join(DEADLINE_S)
    assert not finished.ok
    assert complaint in finished.reason
    shown = SMALL[:1] if name == "twice in a transfer" else []
    assert same_parts(mailbox.parts, shown)
    mailbox.assert_ended_once(RECEIVER)


# --- transfers that stop -----------------------------------------------------------------------------------------------


def receive_by_hand(context: Context, sender: HandMadeSender, parts: list[Part], mailbox: Mailbox) -> ReceiverLane:
    """A lane that takes ``parts`` from a sender made by hand."""
    return ReceiverLane.connect(
        context,
        lane=LaneId(1),
        host=HOST,
        grant=sender.grant,
        expected=expected(parts),
        budget_bytes=sum(part.meta.length_bytes for part in parts),
        idle_timeout_s=DEADLINE_S,
        post=mailbox.post,
        verify_digests=True,
    )


def test_the_last_parts_are_told_one_by_one(context: Context, gate: Gate) -> None:
    parts = [make_part(number, CHUNK_BYTES) for number in range(20)]
    sender, mailbox = HandMadeSender(context, gate), Mailbox()
    try:
        lane = receive_by_hand(context, sender, parts, mailbox)
        chunks = [sender.data(i + 1, bytes(part.payload), final=i == 19) for i, part in enumerate(parts)]
        sender.send(sender.manifest(0, parts), *chunks)
        assert mailbox.wait_for(LaneFinished).ok
        assert lane.join(DEADLINE_S)
    finally:
        sender.close()
    assert same_parts(mailbox.parts, parts)
    told = [len(event.parts) for event in mailbox.seen if isinstance(event, PartsReceived)]
    assert told[-TOLD_AT_ONCE_PARTS:] == [1] * TOLD_AT_ONCE_PARTS


def test_what_has_come_is_told_also_when_nothing_follows(context: Context, gate: Gate) -> None:
    parts = [make_part(number, CHUNK_BYTES) for number in range(20)]
    sender, mailbox = HandMadeSender(context, gate), Mailbox()
    try:
        lane = receive_by_hand(context, sender, parts, mailbox)
        sender.send(sender.manifest(0, parts), *(sender.data(i + 1, bytes(parts[i].payload)) for i in range(3)))
        wait_until(lambda: len(mailbox.parts) == 3, "three parts, far fewer than are told together")
        lane.close(False, "enough")
        mailbox.wait_for(LaneFinished)
        assert lane.join(DEADLINE_S)
    finally:
        sender.close()
    assert same_parts(mailbox.parts, parts[:3])


def test_a_sender_that_stops_midway_leaves_what_was_verified(context: Context, gate: Gate) -> None:
    mailbox = Mailbox()
    sender = HandMadeSender(context, gate)
    lane = ReceiverLane.connect(
        context,
        lane=RECEIVER,
        host=HOST,
        grant=sender.grant,
        expected=expected(SMALL),
        budget_bytes=limits.GIB,
        idle_timeout_s=0.5,
        post=mailbox.post,
        verify_digests=False,
    )
    half = SMALL[3].payload[:CHUNK_BYTES]
    sender.send(
        sender.manifest(0, SMALL), sender.data(1, small(0, 1)), sender.data(2, small(2)), sender.data(3, bytes(half))
    )
    finished = mailbox.wait_for(LaneFinished)
    sender.close()
    assert lane.join(DEADLINE_S)
    assert (finished.ok, finished.reason) == (False, "no data came in time")
    assert same_parts(mailbox.parts, SMALL[:3])


def test_a_port_that_nobody_answers_at_is_named_as_the_reason(context: Context) -> None:
    mailbox = Mailbox()
    with os_socket.socket() as silent:  # bound, not listening: a connection is refused, and nobody else takes the port
        silent.bind((HOST, 0))
        grant = TransferGrant(
            transfer_id=bytes(16),
            port=silent.getsockname()[1],
            token="0" * 64,
            key=bytes(32),
            suite=AES,
            chunk_bytes=CHUNK_BYTES,
        )
        lane = ReceiverLane.connect(
            context,
            lane=RECEIVER,
            host=HOST,
            grant=grant,
            expected=expected(SMALL),
            budget_bytes=limits.GIB,
            idle_timeout_s=0.3,
            post=mailbox.post,
            verify_digests=False,
        )
        finished = mailbox.wait_for(LaneFinished)
        assert lane.join(DEADLINE_S)
    assert (finished.ok, finished.reason) == (False, NO_CONNECTION)


def test_a_sender_may_end_with_parts_missing(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED[:3], final=True)
    sent, received = rig.finish()
    assert (sent.ok, received.ok) == (False, False)
    assert received.reason == f"the sender ended with {len(MIXED) - 3} parts missing"
    assert same_parts(rig.received.parts, MIXED[:3])


def test_parts_that_may_come_or_not_are_not_missed(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    rig.wire(sender)
    wanted = [replace(part, optional=number in (1, len(MIXED) - 1)) for number, part in enumerate(expected(MIXED))]
    rig.connect_receiver(grant, MIXED, expected=wanted)
    sender.feed(MIXED[:-1], final=True)
    sent, received = rig.finish()
    assert (sent.ok, received.ok) == (True, True)
    assert same_parts(rig.received.parts, MIXED[:-1])


def test_a_receiver_that_stops_ends_the_sender_in_time(rig: Rig) -> None:
    parts = [make_part(number, CHUNK_BYTES) for number in range(20)]
    sender, grant = rig.bind_sender(credit_bytes=4 * CHUNK_BYTES, idle_timeout_s=0.5)
    rig.connect_receiver(grant, parts)  # nobody tells the sender about its credit
    sender.feed(parts, final=True)
    finished = rig.sent.wait_for(LaneFinished)
    assert not finished.ok
    assert "did not take" in finished.reason


def test_a_sender_that_nobody_dials_ends_in_time_but_one_that_waits_to_be_fed_stays(rig: Rig) -> None:
    sender, _ = rig.bind_sender(idle_timeout_s=0.2)
    assert not sender.join(0.6)
    sender.feed(MIXED, final=True)
    assert not rig.sent.wait_for(LaneFinished).ok


def test_closing_ends_both_sides_at_once(rig: Rig) -> None:
    sender, grant = rig.bind_sender()
    receiver = rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED[:2], final=False)
    wait_until(lambda: len(rig.received.parts) == 2, "the first parts arrive")
    receiver.close(False, "changed my mind")
    receiver.close(True, "only the first call counts")
    sender.close(True, "done too early")
    sent, received = rig.finish()
    assert (received.ok, received.reason) == (False, "changed my mind")
    assert not sent.ok
    # Which of the two it sees first is chance.
    assert sent.reason == CONNECTION_LOST or "before everything was sent" in sent.reason


def test_feeding_after_the_end_and_wrong_lengths_are_our_own_mistake(rig: Rig) -> None:
    sender, _ = rig.bind_sender()
    with pytest.raises(LocalProtocolError, match="as long as"):
        sender.feed([Part(MIXED[2].meta, MIXED[1].payload)], final=False)
    with pytest.raises(LocalProtocolError, match="positive"):
        sender.add_credit(0)
    sender.feed([], final=True)
    with pytest.raises(LocalProtocolError, match="after its final"):
        sender.feed(MIXED, final=False)


def test_a_port_in_use_ends_the_lane_with_a_reason(rig: Rig) -> None:
    _, grant = rig.bind_sender()
    mailbox = Mailbox()
    lane = SenderLane.bind(
        rig.context,
        rig.gate,
        lane=LaneId(7),
        host=HOST,
        port_range=PortRange(grant.port, grant.port),
        suite=AES,
        chunk_bytes=CHUNK_BYTES,
        credit_bytes=CHUNK_BYTES,
        post=mailbox.post,
        idle_timeout_s=DEADLINE_S,
    )
    assert "in use" in mailbox.wait_for(LaneFinished).reason
    assert lane.join(DEADLINE_S)
    mailbox.assert_ended_once(LaneId(7))


def test_the_group_knows_the_living_and_closes_them(rig: Rig) -> None:
    sender, _ = rig.bind_sender()
    assert rig.group.get(SENDER) is sender
    assert rig.group.get(RECEIVER) is None
    with pytest.raises(LocalProtocolError, match="already"):
        rig.group.add(sender)
    assert rig.group.close_all(DEADLINE_S, "going home")
    assert rig.group.get(SENDER) is None
    assert rig.sent.wait_for(LaneFinished).reason == "going home"
