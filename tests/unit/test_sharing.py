"""Single flight through the session table, and what is handed over for publishing."""

from __future__ import annotations

import numpy as np

from kakeya_zmq.blocks import Part
from kakeya_zmq.protocol.handover import REMEMBERED_MAX, REMEMBERED_S, Handover
from kakeya_zmq.protocol.inference import InferenceSettings, PublishParts
from tests.unit.inference_kit import InferenceHost
from tests.unit.preparation_kit import FULL, all_parts, new_store, tokens_of
from wire.messages import Appended, SourceKind

PROMPT = tokens_of(120)


def host(**options: object) -> InferenceHost:
    return InferenceHost(FULL, settings=InferenceSettings(capacity=8), **options)  # type: ignore[arg-type]


def sources(answer: object) -> list[SourceKind]:
    assert isinstance(answer, Appended)
    return [source.kind for source in answer.explanation.sources]


def test_sessions_with_the_same_prompt_compute_it_once() -> None:
    h = host()
    keys = [h.append(h.create(), PROMPT) for _ in range(3)]
    h.settle()
    assert [sources(h.outcomes[key]) for key in keys] == [[SourceKind.COMPUTED], [SourceKind.HOT], [SourceKind.HOT]]
    assert h.counts["tokens_computed"] == len(PROMPT) - 1
    assert h.counts["prefills_shared"] == 2
    assert h.counts["prefills_shared_tokens"] == 2 * (len(PROMPT) - 1)
    decision = h.outcomes[keys[1]].explanation.decisions[0]
    assert (decision.what, decision.chosen) == ("share", "wait for another session")
    h.finish()


def test_when_the_first_session_is_closed_the_second_one_goes_on_and_the_third_one_waits_for_it() -> None:
    h = host()
    sessions = [h.create() for _ in range(3)]
    keys = [h.append(session, PROMPT) for session in sessions]
    for _ in range(5):
        h.step()
    h.close(sessions[0])
    h.settle()
    assert sources(h.outcomes[keys[1]])[-1] is SourceKind.COMPUTED
    assert sources(h.outcomes[keys[2]]) == [SourceKind.HOT]
    # One segment of the first one was under way when it was told to stop.
    assert h.counts["tokens_computed"] <= len(PROMPT) - 1 + 32
    h.finish()


def test_a_prompt_that_goes_on_continues_where_the_shorter_one_ends() -> None:
    h = host()
    short, long = h.create(), h.create()
    first, second = h.append(short, PROMPT[:65]), h.append(long, PROMPT)
    h.settle()
    assert sources(h.outcomes[first]) == [SourceKind.COMPUTED]
    assert sources(h.outcomes[second]) == [SourceKind.HOT, SourceKind.COMPUTED]
    assert h.counts["tokens_computed"] == len(PROMPT) - 1
    h.finish()


def test_sessions_that_do_not_use_the_own_store_share_nothing() -> None:
    h = host()
    keys = [h.append(h.create(use_local_cache=False), PROMPT) for _ in range(2)]
    h.settle()
    assert [sources(h.outcomes[key]) for key in keys] == [[SourceKind.COMPUTED]] * 2
    assert "prefills_shared" not in h.counts
    h.finish()


def test_a_small_store_shares_nothing_and_costs_nobody_time() -> None:
    h = host(store=new_store(max_bytes=100))
    keys = [h.append(h.create(), PROMPT) for _ in range(2)]
    h.settle()
    assert all(isinstance(h.outcomes[key], Appended) for key in keys)
    assert h.counts["tokens_computed"] == 2 * (len(PROMPT) - 1)
    h.finish()


def test_equal_prompts_and_answers_are_handed_over_once() -> None:
    h = host()
    handed: list[Part] = []
    h.check_published = handed.extend  # type: ignore[method-assign]
    sessions = [h.create(use_local_cache=False) for _ in range(2)]
    for session in sessions:
        h.append(session, PROMPT)
    h.settle()
    h.now += 5.0
    h.tick()
    assert any(isinstance(effect, PublishParts) for effect in h.effects)
    refs = [part.meta.ref for part in handed]
    assert len(refs) == len(set(refs)) == len(all_parts(PROMPT[:-1], FULL))


def test_what_was_handed_over_long_ago_is_handed_over_again() -> None:
    handover, parts = Handover(), all_parts(PROMPT[:-1], FULL)
    assert handover.select(parts, 10.0) == parts
    assert handover.select(parts, 10.0 + REMEMBERED_S / 2) == ()
    assert handover.select(parts, 10.0 + REMEMBERED_S) == parts
    many = all_parts(np.arange(900, dtype=np.int32), FULL)
    for number in range(3):
        handover.select(many, 100.0 + number)
    assert len(handover._handed) <= REMEMBERED_MAX
