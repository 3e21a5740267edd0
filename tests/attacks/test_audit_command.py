"""``kakeya audit`` on the machine of the attacked node: what an administrator sees, and what nobody may see."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

from tests.attacks.kit import Siege
from tests.fleet_rig import PROJECT, Fleet, run_kakeya, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

VERSION = "another protocol version"


def provoke(siege: Siege) -> None:
    with siege.expect(VERSION), siege.client() as client:
        client.send(wire.pack_header(wire.HELLO, wire.key_id(siege.psk), version=9), bytes(60))


def test_entries_as_text_and_as_json(siege: Siege, fleet: Fleet) -> None:
    provoke(siege)
    shown = run_kakeya("audit", "--node-id", "target", "--last", "1000", home=fleet.home)
    assert shown.returncode == 0, shown.stderr
    assert any("refused" in line and VERSION in line for line in shown.stdout.splitlines())
    assert "started" in shown.stdout
    listed = run_kakeya("audit", "--json", "--last", "1000", home=fleet.home)
    entries = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {entry["node"] for entry in entries} == {"target", "other"}
    assert [entry["time"] for entry in entries] == sorted(entry["time"] for entry in entries)
    assert {"started", "registered", "refused"} <= {entry["kind"] for entry in entries}
    few = run_kakeya("audit", "--json", "--last", "2", home=fleet.home)
    assert len(few.stdout.splitlines()) == 2


def test_unknown_node_and_bad_number(fleet: Fleet) -> None:
    for arguments in (("--node-id", "nobody"), ("--last", "-1"), ("--last", "x")):
        done = run_kakeya("audit", *arguments, home=fleet.home)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stdout == ""


def test_following(siege: Siege, fleet: Fleet) -> None:
    """Entries that come later are shown when they come; an interrupt ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "daemons", "audit", "--follow", "--json", "--last", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        cwd=PROJECT,
        env=fleet.environment,
        text=True,
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        lines.extend(iter(process.stdout.readline, ""))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: len(lines) >= 1, "the last entry is shown")
        with siege.client() as client:
            client.join(Identity.new("seen-while-following"), roles=("cache",))
            client.send(wire.pack_header(wire.HELLO, wire.key_id(siege.psk)), b"")
            session = client.join(Identity.new("seen-while-following-2"), roles=("cache",))
            client.ask(session, [12])
        wait_until(lambda: any("seen-while-following-2" in line for line in lines), "a new entry is shown")
    finally:
        process.terminate()
        assert process.wait(10) == 130
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def test_nothing_secret_is_in_any_file_of_the_node(siege: Siege, fleet: Fleet) -> None:
    """After all attacks: logs, audit files and known nodes hold neither the PSK nor an address of a peer."""
    texts = [path.read_text("utf-8", errors="replace") for path in (fleet.home / "logs").iterdir()]
    audits = [path.read_text("utf-8") for path in fleet.home.rglob("audit*.jsonl")]
    assert audits
    psk = siege.psk.decode()
    derived = [wire.purpose_key(siege.psk, purpose).hex() for purpose in ("kz hello", "kz session", "kz bus telemetry")]
    for text in (*texts, *audits):
        assert psk not in text
        assert not any(secret in text for secret in derived)
    assert not any("127.0.0.1" in text for text in audits)
    for pattern in ("audit*.jsonl", "known_nodes.json", "identity.key"):
        for path in fleet.home.rglob(pattern):
            assert path.stat().st_mode & 0o077 == 0, path
