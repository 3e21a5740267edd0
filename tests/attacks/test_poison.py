"""A member publishes wrong KV, and is revoked: what it gave is gone, at the cache and at a primary that fetched it."""

from __future__ import annotations

import json

import pytest

from daemons.emptying import EMPTIED
from tests.attacks.kit import Siege
from tests.fleet_rig import Fleet, Node, Reference, answer, figure, prompt, run_kakeya, wait_published, wait_until
from wire.keys import NodeIdentity
from wire.messages import PrefillPolicy, SourceKind

TOKENS = 600


@pytest.fixture(scope="module")
def poisoned_fleet(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "cache")
    poisoner = empty_fleet.add("primary", name="poisoner", program=("tests.attacks.poisoner",))
    empty_fleet.launch(poisoner)
    with poisoner.client() as client:
        wait_until(lambda: knows(client.status(), "cache"), "the poisoner knows the cache")
    return empty_fleet


def knows(status: object, name: str) -> bool:
    return any(row["node_id"] == name and row["state"] == "up" and row.get("roles") for row in status.peers)  # type: ignore[attr-defined]


def held(node: Node) -> int:
    with node.client() as client:
        return figure(client, "cache", "bytes_used")


def test_a_revocation_ends_what_the_revoked_node_has_given_too(poisoned_fleet: Fleet, reference: Reference) -> None:
    fleet, tokens = poisoned_fleet, prompt(TOKENS, 900)
    primary, cache, poisoner = (fleet[name] for name in ("primary", "cache", "poisoner"))
    expected = reference.answer(tokens, 8)
    with poisoner.client() as client:
        answer(client, tokens, 1)
        wait_published(client, lambda: held(cache) > 0)
    fleet.wait_card("cache", lambda row: row.get("cache_entries", 0) > 0, "the primary knows that the cache holds something")
    with primary.client() as client:
        wrong = answer(client, tokens, 8, policy=PrefillPolicy.REMOTE_REQUIRED)
        assert wrong.reused.get(SourceKind.REMOTE_CACHE, 0) > 0
        assert wrong.tokens != expected, "nothing tells wrong KV from right KV"
        again = answer(client, tokens, 8, policy=PrefillPolicy.LOCAL_ONLY)
        assert again.reused.get(SourceKind.HOT, 0) > 0
        assert again.tokens != expected, "it is in the primary's own store, too"
        with client.create_session() as running:
            running.append(tokens)
            revoke(fleet, "poisoner", by="primary")
            for node in (primary, cache):
                wait_until(lambda node=node: emptied(node) > 0, f"{node.name} has emptied its store")  # type: ignore[misc]
                assert held(node) == 0
                with node.client() as other:
                    assert figure(other, "roster", "emptied_bytes") > 0
                assert [entry for entry in Siege(fleet, node.name).audited("revoked") if entry["reason"] == EMPTIED]
            # What it has imported stays in this session, and goes nowhere.
            list(running.generate(70, inter_token_timeout_s=60.0))
        wait_published(client)
        assert (held(primary), held(cache)) == (0, 0)
        right = answer(client, tokens, 8)
        assert right.reused == {SourceKind.COMPUTED: TOKENS - 1}
        assert right.tokens == expected
        wait_published(client, lambda: held(cache) > 0)
    poisoner.terminate()
    cache.restart()
    assert emptied(cache) == 0, "a revocation that was kept empties nothing"
    fleet.wait_joined()
    assert emptied(cache) == 0


def emptied(node: Node) -> int:
    with node.client() as client:
        return figure(client, "roster", "emptyings")


def revoke(fleet: Fleet, name: str, *, by: str) -> None:
    key = NodeIdentity.load_or_create(fleet.home / "nodes" / name / "identity.key").public_key.hex()
    to = ("--as", by, "--address", fleet[by].address, "--json")
    done = run_kakeya("revoke", name, "--public-key", key, *to, home=fleet.home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["told"] == [fleet[by].address]
