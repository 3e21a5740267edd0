"""Attacks on the control plane by somebody who holds the transport's keys but not the session's, and by a rude member."""

from __future__ import annotations

import contextlib
import os

import msgpack
import pytest

from kakeya_zmq.io.incoming import OVERLONG
from tests.attacks.kit import GET_STATUS, RawClient, Relay, Siege, repeat
from tests.attacks.rogue_member import FAILURE, RogueMember
from tests.attacks.test_cards import assert_served, card_of, tell
from tests.fleet_rig import wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

MALFORMED = ("a control message has two frames", "wrong header length", "not a control message", "malformed header")
FRAMES = 100_000
"""Of one message."""
NOTHING_S = 0.3
"""How long an attacker waits to see that nothing comes back."""
SEAL = "the seal is broken"


def silence(client: RawClient) -> None:
    assert client.receive(NOTHING_S) is None


def test_the_second_implementation_is_served(siege: Siege) -> None:
    with siege.client() as client:
        session = client.join()
        tag, number, body = client.ask(session, GET_STATUS)
        assert (tag, number, body[0], body[1]) == (4, 1, 111, "target")


# --- who has no key, or the wrong one -----------------------------------------------------------------------------------


def test_another_fleets_key(siege: Siege) -> None:
    with (
        siege.expect("a connection was refused: its PSK is not this fleet's"),
        RawClient(siege.address, os.urandom(32)) as client,
    ):
        hello, _ = client.hello(Identity.new("stranger"))
        client.socket.send_multipart(hello)
        silence(client)


def test_unsealed(siege: Siege) -> None:
    """Behind the transport's handshake (its keys leaked, say): what is not sealed under the PSK is nothing."""
    with siege.expect(SEAL, count=2), siege.client() as client:
        plain = msgpack.packb(["x", bytes(32), bytes(32), 1, ["client"], "", bytes(64)])
        client.send(wire.pack_header(wire.HELLO, wire.key_id(siege.psk)), plain)
        session = client.join()
        header = wire.pack_header(wire.SEALED, session.key_id, session.session_id, 1)
        client.send(header, msgpack.packb([1, 1, 1000, GET_STATUS]))
        silence(client)


def test_sealed_with_the_wrong_key(siege: Siege) -> None:
    with siege.expect("another fleet key", SEAL, count=3), siege.client() as client:
        other_psk = os.urandom(32)
        secret = os.urandom(32)
        foreign = wire.make_hello(other_psk, Identity.new("x"), wire.curve_pair(secret)[0])
        client.send(*foreign)
        # With our key id in front, too.
        client.send(wire.pack_header(wire.HELLO, wire.key_id(siege.psk)), foreign[1])
        session = client.join()
        header = wire.pack_header(wire.SEALED, session.key_id, session.session_id, 1)
        client.send(header, wire.seal(os.urandom(32), header, msgpack.packb([7])))
        silence(client)


def test_a_hello_signed_by_another_identity(siege: Siege) -> None:
    with siege.expect("the signature does not hold"), siege.client() as client:
        who = Identity.new("honest-name")
        fields = [who.node_id, who.public, os.urandom(32), 1, ["client"], "", bytes(64)]
        forged = wire.sign_fields(Identity.new("x").signing, b"kakeya-zmq hello\0", fields)
        header = wire.pack_header(wire.HELLO, wire.key_id(siege.psk))
        client.send(header, wire.seal_prefixed(wire.purpose_key(siege.psk, "kz hello"), header, msgpack.packb(forged)))
        silence(client)


# --- order and place ----------------------------------------------------------------------------------------------------


def test_a_replayed_hello(siege: Siege) -> None:
    with siege.expect("a replayed hello"), siege.client() as victim, siege.client() as thief:
        hello, _ = victim.hello(Identity.new("victim"))
        victim.send(*hello)
        assert victim.receive() is not None
        thief.send(*hello)
        silence(thief)


def test_a_replayed_request(siege: Siege) -> None:
    with siege.expect("the counter is not new"), siege.client() as client:
        session = client.join()
        frames = session.seal([1, 1, 1000, GET_STATUS])
        client.send(*frames)
        assert client.answer_to(session, 1)[0] == 4
        client.send(*frames)
        silence(client)


def test_a_request_on_another_connection(siege: Siege) -> None:
    """One that has been answered, and one that was kept from arriving: an answer goes to whose session it is only."""
    with siege.expect("a session on another connection", count=2), siege.client() as client, siege.client() as thief:
        session = client.join()
        answered, kept = session.seal([1, 1, 1000, GET_STATUS]), session.seal([1, 2, 1000, GET_STATUS])
        client.send(*answered)
        assert client.answer_to(session, 1)[0] == 4
        for frames in (answered, kept):
            thief.send(*frames)
        silence(thief)


def test_a_stale_message(siege: Siege) -> None:
    """A message that was held back on the way is not taken any more once a later one was."""
    with siege.expect("the counter is not new"), siege.client() as client:
        session = client.join()
        held_back = session.seal([1, 1, 1000, GET_STATUS])
        client.ask(session, GET_STATUS, number=2)
        client.send(*held_back)
        silence(client)


def test_a_message_from_the_future(siege: Siege) -> None:
    """Raising the counter of a captured message breaks its seal, and does not keep the session's own next messages out."""
    with siege.expect(SEAL), siege.client() as client:
        session = client.join()
        _, body = session.seal([1, 1, 1000, GET_STATUS])
        client.send(wire.pack_header(wire.SEALED, session.key_id, session.session_id, 2**64 - 1), body)
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


def test_a_reflected_answer(siege: Siege) -> None:
    """The server's own messages are no requests: each direction has its own key."""
    with siege.expect(SEAL, "the counter is not new", "an unexpected message", count=3), siege.client() as client:
        hello, secret = client.hello(Identity.new("mirror"))
        client.send(*hello)
        welcome = client.receive()
        assert welcome is not None
        session = wire.start_session(siege.psk, secret, hello, welcome[0], welcome[1])
        client.send(*session.seal([1, 1, 1000, GET_STATUS]))
        answer = client.receive()
        assert answer is not None
        client.send(*answer)
        client.send(wire.pack_header(wire.SEALED, session.key_id, session.session_id, 50), answer[1])
        client.send(*welcome)
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


def test_the_wrong_direction(siege: Siege) -> None:
    """What only servers say is not taken from a client, not even properly sealed."""
    with siege.expect("malformed client message", "an unexpected message", count=4), siege.client() as client:
        session = client.join()
        for envelope in ([4, 1, [100]], [5, 1, [202, 1]], [8]):
            client.send(*session.seal(envelope))
        header = wire.pack_header(wire.UNKNOWN_SESSION, session.key_id, session.session_id)
        client.send(header, wire.seal_prefixed(wire.purpose_key(siege.psk, "kz welcome"), header, bytes(64)))
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


def test_redirected_to_another_node(siege: Siege, other: Siege) -> None:
    with other.expect("an unknown session"), siege.client() as client, other.client() as thief:
        session = client.join()
        thief.send(*session.seal([1, 1, 1000, GET_STATUS]))
        answer = thief.receive()
        # "I don't know this session", signed by the other node: of no use to anybody.
        assert answer is not None
        assert wire.unpack_header(answer[0])[0] == wire.UNKNOWN_SESSION
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


def test_a_hello_that_is_redirected_opens_nothing(siege: Siege, other: Siege) -> None:
    """Who passes a HELLO on to another node cannot use the WELCOME: that takes the client's ephemeral secret."""
    with siege.client() as client, other.client() as thief:
        hello, secret = client.hello(Identity.new("traveller"))
        thief.send(*hello)
        answer = thief.receive()
        assert answer is not None
        before = other.status().sections["node"]["open_requests"]
        guess = wire.start_session(other.psk, os.urandom(32), hello, answer[0], answer[1])
        with other.expect(SEAL):
            thief.send(*guess.seal([1, 1, 1000, GET_STATUS]))
            silence(thief)
        assert other.status().sections["node"]["open_requests"] == before
        # And the client takes it for what it is: signed by another node than it wanted.
        client.send(*hello)
        proper = client.receive()
        assert proper is not None
        assert wire.read_welcome(siege.psk, hello, *proper)[0] == "target"
        assert wire.read_welcome(siege.psk, hello, *answer)[0] == "other"
        assert secret


def test_hellos_that_are_sent_again_spend_nothing_of_their_author(siege: Siege) -> None:
    """Hundreds of proper HELLOs of a node, sent by somebody else: its sessions stay, and it may begin new ones."""
    author, connections, each = Identity.new("has-said-hello-elsewhere"), 40, 8
    with siege.client() as client:
        session = client.join(author)
        assert client.ask(session, GET_STATUS)[0] == 4
        with contextlib.ExitStack() as stack:
            for thief in [stack.enter_context(siege.client()) for _ in range(connections)]:
                for _ in range(each):
                    thief.send(*thief.hello(author)[0])
                answers = [thief.receive() for _ in range(each)]
                assert all(frames is not None for frames in answers), "nobody can tell them from the author's own"
            assert client.ask(session, GET_STATUS, number=2)[0] == 4
            with siege.client() as again:
                assert again.ask(again.join(author, incarnation=2), GET_STATUS)[0] == 4


# --- form ------------------------------------------------------------------------------------------------------------------


def test_truncated(siege: Siege) -> None:
    with siege.expect(*MALFORMED, SEAL, count=60), siege.client() as client:
        session = client.join()
        header, body = session.seal([1, 1, 1000, GET_STATUS])
        for length in range(len(header)):
            client.send(header[:length], body)
        for length in range(len(body)):
            client.send(header, body[:length])
        client.send(header)
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


HEADER_FIELDS = {"magic": 0, "version": 2, "kind": 3, "key id": 4, "session id": 12, "counter": 28}


@pytest.mark.parametrize("field", [*HEADER_FIELDS, "body"])
def test_a_flipped_bit(siege: Siege, field: str) -> None:
    """Any one bit, in any field: the message is not taken; the session goes on."""
    reasons = (*MALFORMED, SEAL, "another protocol version", "another fleet key", "an unknown session")
    reasons += ("an unexpected message", "the counter is not new")
    edges = [*HEADER_FIELDS.values(), wire.CONTROL_HEADER.size]
    with siege.client() as client:
        session = client.join()
        header, body = session.seal([1, 1, 1000, GET_STATUS])
        if field == "body":
            targets = [(1, position) for position in range(len(body))]
        else:
            first = HEADER_FIELDS[field]
            last = next(edge for edge in edges if edge > first)
            targets = [(0, position) for position in range(first, last)]
        with siege.expect(*reasons, count=8 * len(targets)):
            for frame, position in targets:
                for bit in range(8):
                    changed = [bytearray(header), bytearray(body)]
                    changed[frame][position] ^= 1 << bit
                    client.send(*map(bytes, changed))
            # What was answered meanwhile has not been read: until it is, the node may refuse long answers.
            assert any(client.ask(session, GET_STATUS, number=number)[0] == 4 for number in range(2, 40))


def test_an_unknown_version(siege: Siege) -> None:
    with siege.expect("another protocol version", count=3), siege.client() as client:
        for version in (0, 2, 255):
            header = wire.pack_header(wire.HELLO, wire.key_id(siege.psk), version=version)
            client.send(header, wire.seal_prefixed(wire.purpose_key(siege.psk, "kz hello"), header, b""))
        silence(client)


def test_messages_of_wrong_shape_from_a_member(siege: Siege) -> None:
    with siege.expect("malformed client message", count=9), siege.client() as client:
        session = client.join()
        odd = [[], [99], [1], [1, -1, 1, GET_STATUS], [1, 1, 0, GET_STATUS], [1, 1, 1, [77]], [1, 1, 1, [12, 0]], {}, 1]
        for message in odd:
            client.send(*session.seal(message))
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


def test_many_frames_from_a_member(siege: Siege) -> None:
    with siege.expect("a control message has two frames"), siege.client() as client:
        session = client.join()
        client.send(*session.seal([7]), b"", b"")
        assert client.ask(session, GET_STATUS, number=2)[0] == 4


@pytest.mark.parametrize("joins", [False, True], ids=["no-session", "session"])
def test_a_message_of_a_hundred_thousand_frames_from_a_member(siege: Siege, joins: bool) -> None:
    """Nobody waits until it is read, and its connection is cut."""
    with (
        siege.expect(OVERLONG),
        Relay(siege.address) as relay,
        RawClient(relay.address, siege.psk, reconnects=False) as client,
    ):
        if joins:
            client.join()
        client.send(*([b"x" * 8] * FRAMES))
        wait_until(relay.hung_up.is_set, "it is cut", 30)


class Endless(RogueMember):
    """Answers each message, and then says something that has no end."""

    def __init__(self, psk: bytes, who: Identity) -> None:
        self.greeted: list[str] = []
        super().__init__(psk, who, lambda body: [FAILURE, 11, "no"])

    def _reply(self, header: bytes, body: bytes) -> list[tuple[bytes, ...]]:
        is_hello = wire.unpack_header(header)[0] == wire.HELLO
        if is_hello:
            self.greeted.append(wire.read_hello(self._psk, header, body)[0])
        said: list[tuple[bytes, ...]] = [*super()._reply(header, body)]
        return said if is_hello else [*said, (b"x" * 8,) * FRAMES]


def test_a_message_of_a_hundred_thousand_frames_from_a_node_that_was_dialled(siege: Siege) -> None:
    """The connection is given up at once, and not made again soon; who it was is written down."""
    who = Identity.new("endless")
    with siege.expect(OVERLONG), Endless(siege.psk, who) as member:
        with siege.client() as client:
            tell(client, client.join(), 1, card_of(who, address=member.address))
        wait_until(lambda: any(entry.get("node_id") == who.node_id for entry in siege.audited()), "it is refused")
        repeat(1.0, lambda: assert_served(siege))
        assert member.greeted.count(siege.node.name) == 1


# --- names -----------------------------------------------------------------------------------------------------------------


def test_the_name_of_the_node_itself(siege: Siege) -> None:
    with siege.expect("the node says hello with another identity key than before"), siege.client() as client:
        hello, _ = client.hello(Identity.new("target"))
        client.send(*hello)
        silence(client)


def test_a_stolen_name_is_refused_also_after_a_restart(siege: Siege, other: Siege) -> None:
    stolen = "the node says hello with another identity key than before"
    owner = Identity.new("owner")
    with other.client() as client:
        session = client.join(owner, roles=("worker",))
        client.ask(session, GET_STATUS)
    assert any(entry.get("node_id") == "owner" for entry in other.audited("registered"))
    for restarted in (False, True):
        if restarted:
            other.node.terminate()
            other.node.launch()
            other.node.wait_ready()
        with other.expect(stolen), other.client() as thief:
            hello, _ = thief.hello(Identity.new("owner"), roles=("worker",))
            thief.send(*hello)
            silence(thief)
        with other.client() as client:
            assert client.ask(client.join(owner, roles=("worker",)), GET_STATUS)[0] == 4
    known = (other.folder / "known_nodes.json").stat()
    assert known.st_mode & 0o777 == 0o600


# --- greed -----------------------------------------------------------------------------------------------------------------


def test_more_requests_than_one_peer_may_make(siege: Siege) -> None:
    """Over a limit (this daemon was given a low one for jobs): a typed failure with a hint; others are served."""
    count, resource_exhausted, unimplemented = 200, 4, 11
    job = [6, os.urandom(16), bytes(32), bytes(8), 0, [1], 1 << 20, 1 << 20]
    with siege.expect("a peer makes too many jobs", count=20), siege.client() as client:
        session = client.join()
        for number in range(1, count + 1):
            client.send(*session.seal([1, number, 5000, job]))
        failures = [client.answer_to(session, number) for number in range(1, count + 1)]
        over = [failure for failure in failures if failure[2] == resource_exhausted]
        assert len(over) >= 20
        assert all("more jobs a second" in failure[3] and "try again in" in failure[3] for failure in over)
        # A cache peer computes nothing; what was within the limit got as far as that.
        assert {failure[2] for failure in failures} == {resource_exhausted, unimplemented}
        assert failures[0][2] == unimplemented


def test_hellos_without_end_on_one_connection(siege: Siege) -> None:
    # The client stays until they are counted: what the node has not taken in would go with it.
    with siege.client() as client, siege.expect("a connection says hello too often", count=30):
        who = Identity.new("eager")
        for _ in range(60):
            client.send(*client.hello(who)[0])
