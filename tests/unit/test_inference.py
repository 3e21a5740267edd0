"""Inference sessions turn by turn: histories, positions, refusals, what is stored and published when, every kind of end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kakeya_zmq.engine import KV_NOT_ENCODED, Capture, Decode, ImportPrefix, Prefill
from kakeya_zmq.protocol.effects import CommandEnded, Count, Note, RequestKey, RunCommand
from kakeya_zmq.protocol.inference import InferenceSettings, PublishParts
from tests.unit.inference_kit import InferenceHost
from tests.unit.preparation_kit import (
    BLOCK,
    FINGERPRINT,
    FULL,
    REQUIREMENTS,
    STATEFUL,
    WINDOW_ONLY,
    WINDOWED,
    all_parts,
    chain_of,
    new_store,
    tokens_of,
)
from wire.errors import FailureCode
from wire.messages import (
    Appended,
    AppendTokens,
    CloseSession,
    CreateSession,
    Generate,
    Generated,
    GetSession,
    PartKind,
    PartRef,
    PrefillPolicy,
    Requirement,
    SessionClosed,
    SessionCreated,
    StopReason,
)

each_requirement = pytest.mark.parametrize("requirement", REQUIREMENTS)
ONE = np.array([5], np.int32)


def started(requirement: Requirement = FULL, tokens: int = 40, **options: Any) -> tuple[InferenceHost, str]:
    """A host with one session that holds a prompt."""
    settings = options.pop("settings", InferenceSettings(publish_delay_s=3.0))
    host = InferenceHost(
        requirement, settings=settings, **{k: options.pop(k) for k in ("store", "caches", "context") if k in options}
    )
    session_id = host.create(**options)
    if tokens:
        host.append(session_id, tokens_of(tokens))
        host.settle()
    return host, session_id


def history(host: InferenceHost, session_id: str) -> list[int]:
    return host.service._sessions[session_id].history.tolist()


def publishes(host: InferenceHost) -> list[PublishParts]:
    return [effect for effect in host.effects if isinstance(effect, PublishParts)]


def commands(host: InferenceHost) -> list[Any]:
    return [effect.command for effect in host.effects if isinstance(effect, RunCommand)]


def answer(host: InferenceHost, key: RequestKey) -> Any:
    return host.outcomes[key]


def run_generate(host: InferenceHost, session_id: str, max_tokens: int = 5) -> Any:
    key = host.generate(session_id, max_tokens)
    host.settle()
    return answer(host, key)


# --- turns -----------------------------------------------------------------------------------------------------------


@each_requirement
@pytest.mark.parametrize("ends", [(None, None, None), (0, 3, 0), (3, None, 0), (None, 2, None)])
def test_many_turns_keep_positions_right_and_store_and_publish_everything(
    requirement: Requirement, ends: tuple[int | None, ...]
) -> None:
    """The engine refuses any command that does not fit; what an unbroken prefill would have made is in the store."""
    host, session_id = started(requirement)
    for turn, end in enumerate(ends):
        host.eos_after = end
        generated = run_generate(host, session_id, 20)
        assert generated.stop_reason is (StopReason.MAX_TOKENS if end is None else StopReason.EOS)
        assert generated.token_count == (20 if end is None else end)
        if end is None:
            again = run_generate(host, session_id, 3)
            assert again.token_count == 3, "an answer that was cut by its limit goes on without an append"
        host.append(session_id, tokens_of(17, seed=turn + 5))
        host.settle()
    tokens = np.array(history(host, session_id), np.int32)
    host.finish()
    for part in all_parts(tokens[:-1], requirement):
        if part.meta.kind is not PartKind.STATE and part.meta.token_count == BLOCK:
            assert host.store.has(part.meta.ref, fingerprint=FINGERPRINT)
            assert part.meta.ref in host.published


def test_the_grouping_of_appends_never_changes_the_state() -> None:
    tokens = tokens_of(90)
    states = []
    for cuts in [(90,), (1, 89), (16, 16, 58), (40, 1, 1, 48)]:
        host, session_id = started(WINDOWED, tokens=0)
        start = 0
        for count in cuts:
            host.append(session_id, tokens[start : start + count])
            host.settle()
            start += count
        states.append((history(host, session_id), host.engines[session_id]))
        host.finish()
    assert all(state == states[0] for state in states)
    assert states[0] == (tokens.tolist(), tokens[:-1].tolist())


def test_generating_twice_after_an_end_of_sequence_needs_a_new_turn() -> None:
    host, session_id = started()
    host.eos_after = 0
    assert run_generate(host, session_id).token_count == 0
    assert run_generate(host, session_id) is FailureCode.FAILED_PRECONDITION
    host.append(session_id, ONE)
    host.settle()
    assert run_generate(host, session_id).stop_reason is StopReason.EOS
    host.finish()


def test_a_full_context_ends_the_answer_and_refuses_more() -> None:
    host, session_id = started(tokens=40, context=50)
    generated = run_generate(host, session_id, 100)
    assert (generated.stop_reason, generated.history_tokens) == (StopReason.CONTEXT_FULL, 51)
    assert run_generate(host, session_id) == Generated(
        stop_reason=StopReason.CONTEXT_FULL, token_count=0, history_tokens=51, elapsed_ms=0.0
    )
    assert answer(host, host.append(session_id, ONE)) is FailureCode.INVALID_ARGUMENT
    assert isinstance(answer(host, host.append(session_id, tokens_of(0))), Appended)
    host.finish()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_sampling_out_of_range_is_the_clients_fault_and_changes_nothing(options: dict[str, Any]) -> None:
    host, session_id = started()
    assert answer(host, host.generate(session_id, **options)) is FailureCode.INVALID_ARGUMENT
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


@pytest.mark.parametrize("packed", [b"abc", (1000).to_bytes(4, "little"), (-1).to_bytes(4, "little", signed=True)])
def test_tokens_that_are_none_are_refused_and_the_history_stays(packed: bytes) -> None:
    host, session_id = started()
    assert answer(host, host.ask(AppendTokens(session_id=session_id, tokens=packed))) is FailureCode.INVALID_ARGUMENT
    assert len(history(host, session_id)) == 40
    host.finish()


def test_a_session_does_not_exist_for_others() -> None:
    """Neither its text nor its state, and nobody else ends it; a refused request leaves it as it was."""
    host, session_id = started()
    before = history(host, session_id)
    bodies = (
        AppendTokens(session_id=session_id, tokens=b""),
        Generate(session_id=session_id, max_tokens=1),
        CloseSession(session_id=session_id),
        GetSession(session_id=session_id),
    )
    for body in bodies:
        assert answer(host, host.ask(body, node="thief")) is FailureCode.NOT_FOUND
        assert answer(host, host.ask(body, identity=b"another key")) is FailureCode.NOT_FOUND, "under the same name"
        assert history(host, session_id) == before
    assert answer(host, host.ask(bodies[-1])).history_tokens == 40
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_unknown_sessions_and_empty_ones() -> None:
    host, session_id = started(tokens=0)
    for body in (
        AppendTokens(session_id="x", tokens=b""),
        Generate(session_id="x", max_tokens=1),
        CloseSession(session_id="x"),
        GetSession(session_id="x"),
    ):
        assert answer(host, host.ask(body)) is FailureCode.NOT_FOUND
    assert answer(host, host.generate(session_id)) is FailureCode.INVALID_ARGUMENT
    appended = answer(host, host.append(session_id, tokens_of(0)))
    assert (appended.history_tokens, appended.explanation.sources) == (0, ())
    host.finish()


def test_a_second_operation_is_refused_and_disturbs_nothing() -> None:
    host, session_id = started(tokens=0)
    append = host.append(session_id, tokens_of(40))
    assert answer(host, host.append(session_id, ONE)) is FailureCode.ABORTED
    assert host.state(session_id).busy
    host.settle()
    assert answer(host, append).history_tokens == 40
    generate = host.generate(session_id)
    assert answer(host, host.append(session_id, ONE)) is FailureCode.ABORTED
    host.settle()
    assert answer(host, generate).token_count == 5
    assert not host.state(session_id).busy
    host.finish()


# --- cancelled and failed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("kind", ["cancel", "fail", "remote-required"])
def test_an_append_that_does_not_end_well_leaves_the_history_and_a_usable_session(steps: int, kind: str) -> None:
    host, session_id = started()
    before = history(host, session_id)
    if kind == "fail":
        host.failing = {Prefill}
    if kind == "remote-required":
        host.policy = PrefillPolicy.REMOTE_REQUIRED
    key = host.append(session_id, tokens_of(70, seed=3))
    for _ in range(steps):
        host.step()
    if key in host.open:
        host.cancel(key)
    host.settle()
    if answer(host, key) == "cancelled" or isinstance(answer(host, key), FailureCode):
        assert history(host, session_id) == before
    host.failing, host.policy = set(), None
    host.append(session_id, ONE)
    host.settle()
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_kv_lost_by_a_failed_append_comes_back_with_an_append_of_nothing() -> None:
    host, session_id = started(use_local_cache=False)
    host.failing = {Prefill}
    host.append(session_id, tokens_of(70, seed=3))
    host.settle()
    host.failing = set()
    assert answer(host, host.generate(session_id)) is FailureCode.FAILED_PRECONDITION
    appended = host.append(session_id, tokens_of(0))
    host.settle()
    assert answer(host, appended).history_tokens == 40
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_kv_that_covers_the_whole_history_survives_a_refused_append() -> None:
    host, session_id = started()
    host.eos_after = 2
    run_generate(host, session_id)
    host.policy = PrefillPolicy.REMOTE_REQUIRED
    refused = host.append(session_id, tokens_of(70, seed=3))
    assert answer(host, refused) is FailureCode.UNAVAILABLE
    host.settle()
    assert "sessions_restarted" not in host.counts
    host.finish()


@pytest.mark.parametrize("steps", range(6))
def test_a_generation_nobody_waits_for_stops_and_the_next_goes_on_from_there(steps: int) -> None:
    host, session_id = started()
    key = host.generate(session_id, 4)
    for _ in range(steps):
        host.step()
    told = list(host.told[key])
    if key in host.open:
        host.cancel(key)
        host.settle()
        assert host.told[key] == told, "nothing is streamed to somebody who is gone"
    host.settle()
    assert history(host, session_id)[40 : 40 + len(told)] == told
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_a_generation_cancelled_behind_the_last_ones_capture_does_not_lose_it() -> None:
    host, session_id = started()
    first = host.generate(session_id, 30)
    while first in host.open:
        host.step()
    second = host.generate(session_id)
    host.cancel(second)
    host.finish()
    assert host.counts["generations_cancelled"] == 1


def test_a_failed_decode_tells_the_client_and_the_session_recovers() -> None:
    host, session_id = started()
    host.failing = {Decode}
    assert run_generate(host, session_id) is FailureCode.INTERNAL
    host.failing = set()
    host.append(session_id, ONE)
    host.settle()
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_an_import_the_engine_refuses_is_computed_instead() -> None:
    tokens = tokens_of(60)
    host, session_id = started(tokens=0, store=new_store(all_parts(tokens[:48], FULL)))
    host.failing = {ImportPrefix}
    key = host.append(session_id, tokens)
    host.settle()
    assert answer(host, key).history_tokens == 60
    host.finish()


def test_an_engine_that_is_gone_ends_everything() -> None:
    host, session_id = started()
    key = host.generate(session_id)
    host.step()
    (task,) = host.queues[session_id]
    host.queues[session_id].clear()
    host.models[session_id].decode = None
    host.send(CommandEnded(task.ticket, cancelled=True, position=None))
    assert isinstance(answer(host, key), Generated)
    assert not host.service._sessions[session_id].operation


# --- captures and publishing ----------------------------------------------------------------------------------------------


def test_nothing_is_published_before_the_generation_has_ended_and_then_all_at_once() -> None:
    host, session_id = started()
    key = host.generate(session_id, 30)
    while key in host.open:
        host.step()
        assert not publishes(host)
    host.step()
    assert not publishes(host), "the capture has only begun"
    host.settle()
    blocks = chain_of(np.array(history(host, session_id)[:-1], np.int32)).blocks
    assert blocks[-1].token_count < BLOCK
    assert {ref.block_hash for ref in host.published} == {block.block_hash for block in blocks[:-1]}
    host.close(session_id)
    host.settle()
    assert {ref.block_hash for ref in host.published} == {block.block_hash for block in blocks}, "the tail waits for the end"


def test_a_capture_that_ends_within_the_next_generation_is_published_after_it() -> None:
    host, session_id = started()
    first = host.generate(session_id, 30)
    while first in host.open:
        host.step()
    second = host.generate(session_id, 5)
    while second in host.open:
        host.step()
        assert not publishes(host)
    host.settle()
    assert host.published
    host.finish()


def test_without_a_generation_the_parts_wait_for_their_time() -> None:
    host, _ = started()
    assert not host.published
    host.now = host.service.deadline() or 0.0
    assert host.now == pytest.approx(3.0)
    host.tick()
    assert len(host.published) == 3
    host.finish()


def test_an_append_that_brings_nothing_new_does_not_hold_back_what_waits() -> None:
    host, session_id = started()
    key = host.append(session_id, tokens_of(70, seed=3))
    host.cancel(key)
    host.settle()
    host.now += 3.0
    host.tick()
    assert len(host.published) >= 3
    host.finish()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_session_closed_right_after_its_answer_still_stores_and_publishes_it(steps: int) -> None:
    host, session_id = started()
    key = host.generate(session_id, 30)
    while key in host.open:
        host.step()
    tokens = np.array(history(host, session_id), np.int32)
    for _ in range(steps):
        host.step()
    host.close(session_id)
    assert host.service.unpublished == 1, "status must not say that all is published"
    host.finish()
    assert host.service.unpublished == 0
    for block in chain_of(tokens[:-1]).blocks:
        ref = PartRef(block_hash=block.block_hash, kind=PartKind.FULL)
        assert host.store.has(ref, fingerprint=FINGERPRINT)
        assert ref in host.published


def test_a_capture_that_failed_is_made_up_for_by_the_next_one() -> None:
    host, session_id = started()
    host.failing = {Capture}
    run_generate(host, session_id, 40)
    host.failing = set()
    host.append(session_id, tokens_of(20, seed=9))
    host.settle()
    run_generate(host, session_id, 2)
    tokens = np.array(history(host, session_id), np.int32)
    host.finish()
    assert host.counts["capture_failures"] == 1
    assert all(host.store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in all_parts(tokens[:96], FULL))


@pytest.mark.parametrize(("local", "publish"), [(True, False), (False, True), (False, False)])
def test_what_a_session_opted_out_of_does_not_happen(local: bool, publish: bool) -> None:
    host, session_id = started(use_local_cache=local, publish=publish)
    run_generate(host, session_id, 30)
    host.models[session_id].clean = publish
    host.finish()
    assert bool(host.store.stats().entry_count) is local
    assert bool(host.published) is publish


# --- making room, ending ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_idle_session_makes_room_and_busy_ones_never_do() -> None:
    host, first = started(settings=InferenceSettings(capacity=2))
    host.now += 1
    second = host.create()
    host.now += 1
    host.append(first, tokens_of(20, seed=4))
    third = host.create()
    assert set(host.service._sessions) == {first, third}, "the second was idle, the first is busy"
    host.append(third, tokens_of(20, seed=5))
    assert host.service.session_count == 2
    assert second not in host.service._sessions
    key = host.ask(type(host.service._sessions[first].options)())
    assert answer(host, key) is FailureCode.RESOURCE_EXHAUSTED
    host.settle()
    host.finish()


def opened_by(host: InferenceHost, node: str) -> str | None:
    """The id of a new session of this node, or None when it is refused."""
    host.now += 1
    created = answer(host, host.ask(CreateSession(), node=node, identity=node.encode()))
    return created.session_id if isinstance(created, SessionCreated) else None


def owners(host: InferenceHost) -> Counter[bytes]:
    return Counter(session.creator_key for session in host.service._sessions.values())


def test_who_opens_sessions_without_end_ends_his_own() -> None:
    """Whether the honest one's session is the oldest or not, and under whatever names the greedy one's key comes."""
    host = InferenceHost(FULL, settings=InferenceSettings(capacity=4))
    honest = [opened_by(host, "honest"), opened_by(host, "other")]
    for number in range(8):
        host.now += 1
        created = answer(host, host.ask(CreateSession(), node=f"greedy-{number}", identity=b"greedy"))
        assert isinstance(created, SessionCreated)
        assert set(honest) <= set(host.service._sessions)
    assert owners(host) == {b"honest": 1, b"other": 1, b"greedy": 2}
    assert list(host.service._sessions)[-1] == created.session_id, "the greedy one's oldest went"
    assert host.counts["sessions_evicted"] == 6
    host.settle()


def test_a_newcomer_takes_the_oldest_idle_session_of_who_has_most() -> None:
    host = InferenceHost(FULL, settings=InferenceSettings(capacity=4))
    one, first, second, third = (opened_by(host, node) for node in ("a", "b", "b", "b"))
    newcomer = opened_by(host, "c")
    assert list(host.service._sessions) == [one, second, third, newcomer], "not the oldest of all"
    assert opened_by(host, "c")
    assert owners(host) == {b"a": 1, b"b": 1, b"c": 2}
    assert first not in host.service._sessions
    host.settle()


def test_nobody_loses_a_session_to_an_asker_that_has_as_many() -> None:
    """Also when all of the asker's are busy: it is refused, until one of them is idle."""
    host = InferenceHost(FULL, settings=InferenceSettings(capacity=2))
    idle, busy = opened_by(host, "a"), host.create()
    appending = host.append(busy, tokens_of(20))
    assert answer(host, host.ask(CreateSession())) is FailureCode.RESOURCE_EXHAUSTED
    host.settle()
    assert isinstance(answer(host, appending), Appended)
    again = host.create()
    assert set(host.service._sessions) == {idle, again}


def test_idle_sessions_expire_and_busy_ones_do_not() -> None:
    host, session_id = started(settings=InferenceSettings(session_idle_s=10.0, publish_delay_s=3.0))
    busy = host.create()
    host.append(busy, tokens_of(40, seed=2))
    host.now = 10.0
    host.tick()
    assert set(host.service._sessions) == {busy}
    assert host.counts["sessions_expired"] == 1
    assert host.published, "what waited is handed over"
    host.settle()
    assert answer(host, host.append(session_id, ONE)) is FailureCode.NOT_FOUND
    host.finish()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("operation", ["append", "import", "generate", "cancelled append", "asking"])
def test_closing_in_the_middle_answers_everybody_and_leaves_nothing(operation: str, steps: int) -> None:
    tokens = tokens_of(80)
    store = new_store(all_parts(tokens[:48], FULL)) if operation == "import" else new_store()
    host, session_id = started(tokens=0, store=store, caches=("c",) if operation == "asking" else ())
    if operation == "generate":
        host.append(session_id, tokens)
        host.settle()
        key = host.generate(session_id)
    else:
        key = host.append(session_id, tokens)
    for _ in range(steps):
        host.step()
    if operation == "cancelled append" and key in host.open:
        host.cancel(key)
    closed = host.close(session_id)
    assert isinstance(answer(host, closed), SessionClosed)
    assert key not in host.open
    assert answer(host, host.close(session_id)) is FailureCode.NOT_FOUND
    host.finish()


def test_no_progress_goes_to_somebody_who_has_cancelled() -> None:
    host, session_id = started(tokens=0)
    key = host.append(session_id, tokens_of(100))
    for _ in range(2):
        host.step()
    host.cancel(key)  # the host fails on any progress or answer for it from now on
    host.finish()


# --- one K/V a token -----------------------------------------------------------------------------------------------------


def stored_tokens(host: InferenceHost) -> int:
    """Tokens of all parts in the store, each as often as it is stored."""
    events = host.store.events_since(0)
    assert events is not None
    held = {event.ref for event in events if host.store.has(event.ref, fingerprint=FINGERPRINT)}
    return sum(part.meta.token_count for ref in held if (part := host.store.get(ref, fingerprint=FINGERPRINT)) is not None)


@pytest.mark.parametrize("requirement", [FULL, WINDOW_ONLY])
def test_a_chat_stores_and_publishes_each_token_once_and_its_prompts_still_hit(requirement: Requirement) -> None:
    host = InferenceHost(requirement, settings=InferenceSettings(publish_delay_s=3.0))
    session_id = host.create()
    prompts = []
    for turn in range(10):
        host.append(session_id, tokens_of(13 + turn % 3, seed=turn))
        host.settle()
        prompts.append(history(host, session_id))
        run_generate(host, session_id, 7)
    host.close(session_id)
    host.settle()
    total = len(prompts[-1]) + 7
    assert stored_tokens(host) == total - 1, "the last token has no KV"
    by_ref = {ref: host.store.get(ref, fingerprint=FINGERPRINT) for ref in host.published}
    assert all(by_ref.values()), "nothing was published that is not stored"
    assert sum(part.meta.token_count for part in by_ref.values() if part is not None) == total - 1
    computed = host.counts["tokens_computed"]
    for tokens in prompts:
        again = host.create()
        host.append(again, np.array(tokens, np.int32))
        host.settle()
    assert host.counts["tokens_computed"] == computed, "every prompt of the chat is a full hit"


def test_models_with_state_keep_their_tails() -> None:
    host = InferenceHost(STATEFUL, settings=InferenceSettings(publish_delay_s=3.0))
    session_id = host.create()
    host.append(session_id, tokens_of(20))
    host.settle()
    run_generate(host, session_id, 30)
    again = host.create()
    computed = host.counts["tokens_computed"]
    host.append(again, tokens_of(20))
    host.settle()
    assert host.counts["tokens_computed"] == computed


def test_kv_that_the_codec_cannot_store_is_told_once_and_counted() -> None:
    host = InferenceHost(FULL)
    effects = [effect for _ in range(3) for effect in host.service._captures.not_encoded(2)]
    assert [effect for effect in effects if isinstance(effect, Note)] == [Note("error", KV_NOT_ENCODED)]
    assert sum(effect.amount for effect in effects if isinstance(effect, Count)) == 6


# --- a prompt and its answer, asked for at once ------------------------------------------------------------------------


def test_a_generation_that_follows_its_append_begins_when_that_has_succeeded() -> None:
    host, session_id = started(tokens=0)
    append = host.append(session_id, tokens_of(40))
    generation = host.generate(session_id, 5)
    assert append not in host.outcomes
    assert generation not in host.outcomes
    second, more = host.generate(session_id, 5), host.append(session_id, ONE)
    assert answer(host, second) is answer(host, more) is FailureCode.ABORTED, "only one waits, and nothing between"
    host.settle()
    assert isinstance(answer(host, append), Appended)
    assert answer(host, generation).token_count == 5
    assert len(history(host, session_id)) == 45
    host.finish()


def test_what_is_wrong_with_a_generation_that_follows_is_told_at_once() -> None:
    host, session_id = started(tokens=0)
    append = host.append(session_id, tokens_of(40))
    assert answer(host, host.generate(session_id, 0)) is FailureCode.INVALID_ARGUMENT
    assert answer(host, host.ask(Generate(session_id=session_id, max_tokens=1), node="thief")) is FailureCode.NOT_FOUND
    host.settle()
    assert isinstance(answer(host, append), Appended)
    host.finish()


@pytest.mark.parametrize("before", [0, 40])
def test_a_generation_never_goes_on_from_a_history_without_its_append(before: int) -> None:
    host, session_id = started(tokens=before)
    append = host.append(session_id, tokens_of(60, seed=3))
    generation = host.generate(session_id, 5)
    host.cancel(append)
    host.settle()
    assert answer(host, generation) is FailureCode.ABORTED
    assert len(history(host, session_id)) == before
    host.finish()


def test_a_generation_after_an_append_that_nobody_waits_for_is_refused() -> None:
    host, session_id = started(tokens=40)
    append = host.append(session_id, tokens_of(60, seed=3))
    host.cancel(append)
    assert host.service._sessions[session_id].operation is not None, "the engine has not let go yet"
    assert answer(host, host.generate(session_id, 5)) is FailureCode.ABORTED
    host.settle()
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_a_generation_that_follows_can_be_given_up_without_its_append() -> None:
    host, session_id = started(tokens=0)
    append = host.append(session_id, tokens_of(40))
    generation = host.generate(session_id, 5)
    host.cancel(generation)
    host.settle()
    assert isinstance(answer(host, append), Appended)
    assert not [command for command in commands(host) if isinstance(command, Decode)]
    assert isinstance(run_generate(host, session_id), Generated)
    host.finish()


def test_closing_the_session_answers_the_generation_that_waits() -> None:
    host, session_id = started(tokens=0)
    append, generation = host.append(session_id, tokens_of(40)), host.generate(session_id, 5)
    host.close(session_id)
    assert answer(host, append) is answer(host, generation) is FailureCode.CANCELLED
    host.settle()
    host.finish()
