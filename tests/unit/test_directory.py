"""The card table: who wins, when a node is gone, how much a stranger can make it remember, and how often it speaks."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from kakeya_zmq.protocol import directory_table as dm
from kakeya_zmq.protocol import directory_values
from kakeya_zmq.protocol.directory import (
    Announce,
    AnnounceNow,
    CardRefused,
    CardsArrived,
    ClockSkewed,
    Directory,
    DirectoryEffect,
    DirectorySettings,
    DirectoryTick,
    Exchange,
    ExchangeEnded,
    OwnIdClaimed,
    PeerChanged,
    PeerConnected,
    PeerDisconnected,
    PeerGone,
    Slept,
)
from kakeya_zmq.protocol.identities import IdentityBook
from tests.unit.card_kit import card_blob, identity
from wire import limits
from wire.cards import ModelOffering, mark_of, open_card, pack_digest, sign_card, unpack_digest
from wire.codec import encode_server
from wire.errors import RemoteProtocolError
from wire.ids import NodeId
from wire.messages import CardList, Reply

SETTINGS = DirectorySettings(interval_s=10.0, first_interval_s=1.0, first_rounds=2, announce_interval_s=0.25, jitter=0.0)


def new_directory(node: str = "me") -> Directory:
    return Directory(
        node_id=node,
        make_card=lambda sequence: card_blob(node, 1, sequence),
        settings=SETTINGS,
        incarnation=1,
        rng=random.Random(7),
    )


def exchanges(effects: list[DirectoryEffect]) -> list[str]:
    return [effect.node_id for effect in effects if isinstance(effect, Exchange)]


def reachable(node: str, sequence: int = 1) -> tuple[bytes, int]:
    """A card with an endpoint: one without is not chosen."""
    return card_blob(node, 1, sequence, ttl_ms=3_600_000, address="127.0.0.1:1"), 0


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
    assert arrive(directory, 0.0, (card_blob("me", 1, 99), 0)) == []
    assert names(directory, 0.0) == []


def test_somebody_else_with_our_name_is_told_of_and_not_taken() -> None:
    directory = new_directory()
    directory.on(DirectoryTick(), 0.0)
    (other_key,) = arrive(directory, 0.0, (card_blob("me", 1, 1, key="thief"), 0))
    (other_process,) = arrive(directory, 0.0, (card_blob("me", 2, 1), 0))
    assert isinstance(other_key, OwnIdClaimed)
    assert isinstance(other_process, OwnIdClaimed)
    assert "node id" in other_key.reason
    assert "another process" in other_process.reason
    assert names(directory, 0.0) == []


def test_an_asker_learns_that_a_newer_process_runs_under_its_id() -> None:
    relay = new_directory("relay")
    arrive(relay, 0.0, (card_blob("me", 2, 5), 0))
    older = new_directory("me")
    older.on(DirectoryTick(), 0.0)
    known = pack_digest([])
    assert len(relay.answer(known, "me", 0.0)[0]) == 1, "who does not say which process it is"
    assert len(relay.answer(known, "me", 0.0, incarnation=2)[0]) == 1, "the same process"
    cards, ages, _, _ = relay.answer(known, "me", 0.0, incarnation=1)
    (claimed,) = arrive(older, 0.0, *zip(cards, ages, strict=True))[1:]
    assert isinstance(claimed, OwnIdClaimed)


def test_our_own_earlier_incarnation_coming_back_is_no_news() -> None:
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", 9, sequence), incarnation=9)
    directory.on(DirectoryTick(), 0.0)
    assert arrive(directory, 0.0, (card_blob("me", 8, 50), 0)) == []


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
    first, second = new_directory(), new_directory("b")
    arrive(first, 50.0, (card_blob("a", ttl_ms=10_000), 1_000))
    cards, ages, _, _ = first.answer(b"", "b", 53.5)
    assert ages == (0, 4_500)
    second.on(CardsArrived(cards, ages), 900.0)
    assert names(second, 905.4) == ["a", "me"]
    assert names(second, 905.5) == ["me"]


def test_sleep_ages_cards_that_the_clock_did_not() -> None:
    directory = new_directory()
    directory.on(DirectoryTick(), 0.0)
    directory.on(PeerConnected("b"), 0.0)
    directory.on(ExchangeEnded(NodeId("b"), True), 0.0)
    arrive(directory, 0.0, (card_blob("a", ttl_ms=10_000), 0), (card_blob("b", ttl_ms=100_000), 0))
    effects = directory.on(Slept(30.0), 1.0)
    assert [effect.node_id for effect in effects if isinstance(effect, PeerGone)] == ["a"]
    assert exchanges(effects) == ["b"], "whoever wakes up catches up at once"
    assert directory.age_ms("b", 1.0) == 31_000


@pytest.mark.parametrize(("ahead_s", "told"), [(0.0, False), (29.0, False), (31.0, True), (-600.0, True)])
def test_a_wrong_clock_is_told_once_and_does_no_harm(ahead_s: float, told: bool) -> None:
    directory = new_directory()
    now_unix = 1_700_000_000.0
    effects: list[DirectoryEffect] = []
    for sequence in (1, 2, 3):
        blob = card_blob("a", 1, sequence, announced_at_unix=now_unix + ahead_s)
        effects += directory.on(CardsArrived((blob,), (4_000,), now_unix + 4.0), 10.0)
    skewed = [effect for effect in effects if isinstance(effect, ClockSkewed)]
    assert len(skewed) == int(told)
    assert directory.clock_skew_ms("a") == pytest.approx(ahead_s * 1000)
    assert names(directory, 15.9) == ["a"]
    assert names(directory, 16.0) == []


def test_a_clock_that_was_set_right_may_be_told_of_again() -> None:
    directory = new_directory()
    told = 0
    for sequence, ahead_s in enumerate((60.0, 20.0, 10.0, 60.0), start=1):
        blob = card_blob("a", 1, sequence, announced_at_unix=1e9 + ahead_s)
        told += sum(isinstance(e, ClockSkewed) for e in directory.on(CardsArrived((blob,), (0,), 1e9), 0.0))
    assert told == 2


# --- exchanges -------------------------------------------------------------------------------------------------------


def test_only_what_is_newer_travels_and_the_rest_is_asked_for() -> None:
    ours, theirs = new_directory(), new_directory("b")
    arrive(ours, 0.0, (card_blob("old", 1, 1), 0), (card_blob("same", 1, 1), 0), (card_blob("mine", 1, 1), 0))
    arrive(theirs, 0.0, (card_blob("old", 1, 2), 0), (card_blob("same", 1, 1), 0), (card_blob("new", 1, 1), 0))
    (ask,) = ours.on(PeerConnected("b"), 0.0)
    assert isinstance(ask, Exchange)
    assert ask.known is not None
    assert set(unpack_digest(ask.known)) == {mark_of(node) for node in ("old", "same", "mine")}
    theirs.on(CardsArrived(ask.cards, ask.ages_ms), 0.0)
    cards, ages, wanted, more = theirs.answer(ask.known, "me", 0.0)
    assert {open_card(blob).node_id for blob in cards} == {"b", "old", "new"}
    assert (wanted, more) == (mark_of("mine"), False)
    effects = ours.on(ExchangeEnded(ask.node_id, True, cards, ages, wanted, more), 0.0)
    (push,) = [effect for effect in effects if isinstance(effect, Exchange)]
    assert push.known is None
    assert [open_card(blob).node_id for blob in push.cards] == ["mine"]
    theirs.on(CardsArrived(push.cards, push.ages_ms), 0.0)
    assert theirs.answer(None, "me", 0.0)[0] == ()
    assert names(ours, 0.0) == ["b", "mine", "new", "old", "same"]
    assert names(theirs, 0.0) == ["me", "mine", "new", "old", "same"]


def test_what_has_expired_is_not_asked_for_again_but_a_sign_of_life_is() -> None:
    directory = new_directory()
    arrive(directory, 0.0, (card_blob("a", 5, 3, ttl_ms=1_000), 0))
    directory.on(DirectoryTick(), 2.0)
    relay = new_directory("b")
    for version, wanted in (((5, 3), b""), ((5, 2), b""), ((5, 4), mark_of("a")), ((4, 1), mark_of("a"))):
        arrive(relay, 2.0, (card_blob("a", *version), 0))
        (ask,) = relay.on(PeerConnected("me"), 2.0)
        assert isinstance(ask, Exchange)
        assert ask.known is not None
        assert directory.answer(ask.known, "b", 2.0)[2] == wanted, version
        relay = new_directory("b")


def test_a_broken_digest_is_refused_and_a_broken_list_of_marks_ignored() -> None:
    directory = new_directory()
    with pytest.raises(RemoteProtocolError):
        directory.answer(b"x" * 25, "b", 0.0)
    assert directory.on(ExchangeEnded(NodeId("b"), True, (), (), b"x" * 9), 0.0) == []


def test_a_newcomer_gets_more_cards_than_one_message_takes_at_once() -> None:
    hub, newcomer = new_directory("hub"), new_directory()
    nodes = {f"node-{number:03}" for number in range(3 * limits.CARDS_PER_EXCHANGE_MAX + 5)}
    arrive(hub, 0.0, *((card_blob(node, ttl_ms=3_600_000), 0) for node in nodes))
    waiting = newcomer.on(PeerConnected("hub"), 0.0)
    asked = 0
    while waiting:
        ask = waiting.pop()
        if not isinstance(ask, Exchange) or ask.known is None:
            continue
        asked += 1
        cards, ages, wanted, more = hub.answer(ask.known, "me", 0.0)
        assert len(cards) == len(ages) <= limits.CARDS_PER_EXCHANGE_MAX
        message = encode_server(Reply(request_id=1, body=CardList(cards=cards, ages_ms=ages, wanted=wanted, more=more)))
        assert len(message) <= limits.CONTROL_BODY_BYTES_MAX
        waiting = newcomer.on(ExchangeEnded(NodeId("hub"), True, cards, ages, wanted, more), 0.0)
    assert set(names(newcomer, 0.0)) == nodes | {"hub"}
    assert asked == 4


def large_card(node: str) -> bytes:
    """Over 8 KiB."""
    offering = ModelOffering(
        model_id="m",
        role="worker",
        quantization="",
        tokens_per_second=0.0,
        fingerprint=bytes(32),
        tenant="t",
        compatibility={f"field {number}": "x" * 500 for number in range(16)},
    )
    card = open_card(card_blob(node, ttl_ms=3_600_000))
    return sign_card(msgspec.structs.replace(card, models=(offering,)), identity(node))


def test_an_answer_has_so_many_bytes_of_cards_at_most_and_all_of_them_come_in_the_end() -> None:
    hub, known, newcomer = new_directory("hub"), new_directory("known"), new_directory()
    nodes = {f"node-{number:02}": large_card(f"node-{number:02}") for number in range(30)}
    arrive(hub, 0.0, *((card, 0) for card in nodes.values()))
    waiting, answers = newcomer.on(PeerConnected("hub"), 0.0), 0
    while waiting:
        ask = waiting.pop()
        if isinstance(ask, Exchange) and ask.known is not None:
            cards, ages, wanted, more = hub.answer(ask.known, "me", 0.0)
            answers += 1
            assert 0 < sum(map(len, cards)) <= limits.ANSWER_BYTES_MAX
            waiting = newcomer.on(ExchangeEnded(NodeId("hub"), True, cards, ages, wanted, more), 0.0)
    assert set(names(newcomer, 0.0)) == {*nodes, "hub"}
    fitting = limits.ANSWER_BYTES_MAX // max(map(len, nodes.values()))
    assert answers <= math.ceil(len(nodes) / fitting) + 1, "none is nearly empty"
    older = {name: large_card(name) for name in list(nodes)[:25]}
    arrive(known, 0.0, *((card, 0) for card in older.values()))
    (ask,) = [effect for effect in known.on(PeerConnected("hub"), 0.0) if isinstance(effect, Exchange)]
    arrive(hub, 0.0, *((card_blob(name, sequence=2, ttl_ms=3_600_000), 0) for name in older))
    first = {open_card(card).node_id for card in hub.answer(ask.known, "known", 0.0)[0]}
    assert first >= nodes.keys() - older.keys(), "cards it has never seen go first"


def test_what_an_answer_wants_is_sent_in_so_many_bytes_and_the_rest_in_later_exchanges() -> None:
    """48 cards of the largest kind would be 768 KiB in one request."""
    asker, hub = new_directory(), new_directory("hub")
    nodes = {f"node-{number:02}": large_card(f"node-{number:02}") for number in range(30)}
    arrive(asker, 0.0, *((card, 0) for card in nodes.values()))
    sent: set[str] = set()
    for _ in range(len(nodes)):
        (ask,) = [effect for effect in asker.on(PeerConnected("hub"), 0.0) if isinstance(effect, Exchange)]
        cards, ages, wanted, more = hub.answer(ask.known, "me", 0.0)
        effects = asker.on(ExchangeEnded(NodeId("hub"), True, cards, ages, wanted, more), 0.0)
        told = [effect for effect in effects if isinstance(effect, Exchange) and effect.known is None]
        if not told:
            break
        assert 0 < sum(map(len, told[0].cards)) <= limits.ANSWER_BYTES_MAX
        arrive(hub, 0.0, *zip(told[0].cards, told[0].ages_ms, strict=True))
        sent |= {open_card(card).node_id for card in told[0].cards}
        asker.on(PeerDisconnected("hub"), 0.0)
    assert sent == set(nodes)


def test_a_peer_that_always_has_more_is_asked_so_often_and_no_more() -> None:
    directory = new_directory()
    asked = 0
    effects = directory.on(PeerConnected("liar"), 0.0)
    for number in range(100):
        if "liar" not in exchanges(effects):
            break
        asked += 1
        effects = directory.on(ExchangeEnded(NodeId("liar"), True, (card_blob(f"n{number}"),), (0,), b"", True), 0.0)
    assert asked <= directory_values.NODES_MAX // limits.CARDS_PER_EXCHANGE_MAX + 2


def test_a_round_goes_to_a_few_nodes_whatever_their_number() -> None:
    directory = new_directory()
    directory.on(DirectoryTick(), 0.0)
    arrive(directory, 0.0, *(reachable(f"n{number}") for number in range(20)))
    arrive(directory, 0.0, (card_blob("nowhere", ttl_ms=3_600_000), 0))
    chosen: set[str] = set()
    for _ in range(40):
        round_ = exchanges(directory.on(DirectoryTick(), directory.deadline()))
        assert len(round_) == len(set(round_)) == SETTINGS.fanout
        chosen |= set(round_)
        for node in round_:
            directory.on(ExchangeEnded(NodeId(node), True), directory.deadline() - 1)
    assert chosen == {f"n{number}" for number in range(20)}


def test_nodes_that_cannot_be_reached_are_left_alone_and_those_connected_asked() -> None:
    directory = new_directory()
    directory.on(DirectoryTick(), 0.0)
    directory.on(PeerConnected("seed"), 0.0)
    directory.on(ExchangeEnded(NodeId("seed"), True), 0.0)
    arrive(directory, 0.0, *(reachable(f"n{number}") for number in range(3)), reachable("seed"))
    now, rounds = 1.0, []
    for _ in range(4):
        chosen = exchanges(directory.on(DirectoryTick(), now))
        rounds.append(sorted(chosen))
        for node in chosen:
            directory.on(ExchangeEnded(NodeId(node), ok=node == "seed"), now)
        now = directory.deadline()
    assert rounds[-1] == ["seed"]
    directory.on(PeerDisconnected("seed"), now)
    assert "n0" in exchanges(directory.on(DirectoryTick(), now + 45.0)), "they get another chance"


# --- bounds ----------------------------------------------------------------------------------------------------------


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
        assert len(directory._table._identities) <= 5
    assert names(directory, 330.0) == ["good"]
    (refused,) = arrive(directory, 330.0, (card_blob("good", 2, key="thief"), 0))
    assert isinstance(refused, CardRefused), "the identity of a live node is never what makes room"


# --- announcing ------------------------------------------------------------------------------------------------------


def test_a_forgotten_node_is_gone_at_once_and_its_old_card_does_not_come_back() -> None:
    """Others relay it until it expires there; the machine that was set up anew is taken, also with a younger clock."""
    book = IdentityBook(("me", bytes(32)))
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", 1, sequence), identities=book)
    arrive(directory, 0.0, (card_blob("mac", 5), 0))
    assert directory.forget("mac") == [PeerGone(NodeId("mac"), "its key was forgotten by the administrator")]
    assert book.forget("mac")
    assert directory.forget("mac") == []
    (refused,) = arrive(directory, 1.0, (card_blob("mac", 5), 1000))
    assert isinstance(refused, CardRefused)
    assert any(isinstance(each, PeerChanged) for each in arrive(directory, 2.0, (card_blob("mac", 2, key="anew"), 0)))
    assert [each.node_id for each in directory.peers(2.0)] == ["mac"]
    assert directory.on(DirectoryTick(), 100.0)[0] == PeerGone(NodeId("mac"), "its card expired")


def test_a_table_full_of_live_cards_pins_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.protocol.directory_table.NODES_MAX", 2)
    book = IdentityBook(("me", bytes(32)))
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", 1, sequence), identities=book)
    arrive(directory, 0.0, *((card_blob(f"n{number}"), 0) for number in range(4)))
    assert list(book.nodes()) == names(directory, 0.0) == ["n0", "n1"]


def test_rounds_are_quick_at_first_and_then_slow() -> None:
    directory = new_directory()
    times = []
    for _ in range(5):
        now = directory.deadline()
        times.append(now)
        effects = directory.on(DirectoryTick(), now)
        assert announcements(effects) == 1
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
    asked = directory.answer(b"", "b", 0.1)[0]
    assert asked == tuple(blobs), "who asks gets the card that was announced"
    blobs += [effect.card for effect in directory.on(AnnounceNow(), 5.0) if isinstance(effect, Announce)]
    blobs += directory.answer(b"", "b", 5.0 + SETTINGS.interval_s)[0]
    sequences = [open_card(blob).sequence for blob in blobs]
    assert len(sequences) == 3
    assert sequences == sorted(set(sequences))
