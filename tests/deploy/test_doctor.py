"""Faults are planted, and `kakeya doctor` finds each, names the remedy and says so by its exit code."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemons import dashboard_flags
from daemons.command import main
from daemons.doctor.finding import Finding, Level
from daemons.doctor.machine import judge_budgets, judge_disk
from daemons.doctor.model import Speed, judge_probe, judge_speed
from daemons.doctor.network import NodeView, Reach, each_once
from daemons.doctor.network_findings import judge_nodes, judge_reach
from daemons.doctor.software import judge_packages, judge_python
from daemons.doctor.starting import is_writable, judge_levels
from dashboard.server import DEFAULT_ADDRESS
from kakeya_zmq.io.addresses import parse_address
from kakeya_zmq.io.connections import REFUSED_WRONG_PSK
from tests.deploy.doctor_rig import Doctor
from tests.fleet_rig import PROJECT, Fleet, run_kakeya, wait_until
from tests.proxy import free_port
from wire.keys import write_secret_file
from wire.limits import GIB

# --- this machine ------------------------------------------------------------------------------------------------------


def test_a_machine_in_order_has_no_problems(doctor: Doctor) -> None:
    found = doctor.findings()
    assert [row for row in found if row["level"] == "problem"] == []
    assert {"python", "packages", "settings", "keys", "disk", "memory", "ports", "services"} <= {r["subject"] for r in found}
    assert all(bool(row["remedy"]) == (row["level"] != "ok") for row in found)


def test_a_missing_fleet_key(doctor: Doctor) -> None:
    (doctor.home / "fleet.psk").unlink()
    assert "kakeya key new" in doctor.one("no fleet key")["remedy"]


@pytest.mark.parametrize("name", ["fleet.psk", "network_api_key", "nodes/n/identity.key", "tenants/t.key"])
def test_a_key_that_others_can_read(doctor: Doctor, name: str) -> None:
    path = doctor.home / name
    if not path.exists():
        write_secret_file(path, b"0" * 64)
    path.chmod(0o644)
    assert "chmod 600" in doctor.one("open to other users")["remedy"]


def test_a_broken_telemetry_key(doctor: Doctor) -> None:
    write_secret_file(doctor.home / "telemetry.key", b"nonsense")
    found = [row for row in doctor.findings() if row["level"] == "problem"]
    assert [row["subject"] for row in found] == ["keys"]
    assert found[0]["remedy"]


def test_a_folder_of_keys_that_others_may_write_to(doctor: Doctor) -> None:
    doctor.home.chmod(0o777)
    assert "chmod go-w" in doctor.one("others may write")["remedy"]


def test_a_misspelt_setting(doctor: Doctor) -> None:
    (doctor.home / "kakeya.toml").write_text("cache_bg = 1.0\n")
    assert "cache_gb" in doctor.one("unknown setting 'cache_bg'")["remedy"]


def test_the_file_that_settings_are_from_is_named(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*arguments: str) -> str:
        (found,) = [row for row in doctor.findings(*arguments) if row["subject"] == "settings"]
        return found["text"]

    usual, own, other = (doctor.home / name for name in ("kakeya.toml", "own.toml", "other.toml"))
    own.write_text(usual.read_text())
    other.write_text("cache_bg = 1\n")
    assert named() == f"from {usual} and the environment"
    assert named("--config", str(own)) == f"from {own} and the environment"
    monkeypatch.setenv("KAKEYA_CONFIG", str(own))
    assert named() == f"from {own} and the environment"
    assert f"in the configuration file {other}" in named("--config", str(other))
    doctor.install("kakeya-worker.service")
    assert named() == f"from {own} and the environment; of kakeya-worker, as it is installed, and from {usual}"
    monkeypatch.delenv("KAKEYA_CONFIG")
    assert named() == f"from {usual} and the environment; of kakeya-worker, as it is installed, and from the same file"
    other.unlink()
    monkeypatch.setenv("KAKEYA_CONFIG", str(other))
    assert named() == f"the configuration file {other} cannot be read: No such file or directory"
    monkeypatch.delenv("KAKEYA_CONFIG")
    usual.unlink()
    (doctor.units / "kakeya-worker.service").unlink()
    assert named() == "defaults and the environment"


@pytest.mark.parametrize("command", [["cache"], ["config"], ["doctor"]])
def test_the_help_tells_which_file_is_taken(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--config FILE TOML file (default: the one that KAKEYA_CONFIG names, else ~/.kakeya/kakeya.toml, if any)" in told


def test_a_misspelt_variable(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_CACHE_BG", "1")
    found = doctor.one("KAKEYA_CACHE_BG is not known")
    assert (found["level"], found["subject"]) == ("warning", "settings")
    assert "KAKEYA_CACHE_GB" in found["remedy"]
    done = run_kakeya(
        "cache", "--bind", "192.0.2.1:1", home=doctor.home, environment={"KAKEYA_CACHE_BG": "1", "KAKEYA_WORKER_MODEL": "/m"}
    )
    warnings = [line for line in done.stderr.splitlines() if "not known" in line]
    assert len(warnings) == 1, "the daemon says so at its start"
    assert "KAKEYA_CACHE_BG is not known and has no effect: did you mean KAKEYA_CACHE_GB?" in warnings[0]
    done = run_kakeya("dashboard", "--bind", "192.0.2.1:1", home=doctor.home, environment={"KAKEYA_DASHBOARD_BUSS": "a:1"})
    assert "KAKEYA_DASHBOARD_BUSS is not known and has no effect: did you mean KAKEYA_DASHBOARD_BUS?" in done.stderr
    shown = run_kakeya("config", "show", "--role", "cache", home=doctor.home, environment={"KAKEYA_CACHE_BG": "1"})
    assert "KAKEYA_CACHE_BG is not known" in shown.stdout


def test_notes_of_kakeya_up_that_are_damaged(doctor: Doctor) -> None:
    (doctor.home / "run").mkdir()
    (doctor.home / "run" / "fleet.json").write_text("{bad")
    assert "kakeya down" in doctor.one("fleet.json cannot be used")["remedy"]


def test_a_taken_port_and_who_has_it(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("KAKEYA_BIND", f"127.0.0.1:{other.getsockname()[1]}")
        found = doctor.one("is taken by")
    assert f"(process {os.getpid()})" in found["text"]
    assert "--bind" in found["remedy"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process, no daemon of ours, listens at."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_taken_port_of_the_dashboard_and_who_has_it(doctor: Doctor, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_DASHBOARD_BIND", f"127.0.0.1:{taken}")
    found = doctor.one(f"dashboard: 127.0.0.1:{taken} is taken by")
    assert (found["level"], found["subject"]) == ("problem", "ports")
    assert f"(process {os.getpid()})" in found["text"]
    assert "KAKEYA_DASHBOARD_BIND" in found["remedy"]
    monkeypatch.setenv("KAKEYA_DASHBOARD_BIND", "8090")
    assert "host:port" in doctor.one("dashboard: not an address")["remedy"]


def test_a_taken_port_is_a_warning_where_nobody_has_asked_for_a_dashboard(
    doctor: Doctor, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_address(dashboard_flags.DEFAULT_BIND) == DEFAULT_ADDRESS
    monkeypatch.delenv("KAKEYA_DASHBOARD_BIND")
    monkeypatch.setattr(dashboard_flags, "DEFAULT_BIND", f"127.0.0.1:{taken}")
    assert doctor.one(f"dashboard: 127.0.0.1:{taken} is taken by")["level"] == "warning"


def test_a_taken_port_of_an_installed_dashboard(doctor: Doctor, taken: int) -> None:
    doctor.install("kakeya-dashboard.service", KAKEYA_NETWORK_HTTP_PORT=str(taken))
    found = doctor.one(f"dashboard: 127.0.0.1:{taken} is taken by")
    assert found["level"] == "problem"
    assert "KAKEYA_NETWORK_HTTP_PORT" in found["remedy"]
    assert len([row for row in doctor.findings() if row["text"].startswith("dashboard: ")]) == 1, "no other would be started"


def test_a_dashboard_at_its_own_port_is_in_order_and_another_daemon_there_is_not(
    doctor: Doctor, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_DASHBOARD_BIND", f"127.0.0.1:{taken}")
    for role, level in {"dashboard": "ok", "worker": "problem"}.items():
        monkeypatch.setattr(psutil.Process, "cmdline", lambda process, role=role: ["python", "-m", "daemons", role])
        (found,) = [row for row in doctor.findings() if row["text"].startswith("dashboard: ")]
        assert (found["level"], f"a kakeya {role} (process {os.getpid()})" in found["text"]) == (level, True)


def test_an_address_of_another_machine(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_BIND", "192.0.2.1:51051")
    assert "--bind" in doctor.one("cannot be bound")["remedy"]


def test_a_missing_model(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_MODEL", str(doctor.home / "nothing"))
    found = [row for row in doctor.findings() if row["subject"] == "model"]
    assert found
    assert all(row["level"] == "problem" and row["remedy"] for row in found)


EMPTY_WEIGHTS = (2).to_bytes(8, "little") + b"{}"


@pytest.mark.parametrize(("weights", "words"), [(None, "no model*.safetensors"), (EMPTY_WEIGHTS[:-1], "is truncated")])
def test_a_model_without_whole_weights(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, weights: bytes | None, words: str
) -> None:
    model = doctor.home / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gemma3_text"}')
    if weights is not None:
        (model / "model.safetensors").write_bytes(weights)
    monkeypatch.setenv("KAKEYA_MODEL", str(model))
    assert doctor.one(words)["subject"] == "model"


# What keeps a daemon from starting: each fault is planted, and the daemon itself refuses it, too.


def _same_line(doctor: Doctor, words: str) -> dict[str, str]:
    """The doctor's finding, after the daemon itself was refused with these words."""
    done = run_kakeya("cache", "--node-id", "n", "--bind", "127.0.0.1:0", home=doctor.home)
    assert done.returncode not in (0, 1), done.stderr
    assert words in done.stderr
    found = doctor.one(words)
    assert found["level"] == "problem"
    return found


def test_a_broken_roster(doctor: Doctor) -> None:
    (doctor.home / "fleet.toml").write_text("[[node]\n")
    assert _same_line(doctor, "fleet.toml is not TOML")["subject"] == "start"


def test_a_roster_that_is_named_and_not_there(doctor: Doctor) -> None:
    (doctor.home / "kakeya.toml").write_text(f'roster_file = "{doctor.home}/flet.toml"\n')
    assert _same_line(doctor, "flet.toml cannot be read")["subject"] == "start"


def test_a_smallest_store_above_the_largest(doctor: Doctor) -> None:
    (doctor.home / "kakeya.toml").write_text("[cache]\nadaptive_cache = true\ncache_gb = 0.5\ncache_min_gb = 1\n")
    _same_line(doctor, "cache_min_gb 1 is larger than cache_gb 0.5")


def test_damaged_state_of_a_node(doctor: Doctor) -> None:
    folder = doctor.home / "nodes" / "n"
    folder.mkdir(parents=True)
    (folder / "known_nodes.json").write_text("{")
    assert "trust every node anew" in _same_line(doctor, "known_nodes.json is damaged")["remedy"]


def test_an_identity_key_that_is_none(doctor: Doctor) -> None:
    path = doctor.home / "nodes" / "n" / "identity.key"
    write_secret_file(path, b"not hexadecimal digits, but long enough to be taken for a key of a node")
    found = _same_line(doctor, f"{path} does not hold 64 hexadecimal digits")
    assert found["subject"] == "keys"
    assert "remove it" in found["remedy"]
    assert "kakeya key forget" in found["remedy"]


def test_an_identity_key_that_is_cut_off(doctor: Doctor) -> None:
    path = doctor.home / "nodes" / "n" / "identity.key"
    write_secret_file(path, b"0123456789")
    found = _same_line(doctor, f"the identity key file {path} holds 10 bytes, fewer than 64")
    assert "kakeya key forget" in found["remedy"]


def test_a_fleet_key_that_is_cut_off(doctor: Doctor) -> None:
    write_secret_file(doctor.home / "fleet.psk", b"0123456789", replace=True)
    found = _same_line(doctor, "holds 10 bytes, fewer than 16")
    assert "copy it again" in found["remedy"]
    assert "kakeya key new" in found["remedy"]


def test_a_file_where_a_folder_should_be(doctor: Doctor) -> None:
    (doctor.home / "nodes").write_text("")
    assert "mv " in doctor.one(f"{doctor.home / 'nodes'} is not a folder")["remedy"]


@pytest.mark.parametrize("name", ["nodes", "run", "nodes/n"])
def test_a_link_to_a_folder_that_is_not_there(doctor: Doctor, name: str) -> None:
    link = doctor.home / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(doctor.home / "gone")
    found = doctor.one(f"{link} is a link to {doctor.home / 'gone'}, which is not there")
    assert (found["level"], found["subject"]) == ("problem", "start")
    assert f"rm {link}" in found["remedy"]
    (doctor.home / "gone").mkdir()
    assert not doctor.about("start")


def test_a_home_that_is_a_link_to_nothing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    link = doctor.home / "link"
    link.symlink_to(doctor.home / "gone")
    monkeypatch.setenv("KAKEYA_HOME", str(link))
    assert "KAKEYA_HOME" not in doctor.one(f"{link} is a link to")["remedy"]


@pytest.mark.parametrize("name", ["audit.jsonl", "incarnation"])
def test_a_folder_where_a_file_of_a_node_should_be(doctor: Doctor, name: str) -> None:
    (doctor.home / "nodes" / "n" / name).mkdir(parents=True)
    found = doctor.one(f"{doctor.home / 'nodes' / 'n' / name} is not a regular file")
    assert (found["level"], found["subject"]) == ("problem", "start")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="no users here")
def test_a_folder_that_this_user_may_not_write_to() -> None:
    """Asked as somebody who is not root, whom no mode keeps out."""
    folder = Path(tempfile.mkdtemp(prefix="kakeya-doctor-"))
    ourselves, other = os.geteuid(), os.geteuid() or 65_534
    try:
        os.chown(folder, other, -1)
        os.seteuid(other)
        assert is_writable(folder)
        folder.chmod(0o500)
        assert not is_writable(folder)
    finally:
        os.seteuid(ourselves)
        folder.chmod(0o700)
        folder.rmdir()


def test_a_taken_health_port(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("KAKEYA_RUNTIME_HEALTH_PORT", str(other.getsockname()[1]))
        assert "--runtime-health-port" in doctor.one("health endpoint of the worker: ")["remedy"]


def test_an_address_to_advertise_that_is_none(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_ADVERTISE", "0.0.0.0:51051")
    assert "--bind may be 0.0.0.0" in doctor.one("where nobody can reach it")["remedy"]


def test_a_name_to_advertise_that_has_no_address(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_ADVERTISE", "nowhere.invalid:51051")
    found = doctor.one("primary: the host name in --advertise nowhere.invalid:51051 has no address here")
    assert (found["level"], found["subject"]) == ("warning", "start")
    monkeypatch.setenv("KAKEYA_ADVERTISE", "localhost:51051")
    assert not [row for row in doctor.findings() if "has no address" in row["text"]]


def test_an_assertion_about_nothing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_ASSERT_COMPATIBILITY", "foo=1")
    assert "window_size" in doctor.one("unknown compatibility field foo")["remedy"]


def test_memory_levels_that_refuse_everything(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    for level, value in (("WARNING", "0.01"), ("DRAIN", "0.02"), ("UNHEALTHY", "0.05")):
        monkeypatch.setenv(f"KAKEYA_MEMORY_{level}_GB", value)
    assert "--memory-drain-gb" in doctor.one("it would take no work")["remedy"]
    assert not list(judge_levels("worker", 20 * GIB, 5 * GIB))
    assert list(judge_levels("worker", 5 * GIB, 5 * GIB))


def test_a_cache_larger_than_the_machine(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_CACHE_GB", "4000")
    assert "--adaptive-cache" in doctor.one("this machine has")["remedy"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wheels of MLX have a slow BLAS")
def test_a_slow_blas(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX is imported before OpenBLAS is loaded, as a careless site customisation would do."""
    (tmp_path / "sitecustomize.py").write_text("import mlx.core\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PROJECT}")
    found = doctor.one("computes slowly", quick=False)
    assert "cmeel-openblas" in found["remedy"]
    assert found["level"] == "problem"


# --- the fleet ---------------------------------------------------------------------------------------------------------


def test_a_node_that_is_not_there(doctor: Doctor) -> None:
    assert "start the node" in doctor.one("nothing listens", "--address", f"127.0.0.1:{free_port()}")["remedy"]


def test_something_else_listens_there(doctor: Doctor) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert doctor.one("does not answer as a node", "--address", f"127.0.0.1:{other.getsockname()[1]}")


@pytest.fixture(scope="module")
def sick_fleet(empty_fleet: Fleet) -> Fleet:
    """A primary, and a worker whose cache policy differs and whose memory is said to be full."""
    levels = ("--memory-warning-gb", "0.01", "--memory-drain-gb", "0.01", "--memory-unhealthy-gb", "100")
    flags = ("--kv-policy", "sink-window", "--window", "128", "--memory-poll-s", "0.2", *levels)
    empty_fleet.start("primary", "worker", worker=flags)
    with empty_fleet["worker"].client() as client:
        wait_until(lambda: client.status().sections["memory"]["level"] == "drain", "the worker is short of memory")
    return empty_fleet


def _asked(doctor: Doctor, fleet: Fleet) -> list[dict[str, str]]:
    shutil.copy2(fleet.psk_file, doctor.home / "fleet.psk")
    addresses = [word for node in fleet.nodes.values() for word in ("--address", node.address)]
    return doctor.findings(*addresses)


def test_another_namespace_is_named_field_by_field(doctor: Doctor, sick_fleet: Fleet) -> None:
    (found,) = [row for row in _asked(doctor, sick_fleet) if row["subject"] == "namespace"]
    assert found["level"] == "problem"
    assert "sink_size, window_size differ" in found["text"]
    assert "--kv-policy" in found["remedy"]


def test_a_node_that_is_short_of_memory(doctor: Doctor, sick_fleet: Fleet) -> None:
    rows = [row for row in _asked(doctor, sick_fleet) if row["subject"] == "memory" and row["level"] == "problem"]
    assert [row["text"] for row in rows] == ["worker takes no new work: its memory is nearly full (drain)"]
    assert "--memory-drain-gb" in rows[0]["remedy"]


def test_the_links_of_a_fleet_are_told_with_their_round_trips(doctor: Doctor, sick_fleet: Fleet) -> None:
    rows = [row["text"] for row in _asked(doctor, sick_fleet) if row["subject"] == "links"]
    # Whether it is called slow depends on what else this machine does.
    assert any(re.match(r"primary to worker: [\d.]+ ms", text) for text in rows), rows


def test_another_fleet_key(doctor: Doctor, sick_fleet: Fleet) -> None:
    found = doctor.one("another fleet key", "--address", sick_fleet["primary"].address)
    assert "fleet.psk" in found["remedy"]


def test_the_real_command_tells_people_and_exits_with_1(doctor: Doctor) -> None:
    (doctor.home / "fleet.psk").unlink()
    done = run_kakeya("doctor", "--quick", home=doctor.home)
    assert done.returncode == 1
    assert "PROBLEM  keys: there is no fleet key" in done.stdout
    assert "→ run `kakeya key new`" in done.stdout


# --- faults that cannot be planted here: judged from what such a machine would tell --------------------------------------


def test_macos_local_network_permission() -> None:
    """nc connects and Python gets errno 65."""
    found = judge_reach("192.0.2.1:53051", Reach(65, others_connect=True), platform="darwin")
    assert found is not None
    assert "Local Network" in found.remedy
    plain = judge_reach("192.0.2.1:53051", Reach(65, others_connect=False), platform="darwin")
    assert plain is not None
    assert "Local Network" not in plain.remedy
    assert judge_reach("192.0.2.1:53051", Reach(0)) is None


def _view(name: str, **rows: dict[str, Any]) -> NodeView:
    return NodeView("192.0.2.1:1", name, {"node": {"state": "serving", "software": "kakeya-zmq 1"}}, rows)


def _problems(findings: Iterator[Finding]) -> list[Finding]:
    found = [finding for finding in findings if finding.level is not Level.OK]
    assert all(finding.remedy for finding in found)
    return found


def test_a_wrong_clock_a_slow_link_and_one_way_reachability() -> None:
    up = {"state": "up", "network": "thunderbolt", "round_trip_ms": 0.5}
    (skewed,) = _problems(judge_nodes([_view("a", b={**up, "clock_skew_ms": -60_000})]))
    assert "the clock of b is 60 s behind that of a" in skewed.text
    (slow,) = _problems(judge_nodes([_view("a", b={**up, "round_trip_ms": 40.0})]))
    assert "slow for thunderbolt" in slow.text
    crawling = _view("a", b=up)
    crawling.links = {"b": 11.0}
    (link,) = _problems(judge_nodes([crawling]))
    assert "11 MB/s" in link.text
    found = _problems(judge_nodes([_view("a", b=up), _view("b", a={"state": "connecting", "error": "no route: errno 65"})]))
    assert any("a reaches b, but not the other way round" in finding.text for finding in found)
    assert any("Local Network" in finding.remedy for finding in found)


def test_a_node_that_is_found_at_two_addresses_is_one_and_two_of_one_name_are_two() -> None:
    here, elsewhere, namesake = _view("a"), _view("a"), _view("a")
    here.sections["node"]["address"] = elsewhere.sections["node"]["address"] = "192.0.2.1:51051"
    elsewhere.address = "127.0.0.1:51051"
    namesake.sections["node"]["address"] = "192.0.2.2:51051"
    assert each_once([here, elsewhere, namesake]) == [here, namesake]


def test_a_decode_worker_that_was_given_up_or_replaced() -> None:
    view = _view("a")
    view.sections["decode_worker"] = {"state": "ready", "restarts": 0}
    assert not [finding for finding in judge_nodes([view]) if finding.subject == "decode"]
    view.sections["decode_worker"] = {"state": "ready", "restarts": 2}
    (replaced,) = [finding for finding in judge_nodes([view]) if finding.subject == "decode"]
    assert replaced.level is Level.WARNING
    view.sections["decode_worker"] = {"state": "given-up", "restarts": 6}
    (given_up,) = _problems(judge_nodes([view]))
    assert (given_up.subject, given_up.level) == ("decode", Level.PROBLEM)
    assert "a answers no prompt" in given_up.text


def test_versions_that_differ_and_a_draining_node() -> None:
    other = _view("b")
    other.sections["node"] = {"state": "draining", "software": "kakeya-zmq 2"}
    assert {finding.subject for finding in _problems(judge_nodes([_view("a"), other]))} == {"nodes", "versions"}


def test_disk_budgets_python_and_packages() -> None:
    assert judge_disk(GIB // 10).level is Level.PROBLEM
    assert judge_disk(GIB).level is Level.WARNING
    assert judge_disk(50 * GIB).level is Level.OK
    assert judge_budgets([("cache", 8 * GIB)], 16 * GIB, 4 * GIB).level is Level.WARNING
    assert judge_python((3, 10, 4)).level is Level.PROBLEM
    have = {"pyzmq": "26.0", "mlx-lm": "0.31.0", "numpy": "2.1"}
    needs = ["pyzmq>=27", "numpy>=2", "msgspec>=0.20", 'mlx-lm==0.32.2; extra == "mlx"', 'gguf>=1; extra == "demo"']
    found = {finding.text.split()[0]: finding.level for finding in judge_packages(needs, have.get)}
    assert found == {"pyzmq": Level.WARNING, "msgspec": Level.PROBLEM, "mlx-lm": Level.PROBLEM}


def test_mlx_that_is_missing_broken_slow_or_not_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cache peer" in judge_probe(1, "ModuleNotFoundError: No module named 'mlx'").text
    assert judge_probe(1, "Abort trap").level is Level.PROBLEM
    assert judge_probe(0, "no json").level is Level.PROBLEM
    assert judge_speed(Speed("Device(cpu, 0)", 2.0, 1, "", "")).level is (Level.PROBLEM if _mac() else Level.WARNING)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "GPU is not used" in judge_speed(Speed("Device(cpu, 0)", 500.0, 1, "", "")).text
    assert judge_speed(Speed("Device(gpu, 0)", 500.0, 1, "", "")).level is Level.OK


def _mac() -> bool:
    return sys.platform == "darwin"


def test_strangers_that_a_node_has_refused_are_told() -> None:
    view = _view("a")
    view.sections["refusals"] = {REFUSED_WRONG_PSK: 3, "something else": 5}
    (found,) = [finding for finding in judge_nodes([view]) if finding.subject == "keys"]
    assert found.level is Level.WARNING
    assert "another fleet key since its start: 3" in found.text
    assert "kakeya key show" in found.remedy
    view.sections["refusals"] = {"something else": 5}
    assert not [finding for finding in judge_nodes([view]) if finding.subject == "keys"]
