"""What the table of peers knows of one node, and the ways to it that its card offers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kakeya_zmq.io.addresses import parse_address
from kakeya_zmq.protocol.endpoints import EndpointChoice, EndpointOffer
from wire.cards import Card
from wire.errors import ConfigError
from wire.keys import FleetKey


@dataclass(slots=True)
class PeerNode:
    """A node that is connected, or is to be."""

    node_id: str
    choice: EndpointChoice = field(default_factory=EndpointChoice)
    card: Card | None = None
    seeds: set[str] = field(default_factory=set)
    ensured: bool = False
    asked_at: float = 0.0
    due: float | None = None
    passed_over: frozenset[str] = frozenset()
    """Addresses of its card that are not dialled."""
    down_because: str = ""
    """What was told last of its being away; nothing while it is reached."""

    @property
    def passing(self) -> bool:
        """Connected for an exchange of cards alone."""
        return not self.ensured and not self.seeds


def offers_of(card: Card | None, keys: Sequence[FleetKey]) -> list[EndpointOffer]:
    """What a card offers, best first; what cannot be parsed, or admits none of our keys (the oldest first), is left out."""
    generations = {b"": 0, **{key.key_id: generation for generation, key in enumerate(keys)}}
    endpoints = sorted(card.endpoints, key=lambda endpoint: -endpoint.priority) if card is not None else []
    offers = []
    for endpoint in endpoints:
        generation = generations.get(endpoint.key_id)
        if generation is None:
            continue
        with contextlib.suppress(ConfigError):
            address = str(parse_address(endpoint.address))
            offers.append(EndpointOffer(address, endpoint.network, endpoint.priority, generation))
    return offers
