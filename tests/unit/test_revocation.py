"""Who may revoke, what is taken, and how revocations come round."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.protocol.directory import CardRefused, CardsArrived, Directory, Expelled, PeerChanged, PeerGone
from kakeya_zmq.protocol.identities import OTHER_KEY, REVOKED, IdentityBook
from kakeya_zmq.protocol.revocation import FULL, MALFORMED, NOT_ENTITLED, TOO_MANY_OF_ISSUER, RevocationBook
from tests.unit.card_kit import card_blob, identity
from wire.errors import RemoteProtocolError
from wire.revocations import Revocation, open_revocation, sign_revocation

ADMIN = identity("admin")


@cache
def revocation(name: str, issuer: str = "admin") -> bytes:
    statement = Revocation(
        node_id=name,
        identity_public_key=identity(name).public_key,
        issuer_id=issuer,
        issuer_public_key=identity(issuer).public_key,
        issued_at_unix=1.0,
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
    revoked_admin = book()
    revoked_admin.merge((revocation("admin"),))
    assert revoked_admin.merge((revocation("lost"),)).refused == (NOT_ENTITLED,)


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
    merged = book().merge(revocation(f"n{number}") for number in range(3))
    assert len(merged.revoked) == 2
    assert merged.refused == (FULL,)


def book_that_knows(*names: str) -> RevocationBook:
    """Anybody may revoke; the keys of these nodes are bound to their names here."""
    bound = {identity(name).public_key for name in names}
    return RevocationBook(lambda key: True, bound=lambda key: key in bound)


def revoked_names(ours: RevocationBook) -> set[str]:
    return {open_revocation(blob).node_id for blob in ours.blobs()}


def test_one_issuer_does_not_fill_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it revokes of real nodes takes the place of its revocations of keys that nobody has, oldest first."""
    monkeypatch.setattr("kakeya_zmq.protocol.revocation.PER_ISSUER_MAX", 3)
    ours = book_that_knows("real-0", "real-1", "real-2", "real-3", "other")
    merged = ours.merge(revocation(f"n{number}", "mallory") for number in range(4))
    assert len(merged.revoked) == 3
    assert merged.refused == (TOO_MANY_OF_ISSUER,)
    assert len(ours.merge((revocation("other"),)).revoked) == 1, "others have room"
    assert ours.merge((revocation("real-0", "mallory"),)).refused == ()
    assert revoked_names(ours) == {"n1", "n2", "real-0", "other"}
    merged = ours.merge(revocation(f"real-{number}", "mallory") for number in (1, 2, 3))
    assert merged.refused == (TOO_MANY_OF_ISSUER,), "it is bounded with real nodes, too"
    assert revoked_names(ours) == {"real-0", "real-1", "real-2", "other"}


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


def test_what_a_revoked_issuer_said_of_unknown_keys_goes() -> None:
    ours = book_that_knows("real", "mallory")
    ours.merge((revocation("n0", "mallory"), revocation("real", "mallory"), revocation("n1")))
    ours.merge((revocation("mallory"),))
    assert revoked_names(ours) == {"real", "n1", "mallory"}
    assert identity("n0").public_key not in ours
    assert ours.merge((revocation("n0", "mallory"),)).refused == (NOT_ENTITLED,)
    restarted = RevocationBook(lambda key: True, ours.blobs(), bound=lambda key: False)
    assert revoked_names(restarted) == revoked_names(ours)


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
    assert identities.holds(key)
    identities.revoke(key)
    assert not identities.holds(key)
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
