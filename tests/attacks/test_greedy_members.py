"""Members that would like to have everything for themselves: all connections, all names, all handshakes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from daemons.node import NOT_READ
from kakeya_zmq.io.connections import REFUSED_ADDRESS, REFUSED_UNPROVEN
from kakeya_zmq.protocol.identities import OTHER_KEY, TOO_MANY_NEW
from kakeya_zmq.protocol.session_bounds import SESSIONS_PER_KEY_MAX
from tests.attacks.kit import GET_STATUS, MEMORY_MAX, Honest, RawClient, Siege, lone_cache, repeat
from tests.attacks.test_bulk import CHUNK, CREDIT, FETCH, PARTS, PUBLISH, Material, bulk_socket, pull_all, put
from tests.attacks.test_cards import card_of, known_to, tell
from tests.attacks.test_revoked import EXCHANGE
from tests.attacks.test_tenants import compatibility
from tests.fleet_rig import kept_fleet, resident_bytes, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity
from wire.limits import ANSWER_BYTES_MAX, CARD_BYTES_MAX, STATUS_BYTES_MAX

CONNECTIONS_MAX = 64
LARGE_CARDS = 40
CANCEL = 3
ATTACK_S = 8.0


@pytest.fixture(scope="module")
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with lone_cache(
        request, tmp_path_factory.mktemp("greedy"), "narrow", "--max-connections", str(CONNECTIONS_MAX)
    ) as siege:
        yield siege


def served(siege: Siege, name: str) -> None:
    with siege.client() as client:
        assert client.ask(client.join(Identity.new(name)), [12])[0] == 4


def test_a_member_that_opens_connections_without_end(narrow: Siege) -> None:
    """Twice as many as there may be, each through the transport's handshake and with noise behind it."""
    with narrow.expect(REFUSED_UNPROVEN, REFUSED_ADDRESS), contextlib.ExitStack() as stack:
        for number in range(2 * CONNECTIONS_MAX):
            client = stack.enter_context(narrow.client(reconnects=False))
            client.send(b"noise")
            if number % CONNECTIONS_MAX == CONNECTIONS_MAX - 1:
                served(narrow, f"newcomer-{number}")
        served(narrow, "newcomer-at-the-end")
        assert int(narrow.status().sections["node"]["connections"] or 0) <= CONNECTIONS_MAX


def test_a_member_that_has_a_session_on_every_connection(narrow: Siege) -> None:
    """One identity, under many names: a new session of it takes the place of its oldest, and newcomers are served."""
    greedy = Identity.new("greedy")
    with narrow.expect(REFUSED_UNPROVEN, REFUSED_ADDRESS), contextlib.ExitStack() as stack:
        clients = []
        for number in range(CONNECTIONS_MAX):
            client = stack.enter_context(narrow.client(reconnects=False))
            client.send(*client.hello(Identity(f"greedy-{number % 8}", greedy.signing))[0])
            clients.append(client)
        served(narrow, "newcomer")
        answered = [client for client in clients if client.socket.poll(0, zmq.POLLIN)]
        assert len(answered) > SESSIONS_PER_KEY_MAX, "the attack took place"
        assert int(narrow.status().sections["node"]["connections"] or 0) <= CONNECTIONS_MAX


def test_made_up_names_do_not_push_out_a_node_that_is_away(narrow: Siege) -> None:
    """A member tells cards of new names without end; the book of names stays bounded, and keeps whom it knew."""
    away = Identity.new("away")
    with narrow.client() as client:
        tell(client, client.join(away), 1, card_of(away))
        wait_until(lambda: "away" in known_to(narrow), "it is known")
    mallory = Identity.new(f"mallory-{time.time_ns()}")
    puppet = Identity.new("puppet")
    with narrow.expect(TOO_MANY_NEW, count=20), narrow.client() as client:
        session = client.join(mallory)
        for number in range(1, 13):
            cards = [card_of(puppet, node_id=f"made-up-{number}-{each}") for each in range(40)]
            assert client.ask(session, [EXCHANGE, cards, [0] * len(cards)], number=number)[0] == 4
    with narrow.expect(OTHER_KEY), narrow.client() as client:
        client.send(*client.hello(Identity(away.node_id, puppet.signing))[0])
        assert client.receive(0.5) is None


def large_card(who: Identity) -> bytes:
    """Near the bound of a card (16 KiB)."""
    fields = wire.read_card(card_of(who))
    for number in range(5):
        values = compatibility("t", f"{who.node_id}-{number}")
        values |= dict.fromkeys(("model_revision", "tokenizer_revision", "quantization", "kv_dtype", "rope_hash"), "x" * 500)
        fields[10].append(["m", "worker", "", 0.0, wire.fingerprint(values), "t", values])
    card = wire.sign_card(who.signing, fields)
    assert 14_000 < len(card) <= CARD_BYTES_MAX
    return card


def ask_and_never_read(client: RawClient, session: wire.Session, number: int) -> None:
    with contextlib.suppress(zmq.Again):
        client.socket.send_multipart(session.seal([1, number, 60_000, [EXCHANGE, [], [], b""]]), zmq.NOBLOCK)


def test_a_member_that_asks_for_long_answers_and_never_reads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All the sessions one identity may have ask for all cards, which are large, for some seconds; nothing is taken in."""
    home = tmp_path_factory.mktemp("deaf")
    with kept_fleet(request, home / "no-model", home) as fleet, contextlib.ExitStack() as stack:
        node = fleet.add("cache", name="talker")
        node.launch()
        node.wait_ready()
        talker = Siege(fleet, "talker")
        with talker.client() as client:
            session = client.join(roles=("worker",))
            for number in range(1, LARGE_CARDS + 1):
                tell(client, session, number, large_card(Identity.new(f"large-{number}")))
            wait_until(lambda: len(known_to(talker)) >= LARGE_CARDS, "the cards are known")
            reply = client.ask(session, [EXCHANGE, [], [], b""], number=LARGE_CARDS + 1)
            assert sum(map(len, reply[2][1])) <= ANSWER_BYTES_MAX
            assert reply[2][4], "there are more"
            status = client.ask(session, GET_STATUS, number=LARGE_CARDS + 2)
            assert len(msgpack.packb(status[2])) <= STATUS_BYTES_MAX
        greedy = Identity.new("greedy")
        deaf = [stack.enter_context(talker.client(deaf=True)) for _ in range(SESSIONS_PER_KEY_MAX)]
        sessions = [each.join(Identity(f"greedy-{number}", greedy.signing)) for number, each in enumerate(deaf)]
        memory = resident_bytes(node.pid)
        numbers = itertools.count(1)

        def ask_all() -> None:
            for each, opened in zip(deaf, sessions, strict=True):
                ask_and_never_read(each, opened, next(numbers))
            time.sleep(0.02)

        with Honest(node) as honest:
            repeat(ATTACK_S, ask_all)
            grown = resident_bytes(node.pid) - memory
            before = honest.answers
            wait_until(lambda: honest.answers > before or bool(honest.failures), "the honest client is still served")
        assert honest.failures == []
        assert grown < MEMORY_MAX, f"memory grew by {grown / 2**20:.1f} MiB"
        assert talker.refusals()[NOT_READ] > 0


PIECES = 16
"""Parts of a sixteenth of the store: with larger ones fewer offers of one member may be open at a time."""


def offer_of(store_bytes: int, sixteenths: int) -> list[Any]:
    """An offer of so many sixteenths of the store, in parts which nobody need have."""
    namespace, parent, metas = wire.os.urandom(32), bytes(32), []
    for number in range(sixteenths * PIECES):
        name = wire.os.urandom(32)
        metas.append([name, parent, 0, number * 64, 64, store_bytes // (16 * PIECES), bytes(32), bytes(8)])
        parent = name
    return [PUBLISH, namespace, metas, [1], 1 << 20]


def granted(client: RawClient, session: wire.Session, body: list[Any], number: int) -> int:
    """Of how many offered parts the node says that they may come."""
    envelope = client.ask(session, body, number=number, deadline_ms=60_000)
    assert envelope[0] == 5, envelope
    return sum(byte.bit_count() for byte in envelope[2][1])


def test_a_member_whose_offers_never_come_keeps_a_quarter_of_the_store_from_others_at_most(siege: Siege) -> None:
    store_bytes = int(siege.status().sections["cache"]["max_bytes"] or 0)
    with siege.client() as liar, siege.client() as honest:
        promises = liar.join(Identity.new("promises"), roles=("cache",))
        # A sixteenth is left for what other tests have leased just before.
        assert granted(liar, promises, offer_of(store_bytes, 15), 1) == 15 * PIECES
        for number in range(2, 6):
            liar.send(*promises.seal([1, number, 60_000, offer_of(store_bytes, 16)]))
        session = honest.join(Identity.new("keeps"), roles=("cache",))
        assert granted(honest, session, offer_of(store_bytes, 16), 1) >= 11 * PIECES, "a quarter, and what others lease"
        for number in range(1, 6):
            liar.send(*promises.seal([CANCEL, number]))
        honest.send(*session.seal([CANCEL, 1]))
        wait_until(lambda: siege.status().sections["node"]["open_lane_threads"] == 0, "the lanes are closed")


LEASED_PROMPTS = 3
"""What the small store has room for, in materials of PARTS parts of 1 MiB."""


@pytest.fixture(scope="module")
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with lone_cache(
        request, tmp_path_factory.mktemp("leases"), "small", "--cache-gb", f"{LEASED_PROMPTS * PARTS / 1024}"
    ) as siege:
        yield siege


def leased(client: RawClient, session: wire.Session, what: Material, number: int) -> bytes:
    """A new lease on all that is held of it."""
    reply = client.ask(session, what.lookup(), number=number)
    assert reply[0] == 4, reply
    return bytes(reply[2][4])


def test_a_member_that_leases_a_whole_store_again_and_again_keeps_nobody_from_publishing(small: Siege) -> None:
    """It holds everything by leases, each many times, and by a fetch that it takes nothing of; others publish and fetch."""
    full = [Material.new() for _ in range(LEASED_PROMPTS)]
    for each in full:
        put(small, each)
    who = Identity.new("honest")
    with small.client() as greedy:
        session = greedy.join(Identity.new("leases"))
        numbers = itertools.count(1)
        for _ in range(20):
            lease_ids = [leased(greedy, session, each, next(numbers)) for each in full]
        figures = small.status().sections["cache"]
        assert figures["bytes_locked"] == figures["max_bytes"], "the attack took place"
        wanted = [[hash_, 0] for hash_ in full[0].hashes]
        body = [FETCH, lease_ids[0], wanted, [1], CHUNK, CREDIT]
        grant = greedy.ask(session, body, number=next(numbers), deadline_ms=60_000)[2]
        with bulk_socket(zmq.PULL, grant[2], grant[3], receive_max=1):
            for _ in range(3 * LEASED_PROMPTS):
                new = Material.new()
                put(small, new)
                for each in full:
                    leased(greedy, session, each, next(numbers))
                with small.client() as honest:
                    asker = honest.join(who)
                    lease_id = leased(honest, asker, new, 1)
                    parts = [[hash_, 0] for hash_ in new.hashes]
                    answer = honest.ask(asker, [FETCH, lease_id, parts, [1], CHUNK, CREDIT], number=2, deadline_ms=60_000)
                    assert pull_all(answer[2]) == b"".join(new.payloads)
                    honest.send(*asker.seal([2, 2, [300, True]]))
                    assert honest.answer_to(asker, 2, timeout_s=30)[0] == 4
    figures = small.status().sections["cache"]
    assert int(figures["bytes_used"] or 0) <= int(figures["max_bytes"] or 0)
