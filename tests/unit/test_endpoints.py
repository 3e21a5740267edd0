"""Which endpoint of a node is used: priority, then measured round trip; failover at once, the way back without flapping."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.protocol import endpoints as em
from kakeya_zmq.protocol.endpoints import (
    Connected,
    Dial,
    Disconnected,
    EndpointChoice,
    EndpointEffect,
    EndpointEvent,
    EndpointOffer,
    EndpointState,
    EndpointTick,
    HangUp,
    Offered,
    RoundTrip,
    Use,
)

BOLT = EndpointOffer("bolt:1", "thunderbolt", 100)
LAN = EndpointOffer("lan:1", "lan", 50)
OTHER_LAN = EndpointOffer("lan:2", "lan", 50)
TAIL = EndpointOffer("tail:1", "tailscale", 25)


def up(choice: EndpointChoice, address: str, now: float) -> list[EndpointEffect]:
    return choice.on(Connected(address), now)


def started(*offers: EndpointOffer) -> EndpointChoice:
    """A choice whose first endpoint is in use since 0."""
    choice = EndpointChoice()
    choice.on(Offered(offers), 0.0)
    up(choice, offers[0].address, 0.0)
    return choice


# --- choosing --------------------------------------------------------------------------------------------------------


def test_the_default_priorities_are_in_the_order_of_the_networks() -> None:
    order = sorted(em.DEFAULT_PRIORITIES, key=em.DEFAULT_PRIORITIES.__getitem__, reverse=True)
    assert order == ["thunderbolt", "lan", "tailscale", "public", "loopback"]


def test_the_best_is_dialled_first_and_the_next_ones_when_it_is_not_up_soon() -> None:
    choice = EndpointChoice()
    assert choice.on(Offered((TAIL, LAN, BOLT)), 0.0) == [Dial("bolt:1")]
    assert choice.deadline() == em.ATTEMPT_S
    assert choice.on(EndpointTick(), em.ATTEMPT_S) == [Dial("lan:1")]
    assert choice.on(EndpointTick(), 2 * em.ATTEMPT_S) == [Dial("tail:1")]
    assert choice.deadline() is None


def test_the_first_one_up_is_used_and_worse_ones_are_hung_up() -> None:
    choice = EndpointChoice()
    choice.on(Offered((BOLT, LAN, TAIL)), 0.0)
    choice.on(EndpointTick(), 1.0)
    choice.on(EndpointTick(), 2.0)
    assert up(choice, "lan:1", 2.1) == [Use("lan:1"), HangUp("tail:1")]
    assert choice.in_use == "lan:1"
    assert choice.state("bolt:1") is EndpointState.DIALLING


def test_a_better_one_that_comes_later_is_used_after_it_has_held() -> None:
    choice = EndpointChoice()
    choice.on(Offered((BOLT, LAN)), 0.0)
    choice.on(EndpointTick(), 1.0)
    up(choice, "lan:1", 1.1)
    assert up(choice, "bolt:1", 2.0) == []
    assert choice.on(EndpointTick(), 2.0 + em.SETTLE_S - 0.01) == []
    assert choice.on(EndpointTick(), 2.0 + em.SETTLE_S) == [Use("bolt:1"), HangUp("lan:1")]


def test_a_worse_one_is_never_probed() -> None:
    choice = started(BOLT, LAN)
    assert choice.deadline() is None
    assert choice.on(EndpointTick(), 10_000.0) == []


def test_among_equals_the_clearly_shorter_round_trip_wins() -> None:
    for first_ms, second_ms, wins in ((3.0, 1.0, True), (3.0, 2.5, False), (1.0, 3.0, False)):
        choice = started(LAN, OTHER_LAN)
        assert choice.state("lan:2") is EndpointState.DIALLING, "an equal one is looked at"
        up(choice, "lan:2", 1.0)
        choice.on(RoundTrip("lan:1", first_ms), 1.0)
        choice.on(RoundTrip("lan:2", second_ms), 1.0)
        effects = choice.on(EndpointTick(), 1.0 + em.SETTLE_S)
        assert effects == ([Use("lan:2"), HangUp("lan:1")] if wins else [HangUp("lan:2")])
        assert choice.deadline() == pytest.approx(1.0 + em.SETTLE_S + em.COMPARE_PAUSE_S)


def test_round_trips_are_averaged_for_each_endpoint() -> None:
    choice = started(LAN, OTHER_LAN)
    assert choice.round_trip_ms("lan:1") is None
    choice.on(RoundTrip("lan:1", 10.0), 0.0)
    choice.on(RoundTrip("lan:1", 20.0), 0.0)
    choice.on(RoundTrip("gone:1", 5.0), 0.0)
    assert choice.round_trip_ms("lan:1") == pytest.approx(12.0)
    assert choice.round_trip_ms("lan:2") is None


# --- failing over ----------------------------------------------------------------------------------------------------


def test_a_broken_endpoint_is_failed_over_at_once_to_all_others() -> None:
    choice = started(BOLT, LAN, TAIL)
    assert choice.on(Disconnected("bolt:1"), 5.0) == [Use(None), Dial("lan:1"), Dial("tail:1")]
    assert up(choice, "lan:1", 5.1) == [Use("lan:1"), HangUp("tail:1")]
    assert choice.state("bolt:1") is EndpointState.DIALLING, "it is tried again in the background"


def test_one_that_was_about_to_be_used_takes_over_without_dialling() -> None:
    choice = started(LAN, BOLT)
    up(choice, "bolt:1", 1.0)
    assert choice.on(Disconnected("lan:1"), 1.5)[:2] == [Use(None), Use("bolt:1")]


def test_a_single_endpoint_is_dialled_until_it_is_back() -> None:
    choice = started(LAN)
    assert choice.on(Disconnected("lan:1"), 5.0) == [Use(None)]
    assert choice.deadline() is None
    assert up(choice, "lan:1", 500.0) == [Use("lan:1")]


def test_an_endpoint_that_keeps_breaking_is_trusted_later_each_time() -> None:
    choice = started(BOLT, LAN)
    now, waits = 5.0, []
    for _ in range(7):
        choice.on(Disconnected("bolt:1"), now)
        up(choice, "lan:1", now)
        up(choice, "bolt:1", now)
        began = now
        while choice.in_use != "bolt:1":
            due = choice.deadline()
            assert due is not None
            now = max(now, due)
            choice.on(EndpointTick(), now)
        waits.append(now - began)
        now += 1.0
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(2 * em.SETTLE_S)
    assert waits[-1] == pytest.approx(em.SETTLE_LAST_S)
    # A long time without a break, and it is as good as new.
    choice.on(Disconnected("bolt:1"), now + em.FORGIVEN_S)
    up(choice, "lan:1", now + em.FORGIVEN_S)
    up(choice, "bolt:1", now + em.FORGIVEN_S)
    assert choice.deadline() == pytest.approx(now + em.FORGIVEN_S + 2 * em.SETTLE_S)


def test_probes_of_an_unreachable_endpoint_become_rare() -> None:
    choice = EndpointChoice()
    choice.on(Offered((LAN,)), 0.0)
    up(choice, "lan:1", 0.0)
    now, dialled = 0.0, []
    effects = choice.on(Offered((BOLT, LAN)), 0.0)
    while now < 2_000.0:
        dialled += [now for effect in effects if effect == Dial("bolt:1")]
        due = choice.deadline()
        assert due is not None
        now = due
        effects = choice.on(EndpointTick(), now)
    pauses = [later - sooner for sooner, later in itertools.pairwise(dialled)]
    assert pauses == sorted(pauses)
    assert pauses[0] == em.PROBE_S + em.PROBE_PAUSE_S
    assert pauses[-1] == em.PROBE_S + em.PROBE_PAUSE_LAST_S


# --- changing cards --------------------------------------------------------------------------------------------------


def test_an_endpoint_that_is_not_offered_any_more_is_used_while_it_works() -> None:
    choice = started(LAN)
    assert choice.on(Offered((BOLT,)), 1.0) == [Dial("bolt:1")]
    assert choice.in_use == "lan:1"
    assert choice.on(Disconnected("lan:1"), 2.0) == [Use(None), HangUp("lan:1")]
    assert up(choice, "bolt:1", 3.0) == [Use("bolt:1")]
    assert up(choice, "lan:1", 4.0) == []


def test_one_that_breaks_and_is_not_offered_any_more_makes_room_for_the_one_that_was_settling() -> None:
    # Both orders: what breaks is of higher and of lower rank than what takes over.
    for used, next_one in ((LAN, BOLT), (OTHER_LAN, LAN)):
        choice = started(used, next_one)
        up(choice, next_one.address, 1.0)
        choice.on(Offered((next_one,)), 1.1)
        gone, takes_over = HangUp(used.address), Use(next_one.address)
        assert choice.on(Disconnected(used.address), 1.2) == [Use(None), gone, takes_over]
        assert choice.offers() == (next_one,)


def test_an_offer_twice_counts_once_and_a_changed_priority_counts() -> None:
    choice = EndpointChoice()
    choice.on(Offered((LAN, EndpointOffer("lan:1", "configured", 0))), 0.0)
    assert choice.offers() == (LAN,)
    choice.on(Offered((EndpointOffer("lan:1", "thunderbolt", 100),)), 0.0)
    assert [offer.priority for offer in choice.offers()] == [100]


# --- whatever happens ------------------------------------------------------------------------------------------------

ALL = (BOLT, LAN, OTHER_LAN, TAIL)


@dataclass
class World:
    """Connections as the host keeps them: what is dialled and reachable comes up, what is cut goes down."""

    choice: EndpointChoice = field(default_factory=EndpointChoice)
    dialled: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    reachable: set[str] = field(default_factory=set)
    used: str | None = None
    switches: int = 0
    now: float = 0.0

    def tell(self, event: EndpointEvent) -> None:
        for effect in self.choice.on(event, self.now):
            match effect:
                case Dial(address=address):
                    assert address not in self.dialled
                    self.dialled.add(address)
                case HangUp(address=address):
                    assert address in self.dialled
                    self.dialled.discard(address)
                    self.sessions.discard(address)
                case Use(address=address):
                    assert address is None or address in self.sessions
                    self.switches += address is not None
                    self.used = address
        assert self.used == self.choice.in_use
        assert self.used is None or self.used in self.sessions

    def settle(self) -> None:
        """Sessions become what the network allows, one event after another."""
        while True:
            lost = sorted(self.sessions - self.reachable)
            gained = sorted((self.dialled & self.reachable) - self.sessions)
            if lost:
                self.sessions.discard(lost[0])
                self.tell(Disconnected(lost[0]))
            elif gained:
                self.sessions.add(gained[0])
                self.tell(Connected(gained[0]))
                self.tell(RoundTrip(gained[0], 1.0))
            else:
                return

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        self.settle()
        while (due := self.choice.deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.tell(EndpointTick())
            self.settle()
            after = self.choice.deadline()
            assert after is None or after > self.now, "a deadline that has passed was not dealt with"
        self.now = end


addresses = st.sets(st.sampled_from([offer.address for offer in ALL]))


@settings(max_examples=200, deadline=None)
@given(
    offers=st.permutations(ALL),
    steps=st.lists(st.tuples(addresses, st.floats(0.0, 40.0), st.booleans()), max_size=12),
    last=addresses,
)
def test_a_node_is_reached_whenever_any_endpoint_works_and_in_the_end_through_the_best(
    offers: list[EndpointOffer], steps: list[tuple[set[str], float, bool]], last: set[str]
) -> None:
    world = World()
    world.tell(Offered(tuple(offers)))
    for reachable, seconds, shorten in steps:
        world.reachable = set(reachable)
        if shorten:
            world.tell(Offered(tuple(offers[: len(reachable)])))
        world.run(seconds)
    world.tell(Offered(tuple(offers)))
    world.reachable = set(last)
    world.run(len(ALL) * em.ATTEMPT_S)
    assert (world.used is not None) == bool(last)
    # The longest pause between two probes, a probe and the longest settling.
    world.run(em.PROBE_PAUSE_LAST_S + em.PROBE_S + em.SETTLE_LAST_S + em.COMPARE_PAUSE_S)
    best = max((offer.priority for offer in ALL if offer.address in last), default=None)
    assert best == next((offer.priority for offer in ALL if offer.address == world.used), None)


@settings(max_examples=60, deadline=None)
@given(period_s=st.floats(0.5, 30.0))
def test_an_endpoint_that_comes_and_goes_does_not_take_the_node_along(period_s: float) -> None:
    world = World()
    world.reachable = {"lan:1"}
    world.tell(Offered((BOLT, LAN)))
    world.run(5.0)
    before, cycles = world.switches, int(600 / period_s)
    for cycle in range(cycles):
        world.reachable = {"lan:1", "bolt:1"} if cycle % 2 else {"lan:1"}
        world.run(period_s)
    # Each use of the flapping endpoint costs two switches, and each break doubles the time it must hold before the next one.
    assert world.switches - before <= 2 * 8


def test_an_endpoint_of_a_newer_key_is_preferred_whatever_its_priority() -> None:
    newer = EndpointOffer("tail:2", "tailscale", 25, generation=1)
    choice = started(BOLT)
    assert choice.on(Offered((BOLT, newer)), 1.0) == [Dial("tail:2")]
    assert up(choice, "tail:2", 1.5) == []
    assert choice.on(EndpointTick(), 1.5 + em.SETTLE_S) == [Use("tail:2"), HangUp("bolt:1")]
    # And nothing goes back to the older one while the newer one works.
    assert choice.on(EndpointTick(), 1000.0) == []
