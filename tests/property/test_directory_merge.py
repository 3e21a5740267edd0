"""Merging cards is commutative, associative and idempotent: what a node knows depends on the set of cards that reached it,
not on their order, grouping or repetition."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.protocol.directory import CardsArrived, Directory, DirectoryTick
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
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", 9, sequence))
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


@settings(max_examples=60, deadline=None)
@given(cards=arrivals, ticks=st.lists(st.floats(0, 4), max_size=8))
def test_two_nodes_that_go_on_exchanging_forget_the_silent_ones(
    cards: list[tuple[str, int, int, int]], ticks: list[float]
) -> None:
    """Relays understate ages by the time a message travels; even so a card cannot live on by going to and fro."""
    left, right = merged([cards]), Directory(node_id="you", make_card=lambda sequence: card_blob("you", 9, sequence))
    now = 5.0
    for pause in [*ticks, *[1.0] * 12]:
        now += pause
        for giver, taker in ((left, right), (right, left)):
            blobs, ages = giver.exchange(now)
            taker.on(CardsArrived(blobs, tuple(max(0, age - 300) for age in ages)), now)
            taker.on(DirectoryTick(), now)
    assert {card.node_id for card in left.peers(now)} <= {"you"}
    assert {card.node_id for card in right.peers(now)} <= {"me"}
