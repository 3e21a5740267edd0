"""Scenes that need no broken link: small stores, two tenants, wrong digests, forgotten leases, wrong clocks.

Each is a function that makes the fault happen at its step and gives what the user got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.faults.matrix import Fault, Step
from tests.faults.requests import COUNT, Asking
from tests.faults.scenes import DEADLINE_S, LONG_ANSWER, STRIKE_AT, Outcome, figure_of
from tests.fleet_rig import Answer, Fleet, Reference, answer, ask, prompt, wait_published
from wire.messages import PrefillPolicy, SourceKind

SMALL_GB = "0.001"
"""One MiB: 524 tokens of the tiny model."""
FITS, TOO_LONG = 400, 1_500
"""Tokens of a prompt that fits into a small store, and of one that does not."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a special scene gets."""

    fleet: Fleet
    client: Client
    reference: Reference
    seed: int

    def tokens(self, length: int = FITS, other: int = 0) -> list[int]:
        return prompt(length, self.seed + 10_000 * other)

    def outcome(self, said: Answer, tokens: list[int]) -> Outcome:
        return Outcome(said.tokens, self.reference.answer(tokens, COUNT), said.reasons)

    def computed_here(self, tokens: list[int]) -> Answer:
        """Computed by the primary and published."""
        said = answer(self.client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(self.client)
        rig.wait_idle(self.client)
        return said

    def again(self, tokens: list[int], *exclude: str) -> Answer:
        """Asked of the fleet, not of the primary's own store."""
        return Asking(
            self.client, tokens, DEADLINE_S, use_local_cache=False, publish=False, exclude_nodes=list(exclude)
        ).result()

    def wait_for_the_caches_card(self) -> None:
        """Wait until the primary knows that the cache peer holds something: before, it is not asked."""
        self.fleet.wait_card("cache", lambda row: row.get("cache_entries", 0) > 0, "the cache's card tells of its contents")


# --- small stores ----------------------------------------------------------------------------------------------------


def evicted_before_lookup(case: Case) -> Outcome:
    tokens = case.tokens()
    case.computed_here(tokens)
    for other in (1, 2):
        case.computed_here(case.tokens(other=other))
    case.wait_for_the_caches_card()
    return case.outcome(case.again(tokens, "worker"), tokens)


def evicted_before_job(case: Case) -> Outcome:
    tokens = case.tokens()
    case.again(tokens, "cache")
    case.again(case.tokens(other=1), "cache")
    case.again(case.tokens(other=2), "cache")
    before = figure_of(case.fleet, "worker", "prefill", "job_tokens_computed")
    said = case.again(tokens, "cache")
    assert said.reused == {SourceKind.WORKER: len(tokens) - 1}
    assert figure_of(case.fleet, "worker", "prefill", "job_tokens_computed") == before + len(tokens) - 1
    return case.outcome(said, tokens)


def evicting_while_a_job_runs(case: Case) -> Outcome:
    case.again(case.tokens(other=1), "cache")
    tokens = case.tokens()
    said = case.again(tokens, "cache")
    assert said.reused == {SourceKind.WORKER: len(tokens) - 1}
    return case.outcome(said, tokens)


def evicting_for_a_publish(case: Case) -> Outcome:
    case.computed_here(case.tokens(other=1))
    case.computed_here(case.tokens(other=2))
    tokens = case.tokens()
    case.computed_here(tokens)
    case.wait_for_the_caches_card()
    said = case.again(tokens, "worker")
    assert said.reused.get(SourceKind.REMOTE_CACHE, 0) >= FITS // 2
    return case.outcome(said, tokens)


def evicting_while_decoding(case: Case) -> Outcome:
    """Another session's prompt takes the room of the blocks of one that decodes."""
    tokens = case.tokens()
    with case.client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
        session.append(tokens, timeout_s=DEADLINE_S)
        stream = session.generate(LONG_ANSWER, inter_token_timeout_s=DEADLINE_S)
        found = [next(stream) for _ in range(STRIKE_AT)]
        case.computed_here(case.tokens(other=1))
        found += list(stream)
    return Outcome(found, case.reference.answer(tokens, LONG_ANSWER), "")


def decoding_into_a_full_store(case: Case) -> Outcome:
    tokens = case.tokens(500)
    with case.client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
        session.append(tokens, timeout_s=DEADLINE_S)
        found = list(session.generate(LONG_ANSWER, inter_token_timeout_s=DEADLINE_S))
        more = case.tokens(60, other=1)
        said = ask(session, more, COUNT, DEADLINE_S)
    history = tokens + found + more
    assert found == case.reference.answer(tokens, LONG_ANSWER)
    return Outcome(said.tokens, case.reference.answer(history, COUNT), said.reasons)


def fetching_into_a_full_store(case: Case) -> Outcome:
    tokens = case.tokens()
    case.computed_here(tokens)
    for other in (1, 2):
        answer(case.client, case.tokens(other=other), 1, policy=PrefillPolicy.LOCAL_ONLY, publish=False)
    case.wait_for_the_caches_card()
    said = Asking(case.client, tokens, DEADLINE_S, publish=False, exclude_nodes=["worker"]).result()
    assert SourceKind.REMOTE_CACHE in said.reused
    return case.outcome(said, tokens)


def submitting_what_does_not_fit(case: Case) -> Outcome:
    tokens = case.tokens(TOO_LONG)
    return case.outcome(case.again(tokens, "cache"), tokens)


def publishing_what_does_not_fit(case: Case) -> Outcome:
    tokens = case.tokens(TOO_LONG)
    return case.outcome(case.computed_here(tokens), tokens)


# --- two tenants -----------------------------------------------------------------------------------------------------


def of_the_other_tenant(case: Case, tokens: list[int]) -> Answer:
    """Computed by the other tenant's primary, which publishes to the same cache peer."""
    with case.fleet["other-primary"].client() as client:
        said = answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
    assert said.tokens == case.reference.answer(tokens, COUNT)
    case.wait_for_the_caches_card()
    return said


def looking_up_the_other_tenants_prompt(case: Case) -> Outcome:
    tokens = case.tokens()
    of_the_other_tenant(case, tokens)
    said = case.again(tokens)
    assert said.reused == {SourceKind.COMPUTED: len(tokens) - 1}
    return case.outcome(said, tokens)


def publishing_the_other_tenants_prompt(case: Case) -> Outcome:
    tokens = case.tokens()
    of_the_other_tenant(case, tokens)
    case.computed_here(tokens)
    said = case.again(tokens)
    assert said.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
    return case.outcome(said, tokens)


def asking_the_other_tenants_worker(case: Case) -> Outcome:
    tokens = case.tokens()
    said = case.again(tokens)
    assert SourceKind.WORKER not in said.reused
    return case.outcome(said, tokens)


# --- digests and leases ------------------------------------------------------------------------------------------------


def publishing_wrong_digests(case: Case) -> Outcome:
    tokens = case.tokens()
    said = case.computed_here(tokens)
    stats = case.fleet["cache"].status().sections["cache"]
    assert (stats["entry_count"], stats["bytes_reserved"]) == (0, 0)
    last_error = str(case.client.status().sections["prefill"]["last_publish_error"])
    return Outcome(said.tokens, case.reference.answer(tokens, COUNT), last_error)


def running_a_job_with_wrong_digests(case: Case) -> Outcome:
    tokens = case.tokens()
    return case.outcome(case.again(tokens, "cache"), tokens)


def fetching_after_the_lease(case: Case) -> Outcome:
    tokens = case.tokens()
    case.computed_here(tokens)
    case.wait_for_the_caches_card()
    return case.outcome(case.again(tokens), tokens)


# --- clocks ----------------------------------------------------------------------------------------------------------


def fetching_with_wrong_clocks(case: Case) -> Outcome:
    tokens = case.tokens()
    case.computed_here(tokens)
    case.wait_for_the_caches_card()
    said = case.again(tokens, "worker")
    assert said.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
    return case.outcome(said, tokens)


def running_a_job_with_wrong_clocks(case: Case) -> Outcome:
    tokens = case.tokens()
    said = case.again(tokens, "cache")
    assert said.reused == {SourceKind.WORKER: len(tokens) - 1}
    return case.outcome(said, tokens)


def publishing_with_wrong_clocks(case: Case) -> Outcome:
    tokens = case.tokens()
    return case.outcome(case.computed_here(tokens), tokens)


def restarting_with_the_clock_set_back(case: Case) -> Outcome:
    """The worker's clock is put right, so its new incarnation is older than the one before."""
    worker = case.fleet["worker"]
    kept = dict(worker.environment)
    worker.kill()
    worker.environment.clear()
    worker.launch(case.fleet.seed_for(worker))
    worker.wait_ready()
    case.fleet.wait_joined()
    worker.environment.update(kept)
    tokens = case.tokens()
    with rig.worker_only(case.client) as session:
        said = ask(session, tokens, COUNT, DEADLINE_S)
    return case.outcome(said, tokens)


def decoding_with_wrong_clocks(case: Case) -> Outcome:
    tokens = case.tokens()
    said = answer(case.client, tokens, LONG_ANSWER)
    return Outcome(said.tokens, case.reference.answer(tokens, LONG_ANSWER), said.reasons)


SPECIAL: dict[tuple[Fault, Step], Callable[[Case], Outcome]] = {
    (Fault.EVICTED, Step.LOOKUP): evicted_before_lookup,
    (Fault.EVICTED, Step.SUBMIT): evicted_before_job,
    (Fault.EVICTED, Step.RUN): evicting_while_a_job_runs,
    (Fault.EVICTED, Step.PUBLISH): evicting_for_a_publish,
    (Fault.EVICTED, Step.DECODE): evicting_while_decoding,
    (Fault.FULL, Step.FETCH): fetching_into_a_full_store,
    (Fault.FULL, Step.SUBMIT): submitting_what_does_not_fit,
    (Fault.FULL, Step.PUBLISH): publishing_what_does_not_fit,
    (Fault.FULL, Step.DECODE): decoding_into_a_full_store,
    (Fault.INCOMPATIBLE, Step.LOOKUP): looking_up_the_other_tenants_prompt,
    (Fault.INCOMPATIBLE, Step.SUBMIT): asking_the_other_tenants_worker,
    (Fault.INCOMPATIBLE, Step.PUBLISH): publishing_the_other_tenants_prompt,
    (Fault.INCOMPATIBLE, Step.GOSSIP): asking_the_other_tenants_worker,
    (Fault.DIGEST, Step.PUBLISH): publishing_wrong_digests,
    (Fault.DIGEST, Step.RUN): running_a_job_with_wrong_digests,
    (Fault.EXPIRED, Step.LEASE): fetching_after_the_lease,
    (Fault.SKEW, Step.LOOKUP): fetching_with_wrong_clocks,
    (Fault.SKEW, Step.LEASE): fetching_with_wrong_clocks,
    (Fault.SKEW, Step.FETCH): fetching_with_wrong_clocks,
    (Fault.SKEW, Step.SUBMIT): running_a_job_with_wrong_clocks,
    (Fault.SKEW, Step.RUN): running_a_job_with_wrong_clocks,
    (Fault.SKEW, Step.PUBLISH): publishing_with_wrong_clocks,
    (Fault.SKEW, Step.GOSSIP): restarting_with_the_clock_set_back,
    (Fault.SKEW, Step.DECODE): decoding_with_wrong_clocks,
}
