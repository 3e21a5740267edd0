"""Several fleet keys in one file: reading, rotating, retiring; and the commands for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.command import main
from daemons.keys_command import key_states, run_key_action
from kakeya_zmq.known_nodes import load_known_nodes, save_known_nodes
from wire.errors import ConfigError, SecretFileError
from wire.keyring import KEYS_MAX, KeyFile, KeyRing
from wire.keys import KEY_RING_HEADER, FleetKey, NodeIdentity, write_secret_file

TEXTS = st.lists(
    st.text(alphabet="0123456789abcdef", min_size=16, max_size=64).map(str.encode),
    min_size=1,
    max_size=KEYS_MAX,
    unique=True,
)


def ring_file(folder: Path) -> Path:
    path = folder / "fleet.psk"
    write_secret_file(path, FleetKey.generate() + b"\n")
    return path


@given(texts=TEXTS)
def test_a_ring_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, texts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("ring") / "fleet.psk"
    ring = KeyRing(tuple(map(FleetKey, texts)))
    ring.save(path)
    assert KeyRing.load(path) == ring
    assert path.stat().st_mode & 0o777 == 0o600
    # Who knows only one key takes the one that every node admits.
    assert FleetKey.load(path) == ring.oldest


def test_a_key_is_rotated_and_the_old_one_retired(tmp_path: Path) -> None:
    path = ring_file(tmp_path)
    old = FleetKey.load(path)
    assert run_key_action("rotate", "", path)
    both = KeyRing.load(path)
    assert both.oldest == old
    assert both.newest != old
    assert run_key_action("retire", "", path)
    assert KeyRing.load(path).keys == (both.newest,)
    # One key again: the file is what `openssl rand -hex 32` would have made.
    assert path.read_bytes() == both.newest.psk + b"\n"
    with pytest.raises(ConfigError, match="only one key"):
        run_key_action("retire", "", path)


def test_what_to_do_next_is_told_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ring_file(tmp_path)
    assert main(["key", "rotate", "--fleet-psk-file", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("made a new fleet key")
    assert lines[2].startswith("When all of them have it")


def test_a_certain_key_is_retired_by_its_id(tmp_path: Path) -> None:
    path = ring_file(tmp_path)
    run_key_action("rotate", "", path)
    ring = KeyRing.load(path)
    run_key_action("retire", ring.newest.key_id.hex(), path)
    assert KeyRing.load(path).keys == (ring.oldest,)
    run_key_action("rotate", "", path)
    for wrong in ("zz", "00" * 8):
        with pytest.raises(ConfigError):
            run_key_action("retire", wrong, path)


def test_there_are_only_so_many_keys(tmp_path: Path) -> None:
    path = ring_file(tmp_path)
    for _ in range(KEYS_MAX - 1):
        run_key_action("rotate", "", path)
    with pytest.raises(ConfigError, match="1 to 4"):
        run_key_action("rotate", "", path)
    assert len(KeyRing.load(path).keys) == KEYS_MAX


@pytest.mark.parametrize(
    "content", [KEY_RING_HEADER, KEY_RING_HEADER + b"\nshort", KEY_RING_HEADER + b"\n" + 2 * (b"k" * 32 + b"\n")]
)
def test_a_ring_that_is_no_ring(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fleet.psk"
    write_secret_file(path, content)
    with pytest.raises(SecretFileError):
        KeyRing.load(path)


def test_a_key_with_a_line_break_is_not_put_into_a_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "fleet.psk"
    write_secret_file(path, b"a binary key \n of two lines")
    assert FleetKey.load(path).psk == b"a binary key \n of two lines"
    with pytest.raises(ConfigError, match="not one line"):
        run_key_action("rotate", "", path)


def test_a_running_process_sees_the_change_and_survives_a_broken_file(tmp_path: Path) -> None:
    path = ring_file(tmp_path)
    file = KeyFile(path)
    assert not file.refresh()
    both = file.ring.rotated(FleetKey.generate())
    both.save(path)
    assert file.refresh()
    assert file.valid_keys() == (both.oldest, both.newest)
    path.chmod(0o644)
    assert not file.refresh()
    assert "open to other users" in file.error
    assert file.ring == both
    path.unlink()
    assert not file.refresh()
    assert file.ring == both


def test_no_line_about_keys_holds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    path = ring_file(tmp_path)
    told = run_key_action("rotate", "", path)
    identity = NodeIdentity.load_or_create(tmp_path / "nodes" / "me" / "identity.key")
    rows = key_states(path)
    assert [row["key"] for row in rows] == ["fleet key", "older fleet key, still valid", "identity of me"]
    assert identity.public_key.hex() in rows[-1]["state"], "what a roster needs"
    for key in KeyRing.load(path).keys:
        assert key.psk.decode() not in told + repr(rows) + repr(KeyRing.load(path))


def test_a_pinned_key_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    folder = tmp_path / "nodes" / "me"
    NodeIdentity.load_or_create(folder / "identity.key")
    save_known_nodes(folder, {"old-mac": bytes(32), "other": bytes(range(32))})
    assert "me" in run_key_action("forget", "old-mac", tmp_path / "fleet.psk")
    assert load_known_nodes(folder) == {"other": bytes(range(32))}
    for argument in ("old-mac", ""):
        with pytest.raises(ConfigError):
            run_key_action("forget", argument, tmp_path / "fleet.psk")
    for reader in (tmp_path / "telemetry", tmp_path / "telemetry" / "0123456789abcdef"):
        reader.mkdir()
        save_known_nodes(reader, {"old-mac": bytes(32), "other": bytes(range(32))})
    assert "dashboard" in run_key_action("forget", "old-mac", tmp_path / "fleet.psk")
    assert load_known_nodes(reader) == load_known_nodes(reader.parent) == {"other": bytes(range(32))}


def test_no_beginning_of_a_ring_is_taken_for_a_key(tmp_path: Path) -> None:
    path = tmp_path / "fleet.psk"
    KeyRing((FleetKey(b"n" * 32), FleetKey(b"o" * 32))).save(path)
    whole = path.read_bytes()
    assert KeyRing.load(path).newest.psk == b"n" * 32
    for length in range(len(whole.rstrip())):
        path.write_bytes(whole[:length])
        with pytest.raises(SecretFileError):
            KeyRing.load(path)
        with pytest.raises(SecretFileError):
            FleetKey.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + whole)
    with pytest.raises(SecretFileError):
        KeyRing.load(path)
