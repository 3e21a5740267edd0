"""Two tenants and a roster: what one has in a cache does not exist for the other, and who is not listed gets nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from kakeya_zmq.roster import (
    CLIENTS_ONLY_ASK,
    FOREIGN_TENANT,
    NOT_ASKED,
    NOT_LISTED,
    OTHER_KEY_LISTED,
    ROLE_NOT_LISTED,
)
from tests.attacks.impostor import LOOKUP, SUBMIT, Claims
from tests.attacks.kit import RawClient, Siege
from tests.attacks.test_bulk import (
    CHUNK,
    CREDIT,
    DATA_LAST,
    FETCH,
    PART_BYTES,
    PUBLISH,
    RELEASE,
    Material,
    publish,
    published,
    pull_all,
    push_all,
)
from tests.attacks.test_cards import EXCHANGE, card_of, tell
from tests.fleet_rig import Fleet, answer, kept_fleet, model_folder, prompt, wait_published, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

NOT_FOUND, PERMISSION_DENIED = 2, 3
CREATE, GET_REQUESTS = [7, "", [], None, True, True, []], [13, 5]
RED, BLUE, SMALL = Identity.new("red-node"), Identity.new("blue-node"), Identity.new("small-node")
RED_TOO = Identity.new("second-red-node")
QUOTA_PARTS = 2
BLOCKS = 2500


def compatibility(tenant: str, model: str = "x") -> dict[str, Any]:
    texts = ("model_id", "model_revision", "tokenizer_revision", "quantization", "kv_dtype", "cache_format_version")
    numbers = {"block_size_tokens": 64, "sink_size": 0, "window_size": 0}
    values = {**dict.fromkeys((*texts, "rope_hash", "layer_geometry_hash"), "x"), **numbers, "tenant_namespace": tenant}
    return {**values, "model_id": model}


def card_with_namespace(who: Identity, tenant: str, *models: str) -> bytes:
    fields = wire.read_card(card_of(who))
    tuples = [compatibility(tenant, model) for model in models or ("x",)]
    fields[10] = [["m", "worker", "", 0.0, wire.fingerprint(values), tenant, values] for values in tuples]
    return wire.sign_card(who.signing, fields)


class ManyParts(Material):
    """Thousands of blocks of a few bytes each: as many as the longest prompts have."""

    @classmethod
    def of(cls, tenant: str) -> ManyParts:
        return cls(
            wire.fingerprint(compatibility(tenant)),
            [os.urandom(32) for _ in range(BLOCKS)],
            [os.urandom(64) for _ in range(BLOCKS)],
        )

    def frames(self, grant: list[Any]) -> Iterator[list[bytes]]:
        _, transfer, _, _, key, suite, *_ = grant
        contents = ((1, 0, wire.msgpack.packb(self.metas())), (2, DATA_LAST, b"".join(self.payloads)))
        for index, (kind, flags, content) in enumerate(contents):
            header = wire.pack_chunk_header(kind, flags, transfer, index, 0, len(content))
            yield [header, wire.seal_chunk(suite, key, header, content)]


def material(tenant: str, model: str = "x") -> Material:
    return replace(Material.new(), namespace=wire.fingerprint(compatibility(tenant, model)))


def write_roster(path: Path, *listed: tuple[Identity, str], extra: str = "") -> None:
    lines = [extra, "[tenants.small]", f"quota_gb = {(QUOTA_PARTS + 0.5) * PART_BYTES / 2**30}"]
    for who, tenant in listed:
        lines += [
            f"[nodes.{who.node_id}]",
            f'key = "{who.public.hex()}"',
            'roles = ["worker", "cache"]',
            f'tenants = ["{tenant}"]',
        ]
    temporary = path.with_suffix(".new")
    temporary.write_text("\n".join(lines), encoding="utf-8")
    temporary.replace(path)


ALL = ((RED, "red"), (BLUE, "blue"), (SMALL, "small"), (RED_TOO, "red"))


@pytest.fixture(scope="module")
def vault_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("tenants")
    write_roster(home / "fleet.toml", *ALL)
    with kept_fleet(request, home / "no-model", home) as fleet:
        node = fleet.add("cache", "--peer-lookups-per-s", "100000", "--peer-requests-per-s", "100000", name="vault")
        node.launch()
        node.wait_ready()
        yield fleet


@pytest.fixture
def vault(vault_fleet: Fleet) -> Siege:
    return Siege(vault_fleet, "vault")


def join(client: RawClient, who: Identity, tenant: str, *models: str) -> wire.Session:
    session = client.join(who)
    tell(client, session, 1, card_with_namespace(who, tenant, *models))
    return session


def store(vault: Siege, who: Identity, tenant: str, what: Material) -> list[Any]:
    with vault.client() as client:
        session = join(client, who, tenant)
        push_all(what, publish(client, session, what, number=2))
        return published(client, session, number=2)


def all_of(what: Material) -> bytes:
    """The bitmap that says: all of it."""
    return bytes([(1 << len(what.hashes)) - 1])


def flood_the_table_of_namespaces(vault: Siege, who: Identity, tenant: str) -> None:
    """A card with namespaces that nobody else has, and then ever new ones in its place: more than any table holds."""
    with vault.client() as client:
        session = client.join(who)
        names = [f"made up {number}" for number in range(1152)]
        cards = [card_with_namespace(who, tenant, *names[first : first + 16]) for first in range(0, len(names), 16)]
        for number, first in enumerate(range(0, len(cards), 24), start=1):
            told = cards[first : first + 24]
            assert client.ask(session, [EXCHANGE, told, [0] * len(told)], number=number)[0] == 4


def test_what_another_tenant_stored_looks_like_nothing(vault: Siege) -> None:
    """Its namespace, its hashes, and the lookup's answer is that for what nobody has; its owner finds it."""
    what, nothing = material("red"), material("red")
    assert store(vault, RED, "red", what)[0] == len(what.hashes)
    with vault.client() as client, vault.client() as owner:
        session = join(client, BLUE, "blue")
        foreign = client.ask(session, what.lookup(), number=2)
        unknown = client.ask(session, nothing.lookup(), number=3)
        assert foreign[0] == unknown[0] == 4
        assert foreign[2] == unknown[2], "an answer that depends on what the other tenant has"
        own = owner.ask(join(owner, RED, "red"), what.lookup(), number=2)
        assert own[2][1][0] == bytes([(1 << len(what.hashes)) - 1])


def test_an_offer_does_not_tell_what_another_tenant_stored(vault: Siege) -> None:
    """Who knows another tenant's hashes offers them in its own namespace: it is asked for all of them, as for new ones."""
    what = material("red")
    assert store(vault, RED, "red", what)[0] == len(what.hashes)
    known, new = replace(what, namespace=material("blue").namespace), material("blue")
    with vault.client() as client:
        session = join(client, BLUE, "blue")
        for number, each in enumerate((known, new), start=2):
            envelope = client.ask(session, each.offer(), number=number, deadline_ms=5_000)
            assert envelope[0] == 5, f"refused: {envelope}"
            assert envelope[2][1] == all_of(each)


def test_a_place_cannot_be_taken_in_another_tenants_namespace(vault: Siege) -> None:
    """Garbage under the hashes of blocks still to come, in the own namespace: the right ones are stored all the same."""
    what = material("red")
    garbage = replace(what, namespace=material("blue").namespace, payloads=[os.urandom(PART_BYTES) for _ in what.payloads])
    assert store(vault, BLUE, "blue", garbage)[0] == len(garbage.hashes)
    assert store(vault, RED, "red", what)[:3] == [len(what.hashes), 0, 0]
    for who, tenant, each in ((RED, "red", what), (BLUE, "blue", garbage)):
        with vault.client() as client:
            session = join(client, who, tenant)
            reply = client.ask(session, each.lookup(), number=2)
            assert reply[2][1][0] == all_of(each)
            wanted = [[hash_, 0] for hash_ in each.hashes]
            grant = client.ask(session, [FETCH, reply[2][4], wanted, [1], CHUNK, CREDIT], number=3, deadline_ms=60_000)
            assert pull_all(grant[2]) == b"".join(each.payloads)


def test_a_lease_serves_only_whom_it_was_given_to(vault: Siege) -> None:
    """Not even a node of the same tenant may fetch under it, or end it; for whom it is not, there is none."""
    what = material("red")
    assert store(vault, RED, "red", what)[0] == len(what.hashes)
    wanted = [[hash_, 0] for hash_ in what.hashes]
    with vault.client() as owner:
        own = join(owner, RED, "red")
        lease_id = owner.ask(own, what.lookup(), number=2)[2][4]
        assert any(lease_id)
        for who, tenant in ((BLUE, "blue"), (RED_TOO, "red")):
            with vault.client() as client:
                session = join(client, who, tenant)
                failures = [
                    client.ask(session, [FETCH, each, wanted, [1], CHUNK, CREDIT], number=number)
                    for number, each in enumerate((lease_id, os.urandom(16)), start=2)
                ]
                assert failures[0][0] == 6
                assert failures[0][2:] == failures[1][2:], "it looks like one that does not exist"
                assert client.ask(session, [RELEASE, lease_id], number=4)[0] == 4
        grant = owner.ask(own, [FETCH, lease_id, wanted, [1], CHUNK, CREDIT], number=3, deadline_ms=60_000)
        assert pull_all(grant[2]) == b"".join(what.payloads)


def test_a_flood_of_namespaces_makes_nobody_forget_anothers(vault: Siege) -> None:
    what = material("red")
    assert store(vault, RED, "red", what)[0] == len(what.hashes)
    with vault.client() as owner:
        own = join(owner, RED, "red")
        flood_the_table_of_namespaces(vault, BLUE, "blue")
        assert owner.ask(own, what.lookup(), number=2)[2][1][0] == all_of(what)
        empty = material("red")
        assert owner.ask(own, empty.offer(), number=3, deadline_ms=5_000)[0] == 5, "it may still publish"


def test_a_quota_cannot_be_evaded_by_making_the_table_forget(vault: Siege) -> None:
    """What a tenant stored counts, in whatever namespace, and whatever its cards and those of others tell afterwards."""
    first, second = material("small", "x"), material("small", "y")
    with vault.client() as client:
        session = join(client, SMALL, "small")
        first = replace(first, hashes=first.hashes[:QUOTA_PARTS], payloads=first.payloads[:QUOTA_PARTS])
        push_all(first, publish(client, session, first, number=2))
        assert published(client, session, number=2)[0] == QUOTA_PARTS
        flood_the_table_of_namespaces(vault, BLUE, "blue")
        flood_the_table_of_namespaces(vault, SMALL, "small")
        tell(client, session, 3, card_with_namespace(SMALL, "small", "y"))
        answer = client.ask(session, second.offer(), number=4, deadline_ms=5_000)
        assert answer[0] == 4, f"more than the quota was asked for: {answer}"
        assert answer[2][1:4] == [0, 0, len(second.hashes)]
        tell(client, session, 5, card_with_namespace(SMALL, "small", "x"))
        found = client.ask(session, first.lookup(), number=6)
        assert found[2][1][0] == all_of(first), "what it has is not taken from it either"


def test_publishing_and_computing_for_another_tenant(vault: Siege) -> None:
    what = material("red")
    with vault.expect(FOREIGN_TENANT, count=2), vault.client() as client:
        session = join(client, BLUE, "blue")
        job = [SUBMIT, os.urandom(16), what.namespace, bytes(4 * 64), 0, [1], 1 << 20, 1 << 20]
        for number, body in enumerate((what.offer(), job), start=2):
            answer = client.ask(session, body, number=number)
            assert (answer[0], answer[2]) == (6, PERMISSION_DENIED)


def test_a_namespace_that_nobody_has_proven(vault: Siege) -> None:
    """A member cannot make another tenant's namespace its own by a claim: only the tuple behind it counts."""
    what = material("red")
    with vault.expect(FOREIGN_TENANT), vault.client() as client:
        session = client.join(BLUE)
        fields = wire.read_card(card_of(BLUE))
        fields[10] = [["m", "worker", "", 0.0, what.namespace, "blue", compatibility("blue")]]
        tell(client, session, 1, wire.sign_card(BLUE.signing, fields))
        assert client.ask(session, what.offer(), number=2)[2] == PERMISSION_DENIED


def test_a_tenant_gets_no_more_room_than_its_quota(vault: Siege) -> None:
    what = material("small")
    with vault.client() as client:
        envelope = client.ask(join(client, SMALL, "small"), what.offer(), number=2, deadline_ms=5_000)
        wanted = envelope[2][1]
        assert wanted == bytes([(1 << QUOTA_PARTS) - 1]), "more than the quota was asked for"


def test_who_is_not_on_the_roster(vault: Siege) -> None:
    cases = (
        (Identity.new("nobody"), ("worker",), NOT_LISTED),
        (Identity.new("red-node"), ("worker",), OTHER_KEY_LISTED),
        (RED, ("primary",), ROLE_NOT_LISTED),
    )
    for who, roles, reason in cases:
        with vault.expect(reason), vault.client() as client:
            client.send(*client.hello(who, roles=roles)[0])
            assert client.receive(0.5) is None


def test_a_client_that_is_not_listed_asks_for_no_kv(vault: Siege) -> None:
    what = material("red")
    with vault.expect(CLIENTS_ONLY_ASK, count=2), vault.client() as client:
        session = client.join()
        for number, body in enumerate((what.lookup(), what.offer()), start=1):
            assert client.ask(session, body, number=number)[2] == PERMISSION_DENIED


def test_the_roster_is_changed_while_the_node_runs(vault_fleet: Fleet, vault: Siege) -> None:
    """A mistake in it changes nothing; who is taken off is out at once."""
    path = vault_fleet.home / "fleet.toml"
    newcomer = Identity.new("newcomer")
    write_roster(path, *ALL, (newcomer, "red"))
    wait_until(lambda: vault.status().sections["roster"]["listed_nodes"] == len(ALL) + 1, "the roster is read again")
    with vault.client() as client:
        session = client.join(newcomer, roles=("worker",))
        assert client.ask(session, [12])[0] == 4
        write_roster(path, *ALL, extra="oops = 1")
        wait_until(lambda: not vault.status().sections["roster"]["roster_usable"], "the mistake is told")
        assert client.ask(session, [12], number=2)[0] == 4
        with vault.expect(NOT_LISTED):
            write_roster(path, *ALL)
            wait_until(lambda: vault.status().sections["roster"]["listed_nodes"] == len(ALL), "the roster is read again")
            client.await_goodbye(session)
            client.assert_unknown(session, 3)
            client.send(*client.hello(newcomer, roles=("worker",))[0])
            assert client.receive(0.5) is None


@pytest.fixture(scope="module")
def red_primary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    home = tmp_path_factory.mktemp("red")
    write_roster(home / "fleet.toml", *ALL)
    with kept_fleet(request, model_folder(tmp_path_factory), home) as fleet:
        node = fleet.add("primary", "--tenant-id", "red")
        node.launch()
        node.wait_ready()
        yield Siege(fleet, "primary")


def test_a_primary_computes_and_tells_nothing_for_another_tenant(red_primary: Siege) -> None:
    """It holds its tenant's key: who may prompt it can test what is cached, and its records tell of all prompts."""
    with red_primary.expect(FOREIGN_TENANT, count=2), red_primary.client() as client, red_primary.client() as owner:
        session = client.join(BLUE, roles=("worker",))
        for number, body in enumerate((CREATE, GET_REQUESTS), start=1):
            answer = client.ask(session, body, number=number)
            assert (answer[0], answer[2]) == (6, PERMISSION_DENIED)
        own = owner.join(RED, roles=("worker",))
        for number, body in enumerate((CREATE, GET_REQUESTS), start=1):
            assert owner.ask(own, body, number=number)[0] == 4


def test_a_session_does_not_exist_for_others(red_primary: Siege) -> None:
    """Not for a client that knows its id, not for a node of the same tenant, not for one of another."""
    tokens = (5).to_bytes(4, "little") * 3
    with red_primary.client() as owner:
        own = owner.join(RED, roles=("worker",))
        session_id = owner.ask(own, CREATE)[2][1]
        bodies = ([8, session_id, tokens], [9, session_id, 1, 0.0, 0.0, 0, None], [11, session_id], [10, session_id])
        for who in (Identity.new("thief"), BLUE):
            with red_primary.client() as client:
                session = client.join(who, roles=("client",))
                for number, body in enumerate(bodies, start=1):
                    answer = client.ask(session, body, number=number)
                    assert (answer[0], answer[2]) == (6, NOT_FOUND)
        with red_primary.client() as again:
            # It belongs to the node, not to the connection.
            session = again.join(RED, roles=("worker",), incarnation=2)
            assert again.ask(session, [11, session_id])[2][1] == 0
            assert again.ask(session, [10, session_id], number=2)[0] == 4


def test_a_primary_asks_no_node_of_another_tenant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whoever sees a card can claim what it offers, by name of the settings too: none of it gets prompts, hashes or KV. A
    node that the roster lists with the tenant and that claims the same is asked."""
    home = tmp_path_factory.mktemp("claims")
    write_roster(home / "fleet.toml", *ALL)
    with kept_fleet(request, model_folder(tmp_path_factory), home) as fleet:
        psk = fleet.psk_file.read_bytes().strip()
        with Claims(psk, BLUE) as blue, Claims(psk, SMALL) as small, Claims(psk, RED) as red:
            static = ("--worker", blue.address, "--cache-peer", small.address, "--cache-replication-factor", "3")
            node = fleet.add("primary", "--tenant-id", "red", *static)
            node.launch()
            node.wait_ready()
            primary = Siege(fleet, "primary")
            for each in (blue, small):
                each.join(primary)
            with node.client() as client:
                alone = answer(client, prompt(700, 50), 3)
                wait_published(client)
                assert (blue.was_asked(), small.was_asked()) == (set(), set())
                assert primary.refusals()[NOT_ASKED] == 2, "each is told of once"
                red.join(primary)
                answer(client, prompt(700, 51), 3)
                wait_until(
                    lambda: red.was_asked() >= {LOOKUP, SUBMIT, PUBLISH}, "one of the own tenant is asked for everything"
                )
                wait_published(client)
                again = answer(client, prompt(700, 50), 3, use_local_cache=False)
            assert (blue.was_asked(), small.was_asked()) == (set(), set())
            assert again.tokens == alone.tokens
            assert primary.refusals()[NOT_ASKED] == 2


def lookup_seconds(client: RawClient, session: wire.Session, what: Material, number: int) -> float:
    frames = session.seal([1, number, 10_000, what.lookup()])
    began = time.perf_counter()
    client.send(*frames)
    client.answer_to(session, number)
    return time.perf_counter() - began


def rank_distance(first: list[float], second: list[float]) -> float:
    """How sure one may be that one kind takes longer, in standard deviations: Mann and Whitney's U, as a normal one."""
    ordered = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, kind) in enumerate(ordered, start=1) if kind == 0)
    n, m = len(first), len(second)
    mean, deviation = n * (n + m + 1) / 2, (n * m * (n + m + 1) / 12) ** 0.5
    return abs(ranks - mean) / float(deviation)


def test_the_time_of_a_lookup_does_not_tell_what_another_tenant_has(vault: Siege) -> None:
    """300 lookups of each kind in random order; the two kinds are taken for the same unless chance would make such a
    difference once in a million runs. The owner's hits and misses, measured the same way, are told apart: it can see."""
    cached, missing = ManyParts.of("red"), ManyParts.of("red")
    assert store(vault, RED, "red", cached)[0] == len(cached.hashes)
    limit = NormalDist().inv_cdf(1 - 0.5e-6)
    rounds = 300

    def distance(who: Identity, tenant: str) -> float:
        times: dict[int, list[float]] = {0: [], 1: []}
        kinds = [0, 1] * rounds
        random.Random(7).shuffle(kinds)
        with vault.client() as client:
            session = join(client, who, tenant)
            for number, kind in enumerate(kinds, start=2):
                times[kind].append(lookup_seconds(client, session, (cached, missing)[kind], number))
        return rank_distance(times[0], times[1])

    assert distance(BLUE, "blue") < limit
    assert distance(RED, "red") > limit
