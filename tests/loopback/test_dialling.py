"""A peer table and cards of nodes that are not where they claim to be."""

from __future__ import annotations

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.protocol.dialling import UNPROVEN_MAX
from tests.loopback.reactor_kit import node
from tests.loopback.test_control import World, answer_done
from tests.loopback.test_control import world as world  # the fixture
from tests.loopback.test_membership import Table, card_of, rebound
from tests.proxy import free_ports


def dialled(table: Table) -> list[str]:
    """Addresses of the connections there are."""
    return sorted(str(link.client.address) for link in table.peers._links)


def test_of_several_claims_of_one_address_one_is_dialled_and_who_is_really_there_is_found_soon(world: World) -> None:
    server = world.server(answer_done)
    table = Table(world)
    for number in range(20):
        table.peers.ensure(card_of(node(f"made-up-{number}"), server.address))
    table.peers.ensure(card_of(world.server_node, server.address))
    assert dialled(table) == [str(server.address)]
    world.until(lambda: table.at("server", server))
    assert table.ups == [f"server at {server.address}"]
    assert dialled(table) == [str(server.address)]


def test_the_real_node_may_be_heard_of_last(world: World) -> None:
    server = world.server(answer_done)
    table = Table(world)
    table.peers.ensure(card_of(node("made-up"), server.address))
    world.until(lambda: bool(table.downs))
    table.peers.ensure(card_of(world.server_node, server.address))
    world.until(lambda: table.at("server", server))


def test_a_node_takes_the_place_of_another_one_whose_card_still_lives(world: World) -> None:
    before = world.server(answer_done)
    table = Table(world)
    table.peers.ensure(card_of(world.server_node, before.address))
    world.until(lambda: table.at("server", before))
    renamed = node("renamed")
    before.close()
    world.until(lambda: bool(table.downs))
    now_there = rebound(world, before.address, local=renamed)
    table.peers.ensure(card_of(renamed, before.address))
    world.until(lambda: table.at("renamed", now_there))
    assert table.peers.find("server") is None


def test_a_false_claim_takes_nothing_from_a_connection_that_is_up(world: World) -> None:
    server = world.server(answer_done)
    table = Table(world)
    table.peers.ensure(card_of(world.server_node, server.address))
    world.until(lambda: table.at("server", server))
    client: ControlClient | None = table.peers.find("server")
    for number in range(5):
        table.peers.ensure(card_of(node(f"made-up-{number}"), server.address))
    world.turns(0.2)
    assert table.peers.find("server") is client
    assert len(dialled(table)) == 1


def test_strangers_are_dialled_a_bounded_number_at_once(world: World) -> None:
    table = Table(world)
    for number, port in enumerate(free_ports(UNPROVEN_MAX + 20, ["127.0.0.1"])):
        table.peers.ensure(card_of(node(f"made-up-{number}"), Address("127.0.0.1", port)))
    assert len(dialled(table)) == UNPROVEN_MAX


def test_a_name_is_not_dialled_but_the_other_endpoint_of_the_card_is(world: World) -> None:
    server = world.server(answer_done)
    table = Table(world)
    table.peers.ensure(card_of(world.server_node, Address("node.example", server.address.port), server.address))
    assert dialled(table) == [str(server.address)]
    world.until(lambda: table.at("server", server))
