"""Settings that do not go together: the doctor finds them, and `--check-settings` and the daemon's start refuse them."""

from __future__ import annotations

import pytest

from daemons.addresses import check_addresses, meet
from daemons.exit_codes import EXIT_BAD_INPUT
from daemons.own_addresses import own_hosts
from kakeya_zmq.config import resolve_settings
from kakeya_zmq.io.addresses import parse_address
from tests.deploy.doctor_rig import Doctor
from tests.fleet_rig import run_kakeya
from wire.errors import ConfigError

# --- two ports of one daemon ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [("--check-settings",), ()])
def test_a_bus_at_the_port_of_its_own_node(doctor: Doctor, extra: tuple[str, ...]) -> None:
    flags = ("--node-id", "n", "--bind", "127.0.0.1:40123", "--bus-bind", "127.0.0.1:40123")
    done = run_kakeya("cache", *flags, *extra, home=doctor.home)
    assert done.returncode == EXIT_BAD_INPUT
    (line,) = done.stderr.splitlines()
    assert "--bind and --bus-bind are the same port 40123 of one daemon" in line
    assert "give one of them another" in line


def test_a_health_port_at_the_port_of_its_own_daemon() -> None:
    given = {"bind": "0.0.0.0:40123"}
    with pytest.raises(ConfigError) as caught:
        check_addresses(resolve_settings("worker", given, environment={"KAKEYA_RUNTIME_HEALTH_PORT": "40123"}))
    assert caught.value.message == "--bind and KAKEYA_RUNTIME_HEALTH_PORT are the same port 40123 of one daemon"


def test_the_doctor_finds_two_equal_ports_of_one_daemon(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    port = parse_address(resolve_settings("worker", {}, file=doctor.home / "kakeya.toml").settings.bind).port
    monkeypatch.setenv("KAKEYA_RUNTIME_HEALTH_PORT", str(port))
    found = doctor.one("worker: --bind and --runtime-health-port are the same port")
    assert (found["level"], found["subject"]) == ("problem", "ports")
    monkeypatch.delenv("KAKEYA_RUNTIME_HEALTH_PORT")
    monkeypatch.setenv("KAKEYA_BIND", f"127.0.0.1:{port}")
    monkeypatch.setenv("KAKEYA_BUS_BIND", f"0.0.0.0:{port}")
    assert doctor.one(f"cache: --bind and --bus-bind are the same port {port} of one daemon")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("127.0.0.1:1", "127.0.0.1:1", True),
        ("localhost:1", "127.0.0.1:1", True),
        ("0.0.0.0:1", "192.0.2.1:1", True),
        ("[::]:1", "127.0.0.1:1", True),
        ("127.0.0.1:1", "127.0.0.2:1", False),
        ("[::1]:1", "127.0.0.1:1", False),
        ("127.0.0.1:1", "127.0.0.1:2", False),
    ],
)
def test_which_addresses_are_one_port(one: str, other: str, equal: bool) -> None:
    assert meet(parse_address(one), parse_address(other)) is equal


def test_free_ports_that_the_system_chooses_are_never_equal() -> None:
    check_addresses(resolve_settings("worker", {"bind": "127.0.0.1:0", "bus_bind": "127.0.0.1:0"}, environment={}))


# --- an address that leads others to themselves ----------------------------------------------------------------------------


def _leads_nowhere(doctor: Doctor) -> list[dict[str, str]]:
    return [row for row in doctor.findings() if "to itself, not to here" in row["text"]]


def test_a_loopback_address_is_advertised_to_other_machines(doctor: Doctor) -> None:
    (doctor.home / "kakeya.toml").write_text(
        '[worker]\nbind = "0.0.0.0:0"\nadvertise = "localhost:53051"\npeer = ["192.0.2.1:51051"]\n'
    )
    (found,) = _leads_nowhere(doctor)
    assert (found["level"], found["subject"]) == ("problem", "start")
    assert found["text"].startswith("worker: it advertises localhost:53051, which leads 192.0.2.1:51051 to itself")
    assert "--advertise" in found["remedy"]


@pytest.mark.parametrize(
    "lines",
    [
        'bind = "127.0.0.1:0"\nadvertise = "127.0.0.1:53051"\npeer = ["192.0.2.1:51051"]',
        'bind = "0.0.0.0:0"\nadvertise = "127.0.0.1:53051"\npeer = ["127.0.0.1:51051", "localhost:1", "OWN:51051"]',
        'bind = "0.0.0.0:0"\nadvertise = "127.0.0.1:53051"\npeer = ["nowhere.invalid:51051"]',
        'bind = "0.0.0.0:0"\nadvertise = "127.0.0.1:53051"',
        'bind = "0.0.0.0:0"\nadvertise = "127.0.0.1:1"\npeer = ["192.0.2.1:1"]\nendpoint = ["192.0.2.9:1/lan"]',
        'bind = "0.0.0.0:0"\npeer = ["192.0.2.1:51051"]',
    ],
    ids=["a tunnel", "peers here", "who knows where", "no peers", "another way", "not told"],
)
def test_a_loopback_address_that_misleads_nobody(doctor: Doctor, lines: str) -> None:
    own = next(iter(own_hosts(six=False)))
    (doctor.home / "kakeya.toml").write_text(f"[worker]\n{lines.replace('OWN', own)}\n")
    assert not _leads_nowhere(doctor)
