"""Forged capability cards, through the exchange that every member may use."""

from __future__ import annotations

import contextlib
import socket as os_socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

from tests.attacks.kit import RawClient, Siege, repeat
from tests.fleet_rig import wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

EXCHANGE = 1
FORGED = "a card is malformed or its signature does not hold"
STOLEN = (
    "a card has another identity key than the one known here for that name",
    "a card claims a node id that belongs to another identity key",
    "another identity key claims the name of a node that is known here",
)


def card_of(
    who: Identity,
    *,
    node_id: str | None = None,
    incarnation: int | None = None,
    address: str = "127.0.0.1:9",
    ttl_ms: int = 60_000,
) -> bytes:
    fields: list[Any] = [
        node_id or who.node_id,
        who.public,
        time.time_ns() if incarnation is None else incarnation,
        1,
        ["worker"],
        "independent",
        "",
        0,
        [[address, "lan", 50, b""]],
        0,
        [],
        None,
        None,
        time.time(),
        ttl_ms,
    ]
    return wire.sign_card(who.signing, fields)


def tell(client: RawClient, session: wire.Session, number: int, card: bytes) -> list[bytes]:
    """Exchange one card; the cards that come back."""
    envelope = client.ask(session, [EXCHANGE, [card], [0]], number=number)
    assert envelope[0] == 4, envelope
    cards: list[bytes] = envelope[2][1]
    return cards


def known_to(siege: Siege) -> set[str]:
    return {str(row["node_id"]) for row in siege.status().peers}


def test_a_proper_card_is_taken(siege: Siege) -> None:
    with siege.client() as client:
        session = client.join()
        tell(client, session, 1, card_of(Identity.new("newcomer")))
        wait_until(lambda: "newcomer" in known_to(siege), "the card is known")


def test_a_forged_card(siege: Siege) -> None:
    """Signed by another key than it names, or changed at any byte after signing."""
    with siege.expect(FORGED, count=40), siege.client() as client:
        session = client.join()
        honest = Identity.new("paper-node")
        forged = Identity("paper-node", Identity.new("x").signing)
        body, _ = wire.msgpack.unpackb(card_of(honest))
        _, signature = wire.msgpack.unpackb(card_of(forged))
        tell(client, session, 1, wire.msgpack.packb([body, signature]))
        card = card_of(honest)
        for number, position in enumerate(range(4, len(card), max(1, len(card) // 40)), start=2):
            changed = bytearray(card)
            changed[position] ^= 0x01
            tell(client, session, number, bytes(changed))
        assert "paper-node" not in known_to(siege)


def test_a_card_with_a_stolen_name(siege: Siege, other: Siege) -> None:
    """Also from the future: a greater incarnation does not help who has not the key."""
    assert other.node.name in known_to(siege)
    with siege.expect(*STOLEN, count=2), siege.client() as client:
        session = client.join()
        thief = Identity.new("thief")
        for number, incarnation in enumerate((1, 2**63 - 1), start=1):
            tell(client, session, number, card_of(thief, node_id="other", incarnation=incarnation))
        cards = [wire.read_card(card) for card in tell(client, session, 3, card_of(Identity.new("asker")))]
        assert thief.public not in {card[1] for card in cards}
        assert "other" in {card[0] for card in cards}


class Bystander:
    """Somebody's port: takes every connection, reads nothing, says nothing and closes it."""

    def __init__(self) -> None:
        self._listener = os_socket.create_server(("127.0.0.1", 0), backlog=500)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._thread = threading.Thread(target=self._run, name="bystander")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(os_socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                connection.close()


def made_up(count: int, *addresses: str) -> Iterator[bytes]:
    """Cards of nodes that do not exist, soon forgotten again."""
    for number in range(count):
        name = f"made-up-{wire.os.urandom(4).hex()}"
        yield card_of(Identity.new(name), address=addresses[number % len(addresses)], ttl_ms=15_000)


def assert_served(siege: Siege) -> None:
    assert siege.status().node_id == siege.node.name


def test_many_cards_that_name_one_address_do_not_make_a_node_hammer_it(siege: Siege) -> None:
    with Bystander() as bystander, siege.client() as client:
        session = client.join()
        for number, card in enumerate(made_up(24, f"127.0.0.1:{bystander.port}"), start=1):
            tell(client, session, number, card)
        wait_until(lambda: bystander.connections > 0, "the address is dialled")
        repeat(5.0, lambda: assert_served(siege))
        # An attempt may connect twice before it is given up; each of the two nodes makes some, at once, after 1 s, 3 s, 7 s.
        assert bystander.connections <= 24


def test_names_and_odd_forms_of_an_address_are_never_dialled(siege: Siege) -> None:
    def passed_over() -> int:
        return int(siege.status().sections["prefill"].get("endpoints_passed_over", 0) or 0)

    before = passed_over()
    with Bystander() as bystander, siege.client() as client:
        forms = [f"{host}:{bystander.port}" for host in ("localhost", "127.1", "0x7f000001", "2130706433", "0.0.0.0")]
        session = client.join()
        for number, card in enumerate(made_up(20, *forms), start=1):
            tell(client, session, number, card)
        wait_until(lambda: passed_over() >= before + 5, "several of them were looked at")
        assert bystander.connections == 0
