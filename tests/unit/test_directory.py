"""The card table: who wins, when a node is gone, how much a stranger can make it remember, and how often it speaks."""

from __future__ import annotations

import pytest

from kakeya_zmq.protocol import directory as dm
from kakeya_zmq.protocol.directory import (
    Announce,
    AnnounceNow,
    CardRefused,
    CardsArrived,
    Directory,
    DirectoryEffect,
    DirectorySettings,
    DirectoryTick,
    PeerChanged,
    PeerGone,
    PullRound,
)
from tests.unit.card_kit import card_blob
from wire import limits
from wire.cards import open_card
from wire.codec import encode_server
from wire.messages import CardList, Reply

SETTINGS = DirectorySettings(interval_s=10.0, first_interval_s=1.0, first_rounds=2, announce_interval_s=0.25)


def new_directory() -> Directory:
    return Directory(node_id="me", make_card=lambda sequence: card_blob("me", 1, sequence), settings=SETTINGS)


def arrive(directory: Directory, now: float, *cards: tuple[bytes, int]) -> list[DirectoryEffect]:
    return directory.on(CardsArrived(tuple(blob for blob, _ in cards), tuple(age for _, age in cards)), now)


def names(directory: Directory, now: float) -> list[str]:
    return [card.node_id for card in directory.peers(now)]


def announcements(effects: list[DirectoryEffect]) -> int:
    return sum(isinstance(effect, Announce) for effect in effects)


# --- merging ---------------------------------------------------------------------------------------------------------


def test_a_new_node_a_newer_card_and_a_restart_are_told_apart() -> None:
    directory = new_directory()
    (appeared,) = arrive(directory, 0.0, (card_blob("a", 5, 1), 0))
    (changed,) = arrive(directory, 0.0, (card_blob("a", 5, 2), 0))
    (restarted,) = arrive(directory, 0.0, (card_blob("a", 6, 1), 0))
    flags = [(e.appeared, e.restarted) for e in (appeared, changed, restarted) if isinstance(e, PeerChanged)]
    assert flags == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("late", [card_blob("a", 5, 2), card_blob("a", 5, 1), card_blob("a", 4, 9)])
def test_old_and_repeated_cards_change_nothing(late: bytes) -> None:
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("a", 5, 2), 0))
    assert arrive(directory, 0.0, (late, 0)) == []
    (card,) = directory.peers(0.0)
    assert (card.incarnation, card.sequence) == (5, 2)


def test_our_own_card_is_never_taken_from_others() -> None:
    directory = new_directory()
    assert arrive(directory, 0.0, (card_blob("me", 99, 99), 0), (card_blob("me", 99, 99, key="thief"), 0)) == []
    assert names(directory, 0.0) == []


def test_a_node_id_belongs_to_the_first_key_also_after_its_card_expired() -> None:
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("a"), 0))
    (refused,) = arrive(directory, 0.0, (card_blob("a", 2, key="thief"), 0))
    assert isinstance(refused, CardRefused)
    directory.on(DirectoryTick(), 11.0)
    (refused,) = arrive(directory, 11.0, (card_blob("a", 2, key="thief"), 0))
    assert isinstance(refused, CardRefused)
    assert names(directory, 11.0) == []


def test_forged_and_malformed_cards_are_refused_and_the_others_taken() -> None:
    directory = new_directory()
    good = card_blob("a")
    forged = good[:-1] + bytes([good[-1] ^ 1])
    effects = arrive(directory, 0.0, (forged, 0), (b"", 0), (b"\xc1" * 40, 0), (good, 0))
    assert [type(effect) for effect in effects] == [CardRefused, CardRefused, CardRefused, PeerChanged]


def test_a_card_without_an_age_is_not_taken() -> None:
    directory = new_directory()
    directory.on(CardsArrived((card_blob("a"), card_blob("b")), (0,)), 0.0)
    assert names(directory, 0.0) == ["a"]


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_card_lives_shorter_than_its_ttl_and_not_one_moment_longer() -> None:
    directory = new_directory()
    arrive(directory, 100.0, (card_blob("a", ttl_ms=10_000), 4_000))
    assert names(directory, 105.999) == ["a"]
    assert names(directory, 106.0) == []
    directory.on(DirectoryTick(), 100.0)
    directory.on(DirectoryTick(), 105.0)
    assert not any(isinstance(effect, PeerGone) for effect in directory.on(DirectoryTick(), 105.999))
    gone = [effect for effect in directory.on(DirectoryTick(), 106.0) if isinstance(effect, PeerGone)]
    assert [effect.node_id for effect in gone] == ["a"]
    assert directory.card("a") is None


@pytest.mark.parametrize(("age_ms", "taken"), [(9_999, True), (10_000, False), (10_001, False), (2**53, False)])
def test_a_card_as_old_as_its_ttl_is_not_merged(age_ms: int, taken: bool) -> None:
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("a", ttl_ms=10_000), age_ms))
    assert (directory.card("a") is not None) is taken


def test_the_greatest_age_told_counts_and_no_relay_brings_back_what_has_expired() -> None:
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("a", 5, 3), 0))
    arrive(directory, 0.0, (card_blob("a", 5, 3), 2_000))
    arrive(directory, 0.0, (card_blob("a", 5, 3), 1_000))
    directory.on(DirectoryTick(), 8.0)
    assert names(directory, 8.0) == []
    assert arrive(directory, 8.0, (card_blob("a", 5, 3), 9_990), (card_blob("a", 5, 2), 0)) == []
    assert arrive(directory, 8.0, (card_blob("a", 5, 4), 0)) != []


def test_a_node_whose_clock_was_set_back_returns_when_its_old_card_has_expired() -> None:
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("a", 1000, 3), 0))
    assert arrive(directory, 1.0, (card_blob("a", 7, 1), 0)) == []
    directory.on(DirectoryTick(), 10.0)
    (returned,) = arrive(directory, 10.0, (card_blob("a", 7, 2), 0))
    assert isinstance(returned, PeerChanged)
    assert (returned.appeared, returned.restarted) == (True, True)


def test_relayed_ages_grow_with_the_time_a_card_was_held() -> None:
    first, second = new_directory(), Directory(node_id="b", make_card=lambda n: card_blob("b", 1, n))
    arrive(first, 50.0, (card_blob("a", ttl_ms=10_000), 1_000))
    cards, ages = first.exchange(53.5)
    assert ages == (0, 4_500)
    second.on(CardsArrived(cards, ages), 900.0)
    assert names(second, 905.4) == ["a", "me"]
    assert names(second, 905.5) == ["me"]


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_an_exchange_fits_into_one_message_and_takes_every_card_in_turn() -> None:
    directory = new_directory()
    nodes = [f"node-{number:03}" for number in range(3 * limits.CARDS_PER_EXCHANGE_MAX + 5)]
    arrive(directory, 0.0, *((card_blob(node, ttl_ms=3_600_000), 0) for node in nodes))
    seen: set[str] = set()
    for _ in range(4):
        cards, ages = directory.exchange(1.0)
        assert len(cards) == len(ages) == limits.CARDS_PER_EXCHANGE_MAX
        assert len(set(cards)) == len(cards)
        message = encode_server(Reply(request_id=1, body=CardList(cards=cards, ages_ms=ages)))
        assert len(message) <= limits.CONTROL_BODY_BYTES_MAX
        assert open_card(cards[0]).node_id == "me"
        seen |= {open_card(blob).node_id for blob in cards[1:]}
    assert seen == set(nodes)


def test_a_member_that_makes_up_nodes_cannot_grow_the_tables_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dm, "NODES_MAX", 3)
    monkeypatch.setattr(dm, "IDENTITIES_MAX", 5)
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("good", ttl_ms=3_600_000), 0))
    for number in range(30):
        now = float(11 * number)
        effects = arrive(directory, now, *((card_blob(f"fake-{number}-{n}"), 0) for n in range(4)))
        assert sum(isinstance(effect, CardRefused) for effect in effects) == 2
        directory.on(DirectoryTick(), now + 10.5)
        assert len(directory._identities) <= 5
    assert names(directory, 330.0) == ["good"]
    (refused,) = arrive(directory, 330.0, (card_blob("good", 2, key="thief"), 0))
    assert isinstance(refused, CardRefused), "the identity of a live node is never what makes room"


# --- announcing ------------------------------------------------------------------------------------------------------


def test_rounds_are_quick_at_first_and_then_slow() -> None:
    directory = new_directory()
    times = []
    for _ in range(5):
        now = directory.deadline()
        times.append(now)
        effects = directory.on(DirectoryTick(), now)
        assert announcements(effects) == 1
        assert PullRound() in effects
    assert times == [0.0, 1.0, 2.0, 12.0, 22.0]


def test_many_joiners_do_not_cause_a_storm_and_the_last_wish_is_carried_out() -> None:
    directory = new_directory()
    directory.on(DirectoryTick(), 0.0)
    told = [announcements(directory.on(AnnounceNow(), 0.3 + number / 1000)) for number in range(100)]
    assert told == [1] + [0] * 99
    due = directory.deadline()
    assert due == pytest.approx(0.55)
    assert announcements(directory.on(DirectoryTick(), 0.5)) == 0
    (announce,) = directory.on(DirectoryTick(), due)
    assert isinstance(announce, Announce)
    assert announcements(directory.on(DirectoryTick(), 0.9)) == 0, "nothing is left to tell"


def test_a_wish_that_waits_is_fulfilled_by_the_next_round() -> None:
    directory = new_directory()
    directory.on(DirectoryTick(), 0.0)
    directory.on(AnnounceNow(), 0.9)
    directory.on(AnnounceNow(), 0.95)
    assert announcements(directory.on(DirectoryTick(), 1.0)) == 1
    assert announcements(directory.on(DirectoryTick(), 1.2)) == 0


def test_each_announcement_is_newer_than_the_one_before() -> None:
    directory = new_directory()
    blobs = [effect.card for effect in directory.on(DirectoryTick(), 0.0) if isinstance(effect, Announce)]
    blobs += directory.exchange(0.1)[0]
    blobs += [effect.card for effect in directory.on(AnnounceNow(), 5.0) if isinstance(effect, Announce)]
    sequences = [open_card(blob).sequence for blob in blobs]
    assert sequences == sorted(set(sequences))
