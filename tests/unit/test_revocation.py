"""Who may revoke, what is taken, and how revocations come round."""

from __future__ import annotations

from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.protocol.directory import CardRefused, CardsArrived, Directory, Expelled, PeerChanged, PeerGone
from kakeya_zmq.protocol.identities import OTHER_KEY, REVOKED, IdentityBook
from kakeya_zmq.protocol.revocation import FULL, MALFORMED, NOT_ENTITLED, TOO_FAST, TOO_MANY_OF_ISSUER, RevocationBook
from tests.unit.card_kit import card_blob, identity
from wire.errors import RemoteProtocolError
from wire.revocations import Revocation, open_revocation, sign_revocation

ADMIN = identity("admin")


@cache
def revocation(name: str, issuer: str = "admin", at: float = 1.0) -> bytes:
    statement = Revocation(
        node_id=name,
        identity_public_key=identity(name).public_key,
        issuer_id=issuer,
        issuer_public_key=identity(issuer).public_key,
        issued_at_unix=at,
    )
    return sign_revocation(statement, identity(issuer))


def book(*known: bytes) -> RevocationBook:
    return RevocationBook(lambda key: key == ADMIN.public_key, known)


def test_a_proper_revocation_is_taken_once() -> None:
    ours = book()
    merged = ours.merge((revocation("lost"), revocation("lost")))
    assert [each.node_id for each in merged.revoked] == ["lost"]
    assert merged.refused == ()
    assert identity("lost").public_key in ours
    assert book(*ours.blobs()).revoked_keys == ours.revoked_keys, "kept over a restart"


def test_others_may_not_revoke() -> None:
    assert book().merge((revocation("lost", issuer="stranger"),)).refused == (NOT_ENTITLED,)


def test_a_signature_of_somebody_else() -> None:
    statement = Revocation(
        node_id="lost",
        identity_public_key=identity("lost").public_key,
        issuer_id="admin",
        issuer_public_key=ADMIN.public_key,
        issued_at_unix=1.0,
    )
    assert book().merge((sign_revocation(statement, identity("stranger")), b"", b"\xff" * 99)).refused == (MALFORMED,) * 3


def test_a_full_book_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.REVOCATIONS_MAX", 2)
    merged = book().merge(revocation(f"n{number}", at=float(number)) for number in range(3))
    assert len(merged.revoked) == 2
    assert merged.refused == (FULL,)


def book_that_knows(*names: str) -> RevocationBook:
    """Anybody may revoke; the keys of these nodes are bound to their names here."""
    bound = {identity(name).public_key for name in names}
    return RevocationBook(lambda key: True, bound=lambda key: key in bound)


def revoked_names(ours: RevocationBook) -> set[str]:
    return {open_revocation(blob).node_id for blob in ours.blobs()}


def test_of_one_issuer_the_earliest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have room, and what one says later does not undo what it said before."""
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.PER_ISSUER_MAX", 3)
    ours = book_that_knows("other")
    merged = ours.merge(revocation(f"n{number}", "mallory", float(number)) for number in range(4))
    assert len(merged.revoked) == 3
    assert merged.refused == (TOO_MANY_OF_ISSUER,)
    assert len(ours.merge((revocation("other"),)).revoked) == 1
    backdated = ours.merge((revocation("n5", "mallory", 0.5),))
    assert [each.node_id for each in backdated.revoked] == ["n5"]
    assert backdated.reinstated == (identity("n2").public_key,), "mallory's own word, and nobody else's"
    assert revoked_names(ours) == {"n0", "n5", "n1", "other"}


def test_a_key_that_another_issuer_revoked_too_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.PER_ISSUER_MAX", 1)
    ours = book_that_knows()
    ours.merge((revocation("lost", "mallory", 5.0), revocation("lost", "eve")))
    assert len(ours) == 1
    assert ours.merge((revocation("n0", "mallory", 1.0),)).reinstated == ()
    assert identity("lost").public_key in ours


def test_a_book_full_of_unknown_keys_takes_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.REVOCATIONS_MAX", 2)
    ours = book_that_knows("real-0", "real-1", "real-2")
    ours.merge((revocation("n0", "mallory"), revocation("n1", "eve")))
    assert ours.merge((revocation("n2"),)).refused == (FULL,)
    mark = open_revocation(revocation("real-0")).mark
    assert ours.wanted(mark) == mark, "a book that can make room asks"
    for number in (0, 1):
        assert len(ours.merge((revocation(f"real-{number}"),)).revoked) == 1
    assert revoked_names(ours) == {"real-0", "real-1"}
    assert len(ours.marks()) == 2 * len(mark)
    assert ours.merge((revocation("real-2"),)).refused == (FULL,)
    assert ours.wanted(mark) == b""
    lacked = open_revocation(revocation("real-2")).mark
    assert ours.wanted(lacked) == lacked, "whoever asks about one learns that it is not there"


def filled(monkeypatch: pytest.MonkeyPatch, trusted: str = "") -> RevocationBook:
    """A book that four identities of one member have filled by revoking each other; everybody is known."""
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.REVOCATIONS_MAX", 12)
    ours = RevocationBook(lambda key: True, trusted=lambda key: bool(trusted) and key == identity(trusted).public_key)
    rogues = [f"rogue-{number}" for number in range(4)]
    ours.merge(revocation(key, issuer, 0.0) for issuer in rogues for key in rogues if key != issuer)
    assert len(ours.blobs()) == 12
    return ours


def test_who_fills_the_book_with_many_identities_keeps_nobody_else_from_revoking(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what had to make room does not come back in the place of others."""
    ours = filled(monkeypatch)
    before = ours.blobs()
    assert [each.node_id for each in ours.merge((revocation("lost", at=9e9),)).revoked] == ["lost"]
    (gone,) = set(before) - set(ours.blobs())
    assert ours.merge((gone,)).refused == (FULL,)
    assert identity("lost").public_key in ours


def test_a_revocation_is_not_lifted_by_revoking_its_issuer_in_a_full_book(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = filled(monkeypatch)
    ours.merge((revocation("rogue-0", at=5.0),))
    ours.merge((revocation("admin", "rogue-8", 0.0), *(revocation(f"n{number}", "rogue-9", 0.0) for number in range(9))))
    assert revocation("rogue-0", at=5.0) in ours.blobs()


def test_the_own_operator_and_administrators_always_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = filled(monkeypatch, trusted="admin")
    for number in range(11):
        merged = ours.merge((revocation(f"n{number}", at=float(number)),))
        assert (len(merged.revoked), merged.refused) == (1, ())
    others = RevocationBook(lambda key: True)
    others.merge(ours.blobs())
    assert set(others.blobs()) == set(ours.blobs())


@settings(max_examples=100, deadline=None)
@given(data=st.data(), told=st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_in_a_full_book_each_issuer_has_its_share_in_any_order(data: st.DataObject, told: list[int]) -> None:
    """As many for each as go evenly into the book, whoever comes first and with how many; and those it said first."""
    blobs = [
        revocation(f"n{issuer}-{number}", f"i{issuer}", float(number))
        for issuer in range(len(told))
        for number in range(told[issuer])
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kakeya_zmq.protocol.revocation.REVOCATIONS_MAX", 8)
        ours = RevocationBook(lambda key: True)
        for blob in data.draw(st.permutations(blobs)):
            ours.merge((blob,))
    held = [open_revocation(blob) for blob in ours.blobs()]
    assert len(held) == min(8, len(blobs))
    for issuer, count in enumerate(told):
        own = {each.issued_at_unix for each in held if each.issuer_id == f"i{issuer}"}
        assert len(own) >= min(count, 8 // len(told))
        assert own == set(range(len(own)))


def test_what_was_judged_once_costs_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is held nor what found no room; and what may not be judged now is not, and not remembered either."""
    ours = filled(monkeypatch)
    asked: list[str] = []

    def affordable(claimed: Revocation) -> bool:
        asked.append(claimed.node_id)
        return claimed.node_id != "dear"

    late = revocation("rogue-9", "rogue-1", 1.0)
    for _ in range(3):
        assert ours.merge((*ours.blobs(), late), affordable).refused == (FULL,)
    assert asked == ["rogue-9"]
    assert ours.merge((revocation("dear"),), affordable).refused == (TOO_FAST,)
    mark = open_revocation(late).mark
    dear = open_revocation(revocation("dear")).mark
    assert ours.wanted(mark + dear) == dear, "what found no room is not asked for in the place of others"
    assert [each.node_id for each in ours.merge((revocation("dear"),)).taken] == ["dear"]
    assert ours.wanted(mark) == mark, "the book has changed since, or only this one is asked about"


@pytest.mark.parametrize("order", [("a-b", "b-a"), ("b-a", "a-b")])
def test_two_nodes_that_revoke_each_other_are_both_refused(order: tuple[str, str]) -> None:
    """Whichever comes first, and although the issuer of the second one is revoked by then."""
    ours = book_that_knows("a", "b")
    blobs = {"a-b": revocation("b", "a", 2.0), "b-a": revocation("a", "b", 1.0)}
    for name in order:
        assert len(ours.merge((blobs[name],)).revoked) == 1
    assert revoked_names(ours) == {"a", "b"}


def test_nobody_lifts_a_revocation_by_revoking_back() -> None:
    ours = book_that_knows("admin", "mallory", "friend")
    ours.merge((revocation("mallory", "admin", 100.0),))
    merged = ours.merge(
        (revocation("admin", "mallory", 1.0), revocation("admin", "friend", 0.0), revocation("friend", "mallory", 0.0))
    )
    assert merged.reinstated == ()
    assert identity("mallory").public_key in ours


def rosters(*admins: str) -> set[bytes]:
    return {identity(name).public_key for name in admins}


def test_the_roster_is_the_last_word() -> None:
    admins = rosters("a", "b")
    ours = RevocationBook(admins.__contains__, valid=admins.__contains__)
    ours.merge((revocation("lost", "a"), revocation("both", "a"), revocation("both", "b")))
    admins.discard(identity("a").public_key)
    assert ours.judge_again() == ((), (identity("lost").public_key,))
    assert ours.merge((revocation("lost", "a"),)).refused == (NOT_ENTITLED,)
    assert (len(ours), len(ours.marks()), len(ours.blobs())) == (1, 8, 3)
    assert ours.lacking(b"") == (revocation("both", "b"),)
    assert ours.wanted(open_revocation(revocation("lost", "a")).mark), "whoever told it learns that it does not count"
    restarted = RevocationBook(admins.__contains__, ours.blobs(), valid=admins.__contains__)
    assert restarted.revoked_keys == ours.revoked_keys
    admins.add(identity("a").public_key)
    for each in (ours, restarted):
        revoked, reinstated = each.judge_again()
        assert [one.node_id for one in revoked] == ["lost"]
        assert reinstated == ()
        assert each.judge_again() == ((), ())


def test_the_own_file_is_held_to_the_bounds_and_to_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.PER_ISSUER_MAX", 2)
    forged = bytearray(revocation("n9"))
    forged[-1] ^= 1
    ours = book(bytes(forged), *(revocation(f"n{number}", at=float(number)) for number in range(4)))
    assert revoked_names(ours) == {"n0", "n1"}


STATEMENTS = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 6))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), statements=st.sets(STATEMENTS, max_size=24), admins=st.sets(st.integers(0, 4)))
def test_any_order_of_arrival_ends_the_same(
    data: st.DataObject, statements: set[tuple[int, int, int]], admins: set[int]
) -> None:
    """Issuers revoke each other and others, several times each, more than one may, told in pieces; the roster changes at any
    time, and the node is started again at any time."""
    names = [f"n{number}" for number in range(10)]
    final = {identity(names[number]).public_key for number in admins}
    blobs = [revocation(names[key], names[issuer], float(at)) for issuer, key, at in sorted(statements)]

    def one_order() -> tuple[set[bytes], set[bytes]]:
        listed = set(rosters(*names[:5]))
        ours = RevocationBook(lambda key: True, valid=listed.__contains__)
        for blob in data.draw(st.permutations(blobs)):
            ours.merge((blob,))
            match data.draw(st.integers(0, 9)):
                case 0:
                    listed.symmetric_difference_update((data.draw(st.sampled_from(sorted(rosters(*names[:5])))),))
                    ours.judge_again()
                case 1:
                    ours = RevocationBook(lambda key: True, ours.blobs(), valid=listed.__contains__)
                case _:
                    pass
        listed.clear()
        listed.update(final)
        ours.judge_again()
        return set(ours.revoked_keys), set(ours.blobs())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kakeya_zmq.protocol.revocation.PER_ISSUER_MAX", 3)
        first = one_order()
        assert one_order() == first


@settings(max_examples=50, deadline=None)
@given(
    known=st.lists(st.sets(st.integers(0, 5)), min_size=3, max_size=3),
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10),
    starts=st.lists(st.integers(0, 2), min_size=10, max_size=10),
)
def test_nodes_that_met_others_at_other_times_end_the_same(
    known: list[set[int]], pairs: list[tuple[int, int]], starts: list[int]
) -> None:
    """Without a roster: who is not known yet is refused until he is, also when he was revoked in the meantime."""
    names = [f"n{number}" for number in range(6)]
    everybody = {identity(name).public_key for name in names}
    books: list[RevocationBook] = []
    seen = [{identity(names[number]).public_key for number in each} for each in known]

    def may_revoke(number: int, key: bytes) -> bool:
        return key in seen[number] or key in books[number]

    for number in range(3):
        books.append(RevocationBook(partial(may_revoke, number)))
    for (issuer, revoked), start in zip(pairs, starts, strict=False):
        # It is told to a node that knows the issuer, or else nobody ever takes it.
        if identity(names[issuer]).public_key in seen[start]:
            books[start].merge((revocation(names[revoked], names[issuer]),))

    def gossip() -> None:
        for asker in range(3):
            for answerer in range(3):
                marks = books[asker].marks()
                lacking, wanted = books[answerer].lacking(marks), books[answerer].wanted(marks)
                books[asker].merge(lacking)
                books[answerer].merge(books[asker].named(wanted))

    gossip()
    for number in range(3):
        # Cards come round, but not of those that are revoked where they come.
        seen[number] |= {key for key in everybody if key not in books[number]}
    for _ in range(len(pairs) + 1):
        gossip()
    assert set(books[0].revoked_keys) == set(books[1].revoked_keys) == set(books[2].revoked_keys)
    assert set(books[0].blobs()) == set(books[1].blobs()) == set(books[2].blobs())


def test_what_is_refused_does_not_stand_in_the_way_of_the_rest() -> None:
    """More than an exchange takes: after some exchanges each has been told and asked for."""
    full, empty = book_that_knows(), book_that_knows()
    everything = {f"n{number}" for number in range(30)}
    full.merge(revocation(name) for name in everything)
    told = {open_revocation(blob).node_id for _ in range(12) for blob in full.lacking(b"")}
    assert told == everything
    asked = b"".join(empty.wanted(full.marks()) for _ in range(12))
    assert {asked[start : start + 8] for start in range(0, len(asked), 8)} == {
        open_revocation(blob).mark for blob in full.blobs()
    }


@given(data=st.binary(max_size=400))
def test_any_bytes_are_a_revocation_or_a_remote_error(data: bytes) -> None:
    try:
        open_revocation(data)
    except RemoteProtocolError:
        return


@settings(max_examples=25, deadline=None)
@given(
    held=st.lists(st.sets(st.integers(0, 12), max_size=6), min_size=2, max_size=4),
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12),
)
def test_exchanges_bring_everything_everywhere(held: list[set[int]], pairs: list[tuple[int, int]]) -> None:
    """Whoever asked whom before: after a round with each other both sides hold the same, and nothing is lost."""
    books = [book(*(revocation(f"n{number}") for number in numbers)) for numbers in held]
    everything = {key for each in books for key in each.revoked_keys}
    round_robin = [(asker, answerer) for asker in range(len(books)) for answerer in range(len(books))]
    for first, second in [*pairs, *round_robin, *round_robin]:
        asker, answerer = books[first % len(books)], books[second % len(books)]
        marks = asker.marks()
        lacking, wanted = answerer.lacking(marks), answerer.wanted(marks)
        asker.merge(lacking)
        answerer.merge(asker.named(wanted))
        assert set(asker.revoked_keys) == set(answerer.revoked_keys) <= everything
    assert all(set(each.revoked_keys) == everything for each in books)


def test_a_revoked_key_is_refused_under_every_name() -> None:
    identities = IdentityBook(("me", ADMIN.public_key))
    key = identity("lost").public_key
    assert identities.bind("lost", key, ("worker",))
    identities.revoke(key)
    assert identities.knows(key)
    for name in ("lost", "another"):
        assert identities.admit(name, key, ("worker",)) == REVOKED
    # The name stays bound, until it is forgotten.
    fresh = identity("fresh").public_key
    assert identities.admit("lost", fresh, ("worker",)) == OTHER_KEY
    assert identities.forget("lost")
    assert identities.admit("lost", fresh, ("worker",)) == ""


def test_the_directory_drops_the_card_of_a_revoked_key_and_takes_no_other() -> None:
    identities = IdentityBook(("me", ADMIN.public_key))
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", sequence=sequence), identities=identities)
    assert any(isinstance(effect, PeerChanged) for effect in directory.on(CardsArrived((card_blob("lost"),), (0,)), 0.0))
    key = identity("lost").public_key
    identities.revoke(key)
    assert directory.on(Expelled(key, "revoked"), 1.0) == [PeerGone("lost", "revoked")]  # type: ignore[arg-type]
    (refused,) = directory.on(CardsArrived((card_blob("lost", incarnation=2),), (0,)), 2.0)
    assert isinstance(refused, CardRefused)
    assert refused.reason.endswith(REVOKED)
    assert directory.peers(2.0) == ()


def test_keys_of_earlier_runs_hold_for_cards_too() -> None:
    identities = IdentityBook(("me", ADMIN.public_key), {"worker": identity("worker").public_key})
    directory = Directory(node_id="me", make_card=lambda sequence: card_blob("me", sequence=sequence), identities=identities)
    (refused,) = directory.on(CardsArrived((card_blob("worker", key="thief"),), (0,)), 0.0)
    assert isinstance(refused, CardRefused)
    assert any(isinstance(each, PeerChanged) for each in directory.on(CardsArrived((card_blob("worker"),), (0,)), 1.0))
