"""A node's security desk: what it counts, keeps and writes down. A real reactor, no sockets of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.security import Security
from kakeya_zmq.audit import REASONS_MAX, read_entries
from kakeya_zmq.config import Settings, resolve_settings
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.known_nodes import load_known_nodes
from tests.unit.card_kit import identity
from tests.unit.test_cards import make_card
from wire.keys import FleetKey

KEY = FleetKey(b"k" * 32)
OTHER_KEY = FleetKey(b"o" * 32)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    made.close()


@pytest.fixture
def settings() -> Settings:
    return resolve_settings("cache", {"node_id": "me"}, environment={}).settings


def desk(reactor: Reactor, settings: Settings, folder: Path, key: FleetKey = KEY) -> Security:
    told: list[str] = []
    return Security(
        reactor,
        settings,
        identity=identity("me"),
        fleet_key=key,
        folder=folder,
        refused=told.append,
        expel=lambda key, node_id, reason: told.append(reason),
        forgotten=told.append,
    )


def kinds(folder: Path) -> list[str]:
    return [entry["kind"] for entry in read_entries(folder)]


def test_starts_stops_and_a_change_of_the_fleet_key(reactor: Reactor, settings: Settings, tmp_path: Path) -> None:
    for key in (KEY, KEY, OTHER_KEY):
        desk(reactor, settings, tmp_path, key).close("done")
    assert kinds(tmp_path) == ["started", "stopped", "started", "stopped", "key", "started", "stopped"]
    texts = " ".join(entry["reason"] for entry in read_entries(tmp_path))
    assert OTHER_KEY.key_id.hex() in texts


def test_reasons_without_end_are_one_counter(reactor: Reactor, settings: Settings, tmp_path: Path) -> None:
    security = desk(reactor, settings, tmp_path)
    for number in range(REASONS_MAX + 50):
        security.count_refusal(f"reason {number}")
    assert len(security.refusals) == REASONS_MAX + 1
    assert security.refusals["another reason"] == 50


def test_nodes_known_by_their_cards_are_kept_and_held_to_their_keys(
    reactor: Reactor, settings: Settings, tmp_path: Path
) -> None:
    security = desk(reactor, settings, tmp_path)
    names = [f"n{number}" for number in range(20)]
    for name in names:
        security.check_card(make_card(node_id=name, identity_public_key=identity(name).public_key))
    assert list(load_known_nodes(tmp_path)) == names[:1]  # the others wait: a rush costs one writing
    security.close("done")
    assert list(load_known_nodes(tmp_path)) == names
    again = desk(reactor, settings, tmp_path)
    again.check_card(make_card(node_id="n3", identity_public_key=identity("thief").public_key))
    assert again.refusals == {"another identity key claims the name of a node that is known here": 1}
    assert load_known_nodes(tmp_path)["n3"] == identity("n3").public_key
    assert [entry["node_id"] for entry in read_entries(tmp_path) if entry["kind"] == "refused"] == ["n3"]
