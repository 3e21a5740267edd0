"""A member that sends telemetry under another node's name, to a reader that holds the telemetry key."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
import zmq

from dashboard.feed import BusFeed
from dashboard.fleet_view import HERE
from dashboard.hub import LiveFleet
from dashboard.speakers import OTHER_SPEAKER, Speakers
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.bus_subscriber import FORGED
from tests.attacks.kit import Siege
from tests.attacks.rogue_member import FAILURE, RogueMember
from tests.fleet_rig import Fleet, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity
from wire.events import NodeSnapshot
from wire.keys import FleetKey

NODE: Final = 0x42
HIGHEST: Final = 2**64 - 1
LIE: Final = msgpack.packb({"roles": ["cache"], "software": "a lie", "ttl_ms": 60_000, "interval_ms": 200})
VICTIM: Final = "target"


def bus_of(siege: Siege) -> Address:
    return Address("127.0.0.1", int(siege.status().sections["node"]["bus_port"] or 0))


def recorded(siege: Siege, psk: bytes) -> list[bytes]:
    """One snapshot of the victim as it went over the bus."""
    telemetry = wire.purpose_key(psk, "kz bus telemetry")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        public, secret = wire.bus_curve_pair(telemetry)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
        socket.setsockopt(zmq.SUBSCRIBE, bytes([NODE]))
        socket.connect(f"tcp://{bus_of(siege)}")
        assert socket.poll(20_000)
        return socket.recv_multipart()


@contextlib.contextmanager
def reading(psk: bytes, folder: Path, *addresses: Address) -> Iterator[LiveFleet]:
    fleet = LiveFleet()
    feed = BusFeed(fleet, FleetKey(psk).telemetry_key(), addresses=addresses, speakers=Speakers(folder))
    try:
        feed.start()
        yield fleet
    finally:
        assert feed.close()


def told(fleet: LiveFleet, name: str) -> NodeSnapshot | None:
    entry = fleet.read(lambda view, now: view.node(name, now))
    return entry.snapshot if entry is not None else None


def refusals(fleet: LiveFleet) -> dict[tuple[str, str, str], int]:
    """(who tells it, under whose name, why) → how many messages."""
    found: dict[tuple[str, str, str], int] = {}
    for record in fleet.read(lambda view, now: view.security.newest()):
        if record.event.kind == "telemetry_refused":
            which = (record.node_id, record.event.subject, record.event.text)
            found[which] = found.get(which, 0) + record.event.count
    return found


def under_its_own_key(liar: Identity) -> Callable[[bytes], list[list[bytes]]]:
    numbers = itertools.count(1)
    return lambda key: [wire.seal_bus_message(key, liar, NODE, HIGHEST, next(numbers), LIE, name=VICTIM)]


def with_what_the_victim_signed(genuine: list[bytes]) -> Callable[[bytes], list[list[bytes]]]:
    """Its key and signature, under a higher incarnation, with other figures, and both."""
    numbers = itertools.count(1)

    def frames(key: bytes) -> list[list[bytes]]:
        content = wire.bindings.crypto_secretbox_open(genuine[2][24:], genuine[2][:24], bus_message_key(key, genuine[1]))
        made = []
        for header_of, payload in ((HIGHEST, content[96:]), (1, LIE), (HIGHEST, LIE)):
            name = VICTIM.encode()
            header = wire.BUS_HEADER.pack(b"KB", 1, NODE, len(name), header_of, next(numbers)) + name
            nonce = wire.os.urandom(24)
            sealed = wire.bindings.crypto_secretbox(content[:96] + payload, nonce, bus_message_key(key, header))
            made.append([bytes([NODE]), header, nonce + sealed])
        return made

    return frames


def bus_message_key(key: bytes, header: bytes) -> bytes:
    return wire.blake2b(header, 32, key=key, person="kakeya-bus-v2")


def refuse_all(body: list[Any]) -> list[Any]:
    return [FAILURE, 7, "no"]


@pytest.fixture
def psk(fleet: Fleet) -> bytes:
    return fleet.psk_file.read_bytes().strip()


def test_figures_under_another_nodes_name_are_refused_and_shown_as_a_refusal(
    siege: Siege, psk: bytes, tmp_path: Path
) -> None:
    liar = Identity.new("liar")
    ways = {
        OTHER_SPEAKER: under_its_own_key(liar),
        FORGED: with_what_the_victim_signed(recorded(siege, psk)),
    }
    with reading(psk, tmp_path, bus_of(siege)) as reader:
        wait_until(lambda: told(reader, VICTIM) is not None, "the victim's own figures")
        before = reader.read(lambda view, now: view.node(VICTIM, now))
        assert before is not None
        own_software = before.snapshot.software if before.snapshot is not None else ""
        for reason, frames in ways.items():
            with (
                RogueMember(psk, liar, refuse_all, frames=frames) as rogue,
                reading(psk, tmp_path, bus_of(siege), parse_address(rogue.bus_address)) as again,
            ):
                # This reader hears both from its start; the one before has written down whose name it is.
                wait_until(lambda: refusals(again).get((HERE, VICTIM, reason), 0) >= 3, "refusals")  # noqa: B023
                heard_at = again.clock()
                wait_until(
                    lambda: heard_after(again, VICTIM, heard_at),  # noqa: B023
                    "figures of the victim in spite of the liar",
                )
                found = again.read(lambda view, now: view.node(VICTIM, now))
                assert found is not None
                assert found.incarnation == before.incarnation
                assert found.snapshot is not None
                assert found.snapshot.software == own_software != "a lie"


def heard_after(fleet: LiveFleet, name: str, moment: float) -> bool:
    entry = fleet.read(lambda view, now: view.node(name, now))
    return entry is not None and entry.snapshot is not None and fleet.clock() - entry.silent_s > moment


def test_a_reader_that_hears_the_liar_first_after_a_restart_does_not_believe_it(
    siege: Siege, psk: bytes, tmp_path: Path
) -> None:
    with reading(psk, tmp_path, bus_of(siege)) as reader:
        wait_until(lambda: told(reader, VICTIM) is not None, "the victim's own figures")
    liar = Identity.new("liar")
    with (
        RogueMember(psk, liar, refuse_all, frames=under_its_own_key(liar)) as rogue,
        reading(psk, tmp_path, parse_address(rogue.bus_address)) as again,
    ):
        wait_until(lambda: bool(refusals(again)), "refusals")
        assert told(again, VICTIM) is None
        assert again.read(lambda view, now: view.bus_state(now)) != "live"
