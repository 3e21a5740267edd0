"""The audit log: bounded whatever happens, readable, and never a reason for a node to fail."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.audit import (
    AUDIT_FILE,
    ENTRIES_BURST,
    OLD_FILES,
    REASON_BURST,
    REASONS_MAX,
    TOTAL_BURST,
    AuditLog,
    old_files,
    parse_entry,
    read_entries,
)
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, load_known_nodes, save_known_nodes
from kakeya_zmq.protocol.identities import (
    ACCOUNT_MAX,
    CLIENTS_MAX,
    FORGOTTEN,
    FULL,
    NODES_MAX,
    OTHER_KEY,
    REVOKED,
    TOO_MANY_NEW,
    IdentityBook,
)
from wire.errors import ConfigError
from wire.text import NODE_ID, NODE_ID_CHARACTERS_MAX


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log_in(folder: Path, clock: Clock, **options: int) -> AuditLog:
    return AuditLog(folder, monotonic=clock, wall=lambda: 1_700_000_000.0 + clock.now, **options)


def test_an_entry(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    assert log.write("registered", "a node was seen for the first time", subject="mac-2")
    assert list(read_entries(tmp_path)) == [
        {
            "time": "2023-11-14T22:13:20.000Z",
            "kind": "registered",
            "reason": "a node was seen for the first time",
            "count": 1,
            "node_id": "mac-2",
        }
    ]
    assert stat.S_IMODE((tmp_path / AUDIT_FILE).stat().st_mode) == 0o600


def test_a_flood_is_counted_and_not_written(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    written = sum(log.write("refused", "flood") for _ in range(10_000))
    assert written == ENTRIES_BURST
    assert log.write("refused", "something else")
    clock.now += 60
    assert log.write("refused", "flood")
    entries = list(read_entries(tmp_path))
    assert entries[-1]["suppressed"] == 10_000 - ENTRIES_BURST
    assert sum(entry["count"] + entry.get("suppressed", 0) for entry in entries) == 10_002


def test_what_was_left_out_is_told_at_the_end(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    for _ in range(30):
        log.write("refused", "flood")
    log.close()
    log.close()
    assert sum(entry["count"] + entry.get("suppressed", 0) for entry in read_entries(tmp_path)) == 30


def test_reasons_without_end_are_bounded_too(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    written = sum(log.write("refused", f"reason {number}") for number in range(5_000))
    assert written == REASONS_MAX + REASON_BURST < TOTAL_BURST
    log.close()
    assert sum(entry["count"] + entry.get("suppressed", 0) for entry in read_entries(tmp_path)) == 5_000


def test_a_flood_of_one_node_hides_no_other_ones_entries(tmp_path: Path, clock: Clock) -> None:
    """Of the same kind and reason, of another reason, of another kind."""
    log = log_in(tmp_path, clock)
    for _ in range(5_000):
        log.write("refused", "too many requests", subject="mallory")
    assert log.write("refused", "too many requests", subject="eve")
    assert log.write("refused", "an unknown session")
    assert log.write("revoked", "revoked by mallory", subject="eve")
    entries = list(read_entries(tmp_path))
    assert [entry.get("suppressed") for entry in entries if entry.get("node_id") == "eve"] == [5_000 - ENTRIES_BURST, None]


def test_a_flood_under_made_up_names_is_bounded_and_hides_no_other_reason(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    assert sum(log.write("refused", "flood", subject=f"n{number}") for number in range(5_000)) == REASON_BURST
    assert log.write("refused", "something else", subject="n1")
    assert log.write("registered", "a node was seen for the first time", subject="n1")
    log.close()
    assert sum(entry["count"] + entry.get("suppressed", 0) for entry in read_entries(tmp_path)) == 5_002


def test_a_flood_of_one_kind_hides_no_other_kind(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    for number in range(200):
        for _ in range(30):
            log.write("refused", f"reason {number}")
    assert not log.write("refused", "one more"), "the attack took place"
    assert log.write("revoked", "revoked by a", subject="b")


@pytest.mark.parametrize("torn", [b'{"kind": "refu', b'{"kind": "started", "reason": "x"}'])
def test_a_line_that_a_crash_has_torn_costs_no_other(tmp_path: Path, clock: Clock, torn: bytes) -> None:
    log_in(tmp_path, clock).write("started", "one")
    with (tmp_path / AUDIT_FILE).open("ab") as file:
        file.write(torn)
    log = log_in(tmp_path, clock)
    assert log.write("started", "two")
    assert log.write("stopped", "three")
    reasons = [entry["reason"] for entry in read_entries(tmp_path)]
    assert [reason for reason in reasons if reason != "x"] == ["one", "two", "three"]
    assert ("x" in reasons) == torn.endswith(b"}"), "what is whole but for its end is kept"


def test_files_are_rotated_and_bounded(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock, file_bytes_max=2_000)
    for number in range(500):
        clock.now += 10
        log.write("refused", f"{number % 7} " + "x" * 100)
    paths = [tmp_path / AUDIT_FILE, *old_files(tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    assert len(paths) == OLD_FILES + 1
    assert all(path.stat().st_size <= 2_000 for path in paths)
    times = [entry["time"] for entry in read_entries(tmp_path)]
    assert times == sorted(times)
    assert len(times) > 20


def test_a_lost_folder_costs_the_log_and_nothing_else(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "node"
    log = log_in(folder, clock)
    assert not log.write("refused", "x")
    assert log.failures == 1
    folder.mkdir()
    assert log.write("refused", "x")


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="no such flag here")
def test_a_link_in_its_place_is_not_followed(tmp_path: Path, clock: Clock) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / AUDIT_FILE).symlink_to(victim)
    assert not log_in(tmp_path, clock).write("refused", "x")
    assert victim.read_text() == "mine"


@given(st.binary(max_size=200))
def test_any_line_is_an_entry_or_nothing(line: bytes) -> None:
    entry = parse_entry(line)
    assert entry is None or isinstance(entry["kind"], str)


def test_damaged_lines_are_left_out(tmp_path: Path, clock: Clock) -> None:
    log = log_in(tmp_path, clock)
    log.write("started", "x")
    with (tmp_path / AUDIT_FILE).open("ab") as file:
        file.write(b'{"kind": \n\xff\n[1]\n' + b"[" * 5000 + b"\n")
    log.write("stopped", "x")
    assert [entry["kind"] for entry in read_entries(tmp_path)] == ["started", "stopped"]


# --- identities ------------------------------------------------------------------------------------------------------

OWN = ("me", bytes(32))
KEY_A, KEY_B = b"a" * 32, b"b" * 32


def test_the_first_key_of_a_name_is_the_only_one() -> None:
    book = IdentityBook(OWN)
    assert book.bind("n", KEY_A, ("worker",))
    assert book.bind("n", KEY_A, ("client",))
    assert not book.bind("n", KEY_B, ("worker",))
    assert not book.bind("n", KEY_B, ("client",))
    assert not book.bind("me", KEY_A, ("worker",))
    assert book.bind("me", bytes(32), ("worker",))
    assert book.take_new() == ("n",)
    assert book.take_new() == ()


def test_a_client_is_not_kept_but_held_to_its_key_all_the_same() -> None:
    book = IdentityBook(OWN)
    assert book.bind("c", KEY_A, ("client",))
    assert not book.bind("c", KEY_B, ("client",))
    assert not book.bind("c", KEY_B, ("worker",))
    assert (book.take_new(), book.nodes()) == ((), {})
    assert book.bind("c", KEY_A, ("worker",))
    assert (book.take_new(), book.nodes()) == (("c",), {"c": KEY_A})


def test_clients_without_end_do_not_push_a_node_out() -> None:
    book = IdentityBook(OWN, {"n": KEY_A})
    for number in range(CLIENTS_MAX + 100):
        assert book.bind(f"client-{number}", KEY_B, ("client",))
    assert not book.bind("n", KEY_B, ("worker",))
    assert book.key_of("client-0") is None


def test_a_full_book_takes_no_newcomers_and_forgets_nobody() -> None:
    known = {f"n{number}": KEY_A for number in range(NODES_MAX)}
    book = IdentityBook(OWN, known)
    assert book.admit("new", KEY_A, ("worker",)) == FULL
    assert book.nodes() == known
    assert book.admit("n0", KEY_A, ("worker",)) == ""
    assert book.forget("n1")
    assert book.admit("new", KEY_A, ("worker",)) == ""


def test_cards_of_made_up_names_do_not_push_out_a_node_that_is_away() -> None:
    """One member tells them; so do names that it has made up before, and clients."""
    book = IdentityBook(OWN, {"away": KEY_A, "mallory": KEY_B})
    told = [book.admit(f"x{number}", KEY_B, ("worker",), told_by="mallory") for number in range(2 * NODES_MAX)]
    assert told == [""] * ACCOUNT_MAX + [TOO_MANY_NEW] * (2 * NODES_MAX - ACCOUNT_MAX)
    assert book.admit("y", KEY_B, ("worker",), told_by="x0") == TOO_MANY_NEW, "whom she introduced has no account"
    for number in range(NODES_MAX):
        assert book.admit(f"puppet-{number}", KEY_B, ("worker",)) in ("", TOO_MANY_NEW)
        book.admit(f"told-by-puppet-{number}", KEY_B, ("worker",), told_by=f"puppet-{number}")
        book.admit(f"told-by-client-{number}", KEY_B, ("worker",), told_by="client-1")
    assert len(book.nodes()) == 2 + 2 * ACCOUNT_MAX
    assert book.admit("away", KEY_B, ("worker",)) == OTHER_KEY
    assert book.admit("honest", KEY_A, ("worker",), told_by="away") == "", "others still introduce newcomers"
    assert book.admit("seed", KEY_A, ("worker",), dialled=True) == ""
    assert book.admit("behind-the-seed", KEY_A, ("worker",), told_by="seed") == ""


NAMES = st.sampled_from([f"n{number}" for number in range(12)])
ADMISSIONS = st.tuples(
    NAMES, st.sampled_from([KEY_A, KEY_B]), st.sampled_from(["worker", "client"]), st.none() | NAMES, st.booleans()
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, st.just(KEY_A), max_size=3), st.lists(ADMISSIONS, max_size=60))
def test_whatever_comes_no_pin_is_lost_and_the_book_stays_bounded(
    known: dict[str, bytes], admissions: list[tuple[str, bytes, str, str | None, bool]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kakeya_zmq.protocol.identities.NODES_MAX", 8)
        patch.setattr("kakeya_zmq.protocol.identities.ACCOUNT_MAX", 3)
        book = IdentityBook(OWN, known)
        pinned = dict(known)
        for node_id, key, role, told_by, dialled in admissions:
            refusal = book.admit(node_id, key, (role,), told_by=told_by, dialled=dialled and told_by is None)
            if refusal:
                assert refusal in (OTHER_KEY, FULL, TOO_MANY_NEW)
            else:
                assert book.key_of(node_id) == key
            assert book.nodes().items() >= pinned.items()
            pinned = book.nodes()
            assert len(pinned) <= 8
            assert {name: book.names_of(pinned[name]) for name in pinned} == {
                name: tuple(each for each in pinned if pinned[each] == pinned[name]) for name in pinned
            }


def test_a_listed_node_is_remembered_in_a_book_full_of_others() -> None:
    listed = {"listed": KEY_A, "old": KEY_A}

    def judge(node_id: str, key: bytes, roles: Collection[str]) -> str:
        return "" if listed.get(node_id) == key else "no"

    known = {"old": KEY_A} | {f"n{number}": KEY_B for number in range(NODES_MAX - 1)}
    book = IdentityBook(OWN, known, judge=judge)
    assert book.admit("listed", KEY_A, ("worker",)) == ""
    assert book.key_of("old") == KEY_A
    assert len(book.nodes()) == NODES_MAX


def test_a_forgotten_key_comes_back_by_its_node_only() -> None:
    book = IdentityBook(OWN, {"n": KEY_A})
    assert book.names_of(KEY_A) == ("n",)
    assert book.forget("n")
    assert not book.forget("n")
    assert (book.names_of(KEY_A), book.knows(KEY_A)) == ((), False)
    assert book.admit("n", KEY_A, ("worker",), told_by="relay") == FORGOTTEN, "a card that others still relay"
    assert book.key_of("n") is None
    assert book.admit("n", KEY_B, ("worker",), told_by="relay") == ""
    assert book.forget("n")
    assert book.admit("n", KEY_B, ("worker",)) == "", "it says hello itself"
    assert book.admit("n", KEY_B, ("worker",), told_by="relay") == ""
    assert (book.names_of(KEY_B), book.knows(KEY_B)) == (("n",), True)


def test_names_of_a_key() -> None:
    book = IdentityBook(OWN, {"one": KEY_A, "two": KEY_A})
    assert book.names_of(KEY_A) == ("one", "two")
    assert book.names_of(bytes(32)) == ("me",)
    book.bind("c", KEY_B, ("client",))
    assert (book.names_of(KEY_B), book.knows(KEY_B)) == ((), False)
    book.revoke(KEY_A)
    assert book.knows(KEY_A)
    assert book.admit("one", KEY_A, ("worker",)) == REVOKED
    book.reinstate(KEY_A)
    assert book.admit("one", KEY_A, ("worker",)) == ""


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(NODE_ID).filter(lambda name: len(name) <= NODE_ID_CHARACTERS_MAX),
        st.binary(min_size=32, max_size=32),
        max_size=20,
    )
)
def test_known_nodes_survive_a_restart(tmp_path_factory: pytest.TempPathFactory, nodes: dict[str, bytes]) -> None:
    folder = tmp_path_factory.mktemp("known")
    assert load_known_nodes(folder) == {}
    save_known_nodes(folder, nodes)
    assert list(load_known_nodes(folder).items()) == list(nodes.items())
    assert stat.S_IMODE((folder / KNOWN_NODES_FILE).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [KNOWN_NODES_FILE]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"n": 1}', '{"n": "00"}', '{"": "' + "00" * 32 + '"}', '{"n": "zz"}', "[" * 100_000, "\udcff"]
)
def test_a_damaged_file_of_known_nodes_is_refused_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / KNOWN_NODES_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_known_nodes(tmp_path)
    assert caught.value.remedy


@given(st.binary(max_size=300))
def test_any_file_of_known_nodes_is_read_or_refused(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / KNOWN_NODES_FILE).write_bytes(data)
        try:
            nodes = load_known_nodes(Path(folder))
        except ConfigError:
            return
        assert all(len(key) == 32 for key in nodes.values())
        json.dumps(list(nodes))
