"""A member that copies the cards of a primary's workers and caches, and so is asked in their place."""

from __future__ import annotations

from typing import Any, Final

from tests.attacks.kit import Siege
from tests.attacks.rogue_member import FAILURE, RogueMember
from tests.attacks.test_cards import EXCHANGE, card_of, tell
from tests.fleet_rig import wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

LOOKUP: Final = 2
SUBMIT: Final = 6
UNIMPLEMENTED: Final = 11


class Claims(RogueMember):
    """A node that offers what the primary's own workers and caches offer, and remembers what it was asked."""

    def __init__(self, psk: bytes, who: Identity) -> None:
        self.asked: list[int] = []
        super().__init__(psk, who, self._fail, roles=("worker", "cache"))

    def _fail(self, body: list[Any]) -> list[Any]:
        self.asked.append(body[0])
        return [FAILURE, UNIMPLEMENTED, "no"]

    def join(self, primary: Siege) -> None:
        """Copy what it takes from the primary's card and status, and have the primary take a card with it."""
        with primary.client() as client:
            session = client.join(self.who, roles=("worker", "cache"))
            of_primary = client.ask(session, [EXCHANGE, [], [], b"", [], b""])[2][1]
            model = next(fields for fields in map(wire.read_card, of_primary) if fields[0] == "primary")[10][0]
            namespace, values = model[4], dict(model[6])
            fields = wire.read_card(card_of(self.who, incarnation=1))
            fields[4], fields[8], fields[9] = (
                ["worker", "cache"],
                [[self.address, "lan", 50, wire.key_id(self._psk)]],
                self.bus_port,
            )
            fields[11] = [10**6, 10**9, 1000, 1, 0.0, 0, 0, 0, 0, [namespace], [[namespace, 10**6]]]
            values["tenant_key_id"] = primary.status().sections["compatibility"]["tenant_key_id"]
            fields[12] = [namespace, values, 4, 0, 0, 0, 0.0, 1e6, 2**33, True]
            tell(client, session, 2, wire.sign_card(self.who.signing, fields))
        wait_until(lambda: connected(primary) >= {self.who.node_id}, "the primary is connected to it")

    def was_asked(self) -> set[int]:
        """Kinds of requests, but for exchanges of cards."""
        return set(self.asked) - {EXCHANGE}


def connected(primary: Siege) -> set[str]:
    """Names of nodes that it is connected to and whose card it has."""
    rows = primary.status().peers
    return {str(row["node_id"]) for row in rows if row["state"] == "up" and row.get("card_age_ms") is not None}
