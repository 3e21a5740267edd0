"""A FIFO, device, socket or folder where a state file belongs: refused in one line at once, and told once while running."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemons.bus_note import BusNote, nodes_here
from daemons.dashboard_process import running_dashboard
from daemons.fleet import load_fleet
from daemons.membership import next_incarnation
from daemons.node_lock import NodeLock
from daemons.run import remove_ready_files
from daemons.security import Security
from dashboard.database import Database
from dashboard.discovery import local_buses
from dashboard.speakers import Speakers
from kakeya_zmq.audit import AUDIT_FILE, AuditLog, read_entries
from kakeya_zmq.config import Settings, read_config_file
from kakeya_zmq.file_lock import LOCK_FILE, locked
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, load_known_nodes, save_known_nodes
from kakeya_zmq.model.revision import DigestCache
from kakeya_zmq.revocation_file import REVOCATIONS_FILE, load_revocations
from kakeya_zmq.roster import Roster
from tests.odd_files import ODD, give_to_another_user, not_blocking
from tests.unit.card_kit import identity
from tests.unit.test_security_desk import desk, reactor, settings, until
from wire.errors import ConfigError, UnsafeFileError
from wire.files import NotRegularFile

__all__ = ["reactor", "settings"]

odd = pytest.mark.parametrize("make", ODD.values(), ids=list(ODD))
ROSTER = f'[nodes.{{}}]\nkey = "{identity("box").public_key.hex()}"\n'

LOADERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "roster": ("fleet.toml", lambda folder: Roster.load(folder / "fleet.toml")),
    "settings": ("kakeya.toml", lambda folder: read_config_file(folder / "kakeya.toml", "cache")),
    "known nodes": (KNOWN_NODES_FILE, load_known_nodes),
    "revocations": (REVOCATIONS_FILE, load_revocations),
    "incarnation": ("incarnation", next_incarnation),
    "audit": (AUDIT_FILE, lambda folder: AuditLog(folder, monotonic=float, wall=float)),
    "lock": ("lock", lambda folder: NodeLock(folder, "mac")),
    "dashboard state": ("state.sqlite3", lambda folder: Database(folder / "state.sqlite3")),
    "its log": ("state.sqlite3-wal", lambda folder: Database(folder / "state.sqlite3")),
    "its journal": ("state.sqlite3-journal", lambda folder: Database(folder / "state.sqlite3")),
}


@odd
@pytest.mark.parametrize(("name", "load"), LOADERS.values(), ids=list(LOADERS))
def test_what_is_no_regular_file_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], None], name: str, load: Callable[[Path], object]
) -> None:
    make(tmp_path / name)
    with not_blocking(), pytest.raises(ConfigError, match="not a regular file") as caught:
        load(tmp_path)
    assert type(caught.value) is ConfigError, "exit code 2"
    assert name in str(caught.value)
    assert caught.value.remedy


@odd
def test_notes_of_what_runs_that_are_no_files(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    for name in ("fleet.json", "dashboard.json", "node.bus", "node.ready"):
        make(tmp_path / "run" / name)
    with not_blocking():
        with pytest.raises(ConfigError, match=r"fleet\.json cannot be used: it is not a regular file"):
            load_fleet()
        assert running_dashboard() is None
        assert nodes_here(tmp_path) == ()
        assert local_buses(tmp_path) == frozenset()
        BusNote(tmp_path, "node").remove()
        remove_ready_files(str(tmp_path / "run" / "node.ready"))


@odd
def test_a_lock_that_is_no_file_is_an_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK_FILE)
    with not_blocking(), pytest.raises(NotRegularFile), locked(tmp_path):
        pass


@odd
def test_the_digests_of_weights_are_made_anew(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "digests.json")
    with not_blocking():
        DigestCache(tmp_path / "digests.json")


@odd
def test_an_audit_log_that_becomes_something_else_costs_the_log_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    log = AuditLog(tmp_path, monotonic=lambda: 0.0, wall=lambda: 0.0)
    assert log.write("key", "before")
    (tmp_path / AUDIT_FILE).rename(tmp_path / "audit.2.jsonl")
    make(tmp_path / AUDIT_FILE)
    make(tmp_path / "audit.1.jsonl")
    with not_blocking():
        assert not log.write("key", "after")
        assert [entry["reason"] for entry in read_entries(tmp_path)] == ["before"]
    assert log.failures == 1


class TestHuge:
    """What no file of ours can be is not read into memory."""

    @pytest.mark.parametrize("name", ["roster", "settings", "known nodes", "revocations"])
    def test_a_file_that_is_too_large_is_refused(self, tmp_path: Path, name: str) -> None:
        file, load = LOADERS[name]
        (tmp_path / file).touch(0o600)
        os.truncate(tmp_path / file, 1 << 40)
        with pytest.raises(ConfigError, match="larger than"):
            load(tmp_path)

    def test_notes_that_are_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
        (tmp_path / "run").mkdir()
        for name in ("fleet.json", "dashboard.json", "node.bus", "node.ready"):
            (tmp_path / "run" / name).touch(0o600)
            os.truncate(tmp_path / "run" / name, 1 << 40)
        with pytest.raises(ConfigError, match="larger than"):
            load_fleet()
        assert running_dashboard() is None
        assert nodes_here(tmp_path) == ()
        assert local_buses(tmp_path) == frozenset()

    def test_an_incarnation_that_is_too_large_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "incarnation").touch()
        os.truncate(tmp_path / "incarnation", 1 << 40)
        assert next_incarnation(tmp_path) > 0

    def test_of_an_audit_log_that_is_too_large_the_end_is_read(self, tmp_path: Path) -> None:
        with (tmp_path / AUDIT_FILE).open("wb") as file:
            file.truncate(1 << 40)
            file.seek(0, os.SEEK_END)
            file.write(b'\n{"kind": "key", "reason": "last"}\n')
        assert [entry["reason"] for entry in read_entries(tmp_path)] == ["last"]


class TestWhoMayWrite:
    """The roster says who may do what, and the settings say which roster: others may change neither."""

    @pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
    @pytest.mark.parametrize(("name", "load"), [LOADERS["roster"], LOADERS["settings"]], ids=["roster", "settings"])
    def test_a_file_that_others_may_write_to(
        self, tmp_path: Path, name: str, load: Callable[[Path], object], mode: int
    ) -> None:
        path = tmp_path / name
        path.touch()
        path.chmod(mode)
        tmp_path.chmod(0o755)
        with pytest.raises(UnsafeFileError, match="can be changed by other users") as caught:
            load(tmp_path)
        assert caught.value.remedy == f"chmod go-w {path}"

    @pytest.mark.parametrize(("name", "load"), [LOADERS["roster"], LOADERS["settings"]], ids=["roster", "settings"])
    def test_a_file_of_another_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, load: Callable[[Path], object]
    ) -> None:
        (tmp_path / name).touch()
        give_to_another_user(tmp_path / name, monkeypatch)
        with pytest.raises(UnsafeFileError, match="belongs to another user"):
            load(tmp_path)

    def test_settings_that_others_may_read_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "kakeya.toml").write_text("capacity = 3\n", encoding="utf-8")
        (tmp_path / "kakeya.toml").chmod(0o644)
        assert read_config_file(tmp_path / "kakeya.toml", "primary") == {"capacity": 3}


# --- while a node runs -------------------------------------------------------------------------------------------------


def _open_to_others(path: Path) -> None:
    path.parent.chmod(0o755)
    path.write_text(ROSTER.format("other"), encoding="utf-8")
    path.chmod(0o666)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


BAD = {**ODD, "open to others": _open_to_others, "huge": _huge}


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    """In one step, as a careful editor would."""
    make(path.with_name("new"))
    if path.with_name("new").is_dir():
        path.unlink()
    path.with_name("new").replace(path)


def _good(path: Path) -> None:
    path.write_text(ROSTER.format("other"), encoding="utf-8")
    path.chmod(0o644)


def _listed(security: Security) -> list[str]:
    roster = security.entitlement.access.roster
    assert roster is not None
    return list(roster.nodes)


def _look_again(reactor: Reactor, security: Security) -> None:
    looked = security.entitlement._next_look
    until(reactor, lambda: security.entitlement._next_look > looked)


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_a_node_keeps_its_roster_and_tells_once(
    reactor: Reactor, settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(ROSTER.format("box"), encoding="utf-8")
    security = desk(reactor, replace(settings, roster_file=str(path)), tmp_path)
    _replace(path, make)
    with not_blocking():
        until(reactor, lambda: security.entitlement.error != "")
        _look_again(reactor, security)
    told = [record.getMessage() for record in caplog.records if "the roster is not read again" in record.getMessage()]
    assert len(told) == 1
    assert str(path) in told[0]
    assert _listed(security) == ["box"]
    if path.is_dir():
        path.rmdir()
        path.touch()
    _replace(path, _good)
    until(reactor, lambda: security.entitlement.error == "")
    assert _listed(security) == ["other"]
    security.close("done")


def test_a_mode_is_noticed_that_changes_alone(reactor: Reactor, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(ROSTER.format("box"), encoding="utf-8")
    security = desk(reactor, replace(settings, roster_file=str(path)), tmp_path)
    tmp_path.chmod(0o755)
    path.chmod(0o666)
    until(reactor, lambda: "chmod go-w" in security.entitlement.error)
    path.chmod(0o644)
    until(reactor, lambda: security.entitlement.error == "")
    assert _listed(security) == ["box"]
    security.close("done")


@pytest.mark.parametrize("name", [KNOWN_NODES_FILE, REVOCATIONS_FILE])
@odd
def test_a_node_goes_on_without_files_that_become_something_else(
    reactor: Reactor,
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    name: str,
) -> None:
    save_known_nodes(tmp_path, {"box": identity("box").public_key})
    security = desk(reactor, settings, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with not_blocking():
        for _ in range(3):
            _look_again(reactor, security)
    told = [record.getMessage() for record in caplog.records if "not a regular file" in record.getMessage()]
    assert len(told) == 1
    assert security.identities.key_of("box") == identity("box").public_key
    security.close("done")


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_a_reader_of_telemetry_keeps_its_roster_and_tells_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(ROSTER.format("box"), encoding="utf-8")
    speakers = Speakers(tmp_path / "telemetry", roster_file=path)
    _replace(path, make)
    with not_blocking():
        for now in (1.0, 2.0, 3.0):
            speakers.look(now)
    assert caplog.text.count("the changed roster is not used") == 1
    assert speakers.admit("box", identity("box").public_key) == ""
    assert speakers.admit("other", identity("box").public_key) != ""
