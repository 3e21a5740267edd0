"""What a node announces: never an address that nobody can dial, and its own ones where it is told none."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

import psutil
import pytest

from daemons.addresses import check_addresses
from daemons.membership import announced_endpoints
from daemons.own_addresses import HOSTS_MAX, can_be_reached, is_everywhere, own_hosts
from kakeya_zmq.config import resolve_settings
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.protocol.dialling import is_dialable
from wire.cards import ENDPOINTS_MAX
from wire.errors import ConfigError

NOBODY = ("0.0.0.0", "[::]", "224.0.0.1", "[ff02::1]", "255.255.255.255", "240.0.0.1", "0.1.2.3")
SOMEBODY = ("192.168.1.20", "169.254.27.104", "100.101.102.103", "127.0.0.1", "[2001:db8::1]", "mini.local", "localhost")


class State(NamedTuple):
    isup: bool


class Interface(NamedTuple):
    family: int
    address: str


@pytest.mark.parametrize("host", NOBODY)
@pytest.mark.parametrize("name", ["advertise", "endpoint"])
def test_an_address_of_nobody_is_refused_by_the_name_of_its_flag(name: str, host: str) -> None:
    address = f"{host}:51051"
    given = {name: [f"{address}/lan"] if name == "endpoint" else address}
    with pytest.raises(ConfigError) as caught:
        check_addresses(resolve_settings("primary", given, environment={}))
    assert caught.value.message == f"--{name}: nobody can reach this node at {address}"
    assert "--bind may be 0.0.0.0" in caught.value.remedy


@pytest.mark.parametrize("host", SOMEBODY)
def test_an_address_of_somebody_is_taken(host: str) -> None:
    given = {"advertise": f"{host}:51051", "endpoint": [f"{host}:1/lan"], "bind": "0.0.0.0:51051"}
    check_addresses(resolve_settings("primary", given, environment={}))
    assert can_be_reached(host.strip("[]"))


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a Mac: a loopback, a LAN, a Thunderbolt bridge, Tailscale, one that is down, one of virtual machines."""
    four, six = socket.AF_INET, socket.AF_INET6
    found = {
        "lo0": [Interface(four, "127.0.0.1"), Interface(six, "::1")],
        "en0": [Interface(four, "192.168.1.20"), Interface(six, "fe80::1%en0"), Interface(six, "2001:db8::20")],
        "bridge0": [Interface(four, "169.254.27.104")],
        "utun3": [Interface(four, "100.101.102.103")],
        "en5": [Interface(four, "10.9.9.9")],
        "bridge100": [Interface(four, "192.168.64.1")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: State(name != "en5") for name in found})


def test_own_addresses_are_those_that_others_may_dial(interfaces: None) -> None:
    assert own_hosts(six=False) == ("100.101.102.103", "192.168.1.20", "169.254.27.104")
    assert own_hosts(six=True)[:3] == ("100.101.102.103", "192.168.1.20", "2001:db8::20")


def test_own_addresses_stand_in_a_card_with_their_networks(interfaces: None) -> None:
    settings = resolve_settings("cache", {"endpoint": ["10.7.0.2:52051/thunderbolt"]}, environment={}).settings
    endpoints = announced_endpoints(settings, Address("0.0.0.0", 52051), own_hosts(six=False))
    assert {(each.address, each.network, each.priority) for each in endpoints} == {
        ("192.168.1.20:52051", "lan", 50),
        ("169.254.27.104:52051", "lan", 50),
        ("100.101.102.103:52051", "tailscale", 25),
        ("10.7.0.2:52051", "thunderbolt", 100),
    }


def test_many_own_addresses_leave_room_for_those_that_are_given() -> None:
    many = [f"10.0.0.{number}" for number in range(1, ENDPOINTS_MAX + 1)]
    given = {"endpoint": [f"10.1.0.{number}:1/lan" for number in range(1, ENDPOINTS_MAX)]}
    settings = resolve_settings("cache", given, environment={}).settings
    assert len(announced_endpoints(settings, Address("0.0.0.0", 1), many)) == ENDPOINTS_MAX


def test_the_addresses_of_this_machine_can_be_dialled() -> None:
    found = own_hosts(six=True)
    assert 0 < len(found) <= HOSTS_MAX
    for host in found:
        assert is_dialable(host, link_local=True, interfaces=frozenset())
        assert not ipaddress.ip_address(host).is_unspecified
    assert is_everywhere("0.0.0.0")
    assert is_everywhere("::")
    assert not is_everywhere("localhost")
