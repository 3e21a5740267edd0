"""One member with many identities that revokes without end, in a fleet of its own without a roster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import pytest

from daemons.entitlement import NEW_BURST
from kakeya_zmq.protocol.revocation import PER_ISSUER_MAX, TOO_FAST
from tests.attacks.kit import Honest, Siege
from tests.attacks.test_cards import card_of, tell
from tests.attacks.test_revoked import EXCHANGE, tell_revocations
from tests.fleet_rig import Fleet, kept_fleet, run_kakeya, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity
from wire.limits import REVOCATIONS_MAX, REVOCATIONS_PER_EXCHANGE_MAX

ROGUES = REVOCATIONS_MAX // PER_ISSUER_MAX + 1


@pytest.fixture(scope="module")
def two_nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("full-book")
    with kept_fleet(request, home / "no-model", home) as fleet:
        first, second = fleet.add("cache", name="first"), fleet.add("cache", name="second")
        first.launch()
        first.wait_ready()
        second.launch(first.address)
        second.wait_ready()
        yield fleet


def revocation(issuer: Identity, key: bytes, at: float) -> bytes:
    return wire.sign_revocation(issuer.signing, ["made-up", key, issuer.node_id, issuer.public, at])


def tell_all(target: Siege, blobs: Sequence[bytes]) -> None:
    """By as many tellers as it takes."""
    for start in range(0, len(blobs), int(NEW_BURST)):
        some = blobs[start : start + int(NEW_BURST)]
        with target.client() as client:
            session = client.join(Identity.new(f"teller-{start}-{time.time_ns()}"))
            for number, first in enumerate(range(0, len(some), REVOCATIONS_PER_EXCHANGE_MAX), start=1):
                tell_revocations(client, session, number, *some[first : first + REVOCATIONS_PER_EXCHANGE_MAX])


def test_who_fills_the_book_keeps_nobody_from_revoking_and_nobody_waiting(two_nodes: Fleet) -> None:
    """The book is full of revocations of known keys. The command is obeyed on both nodes, and what its author pushes on
    with, ever earlier, is looked at a few times a second only."""
    first, second = Siege(two_nodes, "first"), Siege(two_nodes, "second")
    rogues = [Identity.new(f"rogue-{number}") for number in range(ROGUES)]
    lost = Identity.new("lost")
    for target in (first, second):
        with target.client() as client:
            session = client.join()
            for number, who in enumerate((*rogues, lost), start=1):
                tell(client, session, number, card_of(who))
    blobs = [
        revocation(issuer, other.public, 1.0 + number)
        for issuer in rogues
        for number, other in enumerate(rogues)
        if other is not issuer
    ][:REVOCATIONS_MAX]
    for target in (first, second):
        tell_all(target, blobs)
        wait_until(lambda target=target: kept(two_nodes, target) == REVOCATIONS_MAX, "its book is full")  # type: ignore[misc]
    key = ("--public-key", lost.public.hex())
    done = run_kakeya("revoke", "lost", "--as", "first", *key, "--address", first.address, home=two_nodes.home)
    assert done.returncode == 0, done.stderr
    done = run_kakeya("revoke", "lost", "--as", "first", *key, "--address", second.address, home=two_nodes.home)
    assert done.returncode == 0, done.stderr
    for target in (first, second):
        assert any(entry.get("node_id") == "lost" for entry in target.audited("revoked"))
    count = int(NEW_BURST) + 40
    with first.expect(TOO_FAST, count=20), Honest(first.node) as honest, first.client() as client:
        session = client.join()
        for number in range(count):
            body = [EXCHANGE, [], [], None, [revocation(rogues[0], wire.os.urandom(32), 1.0 - number / count)], b""]
            assert client.ask(session, body, number=number + 1)[0] in (4, 6)
    assert not honest.failures


def kept(fleet: Fleet, target: Siege) -> int:
    """What its file holds: it is written once for many."""
    path = fleet.home / "nodes" / target.node.name / "revocations.json"
    return len(json.loads(path.read_text("utf-8"))) if path.exists() else 0
