"""Whose telemetry is taken under which name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dashboard.speakers import NOT_PAIRED, OTHER_SPEAKER, Speakers, reader_folders, speakers_of
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, forget_node, load_known_nodes
from kakeya_zmq.protocol.identities import ACCOUNT_MAX, TOO_MANY_NEW
from kakeya_zmq.roster import NOT_LISTED, OTHER_KEY_LISTED
from wire.errors import ConfigError
from wire.keys import FleetKey

ONE, OTHER = b"1" * 32, b"2" * 32


def watched(speakers: Speakers) -> list[str]:
    rebound: list[str] = []
    speakers.rebound = rebound.append
    return rebound


def test_the_first_key_heard_is_kept_over_a_restart(tmp_path: Path) -> None:
    speakers = Speakers(tmp_path / "telemetry")
    assert speakers.admit("a", ONE) == ""
    assert speakers.admit("a", OTHER) == OTHER_SPEAKER
    assert speakers.admit("a", ONE) == ""
    speakers.look(0.0)
    again = Speakers(tmp_path / "telemetry")
    assert again.knows("a")
    assert again.admit("a", OTHER) == OTHER_SPEAKER
    assert again.admit("a", ONE) == ""
    assert (tmp_path / "telemetry" / KNOWN_NODES_FILE).stat().st_mode & 0o777 == 0o600


def test_it_is_written_at_the_end_also_when_it_is_not_due(tmp_path: Path) -> None:
    speakers = Speakers(tmp_path)
    speakers.admit("a", ONE)
    speakers.look(0.0)
    speakers.admit("b", OTHER)
    speakers.look(1.0)
    assert set(load_known_nodes(tmp_path)) == {"a"}
    speakers.save()
    assert set(load_known_nodes(tmp_path)) == {"a", "b"}


def test_a_forgotten_key_makes_place_for_the_next_also_while_the_reader_runs(tmp_path: Path) -> None:
    speakers = Speakers(tmp_path)
    rebound = watched(speakers)
    speakers.admit("a", ONE)
    speakers.look(0.0)
    assert forget_node(tmp_path, "a")
    speakers.admit("b", ONE)
    speakers.look(10.0)  # it writes at the same time: what was taken out stays out
    assert rebound == ["a"]
    assert set(load_known_nodes(tmp_path)) == {"b"}
    assert speakers.admit("a", OTHER) == ""
    assert speakers.admit("a", ONE) == OTHER_SPEAKER


def test_two_readers_share_what_they_heard(tmp_path: Path) -> None:
    one, other = Speakers(tmp_path), Speakers(tmp_path)
    rebound = watched(other)
    one.admit("a", ONE)
    one.look(0.0)
    other.admit("a", OTHER)  # not written yet: the file has the first word
    other.admit("b", OTHER)
    other.look(0.0)
    assert rebound == ["a"]
    assert other.admit("a", OTHER) == OTHER_SPEAKER
    one.look(1.0)
    assert one.admit("b", ONE) == OTHER_SPEAKER
    assert load_known_nodes(tmp_path) == {"a": ONE, "b": OTHER}


def test_a_paired_node_has_the_key_it_was_paired_with(tmp_path: Path) -> None:
    paired: dict[str, bytes] = {}
    speakers = Speakers(tmp_path, paired=lambda: dict(paired))
    rebound = watched(speakers)
    assert speakers.admit("a", ONE) == ""
    paired["a"] = OTHER
    speakers.look(0.0)
    assert speakers.admit("a", ONE) == NOT_PAIRED
    assert speakers.admit("a", OTHER) == ""
    assert rebound == ["a"]


def test_a_roster_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Speakers(tmp_path / "telemetry", roster_file=tmp_path / "fleet.toml", roster_is_named=True)


def test_a_roster_has_the_first_word(tmp_path: Path) -> None:
    roster = tmp_path / "fleet.toml"
    speakers = Speakers(tmp_path / "telemetry", roster_file=roster, paired=lambda: {"a": OTHER})
    assert speakers.admit("x", ONE) == ""
    roster.write_text(f'[nodes.a]\nkey = "{ONE.hex()}"\nroles = ["cache"]\n', encoding="utf-8")
    speakers = Speakers(tmp_path / "telemetry", roster_file=roster, paired=lambda: {"a": OTHER})
    assert speakers.admit("a", OTHER) == OTHER_KEY_LISTED
    assert speakers.admit("a", ONE) == ""
    assert speakers.admit("x", ONE) == NOT_LISTED
    rebound = watched(speakers)
    roster.write_text(f'[nodes.a]\nkey = "{OTHER.hex()}"\nroles = ["worker", "cache"]\n', encoding="utf-8")
    speakers.look(0.0)
    assert speakers.admit("a", ONE) == OTHER_KEY_LISTED
    assert speakers.admit("a", OTHER) == ""
    assert rebound == ["a"]
    roster.unlink()  # maybe on its way to being replaced
    speakers.look(1.0)
    assert speakers.admit("x", ONE) == NOT_LISTED


def test_made_up_names_are_bounded_and_push_out_nobody(tmp_path: Path) -> None:
    speakers = Speakers(tmp_path)
    assert speakers.admit("known", ONE) == ""
    results = [speakers.admit(f"made-up-{number}", number.to_bytes(32, "big")) for number in range(2 * ACCOUNT_MAX)]
    assert set(results) == {"", TOO_MANY_NEW}
    assert speakers.admit("known", ONE) == ""
    assert speakers.admit("known", OTHER) == OTHER_SPEAKER


def test_a_damaged_file_is_not_ignored(tmp_path: Path) -> None:
    (tmp_path / KNOWN_NODES_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="damaged"):
        Speakers(tmp_path)


def test_a_file_that_is_damaged_or_gone_meanwhile_changes_nothing(tmp_path: Path) -> None:
    speakers = Speakers(tmp_path)
    speakers.admit("a", ONE)
    speakers.look(0.0)
    (tmp_path / KNOWN_NODES_FILE).write_text("[]", encoding="utf-8")
    speakers.look(1.0)
    assert speakers.admit("a", OTHER) == OTHER_SPEAKER
    os.unlink(tmp_path / KNOWN_NODES_FILE)
    speakers.look(2.0)
    assert speakers.admit("a", OTHER) == OTHER_SPEAKER


def test_another_fleets_key_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAKEYA_FLEET_PSK_FILE", raising=False)
    monkeypatch.delenv("KAKEYA_ROSTER_FILE", raising=False)
    (tmp_path / "fleet.toml").write_text(f'[nodes.a]\nkey = "{ONE.hex()}"\nroles = ["cache"]\n', encoding="utf-8")
    key = FleetKey(b"k" * 32).telemetry_key()
    named = tmp_path / "other.key"
    named.write_bytes(key.to_text())
    own, elsewhere = speakers_of(tmp_path, key, None), speakers_of(tmp_path, key, named)
    assert own.admit("x", ONE) == NOT_LISTED
    assert elsewhere.admit("x", ONE) == ""
    own.admit("a", ONE)
    own.save()
    elsewhere.save()
    assert sorted(name for folder in reader_folders(tmp_path) for name in load_known_nodes(folder)) == ["a", "x"]
    assert len(reader_folders(tmp_path)) == 2
