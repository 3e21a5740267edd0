"""Forged capability cards, through the exchange that every member may use."""

from __future__ import annotations

import time
from typing import Any

from tests.attacks.kit import RawClient, Siege
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


def card_of(who: Identity, *, node_id: str | None = None, incarnation: int | None = None) -> bytes:
    fields: list[Any] = [
        node_id or who.node_id,
        who.public,
        time.time_ns() if incarnation is None else incarnation,
        1,
        ["worker"],
        "independent",
        "",
        0,
        [["127.0.0.1:9", "lan", 50, b""]],
        0,
        [],
        None,
        None,
        time.time(),
        60_000,
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
