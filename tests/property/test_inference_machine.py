"""Random turns of several clients around the session table of a primary, with an engine that holds real histories.

The engine (tests.unit.inference_kit) refuses a prefill, import or decode that does not go on exactly where its session
stands, so the machine's bookkeeping of positions is held against the engine's with every command. Requests end once,
histories grow only by what was answered, nothing is published between first and last token, and at the end nothing is left:
no engine session, ask, lease or owner; what undisturbed sessions made has been published.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kakeya_zmq.engine import Capture, Decode, ImportPrefix, Prefill
from kakeya_zmq.protocol.inference import InferenceSettings
from tests.unit.inference_kit import InferenceHost
from tests.unit.preparation_kit import REQUIREMENTS, new_store, tokens_of
from wire.messages import CreateSession, PrefillPolicy, SessionCreated

CAPACITY = 2
IDLE_S = 50.0
pick = st.integers(0, 1 << 16)


class InferenceMachine(RuleBasedStateMachine):
    host: InferenceHost

    @initialize(
        requirement=st.sampled_from(REQUIREMENTS),
        store_bytes=st.sampled_from([500, 1 << 20]),
        caches=st.sampled_from([(), (), ("c",)]),
    )
    def begin(self, requirement: Any, store_bytes: int, caches: tuple[str, ...]) -> None:
        self.host = InferenceHost(
            requirement,
            store=new_store(max_bytes=store_bytes),
            settings=InferenceSettings(capacity=CAPACITY, session_idle_s=IDLE_S, publish_delay_s=3.0),
            caches=caches,
            context=150,
        )
        self.seed = 0
        self.host.create()

    def choose(self, choice: int) -> str:
        ids = list(self.host.service._sessions)
        return ids[choice % len(ids)]

    def note_cuts(self, before: set[str]) -> None:
        """Sessions that vanished with an operation under way have lost some of what they made."""
        for session_id in before - set(self.host.service._sessions):
            model = self.host.models[session_id]
            model.closed = True
            model.clean = model.clean and model.decode is None and model.appending is None

    @rule(
        publish=st.sampled_from([True, True, False]),
        local=st.sampled_from([True, True, False]),
        when_full=st.sampled_from([False, False, True]),
    )
    def create(self, publish: bool, local: bool, when_full: bool) -> None:
        if self.host.service.session_count == CAPACITY and not when_full:
            return
        before = set(self.host.service._sessions)
        key = self.host.ask(CreateSession(publish=publish, use_local_cache=local))
        self.note_cuts(before)
        created = self.host.outcomes[key]
        if isinstance(created, SessionCreated) and not publish:
            self.host.models[created.session_id].clean = False

    @precondition(lambda self: self.host.service.session_count)
    @rule(choice=pick, count=st.integers(0, 60), alike=st.booleans())
    def append(self, choice: int, count: int, alike: bool = False) -> None:
        """``alike``: a prefix of tokens that others append, too, perhaps at the same time."""
        self.seed += 1
        self.host.append(self.choose(choice), tokens_of(60, seed=0)[:count] if alike else tokens_of(count, seed=self.seed))

    @precondition(lambda self: self.host.service.session_count)
    @rule(choice=pick, max_tokens=st.integers(1, 40))
    def generate(self, choice: int, max_tokens: int) -> None:
        self.host.generate(self.choose(choice), max_tokens)

    @precondition(lambda self: self.host.service.session_count)
    @rule(choice=pick, count=st.integers(1, 40), max_tokens=st.integers(1, 20), steps=st.integers(0, 12))
    def turn(self, choice: int, count: int, max_tokens: int, steps: int) -> None:
        """What clients mostly do, so that deep states are reached; it may be left half done."""
        session_id = self.choose(choice)
        self.append(choice, count)
        self.host.settle()
        if session_id in self.host.service._sessions:
            self.host.generate(session_id, max_tokens)
            for _ in range(steps):
                self.host.step(choice)

    @precondition(lambda self: self.host.service.session_count)
    @rule(choice=pick, count=st.integers(20, 60), steps=st.integers(0, 3), again=st.booleans())
    def append_and_give_up(self, choice: int, count: int, steps: int, again: bool) -> None:
        session_id = self.choose(choice)
        for _ in range(1 + again):
            self.seed += 1
            key = self.host.append(session_id, tokens_of(count, seed=self.seed))
            for _ in range(steps):
                self.host.step(choice)
            if key in self.host.open:
                self.host.cancel(key)

    @rule(lengths=st.lists(st.integers(20, 60), min_size=2, max_size=2), steps=st.integers(0, 4))
    def append_alike_at_once(self, lengths: list[int], steps: int) -> None:
        """Fresh sessions with prompts that begin alike: some wait for others."""
        before = set(self.host.service._sessions)
        for length in lengths:
            key = self.host.ask(CreateSession())
            self.note_cuts(before)
            created = self.host.outcomes[key]
            if isinstance(created, SessionCreated):
                self.host.append(created.session_id, tokens_of(60, seed=0)[:length])
                before = set(self.host.service._sessions)
        for _ in range(steps):
            self.host.step()

    @precondition(lambda self: self.host.open)
    @rule(choice=pick)
    def cancel(self, choice: int) -> None:
        self.host.cancel(list(self.host.open)[choice % len(self.host.open)])

    @precondition(lambda self: self.host.service.session_count)
    @rule(choice=pick)
    def close(self, choice: int) -> None:
        before = set(self.host.service._sessions)
        self.host.close(self.choose(choice))
        self.note_cuts(before)

    @rule(choice=pick, count=st.integers(1, 12))
    def engine_steps(self, choice: int, count: int) -> None:
        for _ in range(count):
            self.host.step(choice)

    @rule()
    def settle(self) -> None:
        self.host.settle()

    @precondition(lambda self: self.host.asks)
    @rule()
    def ask_fails(self) -> None:
        self.host.fail_ask(next(iter(self.host.asks)))

    @rule(seconds=st.sampled_from([0.5, 4.0, 4.0, 4.0, 4.0, 4.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        before = set(self.host.service._sessions)
        self.host.now += seconds
        self.host.tick()
        self.note_cuts(before)

    @rule(
        eos=st.sampled_from([None, None, 0, 1, 7]),
        failing=st.sampled_from([(), (), (), (), (), (), Decode, Prefill, ImportPrefix, Capture]),
        policy=st.sampled_from([None, None, None, None, None, PrefillPolicy.REMOTE_REQUIRED]),
    )
    def mood(self, eos: int | None, failing: Any, policy: Any) -> None:
        self.host.eos_after = eos
        self.host.failing = {failing} if failing else set()
        self.host.policy = policy

    @invariant()
    def positions_are_the_engines(self) -> None:
        if not hasattr(self, "host"):
            return
        assert self.host.service.session_count <= CAPACITY
        for session in self.host.service._sessions.values():
            model = self.host.models[session.session_id]
            if session.operation is None:
                assert session.history.tolist() == model.history
                queue = self.host.queues.get(session.session_id, ())
                if not any(not isinstance(task.command, Capture) for task in queue):
                    held = self.host.engines[session.session_id]
                    assert held == model.history[: session.live_position]
                    assert len(held) == session.live_position

    @invariant()
    def the_deadline_lies_ahead(self) -> None:
        if hasattr(self, "host"):
            before = set(self.host.service._sessions)
            self.host.tick()
            self.note_cuts(before)
            deadline = self.host.service.deadline()
            assert deadline is None or deadline > self.host.now

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.host.failing = set()
            self.host.policy = None
            self.host.settle()
            for session_id in list(self.host.service._sessions):
                self.still_usable(session_id)
            self.host.finish()

    def still_usable(self, session_id: str) -> None:
        """Whatever happened to it: a turn can be appended and answered, unless its context is full."""
        model = self.host.models[session_id]
        if len(model.history) > 100:
            return
        appended = self.host.append(session_id, np.array([5], np.int32))
        self.host.settle()
        assert not isinstance(self.host.outcomes[appended], int), "the append went well"
        generated = self.host.generate(session_id, 3)
        self.host.settle()
        assert not isinstance(self.host.outcomes[generated], int)


TestInferenceMachine = InferenceMachine.TestCase
TestInferenceMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
