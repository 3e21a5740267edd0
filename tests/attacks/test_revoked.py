"""A node whose key is revoked, and others who would like to revoke."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya_zmq.protocol.identities import OTHER_KEY, REVOKED
from kakeya_zmq.protocol.revocation import MALFORMED, NOT_ENTITLED
from tests.attacks.kit import RawClient, Siege
from tests.attacks.test_cards import card_of, known_to, tell
from tests.fleet_rig import Fleet, kept_fleet, run_kakeya, wait_until
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
        # The session it had is over, and is not there any more for a request.
        client.await_goodbye(session)
        client.assert_unknown(session, 5)
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
    with alone(other, siege), other.expect(REVOKED), other.client() as client:
        # Under another name it is the same key.
        client.send(*client.hello(Identity(f"{member.node_id}-again", member.signing))[0])
        assert client.receive(0.5) is None


@contextlib.contextmanager
def alone(target: Siege, elsewhere: Siege) -> Iterator[None]:
    """``target`` restarted while nobody is there who could tell it anything: what it knows it has kept."""
    for node in (elsewhere.node, target.node):
        node.kill()
    try:
        target.node.launch()
        target.node.wait_ready()
        yield
    finally:
        elsewhere.node.launch(target.address)
        elsewhere.node.wait_ready()


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
        assert member.node_id in known_to(siege)
        # Who is revoked counts as known: all nodes have to come to the same, whatever they heard first.
        revoked = run_kakeya("revoke", "former", "--as", siege.node.name, "--public-key", key.hex(), *to, home=fleet.home)
        assert revoked.returncode == 0, revoked.stderr
        done = run_kakeya(*arguments, home=fleet.home)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: member.node_id not in known_to(siege), "it counts")
    finally:
        shutil.rmtree(folder)


def test_a_node_does_not_revoke_itself(tmp_path: Path) -> None:
    """By its name or by its key, and it is told that, not that it does not know itself."""
    key = NodeIdentity.load_or_create(tmp_path / "nodes" / "alone" / "identity.key").public_key
    for also in ((), ("--public-key", key.hex())):
        done = run_kakeya("revoke", "alone", "--as", "alone", *also, home=tmp_path)
        assert done.returncode == 2
        assert "a node does not revoke itself" in done.stderr


def test_two_nodes_that_revoke_each_other_end_the_same_everywhere(siege: Siege, other: Siege) -> None:
    """Told to two nodes in opposite order, each by a relay; the earlier one by its own clock does not win."""
    one, two = Identity.new(f"one-{time.time_ns()}"), Identity.new(f"two-{time.time_ns()}")
    with siege.client() as client, other.client() as elsewhere:
        sessions = {reached: reached.join() for reached in (client, elsewhere)}
        for reached, session in sessions.items():
            for number, who in enumerate((one, two), start=1):
                tell(reached, session, number, card_of(who))
        blobs = (revocation_of(one.public, one.node_id, two), revocation_of(two.public, two.node_id, one))
        tell_revocations(client, sessions[client], 3, blobs[0])
        tell_revocations(elsewhere, sessions[elsewhere], 3, blobs[1])
        for target in (siege, other):
            wait_until(lambda target=target: not {one.node_id, two.node_id} & known_to(target), "both cards are dropped")  # type: ignore[misc]
    for target in (siege, other):
        for who in (one, two):
            with target.expect(REVOKED), target.client() as client:
                client.send(*client.hello(who)[0])
                assert client.receive(0.5) is None


def test_an_issuer_does_not_choose_the_name_that_is_shown(siege: Siege, member: Identity) -> None:
    """It signs under the target's name, and calls the victim something else."""
    issuer = Identity.new(f"issuer-{time.time_ns()}")
    fields = ["innocent", member.public, siege.node.name, issuer.public, time.time()]
    with siege.client() as client:
        session = client.join()
        tell(client, session, 1, card_of(issuer))
        tell_revocations(client, session, 2, wire.sign_revocation(issuer.signing, fields))
        wait_until(lambda: member.node_id not in known_to(siege), "it counts")
    entries = [entry for entry in siege.audited("revoked") if entry.get("node_id") == member.node_id]
    assert [entry["reason"] for entry in entries] == [f"revoked by {issuer.node_id}"]
    assert not any(entry.get("node_id") == "innocent" for entry in siege.audited("revoked"))


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


def test_revoking_where_the_roster_lets_no_clients_in(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The command comes in as the administrator that signs; who is none is told so, and tells nobody."""
    names = ("admin", "helper", "lost")
    keys = {name: NodeIdentity.load_or_create(tmp_path / "nodes" / name / "identity.key").public_key for name in names}
    rows = [f'[nodes.{name}]\nkey = "{key.hex()}"\nroles = ["cache"]' for name, key in keys.items()]
    rows[0] += "\nadmin = true"
    (tmp_path / "fleet.toml").write_text("\n".join(["clients = false", *rows]), encoding="utf-8")
    with kept_fleet(request, tmp_path / "no-model", tmp_path) as fleet:
        nodes = [fleet.add("cache", name=name) for name in names[:2]]
        for node in nodes:
            node.launch(nodes[0].address)
            node.wait_ready()
        revocations = [tmp_path / "nodes" / node.name / "revocations.json" for node in nodes]
        to = ("--public-key", keys["lost"].hex(), "--address", nodes[1].address)
        done = run_kakeya("revoke", "lost", "--as", "helper", *to, home=tmp_path)
        assert done.returncode == 2
        assert "the roster does not let helper revoke" in done.stderr
        assert "administrators are: admin" in done.stderr
        done = run_kakeya("revoke", "lost", "--as", "admin", "--json", *to, home=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["told"] == [nodes[1].address]
        wait_until(lambda: all(path.exists() for path in revocations), "both nodes have it")
        # Nobody is reached: the node that signed finds it in its file.
        to = ("--public-key", keys["helper"].hex(), "--address", "127.0.0.1:1")
        done = run_kakeya("revoke", "helper", "--as", "admin", *to, home=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "not told: 127.0.0.1:1" in done.stdout
        audit = tmp_path / "nodes" / "admin" / "audit.jsonl"
        line = '"reason": "revoked by admin", "count": 1, "node_id": "helper"'
        wait_until(lambda: line in audit.read_text("utf-8"), "it counts")
        assert '"node_id": "lost"' in audit.read_text("utf-8")
