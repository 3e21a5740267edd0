"""The kept state: private files, versions, damage, sums that survive, and a process killed in the middle of writing."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dashboard.benchmark_store import BenchmarkStore
from dashboard.database import MIGRATIONS, Database
from dashboard.ledger import LedgerRow
from dashboard.pairing import check_claim, make_claim, token_id, token_key
from dashboard.state import NetworkState, StateError
from tests.fleet_rig import PROJECT
from wire.errors import AuthenticationError, ConfigError
from wire.keys import NodeIdentity


def test_the_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        database = Database(tmp_path / "deep" / "state" / "network.sqlite3")
    finally:
        os.umask(before)
    NetworkState(database).add_tokens("n", 1, 0)
    files = list((tmp_path / "deep" / "state").iterdir())
    assert len(files) == 3  # the database, its log, its index
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "deep" / "state").stat().st_mode) == 0o700
    database.close()


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    path.touch(0o644)
    path.chmod(0o644)
    Database(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_schema_has_a_version_and_moves_forward_only(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    Database(path).close()
    newer = (*MIGRATIONS, "ALTER TABLE groups ADD COLUMN colour TEXT; CREATE TABLE more (a TEXT)")
    database = Database(path, migrations=newer)
    assert database.row("PRAGMA user_version")[0] == len(newer)  # type: ignore[index]
    database.rows("SELECT colour FROM groups")
    database.close()
    with pytest.raises(ConfigError, match="newer version"):
        Database(path)


def test_a_failed_migration_leaves_the_old_schema(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    Database(path).close()
    with pytest.raises(ConfigError):
        Database(path, migrations=(*MIGRATIONS, "CREATE TABLE half (a TEXT); nonsense"))
    database = Database(path)
    assert database.rows("SELECT name FROM sqlite_master WHERE name = 'half'") == []
    database.close()


def test_a_damaged_file_is_refused_with_a_remedy_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    path.write_bytes(b"this is no database at all, but long enough to be looked at" * 20)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="move it away"):
        Database(path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be opened"):
        Database(tmp_path / "network.sqlite3" / "inside-a-file")


def test_a_file_with_a_damaged_page_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    database = Database(path)
    with database.transaction() as connection:
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute("CREATE TABLE filler (a TEXT)")
        connection.executemany("INSERT INTO filler VALUES (?)", [("x" * 1000,)] * 200)
    database.close()
    content = bytearray(path.read_bytes())
    assert len(content) > 20 * page_bytes
    content[-12 * page_bytes : -10 * page_bytes] = b"\xff" * (2 * page_bytes)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        Database(path)


def test_what_is_no_regular_file_is_refused_and_its_mode_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"")
    target.chmod(0o644)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe", 0o644)
    for name in ("link", "dangling", "pipe", "."):
        with pytest.raises(ConfigError, match="regular file"):
            Database(tmp_path / name)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "pipe").stat().st_mode) == 0o644
    assert not (tmp_path / "nowhere").exists()


def test_everything_is_there_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    database = Database(path)
    state, runs = NetworkState(database), BenchmarkStore(database)
    made, _ = state.register("a", "host:1", "", "cache", 100.0)
    state.create_group("g", ["x", "y"], 100.0)
    state.add_tokens("n", 10, 4)
    run = runs.create("k", {"a": 1}, 1.0)
    runs.update(run.id, [{"name": "remote_compute", "ok": False}], None, None)
    state.save_counters([LedgerRow("n", 2**63 + 5, {"x": 1}, {"x": 2})], 100.0)
    database.close()
    database = Database(path)
    state, runs = NetworkState(database), BenchmarkStore(database)
    assert state.registrations(100.0) == [made]
    assert state.registrations(701.0) == []
    assert [group.node_ids for group in state.groups()] == [("x", "y")]
    assert (state.reported_tokens().completed, state.reported_tokens().kv_assisted) == (10, 4)
    live = runs.live()
    assert live is not None
    assert (live.id, live.summary["stages_failed"], len(live.stages)) == (run.id, 1, 1)
    assert state.load_counters() == [LedgerRow("n", 2**63 + 5, {"x": 1}, {"x": 2})]
    database.close()


def test_numbers_of_things_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(tmp_path / "network.sqlite3")
    state = NetworkState(database)
    for name in ("REGISTRATIONS_MAX", "GROUPS_MAX", "TOKEN_NODES_MAX"):
        monkeypatch.setattr(f"dashboard.state.{name}", 2)
    for number in range(2):
        state.register(f"a{number}", "host:1", "", "cache", 0.0)
        state.create_group("g", ["x"], 0.0)
        state.add_tokens(f"n{number}", 1, 0)
    with pytest.raises(StateError):
        state.register("c", "host:1", "", "cache", 0.0)
    with pytest.raises(StateError):
        state.create_group("g", ["x"], 0.0)
    with pytest.raises(StateError):
        state.add_tokens("n2", 1, 0)
    state.add_tokens("n1", 1, 0)
    state.register("c", "host:1", "", "cache", 601.0)  # the others have expired
    database.close()


def test_a_claim_holds_for_its_token_only() -> None:
    claim = make_claim("kn_pair_" + "a" * 24, "n", NodeIdentity.generate())
    check_claim(claim, token_key("kn_pair_" + "a" * 24))
    with pytest.raises(AuthenticationError):
        check_claim(claim, token_key("kn_pair_" + "b" * 24))
    assert token_id("kn_pair_" + "a" * 24) == claim.token_id


WRITER = """
import sys, itertools
from pathlib import Path
from dashboard.benchmark_store import BenchmarkStore
from dashboard.database import Database
from dashboard.state import NetworkState
database = Database(Path(sys.argv[1]))
state, runs = NetworkState(database), BenchmarkStore(database)
for number in itertools.count():
    made, _ = state.register(f"alias-{number}", "host:1", "", "cache", 1e9)
    run = runs.create("k", {"number": number}, 1.0)
    runs.update(run.id, [{"name": "remote_compute"}] * 3, "completed", 2.0)
    state.add_tokens("n", 1, 1)
    print(made.id, run.id, flush=True)
"""


@pytest.mark.parametrize("writes", [1, 17, 60])
def test_a_killed_process_loses_no_finished_write_and_the_database_opens(tmp_path: Path, writes: int) -> None:
    path = tmp_path / "network.sqlite3"
    finished: list[tuple[str, str]] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    ) as process:
        assert process.stdout is not None
        while len(finished) < writes:
            registration, run = process.stdout.readline().split()
            finished.append((registration, run))
        process.send_signal(signal.SIGKILL)
        for line in process.stdout.read().splitlines():
            if len(words := line.split()) == 2:
                finished.append((words[0], words[1]))
    database = Database(path)
    assert database.row("PRAGMA integrity_check")[0] == "ok"  # type: ignore[index]
    state, runs = NetworkState(database), BenchmarkStore(database)
    kept = {registration.id for registration in state.registrations(1e9)}
    assert kept >= {registration for registration, _ in finished}
    for _, run_id in finished[-50:]:
        run = runs.run(run_id)
        assert (run.status, len(run.stages), run.summary["stages_total"]) == ("completed", 3, 3)
    assert len(finished) <= state.reported_tokens().completed <= len(finished) + 1
    database.close()


def test_two_processes_may_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "network.sqlite3"
    first, second = Database(path), Database(path)
    for database in (first, second) * 5:
        NetworkState(database).add_tokens("n", 1, 0)
    assert NetworkState(first).reported_tokens().completed == 10
    first.close()
    second.close()


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "network.sqlite3")

    def write_twice() -> None:
        with database.transaction() as connection:
            connection.execute("INSERT INTO token_counters VALUES ('n', 1, 1)")
            connection.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(sqlite3.OperationalError):
        write_twice()
    assert NetworkState(database).reported_tokens().completed == 0
    database.close()
