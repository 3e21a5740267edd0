"""Which addresses of cards are dialled, for whom, how many at once, and when again."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.membership import with_literal_hosts
from daemons.own_addresses import look_up
from kakeya_zmq.protocol.dialling import PAUSE_LAST_S, UNPROVEN_MAX, DialPlan, is_dialable
from wire.cards import Endpoint

HERE = frozenset({"en0"})
A, B = "10.0.0.1:1", "10.0.0.2:1"
NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.213.0.2", "192.168.1.20", "100.64.0.3", "::1", "fd00::2", "fe80::1%en0"])
def test_addresses_of_a_fleet_are_dialled(host: str) -> None:
    assert is_dialable(host, link_local=False, interfaces=HERE)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "node.example", "lo", "-", ""),
        *("127.1", "0x7f000001", "2130706433", "127.0.0.01", "FD00::2", "fd00:0::2"),
        *("0.0.0.0", "0.1.2.3", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1"),
        *("::ffff:7f00:1", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe"),
        *("fe80::1", "fe80::1%en9", "fd00::2%en0", "169.254.169.254"),
    ],
)
def test_names_odd_forms_and_addresses_that_mean_no_machine_are_not(host: str) -> None:
    assert not is_dialable(host, link_local=False, interfaces=HERE)


def test_a_bridge_without_a_router_is_reached_where_there_is_one() -> None:
    assert is_dialable("169.254.7.9", link_local=True, interfaces=HERE)


# --- the plan --------------------------------------------------------------------------------------------------------


def wanting(*nodes: str, address: str = A) -> DialPlan:
    plan = DialPlan()
    for node_id in nodes:
        plan.want(node_id, address)
    return plan


def test_one_address_is_dialled_for_the_node_that_is_known_longest() -> None:
    plan = wanting("first", "second", "third")
    assert plan.due(0.0, NOTHING, 0) == [("first", A)]
    assert plan.due(0.0, {A}, 1) == []
    plan.forget("first")
    assert plan.due(0.0, NOTHING, 0) == [("second", A)]


def test_a_claim_that_failed_lets_the_others_have_a_turn() -> None:
    plan = wanting("first", "second")
    now = 0.0
    turns = []
    for _ in range(4):
        ((node_id, _),) = plan.due(now, NOTHING, 0)
        turns.append(node_id)
        plan.failed(node_id, A, now)
        now += 1000.0
    assert turns == ["first", "second", "first", "second"]


def test_who_was_met_there_before_is_tried_before_strangers() -> None:
    plan = wanting("stranger", "friend")
    plan.connected("friend", A)
    plan.failed("friend", A, 0.0)
    assert plan.due(1.0, NOTHING, 0) == [("friend", A)]


def test_who_answers_there_is_tried_next_however_many_claim_the_address() -> None:
    plan = wanting(*(f"made-up-{number}" for number in range(200)), "honest")
    plan.failed("made-up-0", A, 0.0, "honest")
    assert plan.due(1.0, NOTHING, 0) == [("honest", A)]


def test_the_pause_doubles_up_to_a_minute_whoever_claims_the_address_and_ends_with_a_success() -> None:
    plan = wanting("a")
    now, pauses = 0.0, []
    for number in range(9):
        plan.failed(f"name-{number}", A, now)
        plan.forget("a")
        plan.want("a", A)  # a new card changes nothing
        due = plan.deadline(now, NOTHING)
        assert due is not None
        assert plan.due(due - 0.001, NOTHING, 0) == []
        assert plan.due(due, NOTHING, 0) == [("a", A)]
        pauses.append(due - now)
        now = due
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, PAUSE_LAST_S, PAUSE_LAST_S, PAUSE_LAST_S]
    plan.connected("a", A)
    assert plan.deadline(now, NOTHING) is None
    plan.failed("a", A, now)
    assert plan.deadline(now, NOTHING) == now + 1.0


def test_only_so_many_strangers_are_dialled_at_once_and_those_met_before_always() -> None:
    plan = DialPlan()
    for number in range(200):
        plan.want(f"node-{number}", f"10.0.1.{number}:1")
    assert len(plan.due(0.0, NOTHING, 0)) == UNPROVEN_MAX
    assert len(plan.due(0.0, NOTHING, UNPROVEN_MAX - 1)) == 1
    plan.connected("node-199", "10.0.1.199:1")
    assert plan.due(0.0, NOTHING, UNPROVEN_MAX) == [("node-199", "10.0.1.199:1")]


def test_addresses_that_nobody_failed_at_come_before_those_that_somebody_did() -> None:
    plan = wanting("old")
    plan.failed("old", A, 0.0)
    plan.want("new", B)
    assert plan.due(5.0, NOTHING, UNPROVEN_MAX - 1) == [("new", B)]


@given(st.lists(st.tuples(st.sampled_from("wdfcx"), st.sampled_from("abc"), st.sampled_from([A, B])), max_size=40))
def test_whatever_happens_each_wanted_address_is_dialled_once_in_the_end(steps: list[tuple[str, str, str]]) -> None:
    plan, wanted = DialPlan(), set()
    for now, (what, node_id, address) in enumerate(steps):
        match what:
            case "w":
                plan.want(node_id, address)
                wanted.add((node_id, address))
            case "d":
                plan.drop(node_id, address)
                wanted.discard((node_id, address))
            case "f":
                plan.failed(node_id, address, float(now), "b")
            case "c":
                plan.connected(node_id, address)
            case _:
                plan.forget(node_id)
                wanted = {each for each in wanted if each[0] != node_id}
    due = plan.due(1e6, NOTHING, 0)
    assert set(due) <= wanted
    assert sorted(address for _, address in due) == sorted({address for _, address in wanted})


# --- what we announce ------------------------------------------------------------------------------------------------


def test_our_own_names_are_announced_as_addresses_and_those_without_one_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"here.example": ["127.0.1.1", "fd00::7", "10.0.0.7"]}

    def getaddrinfo(host: str, port: None, **options: object) -> list[tuple[object, ...]]:
        if host not in answers:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in answers[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    named = ("here.example:1", "gone.example:1", "10.0.0.7:1", "localhost:1", "[fd00::9]:1")
    endpoints = [Endpoint(address=address, network="lan", priority=5) for address in named]
    literals = look_up(["here.example", "gone.example", "10.0.0.7", "localhost", "fd00::9"])
    told = [each.address for each in with_literal_hosts(endpoints, literals)]
    assert told == ["10.0.0.7:1", "127.0.0.1:1", "[fd00::9]:1"]


def test_a_name_server_that_is_silent_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    waited: list[bool] = []

    def getaddrinfo(host: str, port: None, **options: object) -> list[tuple[object, ...]]:
        waited.append(over.wait(60))
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert look_up(["a.example", "b.example", "10.0.0.7"], 0.2) == {"10.0.0.7": "10.0.0.7"}
    assert waited == []  # both look-ups are still under way
    over.set()
