"""A member of the fleet sends damaged, incomplete or wrong KV: the answer is that of a cold run, and the status says why.

What no receiver can notice is a member that computes other KV than the model does and seals it with digests that fit: a
block's hash names its tokens, not its values. Against that stands only who is let into the fleet.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import fleet_rig as rig
from tests.faults.rogue_cache import MODES
from tests.fleet_rig import Fleet, Reference, answer, figure, prompt, wait_published, wait_until
from wire.messages import PrefillPolicy, SourceKind

COUNT = 16
LENGTH = 1_500


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", primary=("--cache-fetch-timeout-s", "3"))
    return empty_fleet


@pytest.fixture
def fleet(running: Fleet) -> Iterator[Fleet]:
    """The primary alone; what a test adds is gone after it."""
    yield running
    for name in [name for name in running.nodes if name != "primary"]:
        running.nodes.pop(name).kill()
    with running["primary"].client() as client:
        wait_until(lambda: all(row["state"] != "up" for row in client.status().peers), "the primary is alone")
    running.show_logs()


def add_cache(fleet: Fleet, mode: str) -> None:
    fleet.launch(fleet.add("cache", name=f"rogue-{mode}", program=("tests.faults.rogue_cache", mode)))


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_breaks_its_word_costs_time_only(fleet: Fleet, reference: Reference, mode: str) -> None:
    tokens = prompt(LENGTH, seed=MODES.index(mode))
    add_cache(fleet, mode)
    with fleet["primary"].client() as client:
        answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        fleet.wait_card(f"rogue-{mode}", lambda row: row["cache_entries"] > 0, "the cache's card tells of its contents")
        if mode == "boasts":
            tokens = prompt(LENGTH, seed=100)
        fallbacks = figure(client, "prefill", "fallbacks")
        said = answer(client, tokens, COUNT, use_local_cache=False, publish=False)
        assert said.tokens == reference.answer(tokens, COUNT)
        assert said.reused[SourceKind.COMPUTED] > 0
        assert figure(client, "prefill", "fallbacks") > fallbacks
        assert f"rogue-{mode}" in said.reasons or "import" in said.reasons
        rig.wait_idle(client)
        # Whatever came was not kept: the next prompt does not trip over it.
        again = answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY, publish=False)
        assert again.tokens == reference.answer(tokens, COUNT)


def test_the_same_cache_keeping_its_word_is_used(fleet: Fleet, reference: Reference) -> None:
    """The control: what makes the difference above is the broken word."""
    tokens = prompt(LENGTH, seed=200)
    fleet.launch(fleet.add("cache"))
    with fleet["primary"].client() as client:
        answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
        fleet.wait_card("cache", lambda row: row["cache_entries"] > 0, "the cache's card tells of its contents")
        said = answer(client, tokens, COUNT, use_local_cache=False, publish=False)
    assert said.tokens == reference.answer(tokens, COUNT)
    assert said.reused == {SourceKind.REMOTE_CACHE: LENGTH - 1}
