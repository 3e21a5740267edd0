"""Nodes of this machine that have died, that were started otherwise, or that have another key: each fault is told once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict

import psutil
import pytest

from daemons.doctor.finding import Level
from daemons.doctor.network import NodeView
from daemons.doctor.network_findings import judge_nodes
from daemons.fleet import Member
from tests.deploy.doctor_rig import Doctor
from tests.fleet_rig import Fleet, Node, run_kakeya, wait_until
from tests.proxy import free_port


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", "cache")
    return empty_fleet


def _member(node: Node) -> Member:
    created = psutil.Process(node.pid).create_time()
    return Member(node.role, node.name, node.address, node.pid, created, str(node.log), ())


@pytest.fixture
def noted(doctor: Doctor, fleet: Fleet) -> list[Member]:
    """The fleet as if `kakeya up` had started it for the doctor's home; everybody is there."""
    fleet.wait_all_joined()
    shutil.copy2(fleet.psk_file, doctor.home / "fleet.psk")
    members = [_member(node) for node in fleet.nodes.values()]
    (doctor.home / "run").mkdir()
    (doctor.home / "run" / "fleet.json").write_text(json.dumps([asdict(member) for member in members]))
    return members


def _problems(found: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in found if row["level"] == "problem"]


def _told(member: Member) -> str:
    return f"{member.node_id}, which `kakeya up` has started at {member.address}, has ended (process {member.pid})"


def test_all_processes_of_a_fleet_were_killed(doctor: Doctor, fleet: Fleet, noted: list[Member]) -> None:
    assert not _problems(doctor.findings())
    for node in fleet.nodes.values():
        node.kill()
    found = _problems(doctor.findings())
    assert [row["text"] for row in found] == [_told(member) for member in noted]
    for row, member in zip(found, noted, strict=True):
        assert row["subject"] == "nodes"
        assert member.log in row["remedy"]
        assert "`kakeya up`" in row["remedy"]
        assert "`kakeya down`" in row["remedy"]
    shown = run_kakeya("doctor", "--quick", home=doctor.home, environment=doctor.places)
    assert shown.returncode == 1
    assert shown.stdout.count("has ended (process") == 3


def test_one_process_of_a_fleet_was_killed(doctor: Doctor, fleet: Fleet, noted: list[Member]) -> None:
    """It is named, and not the links of the others to it, nor an address where nothing listens."""
    fleet["primary"].kill()
    with fleet["worker"].client() as client:
        wait_until(
            lambda: any(row.get("node_id") == "primary" and row["error"] for row in client.status().peers),
            "the worker has noticed",
        )
    (doctor.home / "kakeya.toml").write_text(f'peer = ["{fleet["primary"].address}"]\n')
    assert [row["text"] for row in _problems(doctor.findings())] == [_told(noted[0])]


def test_a_node_that_serves_again_though_not_by_kakeya_up(doctor: Doctor, fleet: Fleet, noted: list[Member]) -> None:
    fleet["cache"].restart()
    fleet.wait_all_joined()
    found = doctor.findings()
    assert not _problems(found)
    assert any(row["text"].startswith("cache: serving") for row in found)


def test_another_node_at_the_address_of_one_that_has_ended(doctor: Doctor, fleet: Fleet, noted: list[Member]) -> None:
    (doctor.home / "run" / "fleet.json").write_text(
        json.dumps([asdict(noted[0]), {**asdict(noted[1]), "node_id": "local-worker", "created": 1.0}])
    )
    (found,) = _problems(doctor.findings())
    assert found["text"].startswith("local-worker, which `kakeya up` has started at")


def test_a_namesake_on_another_machine_is_not_taken_for_the_one_that_has_ended() -> None:
    """Every `kakeya up` calls its nodes alike; what another machine cannot reach has another port, or is told."""
    row = {"state": "down", "error": "no answer", "address": "192.0.2.1:51051"}
    view = NodeView("192.0.2.2:1", "far", {"node": {"state": "serving"}}, {"local-primary": row})
    gone = Member("primary", "local-primary", "127.0.0.1:51051", 1, 0.0, "", ())
    other = Member("primary", "local-primary", "127.0.0.1:40000", 1, 0.0, "", ())
    for ended, level in (([gone], set()), ([other], {Level.PROBLEM}), ([], {Level.PROBLEM})):
        assert {finding.level for finding in judge_nodes([view], ended)} - {Level.OK} == level


def test_a_node_of_this_home_is_examined_however_it_was_started(doctor: Doctor, fleet: Fleet) -> None:
    shutil.copy2(fleet.psk_file, doctor.home / "fleet.psk")
    assert not [row for row in doctor.findings() if ": serving" in row["text"]]
    shutil.copytree(fleet.home / "run", doctor.home / "run")
    texts = [row["text"] for row in doctor.findings()]
    for name in fleet.nodes:
        assert len([text for text in texts if text.startswith(f"{name}: serving")]) == 1, texts


def test_a_node_of_this_home_that_others_reach_otherwise(doctor: Doctor, fleet: Fleet) -> None:
    """Its address is that of a router, say, which need not lead home from within."""
    shutil.copy2(fleet.psk_file, doctor.home / "fleet.psk")
    address = f"127.0.0.1:{free_port()}"
    (doctor.home / "run").mkdir()
    (doctor.home / "run" / "n.bus").write_text(json.dumps({"pid": fleet["cache"].pid, "address": address}))
    found = doctor.one(f"a node runs here and tells others to reach it at {address}")
    assert found["level"] == "warning"
    assert "--advertise" in found["remedy"]
    assert not _problems(doctor.findings())


def test_one_wrong_key_is_one_problem(doctor: Doctor, fleet: Fleet) -> None:
    addresses = [node.address for node in fleet.nodes.values()]
    found = doctor.findings(*(word for address in addresses for word in ("--address", address)))
    one, two, three = addresses
    assert [row["text"] for row in _problems(found)] == [f"{one}, {two} and {three} have another fleet key"]


def test_a_key_that_cannot_be_used_is_one_problem(doctor: Doctor, fleet: Fleet) -> None:
    (doctor.home / "fleet.psk").chmod(0o644)
    arguments = [word for node in fleet.nodes.values() for word in ("--address", node.address)]
    assert len(_problems(doctor.findings(*arguments))) == 1
