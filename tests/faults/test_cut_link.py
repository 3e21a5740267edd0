"""A link that is cut, or works in one direction only, in network namespaces of the test's own (root only)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fleet_rig as rig
from tests.faults.linked_fleet import LinkedFleet
from tests.faults.requests import COUNT, Asking
from tests.fleet_rig import Reference, answer, ask, figure, prompt, wait_until
from tests.namespaces import Star, required
from wire.messages import SourceKind

pytestmark = pytest.mark.root
LONG = 4_000
WORKER_S = 6.0
COMPUTE_S = 20.0
"""What computing the prompt here may take on a busy machine."""
UNREACHABLE = "10.213.99.99:51051"


@pytest.fixture(scope="module")
def star() -> Iterator[Star]:
    required()
    with Star("primary", "worker", "oneway") as made:
        yield made


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, star: Star, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LinkedFleet]:
    home, kept = tmp_path_factory.mktemp("fleet"), rig.kept_processes(request)
    with LinkedFleet(model, home, kept, star, proxied=False) as fleet:
        fleet.start("primary", "worker", primary=("--prefill-worker-timeout-s", f"{WORKER_S:g}"))
        yield fleet


def assert_used_again(fleet: LinkedFleet, reference: Reference, tokens: list[int]) -> None:
    """The worker's new KV, and what it already has, are used."""
    fleet.wait_joined()
    fleet.wait_card("worker", lambda row: row.get("cache_entries", 0) > 0, "the worker's card tells of its contents")
    with fleet["primary"].client() as client:
        rig.wait_idle(client)
        for prompt_tokens in (tokens, [*tokens, *prompt(300, seed=7)]):
            with rig.worker_only(client) as session:
                said = ask(session, prompt_tokens, COUNT)
            assert said.tokens == reference.answer(prompt_tokens, COUNT)
        # Whether it sends what it has for a fetch, or with the job.
        assert said.reused.keys() <= {SourceKind.REMOTE_CACHE, SourceKind.WORKER}
        assert {source.node_id for source in said.appended.explanation.sources} == {"worker"}


@pytest.mark.parametrize("one_way", [False, True], ids=["cut", "only-towards-the-worker"])
def test_a_link_that_breaks_during_a_job(fleet: LinkedFleet, star: Star, reference: Reference, one_way: bool) -> None:
    tokens = prompt(LONG, seed=1 + one_way)
    with fleet["primary"].client() as client, fleet["worker"].client() as worker:
        failures = figure(client, "prefill", "remote_job_failures")
        request = Asking(client, tokens, WORKER_S + COMPUTE_S, use_local_cache=False)
        assert request.working.wait(30)
        cut_at = time.monotonic()
        if one_way:
            star.mute("worker")
        else:
            star.cut("worker")
        try:
            # By fallback, at the latest when the worker's time is over.
            wait_until(
                lambda: figure(client, "prefill", "remote_job_failures") == failures + 1, "the job is given up", WORKER_S + 5
            )
            given_up_s = time.monotonic() - cut_at
            said = request.result()
            # The worker's side, too, lets go of the job, its lane and its room.
            wait_until(lambda: figure(worker, "worker", "running_jobs") == 0, "the worker has let go of the job", 60)
            rig.wait_idle(client)
        finally:
            if one_way:
                star.unmute("worker")
            else:
                star.mend("worker")
        assert given_up_s <= WORKER_S + 1.0
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused.get(SourceKind.COMPUTED, 0) > 0
        assert "worker worker" in said.reasons
    assert_used_again(fleet, reference, prompt(600, seed=10 + one_way))


def test_a_node_that_reaches_others_but_cannot_be_reached_does_no_harm(fleet: LinkedFleet, reference: Reference) -> None:
    fleet.add("worker", "--advertise", UNREACHABLE, name="oneway").launch(fleet.seed_for(fleet.nodes["oneway"]))
    node = fleet.nodes.pop("oneway")
    try:
        wait_until(lambda: node.running and node._ready_file.exists(), "it serves", rig.START_TIMEOUT_S)
        with fleet["primary"].client() as client:

            def known() -> bool:
                return any("oneway" in str(row["node_id"]) for row in client.status().peers)

            wait_until(known, "its card is known")
            tokens = prompt(700, seed=20)
            said = answer(client, tokens, COUNT, use_local_cache=False)
            assert said.tokens == reference.answer(tokens, COUNT)
            assert "oneway" not in {source.node_id for source in said.appended.explanation.sources}
    finally:
        node.terminate()


def test_a_node_that_cannot_reach_others_but_can_be_reached_is_used(fleet: LinkedFleet, reference: Reference) -> None:
    """The primary dials it; it never dials anybody."""
    lonely = fleet.add("worker", name="oneway")
    lonely.launch()
    lonely.wait_ready()
    primary = fleet["primary"]
    try:
        fleet["worker"].kill()
        primary.kill()
        primary.launch(lonely.address)
        primary.wait_ready()
        with primary.client() as client:
            wait_until(
                lambda: any(row["node_id"] == "oneway" and row.get("roles") for row in client.status().peers), "it is known"
            )
            tokens = prompt(700, seed=30)
            with rig.worker_only(client) as session:
                said = ask(session, tokens, COUNT)
            assert said.tokens == reference.answer(tokens, COUNT)
            assert {source.node_id for source in said.appended.explanation.sources} == {"oneway"}
    finally:
        fleet.nodes.pop("oneway").terminate()
