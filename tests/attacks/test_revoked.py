"""A node whose key is revoked, and others who would like to revoke."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator

import pytest

from kakeya_zmq.protocol.identities import OTHER_KEY, REVOKED
from kakeya_zmq.protocol.revocation import MALFORMED, NOT_ENTITLED
from tests.attacks.kit import RawClient, Siege
from tests.attacks.test_cards import card_of, known_to, tell
from tests.fleet_rig import Fleet, run_kakeya, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity
from wire.keys import NodeIdentity

EXCHANGE = 1


def revocation_of(key: bytes, name: str, issuer: Identity) -> bytes:
    return wire.sign_revocation(issuer.signing, [name, key, issuer.node_id, issuer.public, time.time()])


def tell_revocations(client: RawClient, session: wire.Session, number: int, *blobs: bytes) -> None:
    assert client.ask(session, [EXCHANGE, [], [], None, list(blobs)], number=number)[0] == 4


@pytest.fixture
def member(siege: Siege, other: Siege) -> Iterator[Identity]:
    """A node that both know by its card, and that has sessions with them."""
    who = Identity.new(f"member-{time.time_ns()}")
    with siege.client() as client, other.client() as elsewhere:
        for reached in (client, elsewhere):
            tell(reached, reached.join(who), 1, card_of(who))
        wait_until(lambda: who.node_id in known_to(siege) and who.node_id in known_to(other), "both know it")
        yield who


def test_a_revoked_node_is_refused_everywhere(fleet: Fleet, siege: Siege, other: Siege, member: Identity) -> None:
    """The command on one node; the other one hears of it by gossip. Sessions, hellos and cards end, over restarts too."""
    with siege.client() as client:
        session = client.join(member)
        arguments = ("revoke", member.node_id, "--as", siege.node.name, "--public-key", member.public.hex())
        done = run_kakeya(*arguments, "--address", siege.address, "--json", home=fleet.home)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["told"] == [siege.address]
        # The session it had is over: a request gets no answer of it.
        client.send(*session.seal([1, 5, 2000, [12]]))
        wait_until(lambda: session_ended(client), "its session has ended")
    for target in (siege, other):
        wait_until(lambda target=target: target.status().sections["roster"]["revoked_keys"] >= 1, "it is known")  # type: ignore[misc]
        wait_until(lambda target=target: member.node_id not in known_to(target), "its card is dropped")  # type: ignore[misc]
        assert any(entry["node_id"] == member.node_id for entry in target.audited("revoked"))
        with target.expect(REVOKED), target.client() as client:
            client.send(*client.hello(member)[0])
            assert client.receive(0.5) is None
        with target.expect(REVOKED), target.client() as client:
            tell(client, client.join(), 1, card_of(member))
        assert member.node_id not in known_to(target)
    other.node.restart()
    with other.expect(REVOKED), other.client() as client:
        # Under another name it is the same key.
        client.send(*client.hello(Identity(f"{member.node_id}-again", member.signing))[0])
        assert client.receive(0.5) is None


def test_a_revocation_that_is_refused_is_no_success(fleet: Fleet, siege: Siege, member: Identity) -> None:
    """The signer is a node of this machine that the other one has never seen; then one that it has revoked."""
    folder = fleet.home / "nodes" / "former"
    folder.mkdir()
    key = NodeIdentity.load_or_create(folder / "identity.key").public_key
    to = ("--address", siege.address)
    arguments = ("revoke", member.node_id, "--as", "former", "--public-key", member.public.hex(), *to)
    try:
        with siege.expect(NOT_ENTITLED):
            done = run_kakeya(*arguments, home=fleet.home)
            assert done.returncode == 1, done.stderr
            assert "was not taken" in done.stderr
            assert "former may not revoke there" in done.stderr
        revoked = run_kakeya("revoke", "former", "--as", siege.node.name, "--public-key", key.hex(), *to, home=fleet.home)
        assert revoked.returncode == 0, revoked.stderr
        with siege.expect(NOT_ENTITLED):
            done = run_kakeya(*arguments, home=fleet.home)
            assert done.returncode == 1, done.stderr
            assert "is itself revoked" in done.stderr
    finally:
        shutil.rmtree(folder)
    assert member.node_id in known_to(siege)


def session_ended(client: RawClient) -> bool:
    frames = client.receive(0.1)
    return frames is not None and wire.unpack_header(frames[0])[0] in (wire.UNKNOWN_SESSION, wire.SEALED)


def test_forged_revocations(siege: Siege, member: Identity) -> None:
    """Changed at any byte, or signed by another key than it names."""
    blob = revocation_of(member.public, member.node_id, Identity.new("nobody"))
    with siege.expect(MALFORMED, count=20), siege.client() as client:
        session = client.join()
        for number, position in enumerate(range(4, len(blob), max(1, len(blob) // 20)), start=1):
            changed = bytearray(blob)
            changed[position] ^= 0x01
            tell_revocations(client, session, number, bytes(changed))
    assert member.node_id in known_to(siege)


def test_who_is_no_node_cannot_revoke(siege: Siege, member: Identity) -> None:
    """A client, and a key that nobody has seen."""
    with siege.expect(NOT_ENTITLED, count=2), siege.client() as client:
        who = Identity.new("just-a-client")
        session = client.join(who, roles=["client"])
        tell_revocations(client, session, 1, revocation_of(member.public, member.node_id, who))
        tell_revocations(client, session, 2, revocation_of(member.public, member.node_id, Identity.new("unseen")))
    assert member.node_id in known_to(siege)


def test_a_machine_that_was_set_up_anew(fleet: Fleet, siege: Siege, member: Identity) -> None:
    """Its name is bound to the key it had, until the administrator says otherwise; nothing is restarted for it."""
    anew = Identity(member.node_id, Identity.new("x").signing)
    with siege.expect(OTHER_KEY), siege.client() as client:
        client.send(*client.hello(anew)[0])
        assert client.receive(0.5) is None
    known = fleet.home / "nodes" / siege.node.name / "known_nodes.json"
    # Names that come in quick succession are written down after some seconds.
    wait_until(lambda: member.node_id in known.read_text("utf-8"), "it is written down")
    done = run_kakeya("key", "forget", member.node_id, home=fleet.home)
    assert done.returncode == 0, done.stderr

    def admitted() -> bool:
        with siege.client() as client:
            client.send(*client.hello(anew)[0])
            return client.receive(0.5) is not None

    wait_until(admitted, "the new key is taken")
    assert any(entry["node_id"] == member.node_id for entry in siege.audited("key") if "forgotten" in entry["reason"])
