"""A node's security desk: what it counts, keeps and writes down. A real reactor, no sockets of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from daemons.entitlement import LAPSED, NEW_BURST
from daemons.security import Security
from kakeya_zmq.audit import REASONS_MAX, read_entries
from kakeya_zmq.config import Settings, resolve_settings
from kakeya_zmq.file_lock import locked
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.known_nodes import forget_node, load_known_nodes
from kakeya_zmq.protocol.revocation import TOO_FAST
from kakeya_zmq.revocation_file import add_revocation, load_revocations
from tests.unit.card_kit import identity
from tests.unit.test_cards import make_card
from wire.cards import Card
from wire.keys import FleetKey
from wire.revocations import Revocation, sign_revocation

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


def until(reactor: Reactor, condition: Callable[[], bool], wait_s: float = 20.0) -> None:
    """Run the reactor until something is so."""
    given_up_at = time.monotonic() + wait_s

    def check() -> None:
        if condition() or time.monotonic() > given_up_at:
            reactor.stop()
        else:
            reactor.call_later(0.01, check)

    check()
    reactor.run()
    assert condition()


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


def card_of(name: str, key: str = "") -> Card:
    return make_card(node_id=name, identity_public_key=identity(key or name).public_key)


def statement(revoked: str, issuer: str, *, claims: str = "somebody", at: float = 1.0) -> bytes:
    """A revocation whose texts say what the issuer likes."""
    made = Revocation(
        node_id=claims,
        identity_public_key=identity(revoked).public_key,
        issuer_id=claims,
        issuer_public_key=identity(issuer).public_key,
        issued_at_unix=at,
    )
    return sign_revocation(made, identity(issuer))


def roster_of(folder: Path, **admins: bool) -> None:
    lines = [
        f'[nodes.{name}]\nkey = "{identity(name).public_key.hex()}"\nadmin = {str(admin).lower()}'
        for name, admin in admins.items()
    ]
    (folder / "fleet.toml").write_text("\n".join(lines), encoding="utf-8")


def test_a_forgotten_key_stays_forgotten_when_the_node_is_about_to_write(
    reactor: Reactor, settings: Settings, tmp_path: Path
) -> None:
    """The administrator is quicker than the node's next look at its file, and the node has something to write, too."""
    security = desk(reactor, settings, tmp_path)
    security.check_card(card_of("old-mac"))
    assert forget_node(tmp_path, "old-mac")
    security.check_card(card_of("newcomer"))
    security.close("done")
    assert list(load_known_nodes(tmp_path)) == ["newcomer"]
    assert security.identities.key_of("old-mac") is None
    assert security.identities.bind("old-mac", identity("new key").public_key, ("worker",))


def test_what_others_put_into_the_file_of_revocations_is_not_lost(
    reactor: Reactor, settings: Settings, tmp_path: Path
) -> None:
    security = desk(reactor, settings, tmp_path)
    for name in ("peer", "first", "second"):
        security.check_card(card_of(name))
    add_revocation(tmp_path, statement("first", "me"))
    security.entitlement.merge((statement("second", "peer"),))
    assert set(load_revocations(tmp_path)) == {statement("first", "me"), statement("second", "peer")}
    assert all(security.identities.is_revoked(identity(name).public_key) for name in ("first", "second"))
    # And it is found without any news from the fleet.
    add_revocation(tmp_path, statement("peer", "me"))
    until(reactor, lambda: security.identities.is_revoked(identity("peer").public_key))
    security.close("done")


def test_new_revocations_of_one_teller_are_bounded_and_others_are_heard(
    reactor: Reactor, settings: Settings, tmp_path: Path
) -> None:
    """Ever earlier ones of one issuer: each would cost a signature, and take the place of the one before."""
    security = desk(reactor, settings, tmp_path)
    security.check_card(card_of("rogue"))
    count = int(NEW_BURST) + 20
    told = [statement(f"n{number}", "rogue", at=float(count - number)) for number in range(count)]
    started = reactor.clock()
    for blob in told:
        security.entitlement.merge((blob,), b"teller")
    assert security.refusals[TOO_FAST] >= 20 - 2 * (reactor.clock() - started) - 1
    security.entitlement.merge((statement("lost", "rogue", at=0.5),), b"another")
    assert security.identities.is_revoked(identity("lost").public_key)
    security.close("done")


def test_the_file_of_revocations_is_written_once_for_many_and_at_once_for_the_own_operator(
    reactor: Reactor, settings: Settings, tmp_path: Path
) -> None:
    security = desk(reactor, settings, tmp_path)
    security.check_card(card_of("peer"))
    told = [statement(f"n{number}", "peer") for number in range(20)]
    for blob in told:
        security.entitlement.merge((blob,))
    assert len(load_revocations(tmp_path)) == 1, "the others wait: a rush costs one writing"
    security.entitlement.merge((statement("lost", "me"),))
    assert set(load_revocations(tmp_path)) == {*told, statement("lost", "me")}
    security.entitlement.merge((statement("late", "peer"),))
    until(reactor, lambda: len(load_revocations(tmp_path)) == len(told) + 2)
    security.entitlement.merge((statement("last", "peer"),))
    security.close("done")
    assert statement("last", "peer") in load_revocations(tmp_path)


def test_two_writers_of_the_file_lose_nothing(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: add_revocation(tmp_path, statement(name, "me")), names))
    assert len(load_revocations(tmp_path)) == len(names)


def test_a_lock_that_is_held_too_long_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(TimeoutError), locked(tmp_path, wait_s=0.0):
        pass
    with locked(tmp_path, wait_s=0.0):
        pass


def test_kept_revocations_are_judged_by_the_roster(reactor: Reactor, settings: Settings, tmp_path: Path) -> None:
    """Whoever is no administrator any more has revoked nothing; when he is again, he has."""
    settings = replace(settings, roster_file=str(tmp_path / "fleet.toml"))
    for blob in (statement("lost", "former"), statement("gone", "admin")):
        add_revocation(tmp_path, blob)
    roster_of(tmp_path, me=False, admin=True, former=False, lost=False)
    security = desk(reactor, settings, tmp_path)
    assert security.identities.is_revoked(identity("gone").public_key)
    assert not security.identities.is_revoked(identity("lost").public_key)
    roster_of(tmp_path, me=False, admin=False, former=True, lost=False)
    until(reactor, lambda: security.identities.is_revoked(identity("lost").public_key))
    assert not security.identities.is_revoked(identity("gone").public_key)
    security.close("done")
    revoked = [(entry.get("node_id"), entry["reason"]) for entry in read_entries(tmp_path) if entry["kind"] == "revoked"]
    assert ("lost", "revoked by former") in revoked
    assert any(reason == LAPSED for _, reason in revoked)


def test_names_in_a_revocation_are_never_shown(reactor: Reactor, settings: Settings, tmp_path: Path) -> None:
    security = desk(reactor, settings, tmp_path)
    for name in ("mallory", "victim"):
        security.check_card(card_of(name))
    security.entitlement.merge(
        (statement("victim", "mallory", claims="me"), statement("nobody", "mallory", claims="victim"))
    )
    security.close("done")
    revoked = [entry for entry in read_entries(tmp_path) if entry["kind"] == "revoked"]
    unknown = identity("nobody").public_key.hex()[:16]
    assert [(entry.get("node_id"), entry["reason"]) for entry in revoked] == [
        ("victim", "revoked by mallory"),
        (None, f"the unknown key {unknown} is revoked by mallory"),
    ]
