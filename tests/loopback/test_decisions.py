"""Decisions of a real primary: throttled links, prompts that come at the same time, policies over several turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.fleet_rig import Answer, Fleet, Reference, answer, ask, prompt, wait_published, wait_until
from tests.loopback.throttle import SlowLink
from tests.proxy import free_ports, other_loopback
from wire.errors import FailureCode, RequestFailed
from wire.messages import Decision, PrefillPolicy, SourceKind

COUNT = 12
LANES = 6
QUICK, SLOW = 10_000.0, 0.02
"""Megabytes a second of the link to the cache: as good as none, and 2.8 s for the KV of a single block."""
NO_PENALTY = ("--primary-prefill-penalty-ms", "0", "--cache-fetch-timeout-s", "60", "--import-grid", "off")


class Links:
    """The ways to the cache: its control port, and the ports of its bulk transfers."""

    def __init__(self, links: list[SlowLink]) -> None:
        self._links = links

    def set(self, megabytes_per_second: float) -> None:
        for link in self._links:
            link.megabytes_per_second = megabytes_per_second


@pytest.fixture(scope="module")
def links() -> Iterator[tuple[Links, range, str]]:
    try:
        host = other_loopback()
    except RuntimeError as error:
        pytest.skip(str(error))
    ports = free_ports(LANES + 1, ["127.0.0.1", host])
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(SlowLink(ports[0], QUICK, (host, ports[0])))
        bulk = [stack.enter_context(SlowLink(port, QUICK, (host, port))) for port in ports[1:]]
        assert control.port == ports[0]
        yield Links(bulk), ports, host


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet, links: tuple[Links, range, str]) -> Fleet:
    _, ports, host = links
    shown = f"[{host}]" if ":" in host else host
    behind_links = (
        *("--bind", f"127.0.0.1:{ports[0]}", "--advertise", f"{shown}:{ports[0]}"),
        *("--bulk-ports", f"{ports[1]}-{ports[-1]}"),
    )
    empty_fleet.start("primary", "cache", primary=NO_PENALTY, cache=behind_links)
    return empty_fleet


@pytest.fixture
def fleet(running: Fleet, links: tuple[Links, range, str]) -> Iterator[Fleet]:
    links[0].set(QUICK)
    running.heal()
    yield running
    links[0].set(QUICK)
    running.show_logs()  # pytest shows it with a failure only


def asked(client: Client) -> int:
    """Requests to other nodes but exchanges of cards, which go on all the time: both figures of one moment."""
    node = client.status().sections["node"]
    return int(node["fleet_requests"] or 0) - int(node["fleet_exchanges"] or 0)


def publish(fleet: Fleet, client: Client, tokens: list[int]) -> Answer:
    """Ask once, and wait until the cache has it."""
    before = rig.figure(client, "prefill", "publish_successes")
    said = answer(client, tokens, COUNT)
    wait_until(lambda: rig.figure(client, "prefill", "publish_successes") > before, "it was published")
    wait_published(client)
    fleet.wait_card("cache", lambda row: row["cache_entries"] > 0, "the cache's card tells of its contents")
    return said


def decisions(said: Answer, what: str) -> list[Decision]:
    return [one for one in said.appended.explanation.decisions if one.what == what]


# --- links -----------------------------------------------------------------------------------------------------------


def test_over_a_quick_link_kv_is_imported_and_over_a_slow_one_computed(
    fleet: Fleet, reference: Reference, links: tuple[Links, range, str]
) -> None:
    """The first slow transfer is left on the way; after that the planner knows the link and does not begin one."""
    tokens = prompt(1_600, seed=1)
    expected = reference.answer(tokens, COUNT)
    with fleet["primary"].client() as client:
        publish(fleet, client, tokens)
        quick = answer(client, tokens, COUNT, use_local_cache=False, publish=False)
        assert quick.tokens == expected
        assert quick.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
        (chosen,) = decisions(quick, "prefix")
        assert chosen.chosen == "import from cache"
        assert chosen.costs_ms["import from cache"] < chosen.costs_ms["compute here"]

        links[0].set(SLOW)
        left = answer(client, tokens, COUNT, use_local_cache=False, publish=False)
        assert left.tokens == expected
        (switch,) = decisions(left, "switch")
        assert switch.chosen == "compute here"
        assert switch.costs_ms["stay with cache cache"] > switch.costs_ms["compute here"]
        assert "cache cache was too slow" in left.reasons
        assert rig.figure(client, "prefill", "hedges") == 1

        known = answer(client, tokens, COUNT, use_local_cache=False, publish=False)
        assert known.tokens == expected
        assert known.reused == {SourceKind.COMPUTED: len(tokens) - 1}
        (refused,) = decisions(known, "prefix")
        assert refused.chosen == "compute here"
        assert refused.costs_ms["import from cache"] > refused.costs_ms["compute here"]
        assert "does not pay" in known.reasons
        assert "ms of prefill here" in known.reasons


# --- at the same time ------------------------------------------------------------------------------------------------


def test_equal_prompts_at_the_same_time_are_computed_and_published_once(fleet: Fleet, reference: Reference) -> None:
    tokens = prompt(3_000, seed=2)
    expected = reference.answer(tokens, COUNT)
    with fleet["primary"].client() as client:
        names = ("tokens_computed", "prefills_shared", "misses", "bytes_published")
        before = {name: rig.figure(client, "prefill", name) for name in names}
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(fleet["primary"].client()) for _ in range(3)]
            sessions = [stack.enter_context(one.create_session()) for one in clients]
            answers: dict[int, Answer] = {}
            threads = [
                threading.Thread(target=lambda n=number: answers.update({n: ask(sessions[n], tokens, COUNT)}))
                for number in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        wait_published(client)
        after = {name: rig.figure(client, "prefill", name) - before[name] for name in names}
    assert [answers[number].tokens for number in range(3)] == [expected] * 3
    assert after["tokens_computed"] == len(tokens) - 1
    assert after["misses"] == 1
    # A session that came after the first one's end found everything at home and had nobody to wait for.
    assert after["prefills_shared"] >= 1
    shared = [said for said in answers.values() if decisions(said, "share")]
    assert len(shared) == after["prefills_shared"]
    assert all(said.reused == {SourceKind.HOT: len(tokens) - 1} for said in shared)


# --- policies --------------------------------------------------------------------------------------------------------


def test_remote_required_computes_no_prompt_here_in_any_turn(fleet: Fleet) -> None:
    tokens = prompt(900, seed=3)
    with fleet["primary"].client() as client:
        said = publish(fleet, client, tokens)
        before = rig.figure(client, "prefill", "tokens_computed")
        with client.create_session(policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=False) as session:
            first = ask(session, tokens, COUNT)
            assert first.tokens == said.tokens
            assert first.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
            # Nobody has seen the second turn, and there is no worker: it is refused, and the session stays as it was.
            with pytest.raises(RequestFailed, match="remote prefill is required") as caught:
                session.append(prompt(300, seed=4), timeout_s=30)
            assert caught.value.code is FailureCode.UNAVAILABLE
            assert session.info().history_tokens == len(tokens) + COUNT
        assert rig.figure(client, "prefill", "tokens_computed") == before


def test_local_only_asks_nobody_in_any_turn(fleet: Fleet, reference: Reference) -> None:
    history = prompt(400, seed=5)
    with fleet["primary"].client() as client:
        wait_published(client)
        before = asked(client)
        with client.create_session(policy=PrefillPolicy.LOCAL_ONLY, use_local_cache=False, publish=False) as session:
            for turn in range(3):
                added = history if turn == 0 else prompt(200, seed=5 + turn)
                if turn:
                    history = history + added
                said = ask(session, added, COUNT)
                assert said.tokens == reference.answer(history, COUNT)
                assert said.reused.keys() <= {SourceKind.COMPUTED, SourceKind.LIVE}
                history = history + said.tokens
        assert asked(client) == before
