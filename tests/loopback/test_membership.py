"""Who is connected to whom: endpoints, failover, restarts, sleep, static addresses and names that are taken."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket as os_socket
from collections.abc import Callable
from pathlib import Path

import pytest

from daemons.askers import Askers
from daemons.membership import announced_endpoints, next_incarnation, parse_endpoint, seconds_asleep
from daemons.own_addresses import own_hosts
from daemons.peers import PASSING_MAX, PeerTable
from kakeya_zmq.config import resolve_settings
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.io.control_server import ControlServer, IncomingRequest
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, ask, prompt, wait_until
from tests.loopback.reactor_kit import node
from tests.loopback.test_control import KEY, Asked, World, answer_done
from tests.loopback.test_control import world as world  # the fixture
from tests.proxy import free_ports, other_loopback
from wire.cards import Card, Endpoint
from wire.errors import ConfigError, FailureCode, PortInUseError
from wire.ids import NodeId
from wire.messages import SourceKind


def keep_open(request: IncomingRequest) -> None:
    """Never answers."""


def card_of(
    local: LocalNode, *addresses: Address, networks: tuple[str, ...] = ("thunderbolt", "lan"), sequence: int = 1
) -> Card:
    """Endpoints in order of preference."""
    endpoints = tuple(
        Endpoint(address=str(address), network=network, priority=100 - 10 * place)
        for place, (address, network) in enumerate(zip(addresses, networks, strict=False))
    )
    return Card(
        node_id=local.node_id,
        identity_public_key=local.identity.public_key,
        incarnation=local.incarnation,
        sequence=sequence,
        roles=("worker",),
        software="",
        platform="",
        memory_bytes=0,
        endpoints=endpoints,
        bus_port=0,
    )


def rebound(world: World, address: Address, **options: object) -> ControlServer:
    """A server where another one has just closed, which libzmq does in its own time."""
    made: list[ControlServer] = []

    def bound() -> bool:
        with contextlib.suppress(PortInUseError):
            made.append(world.server(answer_done, bind=address, **options))
        return bool(made)

    world.until(bound)
    return made[0]


class Table:
    """A peer table and what it told."""

    def __init__(self, world: World) -> None:
        self.ups: list[str] = []
        self.downs: list[tuple[str | None, str]] = []
        self.peers = PeerTable(
            world.reactor,
            local=node("me"),
            fleet_key=KEY,
            on_up=self._up,
            on_down=lambda node_id, reason: self.downs.append((node_id, reason)),
        )
        world._closers.append(self.peers.close)

    def _up(self, peer: PeerInfo, client: ControlClient) -> None:
        self.ups.append(f"{peer.node_id} at {client.address}")

    def at(self, node_id: str, server: ControlServer) -> bool:
        client = self.peers.find(node_id)
        return client is not None and client.address == server.address


# --- endpoints -------------------------------------------------------------------------------------------------------


def test_a_dead_endpoint_fails_over_to_the_next_and_the_better_one_is_used_again_when_it_is_back(world: World) -> None:
    fast, slow = world.server(answer_done), world.server(answer_done)
    table = Table(world)
    table.peers.ensure(card_of(world.server_node, fast.address, slow.address))
    world.until(lambda: table.at("server", fast))
    fast.close()
    world.until(lambda: table.at("server", slow))
    (row,) = table.peers.rows()
    assert (row["network"], row["state"], row["address"]) == ("lan", "up", str(slow.address))
    assert f"{fast.address} (thunderbolt 100, dialling" in str(row["endpoints"])
    asked = Asked(table.peers.find("server"))  # type: ignore[arg-type]
    world.until(lambda: asked.over)
    again = rebound(world, fast.address)
    world.until(lambda: table.at("server", again))
    (row,) = table.peers.rows()
    assert row["network"] == "thunderbolt"
    assert table.ups == [f"server at {address}" for address in (fast.address, slow.address, fast.address)]


def test_requests_under_way_end_over_the_connection_they_began_on(world: World) -> None:
    waiting: list[IncomingRequest] = []
    slow = world.server(waiting.append)
    table = Table(world)
    table.peers.ensure(card_of(world.server_node, slow.address, networks=("lan",)))
    world.until(lambda: table.at("server", slow))
    asked = Asked(table.peers.find("server"))  # type: ignore[arg-type]
    world.until(lambda: bool(waiting))
    fast = world.server(answer_done)
    table.peers.update(card_of(world.server_node, fast.address, slow.address, sequence=2))
    world.until(lambda: table.at("server", fast))
    assert not asked.over
    assert table.peers.traffic()["fleet_requests"] == 1, "what goes over a connection that is let go of counts as well"
    answer_done(waiting[0])
    world.until(lambda: asked.over)
    assert asked.failures == []
    world.until(lambda: not slow.peers())
    assert table.peers.traffic()["fleet_requests"] == 1


def test_a_node_whose_first_endpoint_leads_nowhere_is_reached_through_the_second(world: World) -> None:
    with os_socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and says nothing
        server = world.server(answer_done)
        table = Table(world)
        table.peers.ensure(card_of(world.server_node, Address(*deaf.getsockname()), server.address))
        world.until(lambda: table.at("server", server))


def test_an_endpoint_where_another_node_answers_is_not_used(world: World) -> None:
    wrong, right = world.server(answer_done, local=node("other")), world.server(answer_done)
    table = Table(world)
    table.peers.ensure(card_of(world.server_node, wrong.address, right.address))
    world.until(lambda: table.at("server", right))
    assert table.peers.find("other") is None


def test_rates_belong_to_the_endpoint_they_were_measured_on() -> None:
    rates, peer = MeasuredRates(), NodeId("n")
    rates.use_route(peer, "bolt:1")
    rates.observe_link(peer, 10**9, 1000.0)
    rates.use_route(peer, "lan:1")
    assert rates.link_megabytes_per_second(peer) is None
    rates.observe_link(peer, 10**8, 1000.0)
    rates.use_route(peer, "bolt:1")
    assert rates.link_megabytes_per_second(peer) == pytest.approx(1000.0)
    rates.use_route(peer, "lan:1")
    assert rates.link_megabytes_per_second(peer) == pytest.approx(100.0)
    rates.forget(peer)
    assert (rates.links, rates.routes, rates.parked) == ({}, {}, {})


# --- restarts ----------------------------------------------------------------------------------------------------------


def test_a_new_incarnation_fails_what_the_old_one_was_asked_at_once(world: World) -> None:
    old_node = world.server_node
    old = world.server(keep_open)
    table = Table(world)
    table.peers.ensure(card_of(old_node, old.address))
    world.until(lambda: table.at("server", old))
    asked = Asked(table.peers.find("server"))  # type: ignore[arg-type]
    world.until(lambda: bool(old._requests))
    new_node = LocalNode(
        node_id="server", identity=old_node.identity, roles=("test",), incarnation=old_node.incarnation + 1, software="test"
    )
    new = world.server(answer_done, local=new_node)
    table.peers.update(card_of(new_node, new.address))
    # The old process still answers pings: only the card tells.
    world.until(lambda: asked.over)
    assert asked.failures == [(FailureCode.UNAVAILABLE, "the session was lost: the node was restarted")]
    old.close()
    world.until(lambda: table.at("server", new))


def test_requests_of_an_earlier_incarnation_end_when_the_next_one_says_hello(world: World) -> None:
    askers, ended = Askers(), []

    def take(request: IncomingRequest) -> None:
        request.on_end = ended.append
        askers.add(request)

    server = world.server(take, on_peer_up=lambda peer: askers.end_older(peer.node_id, peer.incarnation))
    first = node("asker", incarnation=1)
    second = LocalNode(node_id="asker", identity=first.identity, roles=("test",), incarnation=2, software="test")
    Asked(world.client(server.address, local=first))
    world.until(lambda: len(server._requests) == 1)
    world.client(server.address, local=second)
    world.until(lambda: bool(ended))
    assert ended == ["the node that asked was restarted"]
    assert askers.end_older("asker", 2) == 0


def test_incarnations_grow_also_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next_incarnation(tmp_path)
    monkeypatch.setattr("time.time_ns", lambda: first - 600 * 10**9)
    assert next_incarnation(tmp_path) == first + 1
    (tmp_path / "incarnation").write_text("nonsense")
    assert next_incarnation(tmp_path) == first - 600 * 10**9
    (tmp_path / "incarnation").write_text(str(2**70))
    assert next_incarnation(tmp_path) == first - 600 * 10**9


def test_the_time_asleep_stands_still_while_awake() -> None:
    before = seconds_asleep()
    assert abs(seconds_asleep() - before) < 1.0


# --- who is connected --------------------------------------------------------------------------------------------------


def test_a_node_named_for_a_role_is_known_by_it_without_any_card(world: World) -> None:
    server = world.server(answer_done)
    table = Table(world)
    table.peers.add_seed(server.address, "worker")
    assert table.peers.in_role("worker") == []
    world.until(lambda: table.peers.in_role("worker") == ["server"])
    assert table.peers.in_role("cache") == []


def test_connections_for_the_exchange_of_cards_are_few_and_seeds_outlive_their_cards(world: World) -> None:
    seed = world.server(answer_done)
    others = [world.server(answer_done, local=node(f"n{number}")) for number in range(PASSING_MAX + 2)]
    table = Table(world)
    table.peers.add_seed(seed.address)
    world.until(lambda: table.at("server", seed))
    for number, server in enumerate(others):
        local = server._sessions._local
        assert table.peers.reach(card_of(local, server.address)) is not None
        world.until(lambda number=number, server=server: table.at(f"n{number}", server))  # type: ignore[misc]
    assert {name for name, _ in table.peers.connected()} == {
        "server",
        *(f"n{number}" for number in range(2, PASSING_MAX + 2)),
    }
    assert not table.peers.keeps("n5")
    for name, _ in table.peers.connected():
        table.peers.forget(name)
    assert [name for name, _ in table.peers.connected()] == ["server"]


def test_another_node_at_a_seeds_address_is_taken_for_what_it_is(world: World) -> None:
    first = world.server(answer_done)
    table = Table(world)
    table.peers.add_seed(first.address)
    world.until(lambda: table.at("server", first))
    first.close()
    second = rebound(world, first.address, local=node("another"))
    world.until(lambda: table.at("another", second))
    assert table.peers.find("server") is None
    assert [row["node_id"] for row in table.peers.rows()] == ["another"]


# --- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.7:1", ("10.0.0.7:1", "lan", 50)),
        ("10.0.0.7:1/thunderbolt", ("10.0.0.7:1", "thunderbolt", 100)),
        ("[fe80::1%en0]:1/tailscale/7", ("[fe80::1%en0]:1", "tailscale", 7)),
        ("mac.local:1//60", ("mac.local:1", "lan", 60)),
    ],
)
def test_an_endpoint_is_address_network_priority(text: str, expected: tuple[str, str, int]) -> None:
    endpoint = parse_endpoint(text)
    assert (endpoint.address, endpoint.network, endpoint.priority) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "host:0", "host:1/wifi", "host:1/lan/x", "host:1/lan/1001", "host:1/lan/-1", "host:1/lan/5/6"]
)
def test_an_endpoint_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_endpoint(text)


def test_the_priority_is_the_networks_unless_one_is_given() -> None:
    flags = {"network": "tailscale", "endpoint": ["10.0.0.7:1/thunderbolt", "192.168.0.7:1/lan/90", "192.168.0.7:1/lan"]}
    settings = resolve_settings("cache", flags, environment={}).settings
    endpoints = announced_endpoints(settings, Address("100.64.0.7", 1))
    assert [(endpoint.network, endpoint.priority) for endpoint in endpoints] == [
        ("tailscale", 25),
        ("thunderbolt", 100),
        ("lan", 90),
    ]


# --- real processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "cache")
    return empty_fleet


def told(fleet: Fleet, *words: str) -> Callable[[], bool]:
    return lambda: any(all(word in line for word in words) for line in fleet["primary"].status().recent)


def test_a_node_that_sleeps_longer_than_its_ttl_vanishes_and_is_used_again_when_it_wakes(fleet: Fleet) -> None:
    fleet["cache"].signal(signal.SIGSTOP)
    wait_until(told(fleet, "cache is gone: its card expired"), "the card of a sleeping node expires")
    assert all(row["node_id"] != "cache" for row in fleet["primary"].status().peers)
    fleet["cache"].signal(signal.SIGCONT)
    fleet.wait_joined()


def test_a_worker_that_only_the_settings_name_is_used(fleet: Fleet, model: Path) -> None:
    # It joins through nobody, and nobody else knows it.
    with Fleet(model, fleet.home / "alone") as alone:
        shutil.copy2(fleet.psk_file, alone.psk_file)
        shutil.copytree(fleet.home / "tenants", alone.home / "tenants")
        worker = alone.add("worker", name="named-worker")
        alone.launch(worker)
        primary = alone.add("primary", "--worker", worker.address, "--cache-peer", fleet["cache"].address, name="second")
        primary.launch()
        primary.wait_ready()
        with primary.client() as client:
            wait_until(
                lambda: {row["node_id"] for row in client.status().peers} >= {"named-worker", "cache"}, "they are known"
            )
            with rig.worker_only(client) as session:
                said = ask(session, prompt(300, seed=1), 2)
        assert said.reused == {SourceKind.WORKER: 299}


def test_a_worker_with_two_networks_is_reached_and_sends_over_the_better_one(fleet: Fleet) -> None:
    other = other_loopback()
    if ":" in other:
        pytest.skip("one socket cannot be bound to both loopback addresses of this machine")
    (port,) = free_ports(1, ("127.0.0.1", other))
    addresses = (
        "--bind",
        f"0.0.0.0:{port}",
        "--advertise",
        f"127.0.0.1:{port}",
        "--endpoint",
        f"{other}:{port}/thunderbolt",
    )
    worker = fleet.add("worker", *addresses, name="two-networks")
    try:
        worker.launch(fleet["primary"].address)
        worker.wait_ready()
        fleet.wait_card(
            "two-networks",
            lambda row: row.get("network") == "thunderbolt" and row["state"] == "up",
            "it is reached over the better network",
        )
        with fleet["primary"].client() as client, rig.worker_only(client) as session:
            assert ask(session, prompt(300, seed=2), 2).reused == {SourceKind.WORKER: 299}
    finally:
        worker.kill()
        del fleet.nodes["two-networks"]


def test_a_node_that_serves_everywhere_announces_addresses_that_others_can_dial(fleet: Fleet) -> None:
    (port,) = free_ports(1, ("127.0.0.1", *own_hosts(six=False)))
    cache = fleet.add("cache", "--bind", f"0.0.0.0:{port}", name="everywhere")
    try:
        cache.launch(fleet["primary"].address)
        cache.wait_ready()
        with cache.client() as client:
            assert any("--advertise is not given" in line for line in client.status().recent)
        fleet.wait_card("everywhere", lambda row: row.get("state") == "up", "it is dialled at what its card says")
        with fleet["primary"].client() as client:
            (row,) = [row for row in client.status().peers if row["node_id"] == "everywhere"]
        assert row["address"] in {f"{host}:{port}" for host in own_hosts(six=False)}
    finally:
        cache.kill()
        del fleet.nodes["everywhere"]


def test_a_second_node_with_a_name_that_is_taken_is_told_so(fleet: Fleet, model: Path) -> None:
    with Fleet(model, fleet.home / "twin") as other:
        shutil.copy2(fleet.psk_file, other.psk_file)
        twin = other.add("cache")  # another home, thus another identity key
        twin.launch(fleet["primary"].address)
        twin.wait_ready()
        with twin.client() as client:
            wait_until(
                lambda: any("--node-id" in line for line in client.status().recent), "the twin learns why it is alone"
            )
        assert told(fleet, "another identity key")()
        assert told(fleet, "another machine uses the node id cache")()
    fleet.wait_joined()
