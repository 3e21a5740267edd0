"""The rollback: a primary without ``--enable-prefill-cache`` answers the same, and shares and keeps nothing."""

from __future__ import annotations

import pytest

from tests.fleet_rig import Fleet, Reference, ask, figure, prompt
from wire.errors import RequestFailed
from wire.messages import PrefillPolicy, SourceKind


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", "cache", primary=("--enable-prefill-cache=0",))
    return empty_fleet


def test_every_prompt_is_computed_here_and_nothing_is_kept(fleet: Fleet, reference: Reference) -> None:
    tokens = prompt(700, 5)
    expected = reference.answer(tokens, 6)
    with fleet["primary"].client() as client, fleet["worker"].client() as worker, fleet["cache"].client() as cache:
        for _ in range(2):
            with client.create_session(policy=PrefillPolicy.LOCAL_FALLBACK) as session:
                answered = ask(session, tokens, 6)
            assert list(answered.tokens) == expected
            assert {source.kind for source in answered.appended.explanation.sources} == {SourceKind.COMPUTED}
        assert client.status().sections["primary"]["policy"] == "cache off"
        assert figure(client, "cache", "entry_count") == 0
        assert figure(cache, "cache", "entry_count") == 0
        assert figure(worker, "prefill", "jobs_accepted") == 0


def test_a_session_that_must_not_compute_here_is_refused(fleet: Fleet) -> None:
    with fleet["primary"].client() as client, pytest.raises(RequestFailed, match="--enable-prefill-cache"):
        client.create_session(policy=PrefillPolicy.REMOTE_REQUIRED)
