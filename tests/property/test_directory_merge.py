"""Merging cards is commutative, associative and idempotent: what a node knows depends on the set of cards that reached it,
not on their order, grouping or repetition."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.protocol.directory import CardsArrived, Directory, DirectoryTick, Exchange, ExchangeEnded, PeerConnected
from tests.unit.card_kit import card_blob

arrivals = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "me"]),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(0, 12_000),
    ),
    max_size=12,
)
CHECKED_AT = [5.0 + step / 2 for step in range(22)]


def merged(batches: list[list[tuple[str, int, int, int]]]) -> Directory:
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", 9, sequence), incarnation=9)
    for batch in batches:
        blobs = tuple(card_blob(node, incarnation, sequence) for node, incarnation, sequence, _ in batch)
        directory.on(CardsArrived(blobs, tuple(age for *_, age in batch)), 5.0)
    return directory


def knowledge(directory: Directory) -> object:
    """Everything that can be seen of it from now on, expiries included."""
    return [[(card.node_id, card.incarnation, card.sequence) for card in directory.peers(moment)] for moment in CHECKED_AT]


@settings(max_examples=150, deadline=None)
@given(cards=arrivals, seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_order_grouping_and_repetition_do_not_matter(
    cards: list[tuple[str, int, int, int]], seed: int, cuts: list[int]
) -> None:
    shuffled = cards + cards[: seed % (len(cards) + 1)]
    random.Random(seed).shuffle(shuffled)
    edges = [0, *sorted(cuts), len(shuffled)]
    batches = [shuffled[start:end] for start, end in itertools.pairwise(edges)]
    assert knowledge(merged([cards])) == knowledge(merged([*batches, cards[:1]]))


@settings(max_examples=100, deadline=None)
@given(cards=arrivals)
def test_the_newest_living_card_wins_and_our_own_is_never_taken(cards: list[tuple[str, int, int, int]]) -> None:
    living = [(node, i, s) for node, i, s, age in cards if age < 10_000 and node != "me"]
    expected = {node: max((i, s) for other, i, s in living if other == node) for node, *_ in living}
    known = {card.node_id: (card.incarnation, card.sequence) for card in merged([cards]).peers(5.0)}
    assert known == expected


def exchange(asker: Directory, asker_id: str, server: Directory, now: float, lost_ms: int = 0) -> int:
    """One exchange as the shells carry it, follow-ups included; returns the cards that travelled.

    Args:
        lost_ms: by how much each told age falls short, as travelling makes it.
    """
    waiting = [effect for effect in asker.on(PeerConnected("server"), now) if isinstance(effect, Exchange)]
    travelled = 0
    while waiting:
        ask = waiting.pop()
        travelled += len(ask.cards)
        server.on(CardsArrived(ask.cards, tuple(max(0, age - lost_ms) for age in ask.ages_ms)), now)
        if ask.known is None:
            continue
        cards, ages, wanted, more = server.answer(ask.known, asker_id, now)
        travelled += len(cards)
        ended = ExchangeEnded(ask.node_id, True, cards, tuple(max(0, age - lost_ms) for age in ages), wanted, more)
        waiting += [effect for effect in asker.on(ended, now) if isinstance(effect, Exchange)]
    return travelled


@settings(max_examples=25, deadline=None)
@given(cards=arrivals, ticks=st.lists(st.floats(0, 4), max_size=8))
def test_two_nodes_that_go_on_exchanging_forget_the_silent_ones(
    cards: list[tuple[str, int, int, int]], ticks: list[float]
) -> None:
    """Relays understate ages by the time a message travels; even so a card cannot live on by going to and fro."""
    left, right = merged([cards]), Directory(node_id="you", make_card=lambda sequence: card_blob("you", 9, sequence))
    now = 5.0
    for pause in [*ticks, *[0.2] * 60]:  # shorter than what travelling takes off an age
        now += pause
        for asker, asker_id, server in ((left, "me", right), (right, "you", left)):
            exchange(asker, asker_id, server, now, lost_ms=500)
            server.on(DirectoryTick(), now)
            asker.on(DirectoryTick(), now)
    assert {card.node_id for card in left.peers(now)} <= {"you"}
    assert {card.node_id for card in right.peers(now)} <= {"me"}


@settings(max_examples=150, deadline=None)
@given(ours=arrivals, theirs=arrivals)
def test_one_exchange_leaves_both_with_the_newest_of_both_and_a_second_one_moves_nothing(
    ours: list[tuple[str, int, int, int]], theirs: list[tuple[str, int, int, int]]
) -> None:
    left = merged([ours])
    right = Directory(node_id="you", make_card=lambda sequence: card_blob("you", 9, sequence), incarnation=9)
    blobs = tuple(card_blob(node, incarnation, sequence) for node, incarnation, sequence, _ in theirs if node != "me")
    right.on(CardsArrived(blobs, tuple(age for node, *_, age in theirs if node != "me")), 5.0)
    held = [{card.node_id: (card.incarnation, card.sequence) for card in side.peers(5.0)} for side in (left, right)]
    exchange(left, "me", right, 5.0)
    newest = {node: max(side[node] for side in held if node in side) for node in held[0] | held[1]}
    for side, other in ((left, "you"), (right, "me")):
        known = {
            card.node_id: (card.incarnation, card.sequence) for card in side.peers(5.0) if card.node_id not in ("me", "you")
        }
        assert known == newest
        assert side.card(other) is not None
    # Only the asker's own card, which always goes along.
    assert exchange(left, "me", right, 5.0) == 1
