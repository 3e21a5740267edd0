"""A fleet of real processes: shared prefixes, conversations, restarts, workers that come and go, and a quiet decode."""

from __future__ import annotations

from typing import Any

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.fleet_rig import BLOCK_TOKENS, Fleet, Reference, answer, ask, figure, prompt, wait_published, wait_until
from wire.errors import FailureCode, RequestFailed
from wire.keys import FleetKey
from wire.messages import PrefillPolicy, SourceKind, Status

KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4
"""Of the tiny model: layers, K and V, KV heads, head dimensions, bytes of a float32."""
COUNT = 24
SHARED = 700
SHARED_BLOCKS = SHARED // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", "cache")
    return empty_fleet


def node_section(status: Status) -> dict[str, Any]:
    return dict(status.sections["node"])


def comings(fleet: Fleet) -> int:
    """How often the primary has noted that a worker came."""
    lines = fleet["primary"].status().recent
    return sum("worker restarted" in line or "worker appeared" in line for line in lines)


def stored_bytes(fleet: Fleet, node: str) -> int:
    return int(fleet[node].status().sections["cache"]["bytes_used"] or 0)


def stored_tokens(prompt_tokens: int, generated: int) -> int:
    """Tokens whose KV one prompt and its answer leave in a store, each once; the last token of an answer is not run."""
    return prompt_tokens + generated - 1


# --- shared prefixes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(1_500, 900), (900, 1_500)], ids=["long-first", "short-first"])
def test_prompts_that_differ_late_share_blocks_and_store_only_what_is_new(
    fleet: Fleet, reference: Reference, first: int, second: int
) -> None:
    shared = prompt(SHARED, seed=first)
    one = shared + prompt(first - SHARED, seed=first + 1)
    other = shared + prompt(second - SHARED, seed=first + 2)
    with fleet["primary"].client() as client:
        before = [stored_bytes(fleet, node) for node in ("primary", "cache")]
        cold = answer(client, one, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        between = [stored_bytes(fleet, node) for node in ("primary", "cache")]
        warm = answer(client, other, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        after = [stored_bytes(fleet, node) for node in ("primary", "cache")]
    assert cold.tokens == reference.answer(one, COUNT)
    assert warm.tokens == reference.answer(other, COUNT)
    assert cold.reused == {SourceKind.COMPUTED: first - 1}
    assert warm.reused == {SourceKind.HOT: SHARED_BLOCKS, SourceKind.COMPUTED: second - 1 - SHARED_BLOCKS}
    whole = stored_tokens(first, COUNT) * KV_BYTES_PER_TOKEN
    new = (stored_tokens(second, COUNT) - SHARED_BLOCKS) * KV_BYTES_PER_TOKEN
    assert [now - then for then, now in zip(before, between, strict=True)] == [whole, whole]
    assert [now - then for then, now in zip(between, after, strict=True)] == [new, new]


def test_a_prefix_computed_by_the_worker_serves_another_prompt(fleet: Fleet, reference: Reference) -> None:
    shared = prompt(SHARED, seed=30)
    one, other = shared + prompt(500, seed=31), shared + prompt(300, seed=32)
    with fleet["primary"].client() as client:
        with rig.worker_only(client) as session:
            cold = ask(session, one, COUNT)
        fleet.wait_card("worker", lambda row: row["cache_entries"] > 0, "the worker's card tells of its cache")
        # Not published to the cache peer: only the worker holds the blocks before the window of the first prompt.
        with (
            fleet["worker"].client() as worker,
            client.create_session(
                policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=False, exclude_nodes=["cache"]
            ) as session,
        ):
            computed = figure(worker, "prefill", "job_tokens_computed")
            warm = ask(session, other, COUNT)
            computed = figure(worker, "prefill", "job_tokens_computed") - computed
    assert cold.tokens == reference.answer(one, COUNT)
    assert warm.tokens == reference.answer(other, COUNT)
    assert cold.reused == {SourceKind.WORKER: len(one) - 1}
    # Whether it sends the shared blocks for a fetch, or with the job: it has them, and computes the rest.
    assert sum(warm.reused.values()) == len(other) - 1
    assert {source.node_id for source in warm.appended.explanation.sources} == {"worker"}
    assert computed == len(other) - 1 - SHARED_BLOCKS


# --- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_reuses_its_own_kv_and_after_a_restart_the_caches(fleet: Fleet, reference: Reference) -> None:
    turns = [prompt(500, seed=40), prompt(150, seed=41), prompt(1, seed=42)]
    history: list[int] = []
    with fleet["primary"].client() as client:
        with client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
            for turn in turns:
                # All but the last token of an answer have their KV already.
                live = max(0, len(history) - 1)
                history += turn
                said = ask(session, turn, COUNT)
                assert said.tokens == reference.answer(history, COUNT)
                assert said.reused.get(SourceKind.LIVE, 0) == live
                assert said.reused.get(SourceKind.COMPUTED, 0) == len(history) - 1 - live
                history += said.tokens
            wait_published(client)
            fleet["primary"].restart()
            fleet.wait_joined()
            fleet.wait_card("cache", lambda row: row["cache_entries"] > 0, "the cache's card tells of its contents")
            with pytest.raises(RequestFailed, match="no such session") as caught:
                session.append([1])
            assert caught.value.code is FailureCode.NOT_FOUND
        again = answer(client, [*history, 5], COUNT)
    assert again.tokens == reference.answer([*history, 5], COUNT)
    # Everything up to the last token of the last answer had been published.
    assert again.reused[SourceKind.REMOTE_CACHE] >= len(history) - 1


# --- membership ------------------------------------------------------------------------------------------------------


def test_a_worker_that_was_restarted_elsewhere_is_used_again(fleet: Fleet, reference: Reference) -> None:
    worker = fleet["worker"]
    before = comings(fleet)
    old_address = worker.address
    worker.kill()
    worker.forget_address()
    worker.restart()
    assert worker.address != old_address
    with fleet["primary"].client() as client:
        fleet.wait_joined()
        with rig.worker_only(client) as session:
            said = ask(session, prompt(400, seed=50), COUNT)
        # As one that was restarted, or, when its old card had expired by then, as a new one.
        assert comings(fleet) == before + 1
    assert said.tokens == reference.answer(prompt(400, seed=50), COUNT)
    assert said.reused == {SourceKind.WORKER: 399}


def test_without_a_fleet_remote_required_is_unavailable_and_the_session_stays_usable(
    fleet: Fleet, reference: Reference
) -> None:
    fleet["worker"].kill()
    fleet["cache"].kill()
    # Whether the primary has noticed already must make no difference to the answer.
    with fleet["primary"].client() as client, rig.worker_only(client) as session:
        with pytest.raises(RequestFailed, match="remote prefill is required") as caught:
            session.append(prompt(300, seed=60), timeout_s=30)
        assert caught.value.code is FailureCode.UNAVAILABLE
        assert session.info().history_tokens == 0
        before = client.status().sections["prefill"]["tokens_computed"]
        fleet.heal()
        said = ask(session, prompt(300, seed=60), COUNT)
        after = client.status().sections["prefill"]["tokens_computed"]
    assert said.tokens == reference.answer(prompt(300, seed=60), COUNT)
    assert said.reused == {SourceKind.WORKER: 299}
    assert before == after


def test_a_wrong_key_gets_no_service_and_a_line_on_both_sides(fleet: Fleet) -> None:
    with pytest.raises(RequestFailed, match="PSK") as caught:
        Client(fleet["primary"].address, fleet_key=FleetKey(FleetKey.generate()), connect_timeout_s=10)
    assert caught.value.code is FailureCode.UNAUTHENTICATED
    with fleet["primary"].client() as client:
        status = client.status()
    assert int(status.sections["prefill"]["connections_refused"] or 0) >= 1
    assert sum(int(count or 0) for count in status.sections["refusals"].values()) >= 1
    assert any("refused" in line or "key" in line for line in status.recent)


# --- decode ----------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_of_the_fleet_between_the_first_and_the_last_token(fleet: Fleet) -> None:
    names = ("fleet_updates", "fleet_cancels", "lanes_opened")

    def traffic(status: Status) -> dict[str, int]:
        node = node_section(status)
        figures = {name: int(node[name]) for name in names}
        # Membership goes on all the time, on nobody's behalf.
        figures["requests"] = int(node["fleet_requests"]) - int(node["fleet_exchanges"])
        return figures

    with fleet["primary"].client() as client, rig.worker_only(client) as session:
        wait_published(client)
        rig.wait_idle(client)
        before = traffic(client.status())
        session.append(prompt(2_000, seed=70))
        prepared = traffic(client.status())
        assert all(prepared[name] > before[name] for name in ("requests", "fleet_updates", "lanes_opened"))
        decoding: list[dict[str, int]] = []
        for number, _ in enumerate(session.generate(400)):
            if number % 20 == 0:
                status = client.status()
                if status.sections["primary"]["decoding"]:
                    decoding.append(traffic(status))
        assert len(decoding) >= 5
        assert decoding[0] == decoding[-1]
        # What the turn produced is published afterwards: the same figures move then.
        wait_until(lambda: traffic(client.status())["requests"] > decoding[-1]["requests"], "publishing began")
        wait_published(client)
        assert traffic(client.status())["lanes_opened"] > decoding[-1]["lanes_opened"]
