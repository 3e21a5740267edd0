"""Up to 200 directories on a virtual network: how fast cards spread, what that costs, and that the dead are forgotten."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import pytest

from kakeya_zmq.protocol import directory_table
from tests.simulation.virtual_fleet import HUB, INTERVAL_S, TTL_S, VirtualFleet
from wire import cards as wire_cards

SLACK_S = 1.0
"""Relays understate ages by the time a message travels, a few hundredths of a second for each of a few hops."""


@pytest.fixture(autouse=True)
def _each_card_is_verified_once() -> Iterator[None]:
    """200 nodes verify the same 200 signatures: what they would find is known after the first one."""
    original = directory_table.open_card
    directory_table.open_card = functools.lru_cache(maxsize=100_000)(wire_cards.open_card)  # type: ignore[assignment]
    yield
    directory_table.open_card = original


def started(count: int, seed: int, hidden: float = 0.0) -> VirtualFleet:
    fleet = VirtualFleet(seed, hidden)
    for number in range(count):
        fleet.join(f"node-{number:03}")
        fleet.run(0.01)
    return fleet


def test_two_hundred_nodes_with_churn_know_each_other_within_three_intervals_and_forget_the_dead_at_ttl() -> None:
    fleet = started(200, seed=2, hidden=0.2)
    first = {name: (incarnation, 1) for name, (incarnation, _) in fleet.versions().items()}
    fleet.run(3 * INTERVAL_S)
    assert fleet.behind(first) == []
    for number in range(200, 212):
        # Three nodes an interval die, one of them comes back, three new ones join; never the one all join through.
        fleet.kill(f"node-{number - 199:03}")
        if number % 3 == 0:
            fleet.join(f"node-{number - 199:03}")
        fleet.join(f"node-{number:03}")
        fleet.run(INTERVAL_S / 3)
    versions, last_death = fleet.versions(), fleet.now
    fleet.run(3 * INTERVAL_S)
    assert fleet.behind(versions) == []
    assert fleet.ghosts(), "the dead are known until their cards expire, or the test below proves nothing"
    fleet.run(TTL_S - 3 * INTERVAL_S + SLACK_S)
    assert fleet.now >= last_death + TTL_S
    assert fleet.ghosts() == []
    assert fleet.behind(versions) == [], "nobody alive was forgotten meanwhile"


def test_the_fleet_goes_on_when_the_node_all_joined_through_dies() -> None:
    fleet = started(60, seed=3)
    fleet.run(3 * INTERVAL_S)
    fleet.kill(HUB)
    fleet.run(INTERVAL_S)
    versions = fleet.versions()
    fleet.run(3 * INTERVAL_S)
    assert fleet.behind(versions) == []


def test_gossip_of_a_node_grows_at_most_linearly_with_the_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    mean: dict[int, float] = {}
    hub: dict[int, float] = {}
    for count in (50, 100, 200):
        fleet = started(count, seed=count)
        fleet.run(3 * INTERVAL_S)
        found = fleet.bytes_per_interval(2 * INTERVAL_S)
        mean[count], hub[count] = statistics.mean(found.values()), found[HUB]
    with capsys.disabled():
        for count in mean:
            print(
                f"\n{count} nodes: {mean[count] / 1000:.0f} kB a node and interval on average, sent and received; "
                f"{hub[count] / 1000:.0f} kB the one all joined through",
                end="",
            )
        print()
    # Twice the nodes, twice the bytes; who talks to whom is chance, which evens out over all nodes but not for one of them.
    for figures, chance in ((mean, 1.1), (hub, 1.5)):
        assert figures[100] <= 2 * chance * figures[50]
        assert figures[200] <= 2 * chance * figures[100]
