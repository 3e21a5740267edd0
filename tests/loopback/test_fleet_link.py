"""A fleet of real processes whose KV travels compressed: the answers are those of an unbroken run."""

from __future__ import annotations

import pytest

from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, Reference, answer, ask, prompt, wait_published
from wire.messages import PrefillPolicy, SourceKind

COUNT = 16


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", "cache", primary=("--link-compression", "zstd"))
    return empty_fleet


def test_job_publish_and_fetch_are_lossless_with_zstd(fleet: Fleet, reference: Reference) -> None:
    tokens = prompt(900, seed=1)
    expected = reference.answer(tokens, COUNT)
    with fleet["primary"].client() as client:
        with rig.worker_only(client) as session:
            computed = ask(session, tokens, COUNT)
        stored = answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        fleet.wait_card("cache", lambda row: row["cache_entries"] > 0, "the cache's card tells of its contents")
        fetched = answer(client, tokens, COUNT, use_local_cache=False, exclude_nodes=["worker"])
    assert [said.tokens for said in (computed, stored, fetched)] == [expected] * 3
    assert computed.reused == {SourceKind.WORKER: len(tokens) - 1}
    assert fetched.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
    assert "zstd, as configured" in computed.reasons
    assert "zstd, as configured" in fetched.reasons
