"""Prompts whose parts are spread over several caches: all of them are found, fetched side by side, and put together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.fleet_rig import Answer, Fleet, Reference, answer, figure, prompt, wait_published, wait_until
from tests.loopback.throttle import SlowLink
from tests.proxy import free_ports, other_loopback
from wire.messages import PrefillPolicy, SourceKind

COUNT = 8
LANES = 6
QUICK, SLOW = 10_000.0, 0.02
"""Megabytes a second: as good as no limit, and seconds for the KV of a single block."""
PART_OF_A_BLOCK = 8 * 1024
SlowFleet = tuple[Fleet, list[SlowLink]]
CACHES = ("cache", "cache2")
SPREAD = (129, 257, 385, 513, 641, 769, 897, 1025)
"""Lengths of a prompt that grows: each step's new blocks are published as a run of their own, to a peer of its own."""


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary")
    empty_fleet.launch(*[empty_fleet.add("cache", name=name) for name in CACHES])
    return empty_fleet


def held_bytes(fleet: Fleet) -> dict[str, int]:
    found = {}
    for name in CACHES:
        with fleet[name].client() as client:
            found[name] = figure(client, "cache", "bytes_used")
    return found


def spread(fleet: Fleet, client: Client, seed: int) -> list[int]:
    """A prompt that begins on the first cache and goes on on the second, so that neither holds all of it.

    What counts is what each gives: the bytes a cache holds also grow by the end of an answer, which is published by itself.
    """
    for attempt in range(seed, seed + 40):
        tokens = prompt(SPREAD[-1], attempt)
        answer(client, tokens[: SPREAD[0]], 1, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        if given_without("cache2", client, tokens[: SPREAD[0]]) < SPREAD[0] - 1:
            continue
        for length in SPREAD[1:]:
            answer(client, tokens[:length], 1, policy=PrefillPolicy.LOCAL_ONLY)
            wait_published(client)
        if given_without("cache2", client, tokens) < SPREAD[-1] - 1:
            return tokens
    raise AssertionError("rendezvous hashing gave forty prompts to one peer each")


def given_without(excluded: str, client: Client, tokens: list[int]) -> int:
    """How many tokens of a prompt come from the caches but one."""
    found = answer(client, tokens, 1, use_local_cache=False, publish=False, exclude_nodes=(excluded,))
    return found.reused.get(SourceKind.REMOTE_CACHE, 0)


def from_caches(found: Answer) -> set[str]:
    return {s.node_id for s in found.appended.explanation.sources if s.kind is SourceKind.REMOTE_CACHE}


def fetch_only(client: Client, tokens: list[int]) -> Answer:
    return answer(client, tokens, COUNT, policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=False, publish=False)


def test_parts_that_lie_on_two_caches_are_one_hit_of_exactly_their_bytes(fleet: Fleet, reference: Reference) -> None:
    with fleet["primary"].client() as client:
        tokens = spread(fleet, client, 100)
        moved = figure(client, "prefill", "bytes_received")
        found = fetch_only(client, tokens)
        moved = figure(client, "prefill", "bytes_received") - moved
        assert found.tokens == reference.answer(tokens, COUNT)
        assert found.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
        assert from_caches(found) == set(CACHES)
        again = answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY, publish=False)
        assert again.reused == {SourceKind.HOT: len(tokens) - 1}, "the same parts, at home"
        assert moved == sum(source.transfer_bytes for source in found.appended.explanation.sources) > 0
        assert figure(client, "prefill", "fetch_failures") == 0
        rig.wait_idle(client)


def test_a_chat_that_grew_over_two_caches_is_whole_after_the_primary_has_restarted(
    fleet: Fleet, reference: Reference
) -> None:
    with fleet["primary"].client() as client:
        for seed in range(200, 220):
            before, history = held_bytes(fleet), list[int]()
            with client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
                for turn in range(5):
                    added = prompt(150, seed * 10 + turn)
                    session.append(added)
                    history += [*added, *session.generate(20)]
                    wait_published(client)
            wait_published(client)
            both_grew = all(held > before[name] for name, held in held_bytes(fleet).items())
            # One may hold only what the other has, too, or what nobody needs any more.
            if both_grew and all(given_without(name, client, history) < len(history) - 1 for name in CACHES):
                break
        else:
            raise AssertionError("rendezvous hashing gave twenty chats to one peer each")
    fleet["primary"].restart()
    fleet.wait_joined()
    question = [*history, *prompt(5, 1)]
    with fleet["primary"].client() as client:
        wait_until(lambda: fetchable(client, history), "the primary has the cards of what the caches hold")
        found = answer(client, question, COUNT)
        assert found.tokens == reference.answer(question, COUNT)
        assert found.reused[SourceKind.REMOTE_CACHE] >= len(history) - 1, found.reasons
        assert from_caches(found) == set(CACHES)
        rig.wait_idle(client)


def fetchable(client: Client, history: list[int]) -> bool:
    """Whether the fleet is asked for a prefix at all: cards of the caches have come since the restart."""
    found = answer(client, history[:300], 1, use_local_cache=False, publish=False)
    return SourceKind.REMOTE_CACHE in found.reused


@pytest.fixture(scope="module")
def slow(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowFleet]:
    """The same fleet, with slow links to the bulk ports of the second cache."""
    try:
        host = other_loopback()
    except RuntimeError as error:
        pytest.skip(str(error))
    ports = free_ports(LANES + 1, ["127.0.0.1", host])
    with contextlib.ExitStack() as stack:
        stack.enter_context(SlowLink(ports[0], QUICK, (host, ports[0])))
        links = [stack.enter_context(SlowLink(port, QUICK, (host, port))) for port in ports[1:]]
        fleet = stack.enter_context(rig.kept_fleet(request, model, tmp_path_factory.mktemp("slow")))
        fleet.start("primary", primary=("--cache-fetch-timeout-s", "60"))
        shown = f"[{host}]" if ":" in host else host
        behind_links = (
            *("--bind", f"127.0.0.1:{ports[0]}", "--advertise", f"{shown}:{ports[0]}"),
            *("--bulk-ports", f"{ports[1]}-{ports[-1]}"),
        )
        fleet.launch(fleet.add("cache", name="cache"), fleet.add("cache", *behind_links, name="cache2"))
        yield fleet, links


def test_when_one_of_two_sources_dies_within_the_fetch_what_arrived_is_kept(slow: SlowFleet, reference: Reference) -> None:
    fleet, links = slow
    with fleet["primary"].client() as client:
        tokens = spread(fleet, client, 300)
        before = sum(link.passed_bytes for link in links)
        for link in links:
            link.megabytes_per_second = SLOW
        said: list[Answer] = []
        asking = threading.Thread(
            target=lambda: said.append(answer(client, tokens, COUNT, use_local_cache=False, publish=False))
        )
        asking.start()
        try:
            wait_until(lambda: sum(link.passed_bytes for link in links) > before + PART_OF_A_BLOCK, "data flows from cache2")
        finally:
            fleet["cache2"].kill()
            asking.join(60)
        (found,) = said
        assert found.tokens == reference.answer(tokens, COUNT)
        ended = ("cache cache2 broke off a transfer", "cache cache2 fetch failed")  # whichever is noticed first
        assert any(text in found.reasons for text in ended), found.reasons
        assert SourceKind.REMOTE_CACHE in found.reused, (found.reasons, found.appended.explanation.decisions)
        kept, computed = found.reused[SourceKind.REMOTE_CACHE], found.reused[SourceKind.COMPUTED]
        assert kept >= SPREAD[0] - 1
        assert kept + computed == len(tokens) - 1
        assert figure(client, "prefill", "fetch_failures") == 1
        rig.wait_idle(client)
